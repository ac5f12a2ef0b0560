"""Runs the stages of a cut model in one process, one after another, beside plain PyTorch: what tests of stages compare.

`Cutting` is a captured model with ways to cut it, `run` gives a step of its stages, `plain` that of the model itself.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import models
import torch
from torch import fx
from torch.utils import _pytree as pytree

import zgraph
from zgraph.api.calibration import any_loss
from zgraph.build.planned_step import split_inputs
from zgraph.build.step_program import StepProgram
from zgraph.capture.capture import trace
from zgraph.codegen.eager import compile_eager
from zgraph.codegen.executable import Executable
from zgraph.codegen.partition import split
from zgraph.parameters.layout import planned_layout
from zgraph.passes import verify_program
from zgraph.passes.analysis.costs import CPU, Costs
from zgraph.passes.stages.cut_points import assign, find_cuts
from zgraph.passes.stages.cut_stages import Stages, cut_stages
from zgraph.passes.stages.min_cuts import forward_nodes, free_nodes
from zgraph.program.aliases import is_random
from zgraph.program.node import tensor, value
from zgraph.program.program import InputRole, OutputRole, Port, Program
from zgraph.program.tolerance import Difference
from zgraph.torch_compat import inductor_code
from zgraph.verification.virtual_ranks import run_virtual
from zgraph.verification.virtual_step import Results, named, virtual_step

COSTS = Costs(CPU, fused=False)
PASSED = {
    OutputRole.SENT: InputRole.RECEIVED,
    OutputRole.RETURNED: InputRole.RETURNED,
    OutputRole.SAVED: InputRole.SAVED,
    OutputRole.UNSHARDED: InputRole.UNSHARDED,
    OutputRole.IN_FLIGHT: InputRole.IN_FLIGHT,
}


@dataclass
class Step:
    """What a step gave: the leaves of each micro-batch's output; the sums of gradients, those of stages apart; buffers."""

    outputs: list[list[torch.Tensor]] = field(default_factory=list)
    parts: dict[str, dict[int, torch.Tensor]] = field(default_factory=lambda: defaultdict(dict))
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: sum(parts.values()) for name, parts in self.parts.items()}  # type: ignore[misc]

    def add(self, name: str, stage: int, gradient: torch.Tensor) -> None:
        held = self.parts[name].get(stage)
        self.parts[name][stage] = gradient.clone() if held is None else held + gradient


