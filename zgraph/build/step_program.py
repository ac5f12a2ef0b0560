"""One input signature of a model, compiled: its capture, and the programs that serve it.

Which outputs a user differentiates is known only in the backward; a program is made for one such choice (the model's
own loss, if it returns one, else all outputs). Each program has variants (see `zgraph.build.pass_pipeline.Variant`),
made when they are first needed.
"""

from __future__ import annotations

import abc
import functools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from zgraph.build.build_context import BuildContext, ResidentMemory, tell_nobody
from zgraph.build.compare_collectives import lacking
from zgraph.build.memory_search import SearchResult, run_passes
from zgraph.build.pass_pipeline import PLAIN, MemoryDecision, Variant, runs_of
from zgraph.build.resolve_auto_wire import resolved
from zgraph.build.stored_programs import RecordedWarnings, StepFacts, StoredStep
from zgraph.capture.capture import Trace
from zgraph.capture.storages import Sharing
from zgraph.codegen.accumulate import summing
from zgraph.codegen.debug_mode import checked
from zgraph.codegen.eager import compile_eager
from zgraph.codegen.executable import Executable
from zgraph.codegen.inductor import adopt_strides, compile_inductor
from zgraph.codegen.partition import Parts, split
from zgraph.errors import SignatureError
from zgraph.passes import History, verify_program
from zgraph.passes.analysis.costs import Costs, most_bytes
from zgraph.passes.analysis.live_memory import idle_bytes
from zgraph.passes.overlap.follow_order import order_of
from zgraph.program import transfers_to_host
from zgraph.program.aliases import is_random, is_view
from zgraph.program.digest import digest
from zgraph.program.lazy_program import is_unmade
from zgraph.program.node import Phase, info
from zgraph.program.program import InputRole, OutputRole, Program
from zgraph.ranks import compile_progress
from zgraph.torch_compat import compile_lock, inductor_code

logger = logging.getLogger(__name__)


def is_differentiated(program: Program) -> bool:
    """Return whether a captured program has a backward."""
    return any(p.role in (OutputRole.GRADIENT, OutputRole.RETURNED) for p in program.outputs)


def _read_by_backward(captured: Program) -> frozenset[str]:
    """Return the parameters that a captured program's backward reads, themselves or through a view."""
    names = set()
    for name, node in captured.input_nodes(InputRole.PARAMETER).items():
        stack = [node]
        while stack and name not in names:
            for user in stack.pop().users:
                if user.op == "output":
                    continue
                if info(user).phase is Phase.BACKWARD:
                    names.add(name)
                elif is_view(user):
                    stack.append(user)
    return frozenset(names)


