"""Explains steps whose loss or gradients are not finite: what is kept of a step, and how the first such value is found
and reported.

The update program decides, on the device and over all ranks, whether a step is finite, and leaves weights and states as
they are if it is not. The step's programs then run again on the same inputs, operator by operator, and the values that
are not finite are followed from the gradients and the loss back to the first one. Intended infinities (a mask's) don't
count as the first; the operator that makes NaN of them does.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from zgraph.codegen.executable import lowered
from zgraph.codegen.node_by_node import run_node_by_node
from zgraph.errors import CheckpointError, NonFiniteError, RolledBackError
from zgraph.program.node import info
from zgraph.program.program import InputRole, OutputRole, Port, Program
from zgraph.ranks.rng import RandomStates, restored

if TYPE_CHECKING:
    from zgraph.build.step_program import Entry, StepProgram
    from zgraph.runtime.rank import Rank

logger = logging.getLogger(__name__)


@dataclass
class Forward:
    """What a forward ran with, taken before it ran."""

    number: int  # counts forwards, in their order
    flat: list[Any]  # the flat inputs, copied
    before: dict[int, torch.Tensor]  # buffers that it changes, by input position, as they were
    random: RandomStates | None  # the random states; None if it draws no random numbers


@dataclass
class Run:
    """The forward and backward of one micro-batch."""

    entry: Entry  # the cache entry that it ran by
    step: StepProgram  # its programs
    forward: Forward  # what its forward ran with
    tangents: dict[int, torch.Tensor]  # what its backward began with, by output
    # its losses that were computed outside of the model (0-dim, float64)
    losses: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Taken:
    """What is kept of the last step."""

    number: int  # the step's number
    runs: list[Run]  # its micro-batches, in order


@dataclass(frozen=True)
class Found:
    """The operator or input at which a value that is not finite first appears."""

    order: int  # position of the node in the program
    node: str  # the node's name
    module: str | None  # path of its module; None if it belongs to none
    source: str  # the user's "file:line"
    phase: str  # the phase of the node
    kind: str  # "no number" or "infinite"
    what: str  # a description of the value


@dataclass
class _Buffers:
    """Buffers that forwards of this step changed, as they were before the first such forward."""

    # by the buffer's id: number of the forward, the buffer, a copy from before
    held: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def keep(self, number: int, buffer: torch.Tensor, before: torch.Tensor) -> None:
        known = self.held.get(id(buffer))
        if known is None or number < known[0]:
            self.held[id(buffer)] = number, buffer, before

    def undo(self, bad: torch.Tensor) -> None:
        """Restore the buffers where `bad` (0-dim, on the device) is true."""
        for _, buffer, before in self.held.values():
            buffer.copy_(torch.where(bad, before, buffer))


class NonFinite:
    """The watch over one compiled module's steps, if its plan does not ignore those that are not finite. If the plan
    only skips them, no inputs are kept.
    """

    def __init__(self, runtime: Rank) -> None:
        self.runtime = runtime
        self.mode = runtime.plan.on_nonfinite
        self.explains = self.mode in ("stop", "rollback")
        self._numbers = itertools.count()
        self._runs: list[Run] = []
        self._losses: list[torch.Tensor] = []
        self._buffers = _Buffers()
        self._taken: Taken | None = None

    # -- while a step runs --------------------------------------------------------------------------------------------
    def forward(self, entry: Entry, flat: Sequence[Any], before: dict[int, torch.Tensor], random: Any) -> Forward:
        """Record a forward that is about to run. Inputs are copied: a loop may fill the same tensors with the next
        micro-batch.
        """
        given: list[Any] = []
        if self.explains:
            for port, value in zip(entry.trace.inputs, flat, strict=True):
                copied = port.role is InputRole.INPUT and isinstance(value, torch.Tensor)
                given.append(value.detach().clone() if copied else value)
        return Forward(next(self._numbers), given, before, random)

    def backward(
        self,
        entry: Entry,
        step: StepProgram,
        forward: Forward,
        flat: Sequence[Any],
        tangents: dict[int, torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Record a backward that is about to run; `outputs` are the scalars that it differentiates."""
        # (gradients of earlier backwards were thrown away)
        if all(p.grad is None for p in self.runtime.shards.params().values()):
            self.forget()
        for i, before in forward.before.items():
            if entry.trace.inputs[i].role is InputRole.BUFFER:
                self._buffers.keep(forward.number, flat[i], before)
        if self.explains:
            self._runs.append(Run(entry, step, forward, tangents))
        self._losses += [_number(output) for output in outputs]

    def saw_loss(self, loss: torch.Tensor) -> None:
        """Record a loss that was computed outside of the model, whose backward has begun."""
        self._losses.append(_number(loss))
        if self._runs:
            self._runs[-1].losses.append(self._losses[-1])

    def loss(self) -> torch.Tensor:
        """Return a number on the device (0-dim, float64) that is finite if this rank's losses are."""
        zero = torch.zeros((), dtype=torch.float64, device=self.runtime.device)
        return torch.stack([zero, *self._losses]).sum()

    def stepped(self, number: int, bad: torch.Tensor) -> None:
        """Record that the step's update ran, with no effect where `bad` (0-dim, on the device) is true."""
        self._buffers.undo(bad)
        self._taken = Taken(number, sorted(self._runs, key=lambda r: r.forward.number))
        self.forget()

    def forget(self) -> None:
        """Forget what ran so far: it is not part of the next step (its gradients were thrown away, or the update took
        them).
        """
        self._runs, self._losses, self._buffers = [], [], _Buffers()

    # -- the outcome of a step ----------------------------------------------------------------------------------------
    def was_finite(self) -> None:
        """Forget the last step: it was finite."""
        self._taken = None

    def report(self, number: int, why: str) -> None:
        """Report that the step of this number was not finite. Raises `NonFiniteError` or `RolledBackError`, unless such
        steps are only skipped. All ranks must call it.
        """
        runtime = self.runtime
        taken, self._taken = self._taken, None
        if not self.explains:
            if runtime.agreement.first():
                logger.warning("step %d was skipped: %s", number, why)
            return
        if runtime.device.type != "cpu":
            for param in runtime.shards.params().values():  # (gradients of the step after it, which will not be made)
                param.grad = None
        error = self._explained(taken, number, why)
        if self.mode == "rollback":
            error = self._rolled_back(error)
        raise error

    def _explained(self, taken: Taken | None, number: int, why: str) -> NonFiniteError:
        for micro_batch, run in enumerate(taken.runs if taken is not None else ()):
            mine = self._examine(run)
            ranks = self.runtime.agreement.gather("where values are not finite", mine)
            places = [(origin.order, rank) for rank, origin in enumerate(ranks) if origin is not None]
            if places:
                _, rank = min(places)
                return _error(number, micro_batch, rank, ranks[rank], [r for _, r in places])
        said = (
            "run again operator by operator, every value of it was finite"
            if taken is not None
            else "what it ran with is gone"
        )
        error = NonFiniteError(f"step {number} is not finite: {why}", why=said, hint="look at its batch")
        error.step = number
        return error

    def _examine(self, run: Run) -> Found | None:
        """Run a micro-batch again, and return where on this rank the first value that is not finite appears; None if
        all are finite.
        """
        runtime, forward = self.runtime, run.forward
        program = run.step.history().program
        flat = [forward.before.get(i, v) for i, v in enumerate(forward.flat)]
        trail = Trail(lowered(program, runtime.groups))
        with restored(forward.random, runtime.device):
            run_node_by_node(trail.program, [self._input(p, flat, run, program) for p in program.inputs], trail.seen)
        trace = run.entry.trace
        first = trail.first(trace.loss if trace.loss in trace.differentiable else None)
        if first is None and not all(math.isfinite(float(loss)) for loss in run.losses):
            what = "the loss, which was computed outside of the model, of finite outputs"
            return Found(len(program.nodes), "", None, "", "forward", "not finite", what)
        return first

    def _input(self, port: Port, flat: Sequence[Any], run: Run, program: Program) -> Any:
        if port.role is InputRole.PARAMETER:
            return self.runtime.shards.local(port.name)
        if port.role is InputRole.SCALE:
            return self.runtime.updater.states["/scale"]
        if port.role is InputRole.RESIDUAL:
            return self.runtime.updater.residuals.of(program)(port.name).clone()  # (a copy: the run writes to it)
        if port.role is InputRole.DRAWS:
            return self.runtime.updater.residuals.last_draw()
        assert port.index is not None
        return run.tangents[port.index] if port.role is InputRole.TANGENT else flat[port.index]

    def _rolled_back(self, error: NonFiniteError) -> NonFiniteError:
        """Load the last checkpoint, and return the error to raise then."""
        runtime, saver = self.runtime, self.runtime.saver
        try:
            saver.wait()
        except CheckpointError as failure:
            logger.warning("the last checkpoint is none: %s", failure)
        last, done = saver.last, runtime.updater.calls
        if last is None:
            error.hint = "there was no checkpoint yet to roll back to: save one before the first step"
            return error
        try:
            client = saver.load_last(runtime)
        except CheckpointError as failure:
            error.hint = f"the checkpoint {last.folder} could not be loaded to roll back to: {failure.what}"
            return error
        lost = done - runtime.updater.calls
        hint = (
            f"weights, states and random numbers are those of {last.folder}, {lost} step(s) ago: go on there in your data, "
            "or past what this batch has"
        )
        rolled_back = RolledBackError(error.what, where=error.where, why=error.why, hint=hint)
        rolled_back.step, rolled_back.micro_batch, rolled_back.rank = error.step, error.micro_batch, error.rank
        rolled_back.module, rolled_back.node, rolled_back.phase = error.module, error.node, error.phase
        rolled_back.tag, rolled_back.client_state, rolled_back.lost = last.folder.name, client, lost
        return rolled_back


