"""The weights that the ranks of "tp" divide, by the plan.

The plan has a table of module patterns, names the model's own (`base_model_tp_plan` in transformers), or leaves it to
the captured graph: every axis that may be divided is, and where a weight has several, the one whose step is simulated
to be the fastest.
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import nn

from zgraph.errors import PlanError
from zgraph.names import did_you_mean, parameter_names
from zgraph.passes.analysis.axes import Axes
from zgraph.passes.analysis.costs import Costs
from zgraph.passes.analysis.simulator import simulate
from zgraph.passes.spmd.divide import DivideOptions, divide
from zgraph.passes.spmd.divided_parameters import Choice, choices, compatible, divided, uses_of
from zgraph.plan.plan import Plan
from zgraph.program.program import TENSOR_DIM, Division, InputRole, ParamSpec, Program
from zgraph.record import joined
from zgraph.units import shown_bytes

logger = logging.getLogger(__name__)

# The dimension of a module's weights that each style of a table divides. Names are those of torch's and transformers'
# plans.
STYLES = {
    "colwise": "out",
    "rowwise": "in",
    "vocab": "rows",
    "replicate": None,
}
_OF_TRANSFORMERS = {
    "colwise_rep": "colwise",
    "colwise_gather_output": "colwise",
    "rowwise_rep": "rowwise",
    "rowwise_split_input": "rowwise",
    "embedding_rowwise": "vocab",
    "local_colwise": "colwise",
    "packed_colwise": "colwise",
    "local_packed_colwise": "colwise",
    "local_rowwise": "rowwise",
    "packed_rowwise": "rowwise",
    "local_packed_rowwise": "rowwise",
}


def divided_layout(joint: Program, plan: Plan, costs: Costs, module: nn.Module) -> dict[str, ParamSpec]:
    """Return the layouts of a captured program's parameters with the plan's divisions; unchanged where nothing is
    divided.

    Raises `PlanError` for a table that does not fit the model.
    """
    ranks = joint.mesh.get(TENSOR_DIM, 1)
    if ranks == 1:
        return joint.params
    candidates = choices(joint, TENSOR_DIM, ranks)
    table = plan.tensor_parallel
    if table == "auto":
        chosen = _fastest(joint, candidates, plan, costs)
    else:
        own = table == "model"
        rows = _own_table(module) if own else dict(table)  # type: ignore[arg-type]
        chosen = _by_table(joint, candidates, rows, module, ranks, own)
    specs = divided(joint, chosen)
    _tell(specs, ranks)
    return specs


def as_divided(
    specs: dict[str, ParamSpec], like: Mapping[str, ParamSpec], mesh: Mapping[str, int]
) -> dict[str, ParamSpec]:
    """Divide whole layouts as those of `like` are."""
    return {
        name: spec.divided(division, mesh) if (division := like[name].division) is not None else spec
        for name, spec in specs.items()
    }


def _tell(specs: Mapping[str, ParamSpec], ranks: int) -> None:
    whole = [s for s in specs.values() if s.division is None]
    total = sum(s.whole_nbytes for s in specs.values())
    left = sum(s.nbytes for s in whole)
    logger.info(
        "%d ranks divide %d of %d parameters; %s of %s are whole on each",
        ranks,
        len(specs) - len(whole),
        len(specs),
        shown_bytes(left),
        shown_bytes(total),
    )
    if total and left > total / 2:
        names = ", ".join(s.name for s in sorted(whole, key=lambda s: -s.nbytes)[:3])
        logger.warning(
            "more than half of the model's bytes are whole on each rank of %r (%s, …): %d does not divide their axes, or operators "
            "that read them work on whole dimensions",
            TENSOR_DIM,
            names,
            ranks,
        )


# -- found from the graph ---------------------------------------------------------------------------------------------
def _kind(choice: Choice) -> tuple[object, ...]:
    """Return a key that is the same for choices of equal layers."""
    return tuple(sorted({(re.sub(r"\d+", "*", n), d.dim, d.blocks) for n, d in choice.divisions.items()}))


def _fastest(joint: Program, choices: list[Choice], plan: Plan, costs: Costs) -> dict[str, Division]:
    """Divide every parameter that can be; among several ways take the one that is simulated to be the fastest, the same
    for equal layers."""
    kinds: dict[tuple[object, ...], list[Choice]] = {}
    for choice in choices:
        kinds.setdefault(_kind(choice), []).append(choice)
    left = sorted(kinds.values(), key=lambda c: (-sum(x.nbytes(joint.params) for x in c), _blocks(c)))
    chosen: list[Choice] = []
    while left:
        names = _names(left[0])
        rivals = [c for c in left if _names(c) & names]
        if len(rivals) > 1:
            times = [_simulated(joint, compatible([*chosen, *rival]), plan, costs) for rival in rivals]
            best = rivals[times.index(min(times))]
        else:
            best = left[0]
        chosen += best
        taken = {n for c in chosen for n in c.divisions}
        left = [c for c in left if c is not best and _names(c) - taken]
    return compatible(chosen)


def _names(kind: list[Choice]) -> set[str]:
    return {n for c in kind for n in c.divisions}


def _blocks(kind: list[Choice]) -> int:
    return sum(d.blocks for c in kind for d in c.divisions.values())


def _simulated(joint: Program, divisions: Mapping[str, Division], plan: Plan, costs: Costs) -> float:
    """Return the simulated seconds of a step with these divisions."""
    trial = joint.snapshot()
    trial.params = divided(joint, divisions)
    divide(DivideOptions(TENSOR_DIM, plan.sequence_parallel))(trial)
    return simulate(trial, costs).seconds


# -- by a table -------------------------------------------------------------------------------------------------------
def _own_table(module: nn.Module) -> dict[str, str]:
    """Return the model's own table, for its full module paths."""
    own = getattr(module, "_tp_plan", None) or getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    if not own:
        raise PlanError(
            f"{type(module).__name__} has no table of its own",
            where="tensor_parallel",
            why="it has neither _tp_plan nor config.base_model_tp_plan",
            hint='tensor_parallel="auto", or a table of module patterns',
        )
    return {str(pattern): str(style) for pattern, style in own.items()}