class StepProgram:
    """The programs for one signature and one choice of differentiated outputs.

    For a stage under a memory budget, `decide` gives its rank's decision, and may raise `PlanError`.
    """

    def __init__(
        self,
        captured: Program,
        context: BuildContext,
        decide: Callable[[], SearchResult] | None = None,
        pattern: frozenset[int] = frozenset(),
        kept: StoredStep | None = None,
        from_start: Collection[int] = (),
    ) -> None:
        self.name = captured.name
        self.symbolic = self  # for a program for certain sizes: the one that serves all sizes
        self.hot: dict[tuple[int, ...], StepProgram] = {}  # programs for certain sizes alone
        self.successor: StepProgram | None = None  # the program that has taken its place, with another schedule
        self.from_start = from_start  # see `Trace.from_start`
        self.kept = kept  # the store's entry for it; None where nothing can be kept
        known = kept.facts if kept is not None else None
        self.known = known
        if known is not None and known.formats is not None:
            context.wire.take(known.formats)
        self.pattern = pattern  # the flat outputs that are differentiated
        self.beside: tuple[StepProgram, ...] = (self,)  # programs that ranks may run in one step, this one included
        self.captured = captured
        self.context = context
        self.plan = context.plan
        self.decide = decide
        self.random = known.random if known is not None else any(is_random(n) for n in captured.graph.nodes)
        self.mutated = [p.index for p in captured.outputs if p.role is OutputRole.MUTATION and p.index is not None]
        self._histories: dict[Variant, History] = {}
        self._choice: MemoryDecision | None = known.choice if known is not None else None
        self._is_decided = False  # whether `_choice` is that of the program that this one is made of
        self._parts: dict[tuple[Variant, bool], Parts] = {}
        self._first_gathers: list[Executable] | None = None
        self._forwards: dict[bool, Executable] = {}
        self._backwards: dict[tuple[bool, bool], Executable] = {}
        self._apart: dict[tuple[bool, bool], tuple[Executable | None, Executable | None]] = {}
        self._summing: dict[tuple[bool, bool], Executable] = {}
        self._heard = RecordedWarnings()
        self._keeps_more = False  # whether later programs are kept as soon as they are made
        self.sharing: dict[bool, Sharing] = {}  # by forward (`gathered_before`), from its first run
        self.apart = False  # whether the model's tensors were checked not to overlap when it ran

    @property
    def shared_name(self) -> str:
        """The name that all ranks have for what they run in a step."""
        return " beside ".join([step.name for step in self.beside])

    def sizes_of_call(self, flat: Sequence[Any]) -> dict[str, int]:
        """Return the sizes that differ from call to call, by name, in a call with these flat inputs.

        Raises `SignatureError` for sizes that the program does not hold for.
        """
        sizes = self.captured.sizes
        point = sizes.of_call(flat)
        if not sizes.hold(point):
            condition, where = sizes.broken(point)
            raise SignatureError(
                f"program {self.name} is not for these sizes", where=where, why=f"it is for {condition}"
            )
        return point

    @functools.cached_property
    def differentiated(self) -> bool:
        return is_differentiated(self.captured)

    @functools.cached_property
    def reached(self) -> frozenset[int]:
        """The flat inputs that have a gradient."""
        gradients = (p for p in self.captured.outputs if p.role is OutputRole.GRADIENT)
        return frozenset(p.index for p in gradients if p.index is not None)

    @functools.cached_property
    def keeps(self) -> bool:
        """Whether whole weights outlive the program."""
        if self.known is not None:
            return self.known.keeps
        return any(p.role is OutputRole.UNSHARDED for p in self.history().program.outputs)

    @functools.cached_property
    def offloaded(self) -> int:
        """Bytes of activations that are offloaded from the forward to the backward."""
        if self.known is not None:
            return self.known.offloaded
        nodes = self.history().program.graph.find_nodes(op="call_function", target=transfers_to_host.OFFLOAD)
        return sum(most_bytes(n) for n in nodes if info(n).param is None)

    def facts(self) -> StepFacts:
        """Return what another process needs to know of its graphs."""
        program = self.history().program
        backward = _read_by_backward(self.captured)
        return StepFacts(
            self.random,
            self.keeps,
            self.offloaded,
            backward,
            frozenset(self.from_start),
            self._choice,
            self.context.wire.formats,
            digest(program),
            tuple(dict.fromkeys(self._heard.warnings)),
        )

    def keep(self) -> None:
        """Keep what was made so far for other processes, and from now on whatever is made."""
        self._keeps_more = True
        if self.kept is not None:
            facts = self.known or self.facts()
            self.kept.keep(self.captured, facts, self._parts, self.kept.code.words)

    @functools.cached_property
    def unsharded(self) -> list[str]:
        """The parameters whose whole weights outlive the forward."""
        return [p.name for p in self.forward().program.outputs if p.role is OutputRole.UNSHARDED]

    def history(self, variant: Variant = PLAIN) -> History:
        """Return the history of a variant through the pipeline."""
        if variant not in self._histories:
            if variant is not PLAIN:
                self.history()  # (the plain variant decides for all)
            if self.decide is not None:
                self._histories[variant] = self.decide().history(variant)
                return self._histories[variant]
            # (The plain variant's choice is for all, a symbolic program's also for those for certain sizes.)
            decided = self._is_decided or variant != PLAIN or self.symbolic is not self
            with compile_lock.ONE_AT_A_TIME, self._heard:
                self.context = resolved(self.captured, self.context, training=self.differentiated)
                self._histories[variant], self._choice = run_passes(
                    self.captured.snapshot(),
                    self.context,
                    variant,
                    training=self.differentiated,
                    choice=self._choice if decided else None,
                )
            if variant == PLAIN and self.plan.wire.auto and self.context.wire.formats is not None:
                self._histories[variant].program.remarks.append(self.context.wire.formats.remark())
            if variant == PLAIN and self.kept is not None and self.known is not None:
                self.kept.refuse_another(self._histories[variant].program, self.known.made)
        return self._histories[variant]

    @property
    def choice(self) -> MemoryDecision | None:
        """What was decided under a memory budget: for a stage decided now if need be, else None before the search."""
        return self.decide().choice if self.decide is not None else self._choice

    @property
    def states(self) -> float | None:
        """The share of the optimizer's states that a budget's search has chosen to offload; None before it."""
        return self.choice.states if self.choice is not None else None

    @property
    def outside(self) -> ResidentMemory:
        """The memory that a rank holds besides the program."""
        resident_memory = self.context.residents.at(self.states)
        return replace(resident_memory, held=resident_memory.held + idle_bytes(self.captured))

    def runs(self) -> list[tuple[str, Variant, int]]:
        """Return the programs that a training step runs (see `runs_of`)."""
        return runs_of(self.plan, self.keeps)

    def variants(self) -> list[Variant]:
        """Return the variants that a training step of this plan runs, the plain one first."""
        variants = [PLAIN, *([Variant(gathered_before=True)] if self.keeps else [])]
        if self.plan.zero < 2 and self.plan.micro_batches > 1:
            variants += [Variant(self.keeps, reduce=False), Variant(self.keeps, accumulated=True)]
        return variants

    def at(self, point: Mapping[str, int]) -> StepProgram:
        """Make this program for certain sizes alone.

        It is static, saves what was decided under the memory budget, and communicates in this program's order.
        """
        sizes = "_".join(f"{n}{'_' * n[-1].isdigit()}{point[n]}" for n in self.captured.sizes.needed)
        captured = self.captured.at(point).renamed(f"{self.name}.{sizes}")
        order = lambda variant: order_of(self.history(variant).program)  # noqa: E731
        context = replace(self.context, order=order, keeper=None)
        step = StepProgram(captured, context, pattern=self.pattern, from_start=self.from_start)
        self.history()
        step.symbolic, step._choice = self, self._choice
        return step

    def for_call(self, flat: Sequence[Any]) -> StepProgram:
        """Return the program for exactly the sizes of a call with these flat inputs if there is one, else this program."""
        return self.hot.get(self.captured.sizes.key(flat), self) if self.hot else self

    def following(self, other: StepProgram) -> StepProgram:
        """Make this program anew, with transfers in the order of another one's."""
        context = replace(self.context, order=lambda variant: order_of(other.history(variant).program))
        return StepProgram(self.captured, context, pattern=self.pattern)

    def rescheduled(self, costs: Costs) -> StepProgram:
        """Make this program anew, with transfers scheduled by other costs; nothing is compiled yet, and no other rank is
        told.

        It saves what was decided under the memory budget, and raises `PlanError` where it does not fit into that.
        """
        self.history()
        context = replace(self.context, plan=self.plan, schedule=costs, agree=tell_nobody, keeper=None)
        step = StepProgram(self.captured, context, pattern=self.pattern, from_start=self.from_start)
        step._choice, step._is_decided = self._choice, True
        return step

    def compile_like(self, other: StepProgram, goes_on: Callable[[], None]) -> None:
        """Compile what another program has compiled so far. `goes_on` is called before each part, and may raise."""
        self.first_gathers()
        for gathered_before in list(other._forwards):
            goes_on()
            self.forward(gathered_before)
        for reduce, accumulated in list(other._backwards):
            goes_on()
            self.backward(reduce, accumulated)

    @property
    def latest(self) -> StepProgram:
        """The program that runs in its place, if another one has taken it; else itself."""
        return self if self.successor is None else self.successor.latest

    def variants_made(self) -> list[Variant]:
        """Return the variants that have been split so far, except those with the backward in two."""
        return [variant for variant, apart in self._parts if not apart]

    def parts(self, variant: Variant = PLAIN, *, apart: bool = False) -> Parts:
        if (variant, apart) not in self._parts:
            stored_parts = self.kept.parts(variant, apart=apart) if self.kept is not None else None
            self._parts[variant, apart] = stored_parts or self._split(variant, apart=apart)
        return self._parts[variant, apart]

    def _split(self, variant: Variant, *, apart: bool) -> Parts:
        with compile_lock.ONE_AT_A_TIME:
            parts = split(self.history(variant).program, apart=apart)
            for part in (*parts.ahead, parts.forward, parts.backward, parts.weights):
                if part is not None:
                    verify_program(part)
        return parts

    @functools.cached_property
    def read_late(self) -> tuple[frozenset[int], frozenset[str]]:
        """(flat inputs, parameters) that the backward reads as they are when it runs.

        A parameter that plain PyTorch's backward would read counts even where a gathered copy of it was saved: a change
        is the same error at every ZeRO stage.
        """
        part = self.parts().backward
        ports = [] if part is None else part.inputs
        weights = (InputRole.PARAMETER, InputRole.UNSHARDED)
        others = (*weights, InputRole.TANGENT)
        return (
            frozenset(p.index for p in ports if p.index is not None and p.role not in others),
            frozenset(p.name for p in ports if p.role in weights)
            | (self.known.read_by_backward if self.known is not None else _read_by_backward(self.captured)),
        )

    def forward(self, gathered_before: bool = False) -> Executable:
        variant = Variant(gathered_before=gathered_before)
        for step in lacking(self.beside, variant, lambda one: gathered_before in one._forwards):
            step._forwards[gathered_before] = step._compile(step.parts(variant).forward, is_backward=False)
        return self._forwards[gathered_before]

    def backward(self, reduce: bool = True, accumulated: bool = False) -> Executable:
        variant = Variant(self.keeps, reduce, accumulated)
        for step in lacking(self.beside, variant, lambda one: (reduce, accumulated) in one._backwards):
            part = step.parts(variant).backward
            assert part is not None
            step._backwards[reduce, accumulated] = step._compile_backward(part, [step.forward()])
        return self._backwards[reduce, accumulated]

    def backward_apart(
        self, reduce: bool = True, accumulated: bool = False
    ) -> tuple[Executable | None, Executable | None]:
        """Return the backward in two: the part that gives gradients to earlier stages, and the part that gives those of
        the weights.

        A part that has nothing to give is None.
        """
        if (reduce, accumulated) not in self._apart:
            parts = self.parts(Variant(self.keeps, reduce, accumulated), apart=True)
            executables = [self.forward()]
            first = second = None
            if parts.backward is not None:
                first = self._compile_backward(parts.backward, executables)
                executables.append(first)
            if parts.weights is not None:
                second = self._compile_backward(parts.weights, executables)
            self._apart[reduce, accumulated] = first, second
        return self._apart[reduce, accumulated]

    def summing_backward(self, reduce: bool = True, *, apart: bool = False) -> Executable:
        """Return the backward (of one in two the second part) that adds its gradients to incoming sums (see `summing`).

        The part must have gradients.
        """
        if (reduce, apart) not in self._summing:
            parts = self.parts(Variant(self.keeps, reduce), apart=apart)
            first = self.backward_apart(reduce)[0] if apart else None
            part = parts.weights if apart else parts.backward
            assert part is not None
            earlier = [self.forward(), *([first] if first is not None else [])]
            self._summing[reduce, apart] = self._compile_backward(summing(part), earlier)
        return self._summing[reduce, apart]

    def _compile_backward(self, part: Program, earlier: list[Executable]) -> Executable:
        saved = {p.name for e in earlier for p in e.program.outputs if p.role is OutputRole.SAVED}
        missing = {p.name for p in part.inputs if p.role is InputRole.SAVED} - saved
        if missing:
            raise AssertionError(f"{self.name}: {part.name} takes {missing}, which nothing before it saves")
        for executable in earlier:
            # (two that come from the store were kept together, with these strides)
            if not (is_unmade(part) and is_unmade(executable.program)):
                with compile_lock.ONE_AT_A_TIME:
                    adopt_strides(part, executable)
        return self._compile(part, is_backward=True)

    def first_gathers(self) -> list[Executable]:
        """Return the programs that start the first gathers, in order.

        They are not compiled by Inductor, which makes casts and starts of collectives no faster.
        """
        for step in lacking(self.beside, PLAIN, lambda one: one._first_gathers is not None):
            for program in step.parts().ahead:
                step.context.agree(program)
            groups = step.context.groups
            with compile_lock.ONE_AT_A_TIME:
                step._first_gathers = [checked(compile_eager(p, groups), groups) for p in step.parts().ahead]
        assert self._first_gathers is not None
        return self._first_gathers

    def executables(self) -> list[Executable]:
        """Return the executables compiled so far."""
        apart = [e for pair in self._apart.values() for e in pair if e is not None]
        return [
            *(self._first_gathers or ()),
            *self._forwards.values(),
            *self._backwards.values(),
            *apart,
            *self._summing.values(),
        ]

    def _compile(self, program: Program, *, is_backward: bool) -> Executable:
        self.context.agree(program)
        compile_progress.at(compile_progress.BACKWARD if is_backward else compile_progress.FORWARD)
        start = time.perf_counter()
        with compile_lock.ONE_AT_A_TIME:
            if self.plan.backend == "eager":
                executable = compile_eager(program, self.context.groups)
            else:
                # Where weights are kept, two forwards share one backward, so the values that they save must have the
                # same strides.
                executable = compile_inductor(
                    program,
                    self.context.groups,
                    is_backward=is_backward,
                    fix_saved=self.keeps,
                    hold=self.plan.memory_budget is None,
                    kept=self.kept.code if self.kept is not None else None,
                )
        logger.info("%s: %s compiled in %.2f s", program.name, self.plan.backend, time.perf_counter() - start)
        if self._keeps_more:
            self.keep()
        return checked(executable, self.context.groups)


