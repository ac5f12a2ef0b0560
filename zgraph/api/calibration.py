"""`zgraph.calibrate`: measures the costs of schedules and forecasts, on this machine with this model.

A copy of the model is compiled by the plan and trained for a few steps, with every call of its programs timed (`zgraph.codegen.instrumented`); the
links are timed by themselves (`zgraph.machine.link_benchmark`). With several ranks, steps whose transfers run beside the kernels alternate with steps
that wait for each transfer at once: the kernels' longer time in the former is how much transfers slow down computation. The ranks' tables are merged
into one, so that all ranks make the same schedules.
"""

from __future__ import annotations

import copy
import logging
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from zgraph.api.compiler import compile
from zgraph.build.planned_step import Inputs, split_inputs
from zgraph.capture.capture import find_loss
from zgraph.codegen.executable import Executable
from zgraph.codegen.instrumented import Run, Stopwatch, Timed
from zgraph.errors import PlanError, refuse_unless
from zgraph.machine.link_benchmark import measure_link
from zgraph.machine.operator_times import Sample, operator_table, samples, short, slowest_samples
from zgraph.passes.analysis.costs import Costs, Hardware, Link, bytes_of, hardware_like
from zgraph.plan.plan import Plan, plan_of
from zgraph.program import collectives
from zgraph.program.program import Program
from zgraph.ranks.agreement import Agreement
from zgraph.runtime.runtime import Runtime

logger = logging.getLogger(__name__)

WARM = 3  # steps before those that are measured: the first ones compile, and allocate what is kept
STEPS = 12
TURN = 3  # steps of one kind before the other kind follows: they alternate, since other load on the machine changes
LARGE = 2**20  # bytes: kernels that move more than this measure the memory's rate


def calibrate(
    model: nn.Module,
    plan: Plan | None = None,
    inputs: Inputs = (),
    *,
    loss_fn: Callable[..., Any] | None = None,
    mesh: DeviceMesh | None = None,
    path: str | os.PathLike[str] | None = None,
    steps: int = STEPS,
) -> Hardware:
    """Measure the operators and links of a step of `model` by `plan`, and return them for `Plan(hardware=…)`.

    The model is not compiled and is not changed: a copy of it runs `steps` training steps on `inputs` (as for
    `zgraph.compile`: this rank's own batch, of one micro-batch), so there must be memory for two. `loss_fn` and `mesh` are
    those of `zgraph.compile`; an output without a loss is summed. All ranks must call it, with the same arguments; all get
    the same record, and rank 0 writes it to `path` as JSON. Raises what `compile` and `train_step` do, and `PlanError` if
    the file can't be written, and for a plan with a pipeline (a step without stages has the same operators).
    """
    counted = isinstance(steps, int) and steps > 0
    refuse_unless(counted, "zgraph.calibrate(steps=…)", steps, "a number of steps, 1 or more")
    a_path = path is None or isinstance(path, str | os.PathLike)
    refuse_unless(a_path, "zgraph.calibrate(path=…)", path, "the path of a file or None")
    plan = plan_of(plan).model_copy(update={"hardware": None, "elastic": None, "micro_batches": 1})
    plan.refuse_pipeline(
        dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1")), "calibration"
    )
    args, kwargs = split_inputs(inputs)
    twin: Any = compile(copy.deepcopy(model), plan, loss_fn=loss_fn or any_loss, mesh=mesh)
    runtime: Runtime = twin.zgraph.runtime
    with torch.random.fork_rng(devices=[runtime.device] if runtime.device.type == "cuda" else []):
        links = _links(runtime)
        mine = _time_steps(twin.zgraph, args, kwargs, steps)
    runtime.first_gathers.drop()
    name = torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else "cpu"
    base = hardware_like(runtime.device.type, name)
    views = runtime.everyone.gather("times of operators", mine)
    hardware = _hardware(f"{name}, measured", base, _with_work(links, views), views)
    if path is not None:
        _write(hardware, Path(path), runtime.everyone)
    return hardware


