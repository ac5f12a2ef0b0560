"""Copy the tensors of a call for a run that may write to them; copies of tensors that share memory share memory too."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from zgraph.capture.storages import address


def own_inputs(tree: Any) -> Any:
    """Return the same tree with copies of its tensors. A tensor that occurs twice is copied once, and views of one
    storage become views of one copy."""
    places = [address(x) for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
    shared = {place for place in places if place and places.count(place) > 1}
    copies: dict[int, torch.Tensor] = {}  # by the id of the tensor that is copied
    storages: dict[int, Any] = {}  # the memo of torch's deep copies
    originals: list[torch.Tensor] = []  # (keeps tensors alive, so that ids in the memo stay theirs)

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in copies:
            originals.append(leaf.detach())
            duplicate = originals[-1].__deepcopy__(storages) if address(leaf) in shared else originals[-1].clone()
            copies[id(leaf)] = duplicate.requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return pytree.tree_map(own, tree)


def share_memory(tree: Any) -> bool:
    """Return whether any two tensors of the tree share a storage."""
    places = [place for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor) and (place := address(x))]
    return len(set(places)) < len(places)
