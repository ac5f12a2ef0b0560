"""Write a model's weights as a folder that `from_pretrained` reads: safetensors, written by all ranks at once, with no
gather.

The header of a safetensors file says at which byte each tensor begins, so each rank knows the position of its rows in
it. Rank 0 makes the files in their final sizes, every rank writes its part of each tensor at its position, and once
every rank's bytes have reached the disk, the files are renamed to their final names. If there are several files, the
old index is removed before the first old file is replaced, and the new index is put in place after all files. A changed
config is treated alike: the old one is removed first, and the new one is put in place last. A reader finds the old
model, the new one or, during the renames, none; never parts of both.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zgraph.checkpoint import pretrained, state
from zgraph.checkpoint.folder import sync
from zgraph.checkpoint.master_precision import is_current, is_current_in, tell_changed
from zgraph.checkpoint.pretrained import View
from zgraph.checkpoint.source import MODEL, OPTIMIZER, Block, Source
from zgraph.checkpoint.tensorfile import Piece, checksum, data_of, laid_out, refuse_unwritable, write_bytes
from zgraph.errors import CheckpointError, PlanError, StepError, UnsupportedError, ZgraphError
from zgraph.names import did_you_mean
from zgraph.parameters.layout import row_by_row
from zgraph.plan.communication import parse_bytes
from zgraph.program.tolerance import same_bits
from zgraph.torch_compat.dtensors import local_of
from zgraph.update.build_update import AHEAD, EMA, MASTER

if TYPE_CHECKING:
    from zgraph.runtime.runtime import Runtime

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PARTIAL = ".publishing"
CHUNK = 1 << 26  # bytes that are copied and cast at a time
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NUMBERED = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def dtype_of(given: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype that the user asks for, None for the tensors' own. Raises `CheckpointError`."""
    if isinstance(given, str) and given in DTYPES:
        return DTYPES[given]
    if given is None or (isinstance(given, torch.dtype) and given.is_floating_point):
        return given
    hint = did_you_mean(given, DTYPES) if isinstance(given, str) else f"{', '.join(DTYPES)}, or one of torch's"
    raise CheckpointError(f"{given!r} is no dtype of weights", hint=hint)


def size_of(given: str | int) -> int:
    """Return `max_shard_size` in bytes. Raises `CheckpointError`."""
    try:
        size = parse_bytes(given)
    except PlanError as error:
        raise CheckpointError(f"max_shard_size={given!r} is no size", hint=error.hint) from error
    if type(size) is not int or size < 1:
        raise CheckpointError(f"max_shard_size={given!r} is no size", hint='a number and a unit: "5GB"')
    return size


@dataclass(frozen=True)
class Files:
    """The files that a model's weights are written into, as planned before any byte is written."""

    headers: dict[str, bytes]  # the header of each safetensors file, by file name
    sizes: dict[str, int]  # the size of each file in bytes, by file name
    places: dict[str, tuple[str, Piece]]  # the file of each tensor and its position there, by the tensor's name

    @staticmethod
    def of(views: Sequence[View], dtypes: dict[str, torch.dtype], most: int) -> Files:
        """Assign the tensors to as few files as possible with at most `most` bytes of tensors each; a larger tensor
        gets a file of its own. `dtypes`: the dtype to write, by the source tensor's name."""
        groups: list[list[View]] = [[]]
        size = 0
        for view in views:
            refuse_unwritable(view.name, dtypes[view.source])
            nbytes = math.prod(view.sizes) * dtypes[view.source].itemsize
            if groups[-1] and size + nbytes > most:
                groups.append([])
                size = 0
            groups[-1].append(view)
            size += nbytes
        files = Files({}, {}, {})
        for number, group in enumerate(groups, 1):
            name = WEIGHTS if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
            group.sort(key=lambda view: -dtypes[view.source].itemsize)  # (so all are aligned)
            blocks = [(v.name, dtypes[v.source], Block((0,) * len(v.sizes), v.sizes)) for v in group]
            files.headers[name], pieces = laid_out(blocks, sharding=False)
            files.sizes[name] = max((p.start + p.nbytes for p in pieces), default=len(files.headers[name]))
            files.places.update({p.name: (name, p) for p in pieces})
        return files

    @property
    def entry(self) -> str:
        """The file that readers look for first."""
        return WEIGHTS if WEIGHTS in self.headers else INDEX

    def make(self, folder: Path) -> None:
        """Create the files in an empty folder, without the tensors' bytes. Raises `OSError`."""
        for name, header in self.headers.items():
            with open(folder / name, "xb") as file:
                file.write(header)
                file.truncate(self.sizes[name])
        if self.entry == INDEX:
            total = sum(piece.nbytes for _, piece in self.places.values())
            weight_map = {tensor: file for tensor, (file, _) in sorted(self.places.items())}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_bytes(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())

    def digest(self) -> str:
        """Return a checksum that is equal for equal files, for ranks to compare."""
        return checksum(b"".join(itertools.chain.from_iterable((n.encode(), h) for n, h in self.headers.items())))


