"""The files of a transformers model, by the names and in the forms that the model holds its weights in.

transformers 5 holds some weights in another form than their files have, Mixtral's experts, for example, as one tensor.
`pretrained.views` says which part of which weight each tensor of a file is; here each such part is a block of the
weight.
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
from zgraph.parameters.layout import row_by_row

logger = logging.getLogger(__name__)

ROWS = 1024  # the rows of tied weights that are compared at once


class TransformersForms(Source):
    """The tensors of files as those of a model, by its names. Raises `CheckpointError` for a weight of which the files
    have only some parts. `partial`: tensors that the files lack keep the model's values, and tensors that the model
    lacks are left out; both are logged."""

    def __init__(self, files: Source, model: Any, *, partial: bool) -> None:
        self.files, self.partial = files, partial
        self.kind, self.folder, self.known = files.kind, files.folder, files.known
        file_names = {n.removeprefix(MODEL) for n in files.tensors}
        views = pretrained.views(model)
        self._of = _named(views, file_names, getattr(model, "base_model_prefix", ""))
        self._rename(views, file_names, model)
        tied = self._tied(views, file_names, model)
        model_tensors = pretrained.tensors(model)
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
                self.tensors[MODEL + name] = self._info(name, of, tuple(model_tensors[name].shape))
        used = set(self._of.values()) | tied
        beyond = sorted(file_names - used)
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

    def _rename(self, views: Sequence[View], there: set[str], model: Any) -> None:
        """Find the files' tensors with names of older releases, which `from_pretrained` renames."""
        unknown = there - set(self._of.values())
        if not unknown or all(v.name in self._of for v in views):
            return
        parts: dict[str, list[str]] = {}
        for view in views:
            parts.setdefault(view.source, []).append(view.name)
        for old, name in pretrained.renamed(model, sorted(there)).items():
            if old in unknown and len(parts.get(name, ())) == 1:
                self._of.setdefault(parts[name][0], old)

    def _tied(self, views: Sequence[View], there: set[str], model: Any) -> set[str]:
        """Return the files' tensors of weights that are tied to another one. If the other is not there, it is read from them.

        Raises `CheckpointError` for one that differs from what it is tied to: `from_pretrained` unties the two.
        """
        prefix, tensors = getattr(model, "base_model_prefix", "") + ".", set()
        by_source = {v.source: v.name for v in views}
        for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
            name = by_source.get(source)
            alias = next((n for n in (target, target.removeprefix(prefix), prefix + target) if n in there), None)
            if name is None or alias is None or alias in self._of:
                continue
            other = self._of.setdefault(name, alias)
            if other != alias and not self._equal(other, alias):
                raise CheckpointError(
                    f"{alias} is tied to {other}, and the files have another value for it",
                    where=str(self.folder),
                    why="tie_word_embeddings of the config is true, and the files are of a model whose weights are two",
                    hint="tie_word_embeddings=False in the config",
                )
            tensors.add(alias)
        return tensors

    def _equal(self, one: str, other: str) -> bool:
        infos = [self.files.tensors[MODEL + n] for n in (one, other)]
        if infos[0].shape != infos[1].shape or infos[0].dtype != infos[1].dtype:
            return False
        if any(len(info.blocks) != 1 for info in infos):
            return torch.equal(self.files.whole(MODEL + one), self.files.whole(MODEL + other))
        pairs = [(MODEL + n, info.blocks[0]) for n, info in zip((one, other), infos, strict=True)]
        for first in range(0, infos[0].shape[0], ROWS):
            count = min(ROWS, infos[0].shape[0] - first)
            if not torch.equal(*(self.files.rows(name, block, first, count) for name, block in pairs)):
                return False
        return True

    def _info(self, name: str, views: Sequence[View], shape: tuple[int, ...]) -> TensorInfo:
        """Return a weight, with one block for each tensor of the files that it is made of."""
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
                return info  # (the load compares shapes with the model's, and raises)
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
        """Verify the files."""
        self.files.verify(share, of)


def _named(views: Sequence[View], there: set[str], prefix: str) -> dict[str, str]:
    """Return the name of each view's tensor in the files, where they have it. If the files have none of the views'
    names, these are tried without and with `prefix`, which the names of a base model and of the same model with a head
    differ by."""
    own = {v.name for v in views}
    if not own & there and prefix:
        for candidate in (
            {n: n.removeprefix(prefix + ".") for n in own if n.startswith(prefix + ".")},
            {n: f"{prefix}.{n}" for n in own},
        ):
            if set(candidate.values()) & there:
                return {n: of for n, of in candidate.items() if of in there}
    return {n: n for n in own & there}


def _placed(view: View, shape: tuple[int, ...]) -> tuple[Block, tuple[int, ...]]:
    """Return the block of a weight of this shape that a view fills, and the order of the view's dimensions in it.
    Raises `CheckpointError` if it fills no box."""
    rest, offsets = view.offset, []
    strides = row_by_row(shape)
    for stride in strides:
        offsets.append(rest // stride if stride else 0)
        rest -= offsets[-1] * stride
    left = [d for d, n in enumerate(view.sizes) if n > 1]
    sizes, order = [1] * len(shape), []
    for d, stride in enumerate(strides):
        dim = next((e for e in left if view.strides[e] == stride and shape[d] > 1), None)
        if dim is not None:
            left.remove(dim)
            order.append(dim)
            sizes[d] = view.sizes[dim]
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