class Cutting:
    """A case, captured, with the inputs of each micro-batch."""

    def __init__(self, case: models.Case, micro_batches: int = 1) -> None:
        self.model, self.loss_of = case.model, case.loss_fn or any_loss
        self.batches = [_part(case.inputs, i, micro_batches) for i in range(micro_batches)]
        args, kwargs = self.batches[0]
        specs = planned_layout(self.model, {}, zgraph.Plan(backend="eager"))
        self.trace = trace(self.model, type(self.model).forward, args, kwargs, specs, {}, torch.device("cpu"))
        loss = self.trace.loss if case.loss_fn is None else None
        self.joint = self.trace.joint(self.trace.differentiable if loss is None else frozenset({loss}), {}, "step")

    # -- where it is cut ------------------------------------------------------------------------------------------------
    def found(self, count: int, how: str | tuple[str, ...] = "uniform") -> Stages:
        """Cut as a plan would."""
        cuts = find_cuts(
            self.joint, count, how, COSTS, types={n: type(m).__name__ for n, m in self.model.named_modules()}
        )
        return self.cut(assign(self.joint, cuts), count)

    def at_random(self, count: int, seed: int) -> Stages:
        """Cut at random operators; each other time not in a row, so that branches are in other stages than what stands beside them."""
        draw = random.Random(seed)
        free = free_nodes(self.joint)
        solid = [n for n in forward_nodes(self.joint) if n not in free]
        in_order = seed % 2 == 0 or any(is_random(n) for n in solid)
        cuts = sorted(draw.sample(range(1, len(solid)), count - 1))
        stages: dict[fx.Node, int] = {}
        for i, node in enumerate(solid):
            least = max((stages[a] for a in node.all_input_nodes if a in stages), default=0)
            if node.target is operator.getitem:
                stages[node] = least
            elif in_order:
                stages[node] = sum(i >= c for c in cuts)
            else:
                stages[node] = min(count - 1, least + (draw.random() < 2 * count / len(solid)))
        return self.cut(stages, count)

    def cut(self, stages: Mapping[fx.Node, int], count: int) -> Stages:
        before = self.joint.snapshot()
        made = cut_stages(self.joint, stages, count)
        assert [n.format_node() for n in before.nodes] == [n.format_node() for n in self.joint.nodes]
        assert len(made.programs) == count
        for program in made.programs:
            verify_program(program)
        return made

    def before(self, *targets: Any) -> Stages:
        """Cut before the operators of these kinds: what is made of them is in the second stage."""
        stages: dict[fx.Node, int] = {}
        for node in forward_nodes(self.joint):
            stages[node] = int(node.target in targets or any(stages.get(a) for a in node.all_input_nodes))
        return self.cut(stages, 2)

    def relaid(self, stages: Stages) -> bool:
        """Does something arrive in another layout than it had?"""
        nodes = {n.name: n for n in self.joint.nodes}
        return any(t.like.stride() != value(nodes[t.name]).stride() for t in stages.transfers)

    # -- steps ----------------------------------------------------------------------------------------------------------
    def plain(self) -> Step:
        """Plain PyTorch."""
        model, step = copy.deepcopy(self.model), Step()
        with _random():
            for args, kwargs in self.batches:
                output = model(*args, **kwargs)
                self.loss_of(output).backward()
                step.outputs.append(_leaves(output))
        step.parts = {n: {0: p.grad} for n, p in model.named_parameters() if p.grad is not None}
        step.buffers = dict(model.named_buffers())
        return step

    def run(self, stages: Stages, *, apart: bool = False) -> Step:
        """All stages' forwards in order, then their backwards in the other one, for one micro-batch after another."""
        model, step = copy.deepcopy(self.model), Step()
        parts = [split(program, apart=apart) for program in stages.programs]
        ran = {
            id(part): compile_eager(_verified(part), {})
            for p in parts
            for part in (p.forward, p.backward, p.weights)
            if part is not None
        }
        with _random():
            for args, kwargs in self.batches:
                flat = [
                    v.detach() if isinstance(v, torch.Tensor) else v
                    for v in self.trace.flat.flatten(model, args, kwargs)
                ]
                passed: dict[tuple[Any, ...], Any] = {}
                outputs: dict[int, Any] = {}

                def run(
                    stage: int, part: Program, passed: dict[tuple[Any, ...], Any] = passed, flat: list[Any] = flat
                ) -> Iterator[tuple[Port, Any]]:
                    given = []
                    for port, node in part.input_items():
                        own = stage if port.role is InputRole.SAVED else None
                        key = (port.role, port.name, own)
                        given.append(passed[key] if key in passed else flat[port.index])
                        if port.role in (InputRole.RECEIVED, InputRole.RETURNED):
                            given[-1] = _arrived(given[-1], tensor(node))
                    for port, made in zip(part.outputs, ran[id(part)].run(given), strict=True):
                        if port.role in PASSED:
                            own = stage if port.role is OutputRole.SAVED else None
                            passed[PASSED[port.role], port.name, own] = made
                        else:
                            yield port, made

                for stage, part in enumerate(parts):
                    for port, made in run(stage, part.forward):
                        if port.role is OutputRole.OUTPUT:
                            assert stage == len(parts) - 1
                            outputs[port.index] = made
                        else:
                            flat[port.index].copy_(made)
                output, tangents = self._loss(model, args, kwargs, outputs)
                step.outputs.append(_leaves(output))
                passed |= {(InputRole.TANGENT, f"output_{i}", None): t for i, t in tangents.items()}
                backwards = [
                    (s, p) for s, part in reversed(list(enumerate(parts))) for p in (part.backward, part.weights)
                ]
                for stage, program in backwards:
                    for port, made in run(stage, program) if program is not None else ():
                        step.add(port.name, stage, made)
        step.buffers = dict(model.named_buffers())
        return step

    def _loss(self, model: Any, args: Any, kwargs: Any, outputs: Mapping[int, Any]) -> tuple[Any, dict[int, Any]]:
        """The model's output, and the derivative of its loss by each flat output."""
        returned: Any = self.trace.flat.graph_module.graph.output_node().args[0]
        values = [
            outputs[i].requires_grad_(i in self.trace.differentiable) if i in outputs else r
            for i, r in enumerate(returned)
        ]
        output = self.trace.flat.bind(lambda *_: values)(model, *args, **kwargs)
        wanted = [p.index for p in self.joint.inputs if p.role is InputRole.TANGENT and p.index is not None]
        found = torch.autograd.grad(self.loss_of(output), [values[i] for i in wanted], allow_unused=True)
        made = {i: torch.zeros_like(values[i]) if g is None else g for i, g in zip(wanted, found, strict=True)}
        return output, {i: g.contiguous() for i, g in made.items()}


