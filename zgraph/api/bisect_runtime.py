"""The search for the first node whose value in compiled code differs from that of plain operators, in the code that the backend really runs.

The forward and the backward of a copy of the model run once, and each program again, operator by operator, on copies of the same inputs. If its
outputs differ, the first differing node is searched: for Inductor's code by compiling the program again with all its values as outputs. If the fault
disappears with them, since outputs are not fused away, the search goes on with one output at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from zgraph.api.compiler import compile
from zgraph.capture.capture import find_loss
from zgraph.codegen.debug_mode import compare, norm_of
from zgraph.codegen.eager import Code
from zgraph.codegen.executable import Executable, lowered
from zgraph.codegen.inductor import compile_inductor
from zgraph.codegen.node_by_node import run_node_by_node
from zgraph.errors import LoweringError, ModelError
from zgraph.program.layout import in_flight
from zgraph.program.node import info, value
from zgraph.program.program import OutputRole, Port, Program
from zgraph.program.tolerance import Difference
from zgraph.ranks.rng import RandomStates, random_states, restored

if TYPE_CHECKING:
    from zgraph.build.planned_step import Inputs
    from zgraph.plan.plan import Plan
    from zgraph.runtime.runtime import Runtime


@dataclass(frozen=True)
class Suspect:
    """The first node of a program whose value differs."""

    program: str  # the program's name
    node: str  # the node's name
    operator: str  # its operator
    module: str  # the path of the user's module, "" for the root
    source: str  # the user's "file:line"
    error: float  # the relative error of its value
    allowed: float  # the largest relative error that rounding may give


@dataclass(frozen=True)
class RuntimeBisection:
    """The result of `bisect_runtime`."""

    backend: str  # the plan's backend
    programs: tuple[str, ...]  # the names of the programs that ran
    suspects: tuple[Suspect, ...]  # the first node that differs, for each program that is wrong

    @property
    def ok(self) -> bool:
        return not self.suspects

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "backend": self.backend,
            "programs": list(self.programs),
            "suspects": [asdict(s) for s in self.suspects],
        }


def bisect_runtime(
    model: nn.Module, plan: Plan, inputs: Inputs, loss_fn: Callable[..., torch.Tensor] | None = None
) -> RuntimeBisection:
    """Run a forward and a backward of a copy of `model` on one rank by the plan's backend; find the first node that
    differs in each program.

    `inputs` (a tuple or a dict) and `loss_fn` are those of `zgraph.verify`. Raises `PlanError` for a plan with a
    pipeline, and `ModelError` if there is no loss.
    """
    plan.refuse_pipeline(1, "search of compiled code")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (tuple(inputs), {})
    with restored(random_states(device), device):
        twin = compile(copy.deepcopy(model), plan, inputs=inputs)
        runtime: Runtime = twin.zgraph.runtime  # type: ignore[union-attr, assignment]
        (entry,) = runtime.entries.values()
        runs = [_Run(e, runtime.groups, device) for e in entry.program().executables()]
        output = twin(*args, **kwargs)
        loss = find_loss(output) if loss_fn is None else loss_fn(output)
        if loss is None:
            raise ModelError("the model's output holds no loss", hint="give a loss_fn")
        if loss.requires_grad:
            loss.backward()
        ran = [run for run in runs if run.inputs]
        suspects = [s for run in ran if (s := run.suspect()) is not None]
    return RuntimeBisection(plan.backend, tuple(r.program.name for r in ran), tuple(suspects))


class _Run:
    """One run of an executable: copies of its inputs, the random state before it, and its results."""

    def __init__(self, executable: Executable, groups: dict[str, str], device: torch.device) -> None:
        self.program, self.groups, self.device = executable.program, groups, device
        self.inputs: list[Any] = []
        self.results: Sequence[Any] = ()
        self.states: RandomStates | None = None
        self._function = executable.function
        executable.function = self

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        self.inputs, self.states = _copies(values), random_states(self.device)
        results = self._function(values)
        self.results = [r.detach().clone() if isinstance(r, torch.Tensor) else r for r in results]
        return results

    def suspect(self) -> Suspect | None:
        """Return the first node that differs; None if the outputs are right."""
        self.plain: dict[str, torch.Tensor] = {}

        def seen(node: fx.Node, value: Any) -> None:
            if isinstance(value, torch.Tensor):
                self.plain[node.name] = value.detach().clone()

        self._again(lambda given: run_node_by_node(lowered(self.program, self.groups), given, seen))
        self.norm = norm_of(v for v in (self.plain.get(n.name) for n in self.program.output_values()))
        outputs = {n.name: r for n, r in zip(self.program.output_values(), self.results, strict=True)}
        wrong = self._first(outputs)
        if wrong is None:
            return None
        if isinstance(self._function, Code):
            observed: dict[str, Any] = {}
            self._again(self._function.observed_by(lambda name, v: observed.update({name: v.clone()})))
            return self._first(observed) or wrong
        return self._within(wrong) or wrong

    def _within(self, wrong: Suspect) -> Suspect | None:
        """Return the first node that differs inside of what Inductor compiles; None if none is found."""
        nodes = [n for n in self.program.nodes if n.op == "call_function" and not in_flight(n)]
        nodes = [n for n in nodes if isinstance(v := value(n), torch.Tensor) and v.is_floating_point()]
        if (suspect := self._first(self._values(nodes))) is not None:
            return suspect
        last = next(n for n in self.program.graph.nodes if n.name == wrong.node)
        chain = [n for n in nodes if n in _needed(last)]
        right, bad, best = -1, len(chain) - 1, wrong
        while bad - right > 1:
            middle = (right + bad) // 2
            suspect = self._first(self._values([chain[middle]]))
            right, bad, best = (right, middle, suspect) if suspect is not None else (middle, bad, best)
        return best

    def _values(self, nodes: list[fx.Node]) -> dict[str, Any]:
        """Return these nodes' values from code compiled with them as its outputs; {} if Inductor can't compile it."""
        part = self.program.snapshot()
        names = {n.name for n in nodes}
        part.set_outputs([(Port(OutputRole.SAVED, n.name), n) for n in part.nodes if n.name in names])
        part.graph.eliminate_dead_code()
        part.recompile()
        try:
            executable = compile_inductor(part, self.groups, fix_saved=True)
        except LoweringError:
            return {}
        results = self._again(executable.run)
        return {n.name: r for n, r in zip(part.output_values(), results, strict=True)}

    def _again(self, function: Callable[[list[Any]], Any]) -> Any:
        with restored(self.states, self.device):
            return function(_copies(self.inputs))

    def _first(self, values: dict[str, Any]) -> Suspect | None:
        for node in self.program.graph.nodes:
            if node.name in values and node.name in self.plain:
                compared = compare(self.program, node, values[node.name], self.plain[node.name], self.norm, True)
                if not compared.ok:
                    return _suspect(self.program, node, compared)
        return None


def _suspect(program: Program, node: fx.Node, compared: Difference) -> Suspect:
    record = info(node)
    return Suspect(
        program.name, node.name, str(node.target), record.module, record.source, compared.error, compared.allowed
    )


def _needed(node: fx.Node) -> set[fx.Node]:
    ancestors: set[fx.Node] = set()
    stack = [node]
    while stack:
        if (at := stack.pop()) not in ancestors:
            ancestors.add(at)
            stack += at.all_input_nodes
    return ancestors


def _copies(values: Sequence[Any]) -> list[Any]:
    return [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values]
