"""Presents a forward and its backward to autograd as one function, whose backward runs the compiled backward."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from zgraph.build.step_program import Entry, StepProgram
from zgraph.capture.storages import Sharing
from zgraph.errors import UnsupportedError, divided_penalty
from zgraph.parameters.shards import Shards
from zgraph.program.program import InputRole
from zgraph.ranks.rng import random_states, restored
from zgraph.runtime.needed_votes import NeededVotes
from zgraph.runtime.timings import Clock
from zgraph.runtime.unsharded_weights import UnshardedWeights
from zgraph.runtime.version_counters import VersionCounters
from zgraph.torch_compat import autograd_state, tensor_storage
from zgraph.torch_compat.autograd_state import keeps_graph

logger = logging.getLogger(__name__)


class Saved(list[Any]):
    """The values that a forward saved for its backward.

    When it is freed, it waits for the gathers that the forward started and no backward waited for: torch holds a
    transfer, and its buffers, until someone has waited for it.
    """

    def __init__(self, sharing: Sharing, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.sharing = sharing
        self.sizes = (
            sizes  # the sizes of the call, by name: inputs that have them may be written to before the backward
        )
        self.in_flight: list[torch.Tensor] = []

    def clear(self) -> None:
        super().clear()
        self.in_flight.clear()

    def __del__(self) -> None:
        tensor_storage.land(self.in_flight)


class Cuts(Protocol):
    """The cut of one output from the bucket's size to the size of the batch."""

    def of(self, value: torch.Tensor) -> torch.Tensor: ...

    def filled(self, gradient: torch.Tensor) -> torch.Tensor: ...


class Runs(Protocol):
    """What runs the programs of a forward and its backward: a rank's runtime."""

    shards: Shards
    acts: NeededVotes
    device: torch.device
    clock: Clock
    unsharded: UnshardedWeights
    accumulating: bool
    nonfinite: Any

    def prepare(self, step: StepProgram) -> None: ...

    def cuts(self, entry: Entry, outputs: Sequence[Any]) -> Mapping[int, Cuts]: ...

    def run_forward(
        self, entry: Entry, step: StepProgram, flat: Sequence[Any], *, mutate: bool = True
    ) -> tuple[list[Any], Saved]: ...

    def run_backward(
        self,
        step: StepProgram,
        saved: Saved,
        flat: Sequence[Any],
        tangents: dict[int, torch.Tensor],
        unsharded: dict[str, torch.Tensor],
        *,
        adds: Callable[[], frozenset[str]],
        clear: bool,
    ) -> dict[tuple[InputRole | None, str], torch.Tensor]: ...