def _number(loss: torch.Tensor) -> torch.Tensor:
    return loss.detach().reshape(()).to(torch.float64)


def _error(number: int, micro_batch: int, rank: int, origin: Found, ranks: Sequence[int]) -> NonFiniteError:
    place = f" in module {origin.module or '(root)'} ({origin.phase})" if origin.module is not None else ""
    why = f"the first value that is {origin.kind}: {origin.what}; rank {rank}, micro-batch {micro_batch}"
    if len(ranks) > 1:
        why += f" (it shows on ranks {', '.join(map(str, sorted(ranks)))})"
    hint = "look at this batch's rows and at the operator's inputs there; the weights are as before the step"
    error = NonFiniteError(f"step {number} is not finite{place}", where=origin.source or None, why=why, hint=hint)
    error.step, error.micro_batch, error.rank = number, micro_batch, rank
    error.module, error.node, error.phase = origin.module, origin.node or None, origin.phase
    return error


class Trail:
    """The values of a program's run that are not finite, and the search for the first of them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.marks: dict[fx.Node, bool] = {}  # values that are not finite, and whether one of their elements is NaN
        self._meant: dict[fx.Node, bool] = {}
        self._ports = {node: port for port, node in program.input_items()}
        self._outputs = {p.index: n for p, n in program.output_items() if p.role is OutputRole.OUTPUT}

    def seen(self, node: fx.Node, value: Any) -> None:
        """Record whether a node's value is finite."""
        tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        bad = [t for t in tensors if not t.isfinite().all()]
        if bad:
            self.marks[node] = any(bool(t.isnan().any()) for t in bad)
            self._meant[node] = not self.marks[node] and self._is_meant(node)

    def _is_meant(self, node: fx.Node) -> bool:
        """Return whether these infinities are intended, a mask's say: they come from literals, inputs and buffers
        alone.
        """
        if node.op != "call_function":
            port = self._ports.get(node)
            return port is None or port.role in (InputRole.INPUT, InputRole.BUFFER, InputRole.CONSTANT)
        given = [n for n in node.all_input_nodes if n in self.marks]
        literal = any(
            isinstance(a, float) and not math.isfinite(a) for a in pytree.tree_leaves((node.args, node.kwargs))
        )
        return all(self._meant[n] for n in given) and (literal or bool(given))

    def first(self, loss: int | None) -> Found | None:
        """Return the first value that makes the gradients, or the loss (the output at this index), not finite; None if
        they are finite.
        """
        ends = [n for p, n in self.program.output_items() if p.role is OutputRole.GRADIENT]
        ends += [self._outputs[loss]] if loss in self._outputs else []
        bad = [n for n in ends if n in self.marks]
        origins = self._beginnings(bad, meant=False) or self._beginnings(bad, meant=True)
        if not origins:
            outputs = [n for n in self._outputs.values() if n in self.marks]
            origins = self._beginnings(outputs, meant=False)
        if not origins:
            return None
        at = {node: i for i, node in enumerate(self.program.graph.nodes)}
        node = min(origins, key=lambda n: at[n])
        return self._told(node, at[node])

    def _beginnings(self, ends: Sequence[fx.Node], *, meant: bool) -> list[fx.Node]:
        """Return the values that are not finite although all that they are computed from is. Intended infinities count
        as finite unless `meant`.
        """
        stack = [n for n in ends if meant or not self._meant[n]]
        known, origins = set(stack), []
        while stack:
            node = stack.pop()
            before = [n for n in self._before(node) if n in self.marks and (meant or not self._meant[n])]
            if not before:
                origins.append(node)
            stack += [n for n in before if n not in known]
            known.update(before)
        return origins

    def _before(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that a value is computed from; for a tangent, the output that it belongs to."""
        port = self._ports.get(node)
        if port is not None and port.role is InputRole.TANGENT and port.index in self._outputs:
            return [self._outputs[port.index]]
        return node.all_input_nodes

    def _told(self, node: fx.Node, at: int) -> Found:
        record, port = info(node), self._ports.get(node)
        kind = "no number" if self.marks[node] else "infinite"
        module: str | None = record.module
        if port is not None:
            texts = {
                InputRole.PARAMETER: f"parameter {port.name}, before the step",
                InputRole.BUFFER: f"buffer {port.name}, before the step",
                InputRole.TANGENT: "the gradient that came into the backward from outside of the model, whose outputs are finite",
            }
            what = texts.get(port.role, f"{port.name}, which the model was given")  # type: ignore[arg-type]
            module = port.name.rpartition(".")[0] if port.role in (InputRole.PARAMETER, InputRole.BUFFER) else None
        else:
            what = f"{node.name} = {node.target}"
            meant = [n.name for n in node.all_input_nodes if self._meant.get(n)]
            what += f", of {', '.join(meant)}, which holds infinities" if meant else ", of finite values"
        return Found(at, node.name, module, record.source, str(record.phase), kind, what)
