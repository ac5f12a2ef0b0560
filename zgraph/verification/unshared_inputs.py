"""Tensors of a call in memory of their own, for a run that may write to them: those that share memory still do."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from zgraph.capture.storages import address


def own_inputs(tree: Any) -> Any:
    """The same tree with copies of its tensors, and of nothing else. A tensor that stands there twice is one tensor again, and views of one
    storage are views of one copy."""
    places = [address(x) for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
    shared = {place for place in places if place and places.count(place) > 1}
    copies: dict[int, torch.Tensor] = {}  # by the tensor that is copied
    storages: dict[int, Any] = {}  # what torch has copied, of storages and of tensors
    held: list[torch.Tensor] = []  # (torch knows tensors by their ids)

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in copies:
            held.append(leaf.detach())
            made = held[-1].__deepcopy__(storages) if address(leaf) in shared else held[-1].clone()
            copies[id(leaf)] = made.requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return pytree.tree_map(own, tree)


def share_memory(tree: Any) -> bool:
    """Whether two tensors of the tree are on one storage."""
    places = [place for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor) and (place := address(x))]
    return len(set(places)) < len(places)