def _by_table(
    joint: Program, choices: list[Choice], rows: Mapping[str, str], module: nn.Module, ranks: int, own: bool
) -> dict[str, Division]:
    uses = uses_of(joint, Axes(joint))
    parameters = joint.input_nodes(InputRole.PARAMETER)
    modules, known = [n for n, _ in module.named_modules(remove_duplicate=False)], parameter_names(module)
    divisions: dict[str, Division] = {}
    faults: list[PlanError] = []
    for pattern, style_name in rows.items():
        style = _OF_TRANSFORMERS.get(style_name, style_name) if own else style_name
        if style not in STYLES:
            if own:
                continue  # (styles of activations, or of modules without weights: here these follow from the weights)
            raise PlanError(
                f"tensor_parallel has a style {style!r}",
                where=f"tensor_parallel.{pattern}",
                hint=did_you_mean(style, STYLES),
            )
        # (a model's own table has a row for each of the modules that share a weight; the first module's counts)
        names = {n: [n] if own else known.get(n, [n]) for n in joint.params}
        matched = _matched(pattern, modules, names, own)
        role = STYLES[style]
        for name in sorted(matched):
            if role is None or name not in parameters:
                continue
            division = _division(name, role, choices, uses)
            if division is None and len(joint.params[name].shape) > 1 and not own:
                faults.append(
                    PlanError(
                        f"{name!r} can't be divided into {ranks} parts {style}",
                        where=f"tensor_parallel.{pattern}",
                        why=f"its shape is {list(joint.params[name].shape)}; an operator walks that dimension as a whole, or {ranks} does "
                        "not divide what it is made of (heads, say)",
                        hint="replicate it, or another number of ranks",
                    )
                )
            if division is not None:
                divisions[name] = division
    if faults:
        raise joined(faults)
    return divisions


def unmatched(rows: Collection[str], module: nn.Module) -> Iterator[PlanError]:
    """Yield an error for each pattern of a table that names no module with parameters of its own, and no parameter."""
    modules, known = [n for n, _ in module.named_modules(remove_duplicate=False)], parameter_names(module)
    for pattern in rows:
        if _matched(pattern, modules, known, own=False):
            continue
        there = [m for m in modules if m and fnmatch.fnmatchcase(m, pattern)]
        if there:
            yield PlanError(
                f"tensor_parallel has a pattern {pattern!r}, and {there[0]!r} has no parameter of its own",
                where=f"tensor_parallel.{pattern}",
                why="weights are divided, and a pattern is for the module that holds them",
                hint=f"{pattern}.* names what is in it",
            )
        else:
            yield PlanError(
                f"tensor_parallel has a pattern {pattern!r} that matches no module",
                where=f"tensor_parallel.{pattern}",
                hint=did_you_mean(pattern, [n for n in modules if n]),
            )


def _matched(pattern: str, modules: Collection[str], names: Mapping[str, Sequence[str]], own: bool) -> set[str]:
    """Return the parameters that a pattern names: by their modules' paths, or by their own names.

    In a model's own table a pattern may be the end of a path. `names` has all names of each parameter: a tied one
    belongs to several modules.
    """
    patterns = [pattern, f"*.{pattern}"] if own else [pattern]

    def hit(path: str) -> bool:
        return any(fnmatch.fnmatchcase(path, p) for p in patterns)

    chosen = {m for m in modules if m and hit(m)}
    return {first for first, every in names.items() if any(n.rpartition(".")[0] in chosen or hit(n) for n in every)}


def _division(
    name: str, role: str, choices: list[Choice], uses: Mapping[str, Mapping[int, set[str]]]
) -> Division | None:
    """Return the division of a parameter's dimension with this role that has the fewest blocks, that is, of the
    outermost axis."""
    fits = [
        c.divisions[name]
        for c in choices
        if name in c.divisions and role in uses.get(name, {}).get(c.divisions[name].dim, set())
    ]
    return min(fits, key=lambda d: d.blocks, default=None)
