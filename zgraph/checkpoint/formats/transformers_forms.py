"""The files of a model of transformers' by the names and in the forms that the model holds its weights in.

transformers 5 holds some weights in another form than files have them, Mixtral's experts as one tensor say. What `pretrained.views` says of which
part of which weight a file's tensor is, is read here the other way round: each is a block of the weight.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import torch

from zgraph.checkpoint import pretrained
from zgraph.checkpoint.pretrained import View
from zgraph.checkpoint.source import MODEL, Block, Source, TensorInfo
from zgraph.errors import CheckpointError
from zgraph.parameters.sharding import row_by_row

logger = logging.getLogger(__name__)


class AsModel(Source):
    """Tensors of files as those of a model, by its names. `partial`: tensors that the files lack are no error, and stay as they are, nor are those
    that the model lacks; both are told. Raises `CheckpointError` for a weight of which the files have some parts."""

    def __init__(self, files: Source, model: Any, *, partial: bool) -> None:
        self.files, self.partial = files, partial
        self.kind, self.folder, self.known = files.kind, files.folder, files.known
        there = {n.removeprefix(MODEL) for n in files.tensors}
        views = pretrained.views(model)
        self._of = _named(views, there, getattr(model, "base_model_prefix", ""))
        held = pretrained.tensors(model)
        parts: dict[str, list[View]] = {}
        for view in views:
            parts.setdefault(view.source, []).append(view)
        self.tensors: dict[str, TensorInfo] = {}
        self._blocks: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], tuple[int, ...]]] = {}
        missing = []
        for name, of in parts.items():
            lacking = [v.name for v in of if v.name not in self._of]
            if len(lacking) == len(of):
                missing += lacking
            elif lacking:
                raise CheckpointError(
                    f"{lacking[0]} is missing", where=str(self.folder), why=f"{name} is made of it and others"
                )
            else:
                self.tensors[MODEL + name] = self._info(name, of, tuple(held[name].shape))
        used = set(self._of.values())
        beyond = sorted(there - used)
        if partial:
            _tell(
                missing,
                "are not in the files, and stay as the model initialises them",
                getattr(model, "_keys_to_ignore_on_load_missing", None),
            )
            _tell(
                beyond,
                "are in the files, and not in the model: they are left out",
                getattr(model, "_keys_to_ignore_on_load_unexpected", None),
            )
        else:
            self.tensors |= {MODEL + n: files.tensors[MODEL + n] for n in beyond}

    def _info(self, name: str, views: Sequence[View], shape: tuple[int, ...]) -> TensorInfo:
        """A weight, in a block for each tensor of the files that it is made of."""
        blocks, dtypes = [], set()
        for view in views:
            block, order = _placed(view, shape)
            info = self.files.tensors[MODEL + self._of[view.name]]
            if info.shape != view.sizes:
                if len(views) > 1:
                    raise CheckpointError(
                        f"{view.name} is {list(info.shape)} in the files and {list(view.sizes)} in the model",
                        where=str(self.folder),
                        hint="build the model from the config that lies beside them",
                    )
                return info  # (who compares it with the model's says so)
            dtypes.add(info.dtype)
            blocks.append(block)
            self._blocks[name, block.offsets] = self._of[view.name], order, view.sizes
        if len(dtypes) > 1:
            raise CheckpointError(f"parts of {name} have {len(dtypes)} dtypes", where=str(self.folder))
        return TensorInfo(dtypes.pop(), shape, tuple(blocks))

    def block(self, name: str, block: Block) -> torch.Tensor:
        of, order, _ = self._blocks[name.removeprefix(MODEL), block.offsets]
        return self.files.whole(MODEL + of).permute(order).reshape(block.sizes)

    def rows(self, name: str, block: Block, first: int, count: int) -> torch.Tensor:
        of, order, sizes = self._blocks[name.removeprefix(MODEL), block.offsets]
        info = self.files.tensors[MODEL + of]
        if order == tuple(range(len(order))) and sizes == block.sizes and len(info.blocks) == 1:
            return self.files.rows(MODEL + of, info.blocks[0], first, count)
        return super().rows(name, block, first, count)

    def verify(self, share: int = 0, of: int = 1) -> None:
        """As the files say."""
        self.files.verify(share, of)


def _named(views: Sequence[View], there: set[str], prefix: str) -> dict[str, str]:
    """Which tensor of the files each is: by its name, or by that without or with what stands before the names of the model without its head."""
    own = {v.name for v in views}
    if not own & there and prefix:
        for found in (
            {n: n.removeprefix(prefix + ".") for n in own if n.startswith(prefix + ".")},
            {n: f"{prefix}.{n}" for n in own},
        ):
            if set(found.values()) & there:
                return {n: of for n, of in found.items() if of in there}
    return {n: n for n in own & there}


def _placed(view: View, shape: tuple[int, ...]) -> tuple[Block, tuple[int, ...]]:
    """Where in a weight of this shape a tensor lies, and the order in which its dimensions are there. Raises `CheckpointError` if it is no box."""
    rest, offsets = view.offset, []
    strides = row_by_row(shape)
    for stride in strides:
        offsets.append(rest // stride if stride else 0)
        rest -= offsets[-1] * stride
    left = [d for d, n in enumerate(view.sizes) if n > 1]
    sizes, order = [1] * len(shape), []
    for d, stride in enumerate(strides):
        found = next((e for e in left if view.strides[e] == stride and shape[d] > 1), None)
        if found is not None:
            left.remove(found)
            order.append(found)
            sizes[d] = view.sizes[found]
    if rest or left or any(o + n > m for o, n, m in zip(offsets, sizes, shape, strict=True)):
        raise CheckpointError(
            f"{view.name} can't be read into {view.source}", why="transformers makes it by more than moving numbers"
        )
    order += [d for d in range(len(view.sizes)) if d not in order]
    return Block(tuple(offsets), tuple(sizes)), tuple(order)


def _tell(names: list[str], what: str, ignored: Any) -> None:
    told = [n for n in names if not any(re.search(pattern, n) for pattern in ignored or ())]
    if told:
        logger.warning("%d weights %s: %s%s", len(told), what, ", ".join(told[:5]), " …" if len(told) > 5 else "")