def together(steps: Sequence[StepProgram]) -> None:
    """Let ranks run any of these programs in one step, and those for certain sizes of each."""
    group = tuple(one for step in steps for one in (step, *step.hot.values()))
    for one in group:
        one.beside = group


class Serves(abc.ABC):
    """The programs that serve the calls of one input signature, or of many signatures that differ in sizes alone."""

    trace: Trace
    only: Mapping[str, int]  # sizes that are numbers here, and symbols in other programs of such calls

    @abc.abstractmethod
    def programs(self) -> list[StepProgram]:
        """Return the programs made so far."""

    def every_program(self) -> list[StepProgram]:
        """Return the programs made so far, with those for certain sizes alone."""
        return [one for step in self.programs() for one in (step, *step.hot.values())]

    @property
    def open(self) -> bool:
        """Whether it serves calls that differ in sizes."""
        return bool(self.trace.sizes)

    def holds(self, point: Mapping[str, int]) -> bool:
        """Return whether its programs hold at these sizes by name."""
        if any(point[name] != size for name, size in self.only.items()):
            return False
        return not self.open or all(s.captured.sizes.hold(point) for s in self.programs())

    def bound(self, point: Mapping[str, int]) -> tuple[str, str | None]:
        """Return (the first condition of its programs that does not hold at a point, the user's line that it comes
        from)."""
        broken: list[tuple[str, str | None]] = [
            (f"{name} is {size}", None) for name, size in self.only.items() if point[name] != size
        ]
        broken += [s.captured.sizes.broken(point) for s in self.programs()]
        return next((condition for condition in broken if condition[0]), ("", None))