class _Writer:
    """A writer of parts of tensors into the files of a model. Closing it flushes all of them to the disk."""

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder = folder
        self._files = files
        self._open: dict[str, int] = {}

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with contextlib.ExitStack() as closing:
            for descriptor in self._open.values():
                closing.callback(os.close, descriptor)
            if kind is None:
                for descriptor in self._open.values():
                    os.fsync(descriptor)

    def write(self, view: View, box: Block, part: torch.Tensor, dtype: torch.dtype) -> None:
        """Write the part of a tensor that fills this box. Raises `OSError`, and `CheckpointError` for numbers that the
        dtype can't hold."""
        file, piece = self._files.places[view.name]
        if file not in self._open:
            self._open[file] = os.open(self._folder / file, os.O_WRONLY | os.O_CLOEXEC)
        for at, rows in _runs(view.sizes, box, part, dtype.itemsize):
            there = rows.to("cpu", dtype)
            if dtype is torch.float16 and not torch.equal(there.isfinite(), rows.isfinite().cpu()):
                raise CheckpointError(f"{view.name} has values that float16 can't hold", hint="publish in bf16 or fp32")
            data, start = data_of(there), piece.start + at * dtype.itemsize
            while data:
                written = os.pwrite(self._open[file], data, start)
                data, start = data[written:], start + written


