"""What users add to a checkpoint comes back equal and of the same type, or is refused; and what is malformed raises nothing else."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as some
from hypothesis.extra import numpy as arrays

from zgraph.checkpoint import state
from zgraph.checkpoint.user_values import KIND, PerRank, decode, encode
from zgraph.errors import CheckpointError

PLAIN = (
    some.none()
    | some.booleans()
    | some.integers()
    | some.floats(allow_nan=False)
    | some.complex_numbers(allow_nan=False)
    | some.text()
    | some.binary()
)
NUMBERS = arrays.boolean_dtypes() | arrays.integer_dtypes(endianness="?") | arrays.floating_dtypes(endianness="?")
SCALARS = arrays.from_dtype(np.dtype("f4"), allow_nan=False) | arrays.from_dtype(np.dtype("i8")) | some.just(np.True_)
KEYS = some.recursive(
    PLAIN | SCALARS,
    lambda inner: some.lists(inner, max_size=3).map(tuple) | some.frozensets(inner, max_size=3),
    max_leaves=5,
)
LEAVES = (
    KEYS
    | some.binary().map(bytearray)
    | arrays.arrays(NUMBERS, arrays.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3))
    | some.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.int64]).map(lambda d: torch.ones(2, 3).to(d))
    | some.sets(KEYS, max_size=4)
)
VALUES = some.recursive(
    LEAVES,
    lambda inner: (
        some.lists(inner, max_size=4)
        | some.lists(inner, max_size=4).map(tuple)
        | some.lists(inner, max_size=3).map(PerRank)
        | some.dictionaries(KEYS | some.just(KIND), inner, max_size=4)
        | some.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | some.dictionaries(KEYS, inner, max_size=4).map(Counter)
    ),
    max_leaves=12,
)


def again(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> str:
        tensors[f"client.0.{len(tensors)}"] = tensor.clone()
        return f"client.0.{len(tensors) - 1}"

    return decode(json.loads(json.dumps(encode(value, keep))), tensors.__getitem__)


def alike(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other, equal_nan=True)
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(alike(a, b) for a, b in pairs)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, (set, frozenset)):
        return one == other and {(v, type(v)) for v in one} == {(v, type(v)) for v in other}
    return one == other and (isinstance(one, int) or repr(one) == repr(other))


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(VALUES)
def test_a_value_comes_back_equal_and_of_its_type(value):
    assert alike(value, again(value))


@pytest.mark.parametrize(
    "value",
    [
        {frozenset({1, 2})},
        {frozenset({(1, frozenset("a"))}): 3},
        np.array(2.5),
        np.zeros((0, 3), ">i2"),
        bytearray(b"x"),
        OrderedDict(b=1, a=2),
        Counter("aab"),
        PerRank([1, {2}]),
        {1: 2, "1": 3, None: 4, (1, 2): 5},
        {KIND: "tensor", "name": "model.a"},
        {"[" * 150: [1]},
        1 << 64,
        {3**60000: 1},
        -(7**20000),
        1j,
        (math.inf, -math.inf, -0.0, complex(-0.0, math.inf)),
        torch.ones(2, dtype=torch.complex64).conj() * 1j,
    ],
    ids=lambda value: type(value).__name__,
)
def test_such_a_value_comes_back_as_it_was(value):
    assert alike(value, again([value])[0])


def test_no_number_is_none_again():
    assert math.isnan(again(math.nan)) and np.isnan(again(np.float32(math.nan)))


class Kept:
    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return self.held


def test_of_objects_their_state_comes_back():
    net = torch.nn.Linear(2, 2)
    assert alike(again({"a": Kept([1, Kept((2,))])}), {"a": [1, (2,)]})
    assert list(again(net)) == ["weight", "bias"] and torch.equal(again(net)["weight"], net.weight.detach())
    schedule = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(net.parameters()), [2, 2, 5])
    assert alike(again(schedule), schedule.state_dict())


class Words(str):
    pass


class Numbers(list):
    pass


Point = namedtuple("Point", "x y")
REFUSED = {
    "a subclass of str": (lambda: Words("a"), r"at\[0\] is a .*Words"),
    "a subclass of list": (lambda: Numbers([1]), r"at\[0\] is a .*Numbers"),
    "a namedtuple": (lambda: Point(1, 2), r"at\[0\] is a .*Point"),
    "a size": (lambda: torch.Size([1]), r"at\[0\] is a torch.Size"),
    "a defaultdict": (lambda: defaultdict(list), r"at\[0\] is a .*defaultdict"),
    "a matrix": (lambda: np.ones((2, 2)).view(np.matrix), r"at\[0\] is a .*matrix"),
    "dates": (lambda: np.zeros(2, "M8[s]"), r"at\[0\] is a numpy.ndarray"),
    "a sparse tensor": (lambda: torch.eye(3).to_sparse(), r"at\[0\] is a Tensor \(sparse_coo"),
    "a sparse tensor of rows": (lambda: torch.eye(3).to_sparse_csr(), r"at\[0\] is a Tensor \(sparse_csr"),
    "a tensor without data": (lambda: torch.ones(2, device="meta"), r"at\[0\] is a Tensor .*meta"),
    "a parameter": (lambda: torch.nn.Parameter(torch.ones(1)), r"at\[0\] is a Parameter"),
    "numbers that files have no name for": (
        lambda: torch.ones(1, dtype=torch.complex128),
        r"at\[0\] is of torch.compl",
    ),
    "a tensor as a key": (lambda: {torch.ones(1): 2}, r"at\[0\].keys\(\)\[…\] is a .*Tensor"),
    "an object in a set": (lambda: {Kept([1])}, r"at\[0\]\[…\] is a .*Kept"),
    "a class": (lambda: Kept, r"at\[0\] is a builtins.type"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_not_come_back_so_is_refused_with_its_place(what):
    made, said = REFUSED[what]
    with pytest.raises(CheckpointError, match=said):
        encode([made()], lambda tensor: "name", "at")


def test_what_holds_itself_is_refused():
    value: list[Any] = []
    value.append({"deep": value})
    with pytest.raises(CheckpointError, match="too deeply"):
        encode(value, lambda tensor: "name")


MALFORMED = [
    {"kind": "number", "dtype": "<f8", "is": ""},
    {"kind": "number", "dtype": "<f8", "is": "AAAAAAAAAAAAAAAAAAAAAA=="},
    {"kind": "number", "dtype": "(2,", "is": ""},
    {"kind": "number", "dtype": "f99999999999999999999", "is": ""},
    {"kind": "number", "dtype": "<f99", "is": ""},
    {"kind": "number", "dtype": "<f8", "is": 5},
    {"kind": "number", "dtype": None, "is": ""},
    {"kind": "array", "dtype": "<f8", "name": "x", "shape": [2**70]},
    {"kind": "array", "dtype": "<f8", "name": "x", "shape": [2**40, 2**40]},
    {"kind": "array", "dtype": "<f8", "name": "x", "shape": [-1]},
    {"kind": "array", "dtype": "<f8", "name": "x", "shape": "a"},
    {"kind": "array", "dtype": "|u1", "name": "x", "shape": [0, 2**61, 2**61]},
    {"kind": "array", "dtype": "<f8", "name": "floats", "shape": [8]},
    {"kind": "array", "dtype": "|O8", "name": "x", "shape": [1]},
    {"kind": "tensor", "name": "nowhere"},
    {"kind": "tensor", "name": ["x"]},
    {"kind": "int", "is": "1.5"},
    {"kind": "int", "is": 5},
    {"kind": "complex", "is": [1]},
    {"kind": "complex", "is": [1, "a"]},
    {"kind": "bytes", "is": "a"},
    {"kind": "dict", "is": [[1]]},
    {"kind": "dict", "is": [[1, 2], [True, 3]]},
    {"kind": "dict", "is": [[[], 2]]},
    {"kind": "set", "is": [1, 1]},
    {"kind": "frozenset", "is": [[]]},
    {"kind": "tuple", "is": 5},
    {"kind": ["x"], "is": 5},
    {"kind": "tuple"},
]


@pytest.mark.parametrize("shown", MALFORMED, ids=str)
def test_what_is_malformed_is_refused_and_raises_nothing_else(shown):
    tensors = {"x": torch.zeros(8, dtype=torch.uint8), "floats": torch.zeros(8)}
    value = {KIND: shown["kind"]} | {k: v for k, v in shown.items() if k != "kind"}
    with pytest.raises(CheckpointError, match="can't be read"):
        decode([value], tensors.__getitem__)


JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(), inner, max_size=3),
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(some.sampled_from(MALFORMED), some.sampled_from(["dtype", "is", "shape", "name", "kind"]), JSON)
def test_whatever_is_in_a_checkpoint_is_read_or_refused(shown, key, instead):
    changed = shown | {key: instead}
    value = {KIND: changed["kind"]} | {k: v for k, v in changed.items() if k != "kind"}
    try:
        decode(value, {"x": torch.zeros(8, dtype=torch.uint8)}.__getitem__)
    except CheckpointError:
        assume(True)


# -- random states


FORGED_STATES = {
    "NumPy's position beyond its words": lambda s: s["numpy"].__setitem__(2, 10**9),
    "NumPy's position before its words": lambda s: s["numpy"].__setitem__(2, -1),
    "NumPy's words too few": lambda s: s["numpy"][1].pop(),
    "a word of NumPy's too large": lambda s: s["numpy"][1].__setitem__(0, 2**32),
    "a word of NumPy's that is a fraction": lambda s: s["numpy"][1].__setitem__(0, 0.5),
    "another generator": lambda s: s["numpy"].__setitem__(0, "PCG64"),
    "NumPy's second number": lambda s: s["numpy"].__setitem__(4, "a"),
    "NumPy's flag": lambda s: s["numpy"].__setitem__(3, 2**40),
    "Python's position beyond its words": lambda s: s["python"][1].__setitem__(624, 625),
    "Python's words too few": lambda s: s["python"][1].pop(),
    "a word of Python's too large": lambda s: s["python"][1].__setitem__(3, 2**40),
    "Python's second number": lambda s: s["python"].__setitem__(2, "a"),
    "Python's empty": lambda s: s["python"].__setitem__(1, []),
    "torch's too short": lambda s: s.update(torch="AAAA"),
    "torch's empty": lambda s: s.update(torch=""),
}


@pytest.mark.parametrize("what", FORGED_STATES)
def test_random_states_that_are_none_are_refused(what):
    saved = json.loads(json.dumps(state.random_states(torch.device("cpu"))))
    state.RandomStates(saved, torch.device("cpu"))
    FORGED_STATES[what](saved)
    with pytest.raises(CheckpointError, match="random states"):
        state.RandomStates(saved, torch.device("cpu"))


def test_long_numbers_need_no_setting_of_the_interpreters():
    assert sys.get_int_max_str_digits() < 20000 and again(3**60000) == 3**60000
