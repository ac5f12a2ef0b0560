"""One input signature of a model, compiled: its capture, and the programs that serve it.

Which outputs a user differentiates is known only in the backward; a program is made for one such choice (the model's
own loss, if it gives one, else all). Of each program there are variants (see `zgraph.pipeline.Variant`), made when
they are first needed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from zgraph.budget import Outside, Outsides, run_passes
from zgraph.capture import Trace, trace
from zgraph.codegen.eager import compile_eager
from zgraph.codegen.executable import Executable
from zgraph.codegen.inductor import adopt_strides, compile_inductor
from zgraph.codegen.partition import Parts, split
from zgraph.passes import History, verify_program
from zgraph.passes.aliases import is_random
from zgraph.passes.costs import Costs
from zgraph.passes.memory import idle_bytes
from zgraph.pipeline import EVERYTHING, PLAIN, Choice, Edit, Variant
from zgraph.plan import Plan
from zgraph.program import torch_private
from zgraph.program.program import InputRole, OutputRole, ParamSpec, Program

logger = logging.getLogger(__name__)


class StepProgram:
    """The programs for one signature and one choice of differentiated outputs. `agree` is told of each before it is compiled. An
    `edit` is for programs that are looked at, and not run by ranks."""

    def __init__(
        self,
        name: str,
        captured: Program,
        plan: Plan,
        groups: dict[str, str],
        costs: Costs,
        outsides: Outsides,
        agree: Callable[[Program], None],
        edit: Edit = EVERYTHING,
    ) -> None:
        self.name = name
        self.agree = agree
        self.edit = edit
        self.captured = captured
        self.plan = plan
        self.groups = groups
        self.costs = costs
        self.outsides = outsides
        self.random = any(is_random(n) for n in captured.graph.nodes)
        self.mutated = [p.index for p in captured.outputs if p.role is OutputRole.MUTATION and p.index is not None]
        self._histories: dict[Variant, History] = {}
        self._choice: Choice | None = None
        self._parts: dict[Variant, Parts] = {}
        self._ahead: list[Executable] | None = None
        self._forwards: dict[bool, Executable] = {}
        self._backwards: dict[tuple[bool, bool], Executable] = {}

    @property
    def differentiated(self) -> bool:
        return any(p.role is OutputRole.GRADIENT for p in self.captured.outputs)

    @property
    def keeps(self) -> bool:
        """Do whole weights outlive the program?"""
        return any(p.role is OutputRole.KEPT for p in self.history().program.outputs)

    def history(self, variant: Variant = PLAIN) -> History:
        """The way of this program through the pipeline."""
        if variant not in self._histories:
            if variant is not PLAIN:
                self.history()  # (it decides for all)
            self._histories[variant], self._choice = run_passes(
                self.captured.snapshot(),
                self.plan,
                self.costs,
                variant,
                training=self.differentiated,
                outsides=self.outsides,
                choice=self._choice,
                edit=self.edit,
            )
        return self._histories[variant]

    @property
    def states(self) -> float | None:
        """The share of the optimizer's states that a budget's search has let be offloaded; None before it."""
        return self._choice.states if self._choice is not None else None

    @property
    def outside(self) -> Outside:
        """What a rank holds besides."""
        found = self.outsides.at(self.states)
        return replace(found, held=found.held + idle_bytes(self.captured))

    def runs(self) -> list[tuple[str, Variant, int]]:
        """What a training step runs: ("first", …) for the first micro-batch, ("next", …) for those that follow, ("last", …) for one that
        adds up what they left; each with its variant and how often it runs."""
        micro = self.plan.micro_batches
        if micro == 1:
            return [("first", PLAIN, 1)]
        if self.plan.zero >= 2:  # (each micro-batch reduces)
            return [("first", PLAIN, 1), ("next", Variant(self.keeps), micro - 1)]
        found = [("first", Variant(reduce=False), 1), ("next", Variant(self.keeps, reduce=False), micro - 2)]
        return [run for run in (*found, ("last", Variant(self.keeps, accumulated=True), 1)) if run[2]]

    def variants(self) -> list[Variant]:
        """Those that a training step of this plan takes, the plain one first."""
        found = [PLAIN, *([Variant(gathered_before=True)] if self.keeps else [])]
        if self.plan.zero < 2 and self.plan.micro_batches > 1:
            found += [Variant(self.keeps, reduce=False), Variant(self.keeps, accumulated=True)]
        return found

    def parts(self, variant: Variant = PLAIN) -> Parts:
        if variant not in self._parts:
            parts = split(self.history(variant).program)
            for part in (*parts.ahead, parts.forward, parts.backward):
                if part is not None:
                    verify_program(part)
            self._parts[variant] = parts
        return self._parts[variant]

    def forward(self, gathered_before: bool = False) -> Executable:
        if gathered_before not in self._forwards:
            program = self.parts(Variant(gathered_before=gathered_before)).forward
            self._forwards[gathered_before] = self._compile(program, is_backward=False)
        return self._forwards[gathered_before]

    def backward(self, reduce: bool = True, accumulated: bool = False) -> Executable:
        if (reduce, accumulated) not in self._backwards:
            part = self.parts(Variant(self.keeps, reduce, accumulated)).backward
            assert part is not None
            first = self.forward()
            saved = [p.name for p in first.program.outputs if p.role is OutputRole.SAVED]
            taken = [p.name for p in part.inputs if p.role is InputRole.SAVED]
            if saved != taken:
                raise AssertionError(
                    f"{self.name}: the forward saves {set(saved) ^ set(taken)} that the backward does not take, or the reverse"
                )
            adopt_strides(part, first)
            self._backwards[reduce, accumulated] = self._compile(part, is_backward=True)
        return self._backwards[reduce, accumulated]

    def ahead(self) -> list[Executable]:
        """What starts the first gathers, in order. A cast and a start are nothing that compiling could make faster."""
        if self._ahead is None:
            for program in self.parts().ahead:
                self.agree(program)
            self._ahead = [compile_eager(p, self.groups) for p in self.parts().ahead]
        return self._ahead

    def executables(self) -> list[Executable]:
        """Those compiled so far."""
        return [*(self._ahead or ()), *self._forwards.values(), *self._backwards.values()]

    def _compile(self, program: Program, *, is_backward: bool) -> Executable:
        self.agree(program)
        start = time.perf_counter()
        if self.plan.backend == "eager":
            made = compile_eager(program, self.groups)
        else:
            # Two forwards share one backward where weights are kept: what they save must have the same strides.
            made = compile_inductor(program, self.groups, is_backward=is_backward, fix_saved=self.keeps)
        logger.info("%s: %s compiled in %.2f s", program.name, self.plan.backend, time.perf_counter() - start)
        return made


class Entry:
    """One input signature."""

    def __init__(
        self,
        name: str,
        shown: str,
        module: nn.Module,
        forward: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        specs: dict[str, ParamSpec],
        mesh: dict[str, int],
        plan: Plan,
        groups: dict[str, str],
        costs: Costs,
        outsides: Outsides,
        device: torch.device,
        agree: Callable[[Program], None] = lambda program: None,
    ) -> None:
        start = time.perf_counter()
        self.name = name
        self.shown = shown
        self.plan = plan
        self.groups = groups
        self.costs = costs
        self.outsides = outsides
        self.agree = agree
        self.trace: Trace = trace(module, forward, args, kwargs, specs, mesh, device, plan.resolved_precision())
        returned: Any = self.trace.flat.graph_module.graph.output_node().args[0]
        self.constants = [None if isinstance(n, fx.Node) else n for n in returned]
        loss = self.trace.loss
        self.pattern = frozenset({loss}) if loss is not None else self.trace.differentiable
        self._programs: dict[frozenset[int], StepProgram] = {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
        self.rows = tensors[0].shape[0] if tensors else 1  # of this rank's batch
        self.capture_seconds = time.perf_counter() - start
        # Has it run once, did that change Python state that the capture depends on, and had the program before as well?
        self.settled = self.unsettled = self.unsettled_before = False

    def program(self, pattern: frozenset[int] | None = None) -> StepProgram:
        """The program in which these flat outputs are differentiated (by default those that were the last time)."""
        chosen = self.pattern if pattern is None else pattern
        if chosen not in self._programs:
            decompositions = torch_private.inductor_decompositions() if self.plan.backend == "inductor" else {}
            name = self.name if not self._programs else f"{self.name}.{len(self._programs) + 1}"
            captured = self.trace.joint(chosen, decompositions, name)
            self._programs[chosen] = StepProgram(
                name, captured, self.plan, self.groups, self.costs, self.outsides, self.agree
            )
        return self._programs[chosen]

    def programs(self) -> list[StepProgram]:
        return list(self._programs.values())
