"""What a user adds to a checkpoint, as JSON and tensors: no pickle, and the same values again.

None, booleans, numbers, strings, bytes, lists, tuples, dicts, sets, NumPy arrays and numbers, tensors, and objects with a
`state_dict()`, of which that is taken. All else is refused, with its place.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from zgraph.errors import CheckpointError

KIND = "__zgraph__"
TENSORS = ("tensor", "array")  # kinds of what is kept as a tensor, under its "name"
DEPTH = 100


class PerRank(list[Any]):
    """What each rank had saved, in order: given where ranks had saved different values, and there are other ranks now."""


def encode(value: Any, keep: Callable[[torch.Tensor], str], path: str = "client_state") -> Any:
    """The value as JSON; `keep` takes each tensor and gives the name it is saved by. Raises `CheckpointError` for what is refused."""
    if path.count("[") > DEPTH:
        raise CheckpointError(f"{path[:200]} … is nested too deeply", why=f"more than {DEPTH} levels")
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        value = value.state_dict()
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {KIND: "float", "is": repr(value)}
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor):
            raise CheckpointError(
                f"{path} is a DTensor",
                why="what a user adds is each rank's own",
                hint="give its to_local() or full_tensor()",
            )
        return {KIND: "tensor", "name": keep(value.detach())}
    if isinstance(value, np.ndarray) and _is_plain(value.dtype):
        value = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
        return {
            KIND: "array",
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "name": keep(torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())),
        }
    if isinstance(value, np.generic) and _is_plain(value.dtype):
        return {KIND: "number", "dtype": value.dtype.str, "is": base64.b64encode(value.tobytes()).decode()}
    if isinstance(value, (bytes, bytearray)):
        return {KIND: "bytes", "is": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, Mapping):
        pairs = [(k, encode(v, keep, f"{path}[{k!r}]")) for k, v in value.items()]
        if all(type(k) is str for k, _ in pairs) and KIND not in value:
            return dict(pairs)
        return {KIND: "dict", "is": [[encode(k, keep, f"{path}.keys()[…]"), v] for k, v in pairs]}
    if type(value) is list:
        return [encode(v, keep, f"{path}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, (tuple, list)):
        return {KIND: "tuple", "is": [encode(v, keep, f"{path}[{i}]") for i, v in enumerate(value)]}
    if isinstance(value, (set, frozenset)):
        return {KIND: "set", "is": [encode(v, keep, f"{path}[…]") for v in sorted(value, key=repr)]}
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}",
        why="a checkpoint holds no pickles: who loads one would run what is in it",
        hint="give plain values, arrays, tensors, or an object with state_dict()",
    )


def decode(value: Any, load: Callable[[str], torch.Tensor]) -> Any:
    """The value again. Raises `CheckpointError` for what `encode` does not write."""
    try:
        return _decoded(value, load)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
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
        return load(value["name"]).numpy().view(_plain(value["dtype"])).reshape(value["shape"])
    if kind == "number":
        return np.frombuffer(base64.b64decode(value["is"], validate=True), _plain(value["dtype"]))[0]
    if kind == "float":
        return float(value["is"])
    if kind == "bytes":
        return base64.b64decode(value["is"], validate=True)
    if kind == "dict":
        return {_decoded(k, load): _decoded(v, load) for k, v in value["is"]}
    if kind == "tuple":
        return tuple(_decoded(v, load) for v in value["is"])
    if kind == "set":
        return {_decoded(v, load) for v in value["is"]}
    raise ValueError(f"there is no kind {kind!r}")


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufc" and dtype.itemsize <= 16


def _plain(name: Any) -> np.dtype[Any]:
    found = np.dtype(str(name))
    if not _is_plain(found):
        raise ValueError(f"an array of {name!r}")
    return found