class Entry(Serves):
    """One input signature: its capture, and its programs by the choice of differentiated outputs."""

    def __init__(self, name: str, shown: str, trace: Trace, rows: int, context: BuildContext) -> None:
        self.name = name
        self.shown = shown  # the inputs, in words
        self.trace = trace
        self.capture_seconds = trace.seconds
        self.rows = rows  # the rows of this rank's batch
        self.context = context
        returned: Any = self.trace.flat.graph_module.graph.output_node().args[0]
        self.constants = [None if isinstance(n, fx.Node) else n for n in returned]
        self.pattern = self.trace.pattern
        self._programs: dict[frozenset[int], StepProgram] = {}
        # Whether it has run once; whether that changed Python state that the capture depends on; whether the entry
        # before had done so.
        self.settled = self.unsettled = self.unsettled_before = False
        self.only = {}
        self.follows: Mapping[
            int, Mapping[int, str]
        ] = {}  # the padded size of each dimension of a flat output that has one
        self.beside: tuple[Entry, ...] = (self,)  # entries that ranks may run in one step, this one included
        self.batch_known = False  # whether the cut into micro-batches was checked to be along the batch
        self.rows_by_place: Mapping[int, int | None] = {}  # see `zgraph.runtime.join_outputs`

    def program(self, pattern: frozenset[int] | None = None) -> StepProgram:
        """Return the program in which these flat outputs are differentiated, by default the same as the last time."""
        if (
            pattern is None
            and self.pattern != self.trace.differentiable
            and not self._program(self.pattern).differentiated
        ):
            # (what looked like the loss has no gradient: the sign of a determinant, say)
            self.pattern = self.trace.differentiable
        return self._program(self.pattern if pattern is None else pattern)

    def _program(self, chosen: frozenset[int]) -> StepProgram:
        if chosen not in self._programs:
            together([entry._made(self.in_other(entry, chosen)) for entry in self.beside])
        return self._programs[chosen]

    def in_other(self, other: Entry, outputs: frozenset[int]) -> frozenset[int]:
        """Return flat outputs as the corresponding ones of another entry.

        They differ where a model returns a tensor for each image, and so its loss at another position. Only the loss,
        and all outputs that can be differentiated, are translated.
        """
        if outputs == self.trace.pattern:
            return other.trace.pattern
        return other.trace.differentiable if outputs == self.trace.differentiable else outputs

    def follow(self, mine: StepProgram, other: StepProgram) -> StepProgram:
        """Make one of its programs anew with transfers in the order of another entry's program, and return it."""
        step = self._programs[mine.pattern] = mine.following(other)
        return step

    def take_over(self, step: StepProgram, other: StepProgram) -> None:
        """Let another program that computes the same as `step` serve calls in its place. A forward of the earlier one
        still has that one's backward.
        """
        other.context = replace(other.context, agree=step.context.agree)
        self._programs[step.pattern] = step.successor = other
        together([other])

    def _made(self, chosen: frozenset[int]) -> StepProgram:
        if chosen not in self._programs:
            name = self.name if not self._programs else f"{self.name}.{len(self._programs) + 1}"
            self._programs[chosen] = self._step(chosen, name)
        return self._programs[chosen]

    def _step(self, chosen: frozenset[int], name: str) -> StepProgram:
        def make() -> Program:
            inductor = self.context.plan.backend == "inductor"
            decompositions = inductor_code.inductor_decompositions() if inductor else {}
            return self.trace.joint(chosen, decompositions, name)

        keeper = self.context.keeper
        stored_step = keeper.step(self.trace, chosen, name, self.context) if keeper is not None else None
        if stored_step is None or stored_step.facts is None:
            return StepProgram(make(), self.context, pattern=chosen, kept=stored_step, from_start=self.trace.from_start)
        self.trace.from_start |= stored_step.facts.from_start
        stored_step.facts.warn()
        return StepProgram(stored_step.captured(make), self.context, pattern=chosen, kept=stored_step)

    def programs(self) -> list[StepProgram]:
        return list(self._programs.values())
