"""A model as transformers' `save_pretrained` would write it: names, parts of tensors, and its config.

transformers 5 holds some models in another form than their files have: Mixtral's experts, for example, as one tensor.
Its conversion back to the form of files is run here on tensors without data, to learn which part of which weight each
tensor of a file is. So no rank needs more than its own rows. Plain modules are written under the names of their state
dicts.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from zgraph.checkpoint import state
from zgraph.checkpoint.source import Block
from zgraph.errors import CheckpointError, UnsupportedError
from zgraph.parameters.layout import row_by_row
from zgraph.torch_compat import autograd_state


@dataclass(frozen=True)
class View:
    """A tensor of a published file, as a strided view of one tensor of the model."""

    name: str  # its name in the file
    source: str  # the name of the model's tensor
    sizes: tuple[int, ...]  # its shape
    strides: tuple[int, ...]  # its strides in the source, which counts as row-major, in elements
    offset: int  # the element of the source that it begins at

    def cut(self, shape: tuple[int, ...], block: Block, held: torch.Tensor) -> tuple[Block, torch.Tensor] | None:
        """Return (box of this tensor, its numbers) for the numbers that `held` has of it, a block of the source, whose
        whole shape is `shape`; None if it has none of them. Raises `CheckpointError` and `UnsupportedError`."""
        if self.sizes == shape and self.strides == row_by_row(shape) and not self.offset:
            return block, held
        if not shape:
            return Block((0,) * len(self.sizes), self.sizes), held.reshape(self.sizes)
        if block.sizes[1:] != shape[1:]:
            raise CheckpointError(
                f"{self.source} becomes {self.name} in the file, and ranks hold parts of its rows",
                hint="export a checkpoint of it in one process: zgraph ckpt export",
            )
        row = math.prod(shape[1:])
        (first, *_), (count, *_) = block.offsets, block.sizes
        along = [
            d for d, (n, stride) in enumerate(zip(self.sizes, self.strides, strict=True)) if n > 1 and stride >= row
        ]
        within = self.offset % row + sum(
            (self.sizes[d] - 1) * self.strides[d] for d in range(len(self.sizes)) if d not in along
        )
        if len(along) > 1 or any(self.strides[d] != row for d in along) or within >= row:
            raise self._refused()
        begins, sizes, begin = [0] * len(self.sizes), list(self.sizes), self.offset // row
        low, high = max(begin, first), min(begin + (self.sizes[along[0]] if along else 1), first + count)
        if low >= high:
            return None
        if along:
            begins[along[0]], sizes[along[0]] = low - begin, high - low
        at = self.offset % row + (low - first) * row
        part = held.contiguous().view(-1).as_strided(sizes, self.strides, at)
        return Block(tuple(begins), tuple(sizes)), part

    def _refused(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self.name} can't be written",
            why=f"transformers makes it of {self.source} by more than taking a part of it",
            hint="publish it in one process: transformers' own save_pretrained of a model that the weights were loaded into",
        )


def is_pretrained(module: nn.Module) -> bool:
    """Return whether this is one of transformers' models, which have a config and names of their own for files."""
    library = sys.modules.get("transformers.modeling_utils")  # (loaded where there is such a model)
    return library is not None and isinstance(module, library.PreTrainedModel)


def refuse_special(module: nn.Module) -> None:
    """Raise `UnsupportedError` for models whose files hold more than their weights."""
    special = {"hf_quantizer": "it is quantized", "_hf_peft_config_loaded": "it has adapters"}
    for attribute, why in special.items():
        if getattr(module, attribute, None):
            raise UnsupportedError("such a model can't be published", why=why, hint="save a checkpoint of it")
    if state.extra_states(module):
        raise UnsupportedError(
            "such a model can't be published",
            why=f"module {next(iter(state.extra_states(module)))!r} has get_extra_state(), and safetensors hold tensors alone",
            hint="save a checkpoint of it",
        )


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and every persistent buffer, under every name it has."""
    return dict(module.named_parameters(remove_duplicate=False)) | state.persistent_buffers(module)


def views(module: nn.Module) -> list[View]:
    """Return the tensors of the model's files, a tied one under one name. The module may be on the meta device. Raises
    `UnsupportedError`."""
    named_tensors = tensors(module)
    saved_tensors = {n: named_tensors[n] for n in _once(module, named_tensors)}
    if not is_pretrained(module):
        return [View(n, n, tuple(t.shape), row_by_row(t.shape), 0) for n, t in saved_tensors.items()]
    for name in getattr(module, "_keys_to_ignore_on_save", None) or ():
        saved_tensors.pop(name, None)
    empty = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in saved_tensors.items()}
    sources = {_storage(t): n for n, t in empty.items()}
    file_views = []
    for name, part in _reverted(module, empty).items():
        source = sources.get(_storage(part))
        if source is None or part.dtype is not saved_tensors[source].dtype:
            raise View(name, "the model's weights", (), (), 0)._refused()
        file_views.append(View(name, source, tuple(part.shape), part.stride(), int(part.storage_offset())))
    return file_views


def _once(module: nn.Module, held: dict[str, torch.Tensor]) -> Iterator[str]:
    """Yield one name for each tensor: the name that transformers ties the others to, else the first."""
    tied = getattr(module, "all_tied_weights_keys", None) or {}
    names: dict[int, list[str]] = {}
    for name, tensor in held.items():
        names.setdefault(id(tensor), []).append(name)
    for same in names.values():
        yield next((n for n in same if n not in tied), same[0])


def _reverted(module: nn.Module, empty: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors in the form of transformers' files, by its own conversion. Raises `UnsupportedError`."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # (before 5 models were what their files have)
        return empty
    try:
        with autograd_state.without_copies():
            return dict(revert_weight_conversion(module, empty))
    except Exception as error:
        raise UnsupportedError(
            "the model's weights can't be given the names of its files",
            why=f"transformers says {type(error).__name__}: {error}",
        ) from error


def _storage(tensor: torch.Tensor) -> int:
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)  # type: ignore[no-untyped-call]


def write_config(module: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the config, the generation config and custom code that `from_pretrained` needs, by transformers' own means;
    `dtype` is the weights'. Raises `CheckpointError`."""
    config = copy.deepcopy(module.config)
    config.architectures = [type(module).__name__]
    if dtype is not None:
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", str(dtype).removeprefix("torch."))
    try:
        config.save_pretrained(folder)
        if module.can_generate():
            module.generation_config.save_pretrained(folder)
        if module._auto_class is not None:  # (its class is in a file of the user's, which belongs to it)
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(module, folder, config=config)
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(
            "transformers can't write the model's config", why=f"{type(error).__name__}: {error}"
        ) from error


def renamed(model: Any, names: Sequence[str]) -> dict[str, str]:
    """Return the name in the model of each tensor of files, by its name there, as `from_pretrained` renames it: `LayerNorm.gamma` is a weight."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings: Any = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]
    prefix, state = getattr(model, "base_model_prefix", None), model.state_dict()
    return {name: rename_source_key(name, renamings, [], prefix, state)[0] for name in names}
