"""`ZGRAPH_DEBUG=layout,values`: programs that check themselves each time that they run.

`layout` compares each value's real strides, dtype and size with its fake value's: for an eager program those of every
node, for one that Inductor compiled those of inputs and outputs (Inductor's own code checks the results of library
calls). `values` runs each program a second time, operator by operator on copies of its inputs and from the same random
state, and compares. Collectives run a second time too: all ranks must have the same `ZGRAPH_DEBUG`. Whether a program
checks itself is decided when it is compiled; otherwise it costs nothing.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from zgraph.codegen.eager import Code
from zgraph.codegen.executable import Executable, lowered
from zgraph.codegen.node_by_node import run_node_by_node
from zgraph.errors import LayoutError, PlanError, WrongValueError
from zgraph.program import collectives, transfers_to_host
from zgraph.program.aliases import mutates
from zgraph.program.layout import has_strides, in_flight, promised
from zgraph.program.node import info, place_of, tensors, value
from zgraph.program.program import OutputRole, Program
from zgraph.program.tolerance import TOLERANCE, Difference, difference
from zgraph.ranks.rng import random_states, restored

logger = logging.getLogger(__name__)

VARIABLE = "ZGRAPH_DEBUG"
LAYOUT, VALUES = KINDS = ("layout", "values")
MAX_SHARE = 0.01  # of the elements of saved integers and masks may differ: rounding may change one


def wanted() -> frozenset[str]:
    """Return the checks that the environment asks for. Raises `PlanError` for an unknown word."""
    words = [w.strip() for w in os.environ.get(VARIABLE, "").split(",") if w.strip()]
    unknown = [w for w in words if w not in KINDS]
    if unknown:
        raise PlanError(
            f"{VARIABLE} has no {unknown[0]!r}",
            where=f"the environment variable {VARIABLE}",
            why=f"it is {os.environ[VARIABLE]!r}",
            hint=f"give it one or both of {', '.join(KINDS)}, divided by a comma",
        )
    return frozenset(words)


def checked(executable: Executable, groups: dict[str, str]) -> Executable:
    """Make an executable check itself in each run, as the environment asks for; `groups` are those that it was
    compiled for."""
    kinds = wanted()
    if kinds:
        executable.function = _Checked(executable, groups, kinds)
    return executable


class _Checked:
    """A function that runs in place of an executable's own, and checks it."""

    def __init__(self, executable: Executable, groups: dict[str, str], kinds: frozenset[str]) -> None:
        self.executable, self.kinds = executable, kinds
        self.program = executable.program
        self.ready = lowered(self.program, groups)
        self.nodes = {n.name: n for n in self.ready.graph.nodes}
        self.function = executable.function
        self.observed: dict[str, torch.Tensor] = {}
        if isinstance(executable.function, Code):
            self.function = executable.function.observed_by(self._seen)
        if VALUES in kinds and any(n.target is transfers_to_host.STORE for n in self.program.graph.nodes):
            logger.warning(
                "%s: %s can't run it twice: it writes to where states are offloaded", self.program.name, VARIABLE
            )
            self.kinds = kinds - {VALUES}

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        inputs = self.program.placeholders()
        for argument, node in zip(values, inputs, strict=True):
            _land(argument, node)
            if LAYOUT in self.kinds and not in_flight(node):
                _refuse_layout(self.program, node, argument, "comes in")
        if VALUES not in self.kinds:
            return self._outputs(self.function(values))
        arguments, before = list(values), [_copied(v, n) for v, n in zip(values, inputs, strict=True)]
        device = next((v.device for v in values if isinstance(v, torch.Tensor)), torch.device("cpu"))
        states = random_states(device)
        self.observed.clear()
        results = self._outputs(self.function(values))
        with restored(states, device):
            plain_values = self._stepwise(before)
        self._compare(plain_values, results, list(zip(inputs, arguments, before, strict=True)))
        return results

    def _seen(self, name: str, value: Any) -> None:
        """Check a value of an eager program as soon as it is computed, and keep a copy for the comparison."""
        node = self.nodes[name]
        if LAYOUT in self.kinds:
            _refuse_layout(self.program, node, value, "is made")
        if VALUES in self.kinds and isinstance(value, torch.Tensor):
            self.observed[name] = value.detach().clone()

    def _outputs(self, results: Sequence[Any]) -> Sequence[Any]:
        strides = self.executable.strides or [None] * len(results)
        for (_, node), result, chosen in zip(self.program.output_items(), results, strides, strict=True):
            _land(result, node)
            if LAYOUT in self.kinds and not in_flight(node):
                _refuse_layout(self.program, node, result, "comes out", chosen)
        return results

    def _stepwise(self, inputs: list[Any]) -> dict[str, Any]:
        looked_at = {n.name for n in self.ready.output_values()} | self.observed.keys()
        plain_values: dict[str, Any] = {}

        def seen(node: fx.Node, value: Any) -> None:
            if node.name in looked_at and isinstance(value, torch.Tensor):
                plain_values[node.name] = value.detach().clone()

        run_node_by_node(self.ready, inputs, seen)
        return plain_values

    def _compare(self, plain: dict[str, Any], results: Sequence[Any], inputs: list[tuple[fx.Node, Any, Any]]) -> None:
        """Raise `WrongValueError` for the first node, in the program's order, whose value differs from what plain
        operators give."""
        mine = dict(self.observed)
        loose = set()
        for port, node, result in zip(self.program.outputs, self.ready.output_values(), results, strict=True):
            if isinstance(result, torch.Tensor):
                mine.setdefault(node.name, result)
            if port.role is OutputRole.SAVED:
                loose.add(node.name)
        norm = norm_of(plain.values())
        for node in self.ready.graph.nodes:
            if node.name in mine and node.name in plain:
                compared = compare(self.program, node, mine[node.name], plain[node.name], norm, node.name in loose)
                _refuse_value(self.program, node, compared)
        for node, now, expected in inputs:
            if any(mutates(u) for u in node.users) and isinstance(now, torch.Tensor) and now is not expected:
                _refuse_value(self.program, node, compare(self.program, node, now, expected, norm, False))


