"""Store what a user adds to a checkpoint as JSON and tensors, without pickle, and read the same values again.

None, booleans, numbers, strings, bytes, lists, tuples, dicts, sets, NumPy arrays and numbers, dense tensors, and
objects with a `state_dict()`, which is saved in their stead. A value that is read back is equal and of the same type.
All else is refused by an error that says where in the value it is.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from zgraph.checkpoint.source import naturals
from zgraph.checkpoint.tensorfile import refuse_unwritable
from zgraph.errors import CheckpointError

KIND = "__zgraph__"
TENSORS = ("tensor", "array")  # kinds that are saved as a tensor, whose name is under "name"
DEPTH = 100
MOST_BITS = 64  # the longest int that is written in decimal digits: JSON readers refuse longer ones
_DTYPE = re.compile(r"[<>|][biufc]\d{1,2}")


class PerRank(list[Any]):
    """The values that the ranks of a save had, in rank order: given where they differed and the number of ranks is
    another now."""


SEQUENCES: dict[str, type] = {"tuple": tuple, "per rank": PerRank}
SETS: dict[str, type] = {"set": set, "frozenset": frozenset}
TABLES: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_KIND_OF = {made: kind for kinds in (SEQUENCES, SETS, TABLES) for kind, made in kinds.items()}


def encode(value: Any, keep: Callable[[torch.Tensor], str], path: str = "client_state") -> Any:
    """Return the value as JSON. `keep` takes each tensor and returns the name it is saved by. Raises `CheckpointError`
    for what can't be saved."""
    return _encoded(value, keep, path, 0)


def _encoded(value: Any, keep: Callable[[torch.Tensor], str], path: str, depth: int, key: bool = False) -> Any:
    """Encode one value. `key`: it is a dict's key or in a set, so it must be equal by value when read back: tensors and
    objects are refused."""
    if depth > DEPTH:
        raise CheckpointError(f"{path[:200]} … is nested too deeply", why=f"more than {DEPTH} levels")
    if not key and callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        value = value.state_dict()
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if value.bit_length() <= MOST_BITS else {KIND: "int", "is": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {KIND: "float", "is": repr(value)}
    if kind is complex:
        return {KIND: "complex", "is": [_encoded(part, keep, path, depth) for part in (value.real, value.imag)]}
    if kind in (bytes, bytearray):
        return {KIND: kind.__name__, "is": base64.b64encode(value).decode()}
    if isinstance(value, np.generic) and _is_plain(value.dtype) and kind is np.dtype(value.dtype.str).type:
        return {KIND: "number", "dtype": value.dtype.str, "is": base64.b64encode(value.tobytes()).decode()}
    if kind in SETS.values():
        items = [_encoded(v, keep, f"{path}[…]", depth + 1, key=True) for v in value]
        return {KIND: _KIND_OF[kind], "is": sorted(items, key=json.dumps)}
    if kind is tuple or (not key and kind in (list, PerRank)):
        items = [_encoded(v, keep, f"{path}[{i}]", depth + 1, key) for i, v in enumerate(value)]
        return items if kind is list else {KIND: _KIND_OF[kind], "is": items}
    if not key and kind in TABLES.values():
        shown = {k: _encoded(v, keep, f"{path}[{_shown(k)}]", depth + 1) for k, v in value.items()}
        if kind is dict and all(type(k) is str for k in value) and KIND not in value:
            return shown
        pairs = [[_encoded(k, keep, f"{path}.keys()[…]", depth + 1, key=True), v] for k, v in shown.items()]
        return {KIND: _KIND_OF[kind], "is": pairs}
    if not key and kind is torch.Tensor and _is_dense(value):
        refuse_unwritable(path, value.dtype)
        return {KIND: "tensor", "name": keep(value.detach().resolve_conj().resolve_neg())}
    if not key and kind is np.ndarray and _is_plain(value.dtype):
        flat = torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), np.uint8))
        return {KIND: "array", "dtype": value.dtype.str, "shape": list(value.shape), "name": keep(flat)}
    raise _refusal(value, path, key)


def _shown(key: Any) -> str:
    return repr(key)[:80] if type(key) is str or (type(key) is int and key.bit_length() <= MOST_BITS) else "…"


def _refusal(value: Any, path: str, key: bool) -> CheckpointError:
    if isinstance(value, torch.Tensor) and not key:
        how = {DTensor: "to_local() or full_tensor()", torch.nn.Parameter: "detach()"}.get(type(value), "to_dense()")
        what = f"{type(value).__name__} ({str(value.layout).removeprefix('torch.')}, on {value.device.type})"
        return CheckpointError(
            f"{path} is a {what}", why="what a user adds is dense tensors, each rank's own", hint=f"give its {how}"
        )
    return CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}",
        why="what is in a set, or a key, must be a plain value"
        if key
        else "a checkpoint holds no pickles: who loads one would run what is in it",
        hint="give plain values of Python's own types, arrays, tensors, or an object with state_dict()",
    )


def decode(value: Any, load: Callable[[str], torch.Tensor]) -> Any:
    """Return the value that `encode` encoded; `load` reads a tensor by name. Raises `CheckpointError` for what `encode`
    does not write."""
    try:
        return _decoded(value, load)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            "the user's part of the checkpoint can't be read", why=f"{type(error).__name__}: {error}"[:300]
        ) from None


def _decoded(value: Any, load: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(v, load) for v in value]
    if not isinstance(value, dict):
        return value
    if KIND not in value:
        return {k: _decoded(v, load) for k, v in value.items()}
    kind = value[KIND]
    if kind == "tensor":
        return load(value["name"])
    if kind == "array":
        return _array(load(value["name"]), _dtype(value["dtype"]), naturals(value["shape"]))
    content = value["is"]
    if kind == "number":
        (number,) = np.frombuffer(base64.b64decode(content, validate=True), _dtype(value["dtype"]))
        return number
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float(content)
    if kind == "complex":
        real, imaginary = (_decoded(part, load) for part in content)
        return complex(real, imaginary)
    if kind in ("bytes", "bytearray"):
        data = base64.b64decode(content, validate=True)
        return data if kind == "bytes" else bytearray(data)
    if kind in SEQUENCES:
        return SEQUENCES[kind](_decoded(v, load) for v in content)
    if kind in SETS:
        collection = SETS[kind](_decoded(v, load) for v in content)
    elif kind in TABLES:
        collection = TABLES[kind]({_decoded(k, load): _decoded(v, load) for k, v in content})
    else:
        raise ValueError(f"there is no kind {kind!r}")
    if len(collection) != len(content):
        raise ValueError(f"a {kind} holds one key twice")
    return collection


def _array(raw: torch.Tensor, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if raw.dtype is not torch.uint8 or raw.dim() != 1 or raw.numel() != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of {dtype}{list(shape)} from {list(raw.shape)} of {raw.dtype}")
    return raw.numpy().view(dtype).reshape(shape)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return _DTYPE.fullmatch(dtype.str) is not None


def _dtype(name: Any) -> np.dtype[Any]:
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise ValueError(f"{str(name)[:80]!r} is no type of numbers")
    return np.dtype(name)
