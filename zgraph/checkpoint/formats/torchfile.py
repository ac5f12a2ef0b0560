"""Read a file of `torch.save` without running what is in it.

It is a ZIP archive: `data.pkl`, a pickle of everything but the tensors' numbers, and one uncompressed record for each
storage. The pickle is parsed by an unpickler that knows plain values, dtypes, shapes and tensors. Whatever else it
names becomes an `Inert`, which keeps its arguments and state; nothing is imported, called or constructed. Tensors are
not read but described (`Stored`).
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from zgraph.checkpoint.source import natural, naturals
from zgraph.checkpoint.tensorfile import CHUNK, OpenFile, damaged
from zgraph.errors import CheckpointError

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
MOST_NUMBERS, MOST_LEVELS = 1_000_000, 20  # of a parameter group
LOCAL_HEADER = 30  # bytes of a record's header in the archive, without its name and extra field
# The errors that readers of ZIP archives and pickles, and torch, raise for malformed bytes.
MALFORMED = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    struct.error,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)


class Inert:
    """A stand-in for an object of an unknown class: `origin` is the class, `args` its arguments, `state` its state."""

    origin = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        stand_in = super().__new__(cls)
        stand_in.args = args
        stand_in.state = {}
        return stand_in

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        return

    args: tuple[Any, ...]
    state: Any

    def __call__(self, *args: Any) -> Inert:
        return Inert(*args)

    def append(self, item: Any) -> None:
        return

    def extend(self, items: Any) -> None:
        return

    def __setitem__(self, key: Any, value: Any) -> None:
        return


@dataclass(frozen=True)
class _Dtype:
    """A class of storages."""

    dtype: torch.dtype  # the dtype of its elements


@dataclass(frozen=True)
class _Storage:
    path: Path  # the file
    dtype: torch.dtype  # the dtype of its elements
    start: int  # its first byte in the file
    nbytes: int  # its size


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, not read yet."""

    path: Path  # the file, not kept open: a checkpoint of many ranks has more files than a process may open
    dtype: torch.dtype  # its dtype
    shape: tuple[int, ...]  # its shape
    strides: tuple[int, ...]  # its strides in elements
    start: int  # its first byte in the file

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def in_rows(self) -> bool:
        """Whether it is stored row by row, without gaps."""
        step = 1
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n > 1 and stride != step:
                return not self.elements
            step *= n
        return True

    def read(self) -> torch.Tensor:
        """Read all of it. Raises `CheckpointError`."""
        if self.in_rows:
            tensor = torch.empty(self.shape, dtype=self.dtype)
            self.read_into(tensor.view(-1), 0)
            return tensor
        span = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1
        raw = torch.empty(span, dtype=self.dtype)
        _fill(self.path, raw, self.start)
        return raw.as_strided(self.shape, self.strides).contiguous()

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Read `count` of its rows (of dimension 0) from row `first` on. Raises `CheckpointError`."""
        if not self.in_rows:
            return self.read()[first : first + count]
        tensor = torch.empty((count, *self.shape[1:]), dtype=self.dtype)
        self.read_into(tensor.view(-1), first * math.prod(self.shape[1:]))
        return tensor

    def read_into(self, target: torch.Tensor, first: int) -> None:
        """Fill a 1-d tensor of the same dtype with its elements from the `first` on, in row-major order. Raises
        `CheckpointError`."""
        assert self.in_rows and first + target.numel() <= self.elements
        _fill(self.path, target, self.start + first * self.dtype.itemsize)


def _fill(path: Path, target: torch.Tensor, at: int) -> None:
    if target.numel():
        OpenFile(path).read_into(target.view(torch.uint8).numpy(), at)


class TorchFile:
    """An archive of `torch.save`, which is a whole file or `nbytes` bytes of one from `start` on. `value` is what was
    saved, with `Stored` in place of tensors and `Inert` in place of unknown objects. Raises `CheckpointError`."""

    def __init__(self, path: Path, start: int = 0, nbytes: int | None = None) -> None:
        self.path = path
        file = OpenFile(path)
        self.start = start
        self.nbytes = file.nbytes - start if nbytes is None else nbytes
        if start + self.nbytes > file.nbytes:
            damaged(path, f"it ends at byte {file.nbytes}, and something in it at {start + self.nbytes}")
        try:
            self.value = self._read(file)
        except MALFORMED as error:
            damaged(self.path, f"it is no file of torch.save: {type(error).__name__}: {error}"[:300])

    def _read(self, file: OpenFile) -> Any:
        window = _Window(file, self.start, self.nbytes)
        with zipfile.ZipFile(window) as archive:
            records = archive.infolist()
        self._checksums = {r.filename: r.CRC for r in records}
        self._places = {r.filename: self._place(file, r) for r in records}
        names = [n for n in self._places if n.endswith("/data.pkl") and n.count("/") == 1]
        if len(names) != 1 or len(self._places) != len(records):
            raise ValueError("it has no data.pkl, or two records of one name")
        self._prefix = names[0].removesuffix("data.pkl")
        order = self._places.get(f"{self._prefix}byteorder")
        if order is not None and file.read(*order) != b"little":
            raise ValueError("its numbers have the other byte order")
        return unpickled(file.read(*self._places[names[0]]), self._global, self._stored)

    def _place(self, file: OpenFile, record: zipfile.ZipInfo) -> tuple[int, int]:
        """Return (the first byte in the file, the size) of a record. Raises `ValueError` if it is compressed or outside
        of the archive."""
        at = self.start + record.header_offset
        header = file.read(at, LOCAL_HEADER)
        name, extra = struct.unpack("<HH", header[26:30])
        start = at + LOCAL_HEADER + name + extra
        stored = record.compress_type == zipfile.ZIP_STORED and record.compress_size == record.file_size
        if header[:4] != b"PK\3\4" or not stored or start + record.file_size > self.start + self.nbytes:
            raise ValueError(f"record {record.filename!r} is not in it")
        return start, record.file_size

    def _global(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in STORAGES:
            return _Dtype(STORAGES[name])
        if module == "torch._utils" and name in _REBUILT:
            return _REBUILT[name]
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _rebuild_from_type_v2
        return known_global(module, name) or type(name, (Inert,), {"origin": f"{module}.{name}"})

    def _stored(self, described: Any) -> _Storage:
        kind, of, key, _, count = described
        if kind != "storage" or not isinstance(of, _Dtype) or not isinstance(key, str):
            raise ValueError("it refers to something that is no storage")
        nbytes = natural(count) * of.dtype.itemsize
        start, there = self._places[f"{self._prefix}data/{key}"]
        if nbytes > there:
            raise ValueError(f"storage {key} has {there} bytes, and should have {nbytes}")
        return _Storage(self.path, of.dtype, start, nbytes)

    def verify(self) -> None:
        """Compare every record with its checksum in the archive (torch can be told to write none). Raises
        `CheckpointError`."""
        file = OpenFile(self.path)
        for name, (start, nbytes) in self._places.items():
            crc = 0
            for at in range(start, start + nbytes, CHUNK):
                crc = zlib.crc32(file.read(at, min(CHUNK, start + nbytes - at)), crc)
            if self._checksums[name] not in (0, crc):
                damaged(self.path, f"record {name}: its checksum is not that of its bytes")


def unpickled(data: bytes, find: Callable[[str, str], Any], refer: Callable[[Any], Any] | None = None) -> Any:
    """Parse a pickle: `find(module, name)` returns the stand-in for a global, `refer` that for a persistent reference.
    Raises one of `MALFORMED`."""
    reader = _Unpickler(io.BytesIO(data), encoding="utf-8")
    reader.find = find
    reader.refer = refer
    return reader.load()


class _Unpickler(pickle._Unpickler):
    # In Python, not C: the one in C allocates a memo table as long as the largest index in the pickle, however large.
    find: Callable[[str, str], Any]
    refer: Callable[[Any], Any] | None
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        return self.find(module, name)

    def persistent_load(self, described: Any) -> Any:
        if self.refer is None:
            raise pickle.UnpicklingError("it refers to something outside")
        return self.refer(described)

    def load_build(self) -> None:
        """Set the state of a stand-in; ignore that of an `OrderedDict`; refuse any other, which could change objects
        outside the pickle."""
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Inert):
            target.state = state
        elif not isinstance(target, OrderedDict):  # (whose state would be attributes)
            raise pickle.UnpicklingError(f"a state for a {type(target).__name__}")

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}
    del dispatch[pickle.BYTEARRAY8[0]]  # (it allocates as much memory as the pickle asks for)


def known_global(module: str, name: str) -> Any:
    """Return the class or dtype that a global of plain values and shapes names; None for all others."""
    if (module, name) == ("collections", "OrderedDict"):
        return OrderedDict
    if (module, name) == ("torch", "Size"):
        return torch.Size
    if (module, name) in (("builtins", "set"), ("__builtin__", "set")):
        return set
    attribute = getattr(torch, name, None) if module == "torch" else None
    return attribute if isinstance(attribute, torch.dtype) else None


def _tensor(storage: _Storage, offset: Any, size: Any, stride: Any, dtype: torch.dtype) -> Stored:
    shape, strides = naturals(size), naturals(stride)
    if len(shape) != len(strides):
        raise ValueError("a tensor with more strides than dimensions, or fewer")
    count = storage.nbytes // dtype.itemsize
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    elements = math.prod(shape)
    if elements > count or (elements and natural(offset) + last >= count):
        raise ValueError(f"a tensor {list(shape)} in a storage of {count} elements")
    return Stored(storage.path, dtype, shape, strides, storage.start + natural(offset) * dtype.itemsize)


def _rebuild_tensor(storage: _Storage, offset: Any, size: Any, stride: Any, *_: Any) -> Stored:
    return _tensor(storage, offset, size, stride, storage.dtype)


def _rebuild_tensor_v3(storage: _Storage, offset: Any, size: Any, stride: Any, *rest: Any) -> Stored:
    dtype = rest[2]
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a dtype")
    return _tensor(storage, offset, size, stride, dtype)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def _rebuild_from_type_v2(function: Any, kind: Any, args: Any, *_: Any) -> Any:
    """Rebuild a tensor without its attributes; an `Inert` for a subclass of tensors."""
    known = getattr(kind, "origin", "") in ("torch.Tensor", "torch.nn.parameter.Parameter")
    return function(*args) if known and function in _REBUILT.values() else Inert(*args)


_REBUILT = {
    "_rebuild_tensor": _rebuild_tensor,
    "_rebuild_tensor_v2": _rebuild_tensor,
    "_rebuild_tensor_v3": _rebuild_tensor_v3,
    "_rebuild_parameter": _rebuild_parameter,
    "_rebuild_parameter_with_state": _rebuild_parameter,
}


def number(value: Any, what: str) -> float | None:
    """Return a checkpoint's number, which may be a tensor of one element; None if it is no number. Raises
    `CheckpointError` if it can't be read."""
    if isinstance(value, Stored):
        if value.elements != 1 or value.dtype.is_complex:
            raise CheckpointError(f"{what} is no number but {list(value.shape)}", where=str(value.path))
        return float(value.read().reshape(()))
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group's options (not its parameters) as JSON: numbers, strings and lists of them, None for all
    else. Raises `CheckpointError` for more values than a group has."""
    left = itertools.count(MOST_NUMBERS, -1)
    return {k: _plain(v, left, 0) for k, v in group.items() if k != "params"}


def _plain(value: Any, left: Iterator[int], depth: int) -> Any:
    # A pickle may refer to one list in many places: written out, a short pickle could grow without bound.
    if depth > MOST_LEVELS or not next(left):
        raise CheckpointError(
            "a parameter group holds too much",
            why=f"more than {MOST_NUMBERS} numbers, or {MOST_LEVELS} lists within each other",
        )
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return [_plain(v, left, depth + 1) for v in value] if isinstance(value, (list, tuple)) else None


class _Window(io.RawIOBase):
    """A range of bytes of a file, as a file."""

    def __init__(self, file: OpenFile, start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes, self._at = file, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        if at < 0:
            raise ValueError("before the beginning")
        self._at = at
        return at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._nbytes - self._at)
        count = left if size is None or size < 0 else min(size, left)
        data = self._file.read(self._start + self._at, count)
        self._at += count
        return data