def norm_of(values: Any) -> float:
    """Return the norm of all floating-point tensors among `values` together; tensors that are not finite are left out."""
    floats = (v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())
    return math.sqrt(sum(n * n for v in floats if math.isfinite(n := float(v.double().norm()))))


def compare(
    program: Program, node: fx.Node, mine: torch.Tensor, plain: torch.Tensor, norm: float, loose: bool
) -> Difference:
    """Return how far a node's value in compiled code is from that of plain operators, and how far it may be.

    With `loose`, a share of the elements of an integer or boolean value may differ: it was computed from rounded
    numbers.
    """
    compared = difference("value", node.name, 0, mine, plain, norm, coarsest(program))
    if loose and not compared.ok and not mine.is_floating_point() and mine.shape == plain.shape:
        share = float(mine.ne(plain).double().mean())
        return Difference("value", node.name, 0, share, MAX_SHARE, False)
    return compared


def coarsest(program: Program) -> torch.dtype | None:
    """Return the dtype with the largest rounding error among a program's values, or None where none rounds."""
    dtypes = {t.dtype for n in program.graph.nodes for t in tensors(n) if t.dtype in TOLERANCE}
    return max(dtypes, key=lambda d: TOLERANCE[d], default=None)


def _land(value: Any, node: fx.Node) -> None:
    """Wait for a collective that is still running, before its value is looked at."""
    if (
        in_flight(node)
        and not transfers_to_host.is_start(node)
        and not any(transfers_to_host.is_wait(u) for u in node.users)
    ):
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                collectives.WAIT(tensor)


def _copied(value: Any, node: fx.Node) -> Any:
    """Return a copy of an input, or the input itself if it is offloaded and the program only reads it."""
    written = any(mutates(user) for user in node.users)
    if not isinstance(value, torch.Tensor) or (info(node).home is not None and not written):
        return value
    return value.clone()


def _refuse_layout(program: Program, node: fx.Node, given: Any, how: str, chosen: Any = None) -> None:
    strides = promised(node)
    if strides is None or not isinstance(given, torch.Tensor):
        return
    fake = value(node)
    expected = tuple(chosen) if chosen is not None else strides
    if given.dtype is fake.dtype and tuple(given.shape) == tuple(fake.shape) and has_strides(given, expected):
        return
    raise LayoutError(
        f"{node.name!r} {how} otherwise than {program.name} was made for",
        where=place_of(node),
        why=f"it is {given.dtype}{list(given.shape)} with strides {list(given.stride())}, and was to be "
        f"{fake.dtype}{list(fake.shape)} with strides {list(expected)} ({node.target})",
        hint="report this: it is a fault of zgraph or of this torch",
    )


def _refuse_value(program: Program, node: fx.Node, compared: Difference) -> None:
    if compared.ok:
        return
    raise WrongValueError(
        f"{node.name!r} of {program.name} is not what plain operators give for the same inputs",
        where=place_of(node),
        why=f"its relative error is {compared.error:.3g}, and {compared.allowed:.3g} is allowed ({node.target})",
        hint="`zgraph bisect --runtime` finds the first node that differs inside of compiled code; report this with what it says",
    )