def assert_equal(mine: Step, plain: Step, *, tied: Sequence[str] = (), bound: float = 0.0) -> None:
    """Outputs, buffers and gradients are the same: but for rounding those of the `tied` parameters, and all within `bound`, if there is one."""

    def same(what: str, a: torch.Tensor, b: torch.Tensor, allowed: float) -> None:
        assert a.shape == b.shape and a.dtype is b.dtype, what
        if not torch.equal(a, b):
            error, norm = float((a - b).detach().double().norm()), float(b.detach().double().norm())
            assert allowed and error <= allowed * norm + floor, f"{what}: {error} of {norm}"

    floor = 0.0 if not bound else 3e-7 * sum(float(g.double().norm()) ** 2 for g in plain.gradients().values()) ** 0.5
    for i, (a, b) in enumerate(zip(mine.outputs, plain.outputs, strict=True)):
        for j, (x, y) in enumerate(zip(a, b, strict=True)):
            same(f"leaf {j} of output {i}", x, y, bound)
    assert mine.buffers.keys() == plain.buffers.keys()
    for name, buffer in plain.buffers.items():
        same(f"buffer {name}", mine.buffers[name], buffer, bound)
    gradients = mine.gradients()
    assert plain.gradients().keys() <= gradients.keys()
    for name, gradient in gradients.items():
        want = plain.gradients().get(name, torch.zeros_like(gradient))
        same(f"gradient of {name}", gradient, want, max(bound, 1e-6 if name in tied else 0.0))


def tied(stages: Stages) -> list[str]:
    """The parameters that are on several stages."""
    return [name for name, held in stages.holders.items() if len(held) > 1]


@contextlib.contextmanager
def _random() -> Iterator[None]:
    state = torch.get_rng_state()
    torch.manual_seed(7)
    try:
        with inductor_code.eager_random_numbers():
            yield
    finally:
        torch.set_rng_state(state)


def _verified(part: Program) -> Program:
    verify_program(part)
    return part


def _leaves(output: Any) -> list[torch.Tensor]:
    """The tensors of an output."""
    output = vars(output) if dataclasses.is_dataclass(output) else output
    return [v.detach() for v in pytree.tree_leaves(output) if isinstance(v, torch.Tensor)]


def _part(inputs: Any, at: int, count: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def cut(leaf: Any) -> Any:
        batch = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == models.BATCH
        return leaf.chunk(count)[at].clone() if batch else leaf

    return split_inputs(pytree.tree_map(cut, inputs))


# -- with all passes of a plan -------------------------------------------------------------------------------------------
def with_passes(
    case: models.Case, plan: zgraph.Plan, world: int, count: int, *, apart: bool = False
) -> tuple[list[Difference], list[StepProgram]]:
    """(how far a step of `count` stages, each with the passes of `plan`, is from plain PyTorch; the stages' programs). They run on so many
    virtual ranks, or, if they are for Inductor, compiled on the one that there is."""
    torch.manual_seed(1)
    with virtual_step(case.model, plan, world, case.inputs, case.loss_fn) as whole:
        joint = whole.step.captured
        stages = cut_stages(joint, assign(joint, find_cuts(joint, count, "time", COSTS)), count)
        steps = [StepProgram(p, whole.step.context) for p in stages.programs]
        states = whole.random_states()
        own: list[list[dict[Any, Any]]] = [[{} for _ in whole.ranks] for _ in steps]
        crossed: list[dict[Any, Any]] = [{} for _ in whole.ranks]
        found: Results = [{} for _ in whole.ranks]

        def run(stage: int, part: Program, execute: Callable[[Any], Any]) -> None:
            given = []
            for rank in range(world):
                there = crossed[rank] | own[stage][rank]
                given.append(
                    [
                        whole.input_of(port, node, rank, whole.ranks[rank], part, there)
                        for port, node in part.input_items()
                    ]
                )
            for rank, values in enumerate(execute(given)):
                for port, made in zip(part.outputs, values, strict=True):
                    if port.role in (OutputRole.SENT, OutputRole.RETURNED):
                        like = next(t.like for t in stages.transfers if t.name == port.name)
                        crossed[rank][PASSED[port.role], port.name] = _arrived(made, like)
                    elif port.role in PASSED:
                        own[stage][rank][PASSED[port.role], port.name] = made
                for key, made in named(part, whole.ranks[rank], values).items():
                    held = found[rank].get(key) if key[0] == "gradient" else None
                    found[rank][key] = made if held is None else held + made

        backwards: list[list[Any]] = []
        for stage, step in enumerate(steps):
            if plan.backend == "inductor":
                forwards, later = [step.forward()], [step.backward()]
                if apart:
                    later = list(step.backward_apart())
            else:
                parts = step.parts(apart=apart)
                forwards, later = [*parts.ahead, parts.forward], [parts.backward, parts.weights]
            backwards.append(later)
            for part in forwards:
                run(stage, *_runs(part, states))
        for stage, later in reversed(list(enumerate(backwards))):
            for part in later:
                if part is not None:
                    run(stage, *_runs(part, states))
        return whole.differences(found), steps


def _runs(part: Program | Executable, states: list[torch.Tensor]) -> tuple[Program, Callable[[Any], Any]]:
    if isinstance(part, Executable):
        return part.program, lambda given: [part.run(row) for row in given]
    return part, lambda given: run_virtual(part, given, states)


def _arrived(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What was sent, in memory of its own and in the layout that is awaited."""
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype).copy_(value)