def _runs(shape: tuple[int, ...], box: Block, part: torch.Tensor, itemsize: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (index of the first element, the numbers) of each contiguous stretch of a row-major tensor that its box
    `box` consists of."""
    if not box.elements:
        return
    if not shape:
        yield 0, part
        return
    strides = row_by_row(shape)
    whole = len(shape)
    while whole > 1 and box.sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    last = whole - 1  # the dimension that a stretch runs along; the box has all of the later ones
    step = max(1, CHUNK // (strides[last] * itemsize))
    for index in itertools.product(*(range(n) for n in box.sizes[:last])):
        begin = sum((o + i) * s for o, i, s in zip(box.offsets, index, strides, strict=False))
        for row in range(0, box.sizes[last], step):
            yield begin + (box.offsets[last] + row) * strides[last], part[index][row : row + step]


def _begin(folder: Path) -> Path:
    """Make an empty folder beside the present files. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / PARTIAL
    if partial.is_dir() and not partial.is_symlink():
        shutil.rmtree(partial)
    partial.mkdir()
    return partial


def _place(partial: Path, files: Files) -> None:
    """Rename files that are all written to their final names. Raises `CheckpointError`."""
    folder = partial.parent
    with _told(folder):
        fresh = {path.name for path in partial.iterdir()}
        for name in sorted(fresh):
            sync(partial / name)
        sync(partial)
        old = {p.name for p in folder.iterdir() if p.name in (WEIGHTS, INDEX) or _NUMBERED.fullmatch(p.name)}
        configs = fresh - {*files.headers, INDEX}
        outdated = [n for n in configs if (folder / n).exists() and not _same_file(folder / n, partial / n)]
    with _told(folder, _PLACING):
        for name in outdated:  # (the weights of one model must not lie beside the config of the other)
            (folder / name).unlink()
        if (old & fresh) - {files.entry}:  # (files of both models would have one name)
            for name in old & {WEIGHTS, INDEX}:
                (folder / name).unlink()
        sync(folder)
        for name in sorted(fresh - configs, key=lambda name: name == files.entry):
            (partial / name).rename(folder / name)
        sync(folder)
        for name in old - fresh:
            (folder / name).unlink(missing_ok=True)
        for name in configs:
            (partial / name).rename(folder / name)
        sync(folder)
        partial.rmdir()


def _same_file(one: Path, other: Path) -> bool:
    return one.read_bytes() == other.read_bytes()


_WRITING = "what was there is as it was; all ranks need the folder, and room in it"
_PLACING = "publish again: files may be of two models, and then there is no config, no index or no weights"


@contextlib.contextmanager
def _told(folder: Path, hint: str = _WRITING) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError("the model could not be published", where=str(folder), why=why, hint=hint) from error


def _refuse_other_tensors(runtime: Runtime, given: Mapping[str, Any] | None) -> None:
    """Raise `UnsupportedError` unless `given` (None: nothing to check) is the model's own state dict, or an equal one
    of whole tensors. (A state dict that was gathered on another rank is empty on this one.)"""
    if given is None or (not given and runtime.everyone.ranks):
        return
    names = {id(p): n for n, p in runtime.shards.params().items()}
    own = runtime.module.state_dict(keep_vars=True)
    other = [
        n
        for n in sorted(own.keys() | given.keys())
        if not _same_memory(own.get(n), given.get(n))
        and not _same_values(runtime, names.get(id(own.get(n))), own.get(n), given.get(n))
    ]
    if other:
        raise UnsupportedError(
            f"state_dict is not that of the model: {len(other)} tensors are others, {other[0]!r} first",
            where="save_pretrained",
            why="what is written are the model's own weights, as they are on all ranks",
            hint="load them into the model first (model.load_state_dict), or give no state_dict",
        )


def _same_memory(one: Any, other: Any) -> bool:
    local = [x.to_local() if isinstance(x, DTensor) else x for x in (one, other)]
    if not all(isinstance(x, torch.Tensor) for x in local):
        return one is other
    first, second = local
    return first.data_ptr() == second.data_ptr() and first.shape == second.shape and first.dtype is second.dtype


def _same_values(runtime: Runtime, name: str | None, own: Any, whole: Any) -> bool:
    """Return whether a whole tensor has the same bits as this rank's part of the model's tensor `own`, which is the
    parameter `name`, or no parameter if that is None."""
    if not isinstance(own, torch.Tensor) or type(whole) is not torch.Tensor:
        return False
    if whole.shape != own.shape or whole.dtype is not own.dtype:
        return False
    part, local = runtime.shards.own_part(name, whole) if name is not None else whole, local_of(own).detach()
    return same_bits(part.to(local.device), local)


# -- from a running model ---------------------------------------------------------------------------------------------
def publish(
    runtime: Runtime,
    folder: Path,
    *,
    dtype: str | torch.dtype | None,
    max_shard_size: str | int,
    averaged: bool,
    state_dict: Mapping[str, Any] | None = None,
) -> None:
    """Write the model's weights; see `zgraph.api.handle.Handle.save_pretrained`."""
    agreement, module = runtime.everyone, runtime.module
    agreement.vote("a model to publish", f"{folder} {dtype} {max_shard_size} {averaged}")
    wanted, most = dtype_of(dtype), size_of(max_shard_size)

    def refused(rank: int, said: str) -> ZgraphError:
        return CheckpointError(f"rank {rank} could not publish the model", where=str(folder), why=said)

    if averaged and runtime.updater.options.ema is None:
        raise StepError("the plan keeps no average of the weights", where="ema", hint="ema=0.999 in the plan")

    def prepare() -> tuple[list[View], dict[str, torch.dtype], Files, list[tuple[View, Block, torch.Tensor]]]:
        runtime.updater.finish()
        runtime.refuse_unset()
        runtime.updater.rounds.refuse_open("a model can't be published")
        if averaged:
            runtime.updater.make_states()
        pretrained.refuse_special(module)
        _refuse_other_tensors(runtime, state_dict)
        views = pretrained.views(module)
        dtypes = {n: _written(t.dtype, wanted) for n, t in pretrained.tensors(module).items()}
        return views, dtypes, Files.of(views, dtypes, most), list(_parts(runtime, views, dtypes, averaged))

    views, dtypes, files, parts = agreement.together("the model's weights", prepare, refused)
    agreement.vote("the files of a model", files.digest())
    partial = folder / PARTIAL

    def begin() -> None:
        if agreement.first():
            with _told(folder):
                _begin(folder)
                files.make(partial)
                if pretrained.is_pretrained(module):
                    pretrained.write_config(module, partial, _main_dtype(views, dtypes))

    def write() -> None:
        with _told(folder), _Writer(partial, files) as writer:
            for view, box, part in parts:
                writer.write(view, box, part, dtypes[view.source])

    def place() -> None:
        if agreement.first():
            _place(partial, files)

    try:
        for attempt in (begin, write, place):
            agreement.together("a published model", attempt, refused)
    except BaseException:
        if agreement.first():
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _written(held: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and held.is_floating_point else held


def _main_dtype(views: Sequence[View], dtypes: dict[str, torch.dtype]) -> torch.dtype | None:
    """Return the floating-point dtype that most numbers have, which `from_pretrained` takes for the model's; None
    without any."""
    counts: dict[torch.dtype, int] = {}
    for view in views:
        if dtypes[view.source].is_floating_point:
            counts[dtypes[view.source]] = counts.get(dtypes[view.source], 0) + math.prod(view.sizes)
    return max(counts, key=lambda dtype: counts[dtype]) if counts else None


def _parts(
    runtime: Runtime, views: Sequence[View], dtypes: dict[str, torch.dtype], averaged: bool
) -> Iterator[tuple[View, Block, torch.Tensor]]:
    """Yield (view, box, numbers) for all that this rank writes: a part that several ranks hold is written by one of
    them."""
    tensors = state.of_module(runtime)
    loads: dict[int, list[int]] = {}
    wanted = [n for n in dict.fromkeys(v.source for v in views) if n in tensors]
    own_tensors = {n: tensors[n] for n in wanted if state.is_mine(tensors[n], runtime.mesh, loads)}
    stale: list[str] = []
    values = {n: _value(runtime, n, t, dtypes[n], averaged, stale) for n, t in own_tensors.items()}
    tell_changed(stale)
    for view in views:
        if view.source in own_tensors:
            source = own_tensors[view.source]
            shape = tuple(source.shape)
            for block in _blocks(source):
                cut = view.cut(shape, block, values[view.source]) if block.elements else None
                if cut is not None:
                    yield view, *cut


def _blocks(tensor: torch.Tensor) -> list[Block]:
    """Return the part of a tensor that this rank holds, as blocks."""
    if not isinstance(tensor, DTensor):
        return [Block((0,) * tensor.dim(), tuple(tensor.shape))]
    return [Block(tuple(c.offsets), tuple(c.sizes)) for c in tensor.__create_chunk_list__()]


def _value(
    runtime: Runtime, name: str, tensor: torch.Tensor, dtype: torch.dtype, averaged: bool, stale: list[str]
) -> torch.Tensor:
    """Return this rank's numbers of a tensor: as the model holds them if they are written in that dtype, else from the
    fp32 master if it is current."""
    optimizer = runtime.updater.optimizer
    states = optimizer.state.get(tensor, {}) if optimizer is not None else {}
    own = local_of(tensor).detach()
    if averaged and EMA in states:
        return local_of(states[EMA]).detach()
    if dtype is own.dtype or MASTER not in states:
        return own
    master = local_of(states[MASTER]).detach()
    if is_current(master, own):
        return master
    stale.append(name)
    return own


# -- from a checkpoint ------------------------------------------------------------------------------------------------
def export(
    source: Source,
    folder: Path,
    *,
    dtype: str | torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
    like: nn.Module | None = None,
    say: Callable[[str], None] = lambda name: None,
) -> list[Path]:
    """Write the weights of a checkpoint as `save_pretrained` does, in one process that holds one weight at a time;
    return the files.

    `dtype`: by default that of the checkpoint's weights; for a wider one the fp32 masters of weights that are unchanged
    since the last update are written. `like`: the checkpoint's model, for example on the meta device: with it, names,
    ties and config are those of transformers' files; without it, names are the checkpoint's, and there is no config.
    `say` is called with each tensor's name. Raises `CheckpointError`; then the folder is as it was before, unless files
    were already being put in place.
    """
    wanted, most = dtype_of(dtype), size_of(max_shard_size)
    shapes = {n.removeprefix(MODEL): info.shape for n, info in source.tensors.items() if n.startswith(MODEL)}
    if like is None:
        views = [View(n, n, shape, row_by_row(shape), 0) for n, shape in shapes.items()]
    else:
        pretrained.refuse_special(like)
        views = pretrained.views(like)
        _refuse_other(source, shapes, like)
    if not views:
        raise CheckpointError("the checkpoint has no weights", where=str(source.folder))
    dtypes = {n: _written(source.tensors[MODEL + n].dtype, wanted) for n in shapes}
    files = Files.of(views, dtypes, most)
    of_source: dict[str, list[View]] = {}
    for view in views:
        of_source.setdefault(view.source, []).append(view)
    twins = masters_of_tied(source, list(shapes)) if wanted is not None else {}
    partial = folder / PARTIAL
    try:
        with _told(folder):
            _begin(folder)
            files.make(partial)
            if like is not None and pretrained.is_pretrained(like):
                pretrained.write_config(like, partial, _main_dtype(views, dtypes))
            stale: list[str] = []
            with _Writer(partial, files) as writer:
                for name, source_views in of_source.items():
                    say(name)
                    read_from = widest(source, twins.get(name, name), dtypes[name], stale)
                    _write_whole(writer, source_views, source, read_from, dtypes[name])
                tell_changed(stale)
                written = sorted(path.name for path in partial.iterdir())
        _place(partial, files)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return [folder / name for name in written]


def _write_whole(writer: _Writer, views: Sequence[View], source: Source, name: str, dtype: torch.dtype) -> None:
    """Write the tensors of the files that are made from the checkpoint's tensor `name`, which is read whole."""
    whole = source.whole(name)
    for view in views:
        cut = view.cut(tuple(whole.shape), Block((0,) * whole.dim(), tuple(whole.shape)), whole)
        if cut is not None:
            writer.write(view, *cut, dtype)


def _refuse_other(source: Source, shapes: dict[str, tuple[int, ...]], like: nn.Module) -> None:
    """Raise `CheckpointError` unless the model's tensors have the names and shapes of the checkpoint's."""
    model_shapes = {n: tuple(t.shape) for n, t in pretrained.tensors(like).items()}
    wrong = [n for n in model_shapes if n in shapes and model_shapes[n] != shapes[n]]
    missing = [n for n in model_shapes if n not in shapes]
    beyond = [n for n in shapes if n not in model_shapes]
    for what, names in (("the model lacks", beyond), ("the checkpoint lacks", missing), ("of another shape", wrong)):
        if names:
            raise CheckpointError(
                "the checkpoint is of another model than the config",
                where=str(source.folder),
                why=f"{what}: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}",
            )


def widest(source: Source, name: str, dtype: torch.dtype, stale: list[str]) -> str:
    """Return the name of the checkpoint's tensor that a weight is read from: its fp32 master if a wider dtype is wanted
    and the master is current."""
    state_of = f"{OPTIMIZER}{name}."
    newest = state_of + AHEAD if state_of + AHEAD in source.tensors else MODEL + name
    master = state_of + MASTER
    if source.tensors[newest].dtype is dtype or master not in source.tensors:
        return newest
    if is_current_in(source, master, newest):
        return master
    stale.append(name)
    return newest


def masters_of_tied(source: Source, names: Sequence[str]) -> dict[str, str]:
    """Return the name with the fp32 master for each tied weight without one: a checkpoint has the weight under every
    name, the master under one."""
    mastered: dict[tuple[Any, ...], list[str]] = {}
    for name in names:
        if f"{OPTIMIZER}{name}.{MASTER}" in source.tensors:
            info = source.tensors[MODEL + name]
            mastered.setdefault((info.dtype, info.shape), []).append(name)
    twins = {}
    for name in names:
        if not any(f"{OPTIMIZER}{name}.{key}" in source.tensors for key in (MASTER, AHEAD)):
            info = source.tensors[MODEL + name]
            for other in mastered.get((info.dtype, info.shape), []):
                if same_bits(source.whole(MODEL + name), source.whole(MODEL + other)):
                    twins[name] = other
                    break
    return twins