class Step(torch.autograd.Function):
    """One forward and its backward, as a function of autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        runtime: Runs,
        entry: Entry,
        step: StepProgram,
        flat: tuple[Any, ...],
        names: list[str],
        loose: list[int],
        *tensors: torch.Tensor,
    ) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.runtime, ctx.entry, ctx.step, ctx.flat, ctx.names, ctx.loose = (
            runtime,
            entry,
            step,
            flat,
            names,
            loose,
        )
        # Kept to run the forward again, if the user differentiates other outputs than were expected.
        ctx.random = random_states(runtime.device) if step.random else None
        ctx.before = {i: flat[i].clone() for i in step.mutated}
        nonfinite = runtime.nonfinite
        ctx.evidence = nonfinite.forward(entry, flat, ctx.before, ctx.random) if nonfinite is not None else None
        outputs, ctx.saved = runtime.run_forward(entry, step, flat)
        ctx.cuts = runtime.cuts(entry, outputs)
        for at, cut in ctx.cuts.items():
            outputs[at] = cut.of(outputs[at])
        ctx.kept = dict(runtime.unsharded.weights) if step.keeps else {}
        ctx.versions = VersionCounters(entry.trace, step, ctx.saved.sharing, runtime.shards.version)
        ctx.versions.note(flat, outputs)
        # (an output itself would refer to this context, which would refer to it)
        ctx.numbers = {i: v.detach() for i, v in enumerate(outputs) if nonfinite is not None and _is_number(v)}
        ctx.seen = {i: weakref.ref(outputs[i]) for i in entry.trace.upstream}
        plain = [
            v for i, v in enumerate(outputs) if isinstance(v, torch.Tensor) and i not in entry.trace.differentiable
        ]
        ctx.mark_non_differentiable(*plain)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "gradients of gradients are not supported",
                why="the backward was started with create_graph=True, and programs have one backward",
                hint="compute a penalty on gradients with the plain model, or leave out create_graph",
            )
        runtime, entry, step = ctx.runtime, ctx.entry, ctx.step
        tangents = {i: g for i, g in enumerate(grads) if g is not None and i in entry.trace.differentiable}
        tangents |= {i: cut.filled(tangents[i]) for i, cut in ctx.cuts.items() if i in tangents}
        _refuse_shards(tangents)
        refuse_partial(entry, ctx.seen, tangents.keys())
        outputs = sorted(entry.in_other(entry.beside[0], frozenset(tangents)))
        runtime.needed_votes.backward(step.shared_name, outputs, accumulates=runtime.accumulating)
        if ctx.saved is None:
            raise RuntimeError(
                "backward through this forward a second time: what it saved is gone; pass retain_graph=True to the first backward"
            )
        again = frozenset(tangents) != entry.pattern or step.symbolic.latest is not entry.program()
        ctx.versions.check(ctx.flat, whole=again)
        flat, saved, unsharded = ctx.flat, ctx.saved, ctx.kept
        if again:
            step, saved, flat = _again(ctx, frozenset(tangents))
            unsharded = dict(runtime.unsharded.weights)
        if not step.differentiated:  # (no gradient depends on these outputs)
            return (None,) * (6 + len(ctx.names) + len(ctx.loose))
        clear = not keeps_graph()
        if runtime.nonfinite is not None:
            losses = [v for i, v in ctx.numbers.items() if i in tangents]
            runtime.nonfinite.backward(entry, step, ctx.evidence, flat, tangents, losses)
        with runtime.clock.timed("backward"):
            gradients = runtime.run_backward(
                step,
                saved,
                _detached(flat, entry.trace.others),
                tangents,
                unsharded,
                adds=lambda: _adds_to(ctx),
                clear=clear,
            )
        if clear:
            ctx.saved = ctx.flat = ctx.kept = ctx.versions = None
        of_params = [gradients.get((InputRole.PARAMETER, n)) for n in ctx.names]
        of_inputs = [gradients.get((entry.trace.inputs[i].role, entry.trace.inputs[i].name)) for i in ctx.loose]
        return (None,) * 6 + (*of_params, *of_inputs)


def _refuse_shards(tangents: Mapping[int, torch.Tensor]) -> None:
    """Raise `UnsupportedError` for the gradient of a loss that shards were added to."""
    if any(isinstance(tangent, DTensor) for tangent in tangents.values()):
        why = "its gradient at the model's outputs is a DTensor, which the compiled backward does not take"
        raise divided_penalty(UnsupportedError, why)


def refuse_partial(
    entry: Entry, outputs: Mapping[int, Callable[[], torch.Tensor | None]], tangents: Collection[int]
) -> None:
    """Raise `UnsupportedError` for an output whose whole gradient the user asked for, if an output computed from it has
    a tangent: the gradient that reaches it inside the program is not seen. (A hook with `only_scales` set may be there: it
    gives the same for a part of a gradient as for the whole.)
    """
    for at, output in outputs.items():
        value = output()
        if (
            value is None
            or not (value.retains_grad or any(map(_looks_at, (value._backward_hooks or {}).values())))
            or entry.trace.upstream[at].isdisjoint(tangents)
        ):
            continue
        raise UnsupportedError(
            f"output {at} of the model keeps its gradient or has a hook, and other outputs are computed of it",
            why="a program's outputs are apart for autograd: of the gradient only what comes from outside of the model would be seen",
            hint="let the model compute one from the other outside of what is compiled, or give the plain model",
        )


def _looks_at(hook: Callable[..., Any]) -> bool:
    return not getattr(hook, "only_scales", False)


def _adds_to(ctx: Any) -> frozenset[str]:
    """Return the names of the parameters whose `.grad` the running backward adds to."""
    nodes = (node for node, _ in ctx.next_functions)
    return frozenset(n for n, node in zip(ctx.names, nodes, strict=False) if autograd_state.accumulates(node))


def _again(ctx: Any, pattern: frozenset[int]) -> tuple[StepProgram, Saved, Sequence[Any]]:
    """Run the forward again with the program for tangents of exactly these outputs; later calls use that program at
    once.
    """
    runtime, entry = ctx.runtime, ctx.entry
    logger.warning("%s: the backward starts from other outputs than expected; compiling a program for them", entry.name)
    step = entry.program(pattern)
    runtime.prepare(step)
    if step.differentiated:
        for one in entry.beside:
            one.pattern = entry.in_other(one, pattern)
    # (nothing has checked since its forward whether these are still the weights of the shards)
    runtime.unsharded.drop()
    flat = [ctx.before.get(i, v) for i, v in enumerate(ctx.flat)]
    lost = [i for i in entry.trace.others if i in step.reached and i not in ctx.loose and ctx.flat[i].requires_grad]
    if lost:
        raise UnsupportedError(
            f"{entry.trace.source(lost[0])} has a gradient of these outputs, and had none of those that the step before started from",
            hint="call the model again: it is ready for these outputs now",
        )
    with restored(ctx.random, runtime.device):
        _, saved = runtime.run_forward(entry, step, flat, mutate=False)
    return step, saved, flat


def _detached(flat: Sequence[Any], others: Collection[int]) -> list[Any]:
    """Return the flat inputs with those at `others` (the inputs that are not parameters) detached; a program takes
    parameters from the shards.
    """
    leaves = list(flat)
    for at in others:
        if isinstance(leaves[at], torch.Tensor) and leaves[at].requires_grad:
            leaves[at] = leaves[at].detach()
    return leaves


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()