# -- running ------------------------------------------------------------------------------------------------------------
def _links(runtime: Runtime) -> dict[str, Link]:
    """Measure the link of each mesh dimension with more than one rank."""
    links = {}
    for dim, ranks in runtime.sizes.items():
        if ranks > 1:
            links[dim] = measure_link(runtime.groups[dim], ranks, runtime.device, runtime.agreement)
            logger.info("link %r: %s", dim, links[dim])
    return links


@dataclass(frozen=True)
class _Step:
    """A timed step."""

    settled: bool  # each transfer was waited for where it starts
    wall: float  # the seconds of the whole step
    runs: list[tuple[Timed, Run]]  # the timed runs of its programs

    @property
    def besides(self) -> float:
        """Seconds outside of the programs."""
        return self.wall - sum(run.seconds for _, run in self.runs)

    @property
    def started(self) -> tuple[float, int]:
        """(the seconds in starts of transfers, the number of starts)."""
        starts = [each.starts(run) for each, run in self.runs]
        return sum(s for s, _ in starts), sum(n for _, n in starts)


@dataclass(frozen=True)
class _Found:
    """The measurements of one rank."""

    samples: list[Sample]  # every node of the programs that ran
    besides: float  # seconds of a step outside of its programs
    sent: int = 0  # bytes of all transfers of a step, as `Costs.work` counts them
    stolen: float = 0.0  # seconds by which these transfers slowed down the computation
    start: float = 0.0  # seconds of the start of one transfer


def _observe(timed: Sequence[Timed], step: Callable[[], float], ways: tuple[bool, ...], steps: int) -> list[_Step]:
    """Run `steps` steps of each kind in `ways`, in turns: True waits for every transfer where it starts, False does
    not."""
    timed_steps: list[_Step] = []
    for each in timed:
        each.install()
    try:
        for turn in range(-(-steps // TURN)):
            for settled in ways:
                for each in timed:
                    each.settles = settled
                for number in range(min(TURN, steps - turn * TURN) + 1):
                    wall = step()
                    runs = [(each, run) for each in timed for run in each.take()]
                    if number:  # (in the first one, transfers of the other kind of step may still run)
                        timed_steps.append(_Step(settled, wall, runs))
    finally:
        for each in timed:
            each.remove()
    return timed_steps


def _time_steps(handle: Any, args: tuple[Any, ...], kwargs: dict[str, Any], steps: int) -> _Found:
    runtime: Runtime = handle.runtime
    watch = Stopwatch(runtime.device)

    def step() -> float:
        start = watch.now()
        handle.train_step(*args, **kwargs)
        end = watch.now()
        if runtime.plan.optimizer is None:
            for param in runtime.shards.params().values():
                param.grad = None
        return watch.between(start, end)

    for _ in range(WARM):
        step()
    timed = {Timed(executable, watch): whole for executable, whole in _executables(runtime)}
    sends = any(ranks > 1 for ranks in runtime.sizes.values())
    observed = _observe(list(timed), step, (True, False) if sends else (True,), steps)
    alone, beside = [s for s in observed if s.settled], [s for s in observed if not s.settled]
    costs = Costs(runtime.costs.hardware, fused=runtime.plan.backend == "inductor")
    timed_nodes: list[Sample] = []
    stolen = 0.0
    wholes = {}
    for each, whole in timed.items():
        runs = [run for s in alone for own, run in s.runs if own is each]
        if not runs:  # (a program for other inputs or outputs than these steps have)
            continue
        wholes[id(whole)] = whole
        timed_nodes += samples(each, runs, whole, costs)
        stolen += each.longer(runs, [run for s in beside for own, run in s.runs if own is each])
    besides = max(statistics.median(s.besides for s in beside or alone), 0.0)
    if not beside:
        return _Found(timed_nodes, besides)
    sent = sum(bytes_of(n) for whole in wholes.values() for n in whole.graph.nodes if collectives.is_start(n))
    start = statistics.median(seconds / max(count, 1) for seconds, count in (s.started for s in beside))
    return _Found(timed_nodes, besides, sent, max(stolen, 0.0), start)


def _executables(runtime: Runtime) -> Iterable[tuple[Executable, Program]]:
    """Yield the executables of a step, each with the whole program that it is a part of."""
    for entry in runtime.entries.values():
        for step in entry.every_program():
            for executable in step.executables():
                yield executable, step.history().program
    for update in runtime.updater.programs.compiled():
        for chunk in update.executable.chunks:
            yield chunk.executable, update.history.program


def any_loss(output: Any, *_: Any, **__: Any) -> torch.Tensor:
    """Return the loss of an output, or the sum of all its differentiable values."""
    loss = find_loss(output)
    if loss is not None:
        return loss
    leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad]
    return torch.stack([x.sum().to(torch.float32) for x in leaves]).sum()


# -- the table ------------------------------------------------------------------------------------------------------------
def _with_work(links: dict[str, Link], ranks: Sequence[_Found]) -> dict[str, Link]:
    """Return the links with how much a transfer slows down computation: at least nothing, at most its own time."""
    stolen, start = statistics.median(r.stolen for r in ranks), statistics.median(r.start for r in ranks)
    sent = max(ranks[0].sent, 1)  # (ranks run the same programs)
    return {
        dim: link.model_copy(update={"work": min(stolen / sent, 1 / link.bandwidth), "start": start})
        for dim, link in links.items()
    }


def _hardware(name: str, base: Hardware, links: dict[str, Link], ranks: Sequence[_Found]) -> Hardware:
    """Return one record of what all ranks measured: the slowest rank's times, since the others wait for it, averaged
    over nodes of equal signature."""
    rows = slowest_samples([r.samples for r in ranks])
    rates = _rates(rows)
    return base.model_copy(
        update={
            "name": name,
            "flops": {**base.flops, **rates},
            "memory": _memory(rows) or base.memory,
            "launch": _launch(rows, base.launch),
            "links": {**base.links, **{d: _rounded(link) for d, link in links.items()}},
            "operators": operator_table(rows),
            "step": short(min(r.besides for r in ranks)),  # (the last rank to arrive waits for none)
        }
    )


def _rates(rows: list[Sample]) -> dict[str, float]:
    """Return FLOP/s of products by dtype."""
    flops: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for row in rows:
        if row.flops and row.seconds:
            flops[row.dtype] = flops.get(row.dtype, 0) + row.flops
            seconds[row.dtype] = seconds.get(row.dtype, 0.0) + row.seconds
    return {dtype: short(flops[dtype] / seconds[dtype]) for dtype in flops}


def _memory(rows: list[Sample]) -> float | None:
    """Return bytes/s of large nodes that are not products; None if there are none."""
    large = [r for r in rows if not r.flops and r.moved > LARGE and r.seconds]
    return short(sum(r.moved for r in large) / sum(r.seconds for r in large)) if large else None


def _launch(rows: list[Sample], base: float) -> float:
    """Return the median seconds of nodes that move next to nothing; `base` if there are none."""
    small = [r.seconds for r in rows if not r.flops and 0 < r.moved < LARGE // 256]
    return short(statistics.median(small)) if small else base


def _rounded(link: Link) -> Link:
    return Link.model_validate({k: v if isinstance(v, bool) else short(v) for k, v in link.model_dump().items()})


def _write(hardware: Hardware, path: Path, agreement: Agreement) -> None:
    """Write the record on rank 0, and return on all ranks once the file is complete. Raises `PlanError`."""
    problem: str | None = None
    if not agreement.ranks or dist.get_rank() == agreement.ranks[0]:
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_text(hardware.model_dump_json(indent=1) + "\n", encoding="utf-8")
            os.replace(part, path)
        except OSError as error:
            problem = str(error)
            part.unlink(missing_ok=True)
    problem = agreement.gather("a file", problem)[0]
    if problem is not None:
        raise PlanError("the table of costs can't be written", where=str(path), why=problem)
