"""Training steps of zgraph over the emulated link: what of the link's time is hidden, what a profile says of it, whether there
is a race, whether the host waits. `benchmarks/gpu.py` prints it; on CPU the same code runs, without streams.

The second rank's rows are taken to be this one's, so these steps train no model that anyone wants. They do what a rank of two
does: the same programs, transfers, waits and kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import zgraph
from link import gpt
from link.emulated import WAITED, Link, emulated
from zgraph.passes.analysis.costs import Costs, Hardware, hardware_like
from zgraph.passes.analysis.costs import Link as LinkCosts
from zgraph.passes.analysis.simulator import StepForecast, simulate_step
from zgraph.runtime.timings import median_step, uncovered

WARMUP = 3  # steps, of which the first compiles
SPIN = "spin_kernel"  # the kernel of torch.cuda._sleep: it runs on the link's stream, and nowhere else while it is profiled

GPTS = {
    "h200": gpt.Size(layers=12, dim=2048, vocab=32768, positions=1024, batch=8, seq=1024),
    "h200-large": gpt.Size(layers=24, dim=2048, vocab=32768, positions=1024, batch=8, seq=1024),
    "small": gpt.Size(),
    "tiny": gpt.Size(layers=1, dim=64, vocab=256, positions=32, batch=2, seq=32),
}


@dataclass(frozen=True)
class Setting:
    """`rate` in bytes per second and direction, `latency` in seconds. Passes decide from what was `calibrated`, else from data
    sheets."""

    size: gpt.Size
    rate: float
    device: torch.device
    latency: float = 10e-6
    backend: str = "inductor"
    precision: str = "bf16"
    repeat: int = 20
    calibrated: Hardware | None = None


@dataclass(frozen=True)
class Overlap:
    """Seconds of a step. `unlimited` is that of the same program over a link that takes no time, `link` what the transfers
    take alone, `serialised` where each one is waited for where it starts."""

    compute: float
    unlimited: float
    link: float
    serialised: float
    step: float

    @property
    def hidden(self) -> float:
        """The share of the link's time that the step does not show."""
        return 1 - (self.step - self.unlimited) / self.link

    @property
    def over_bound(self) -> float:
        """A step over the longer one of computing and the link's time."""
        return self.step / max(self.unlimited, self.link)


@dataclass(frozen=True)
class Exposed:
    """Seconds of a step in which the link is busy, and in which it is while nothing computes."""

    busy: float
    exposed: float


# -- steps ------------------------------------------------------------------------------------------------------------
def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(run: Callable[[], Any], device: torch.device, repeat: int) -> tuple[float, float, float]:
    """(median, fastest) milliseconds of a step, and its peak memory in GiB (0 on CPU)."""
    for _ in range(WARMUP):
        run()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    return statistics.median(times), min(times), peak


def hardware_of(setting: Setting) -> Hardware:
    """What is known of the device, with the emulated link."""
    name = torch.cuda.get_device_name(setting.device) if setting.device.type == "cuda" else ""
    known = setting.calibrated or hardware_like(setting.device.type, name)
    link = LinkCosts(bandwidth=setting.rate, latency=setting.latency)
    return known.model_copy(update={"name": f"{known.name}, emulated link", "links": {"*": link}})


def plan_of(setting: Setting, stage: int, **fields: Any) -> zgraph.Plan:
    return zgraph.Plan(
        zero=stage,
        backend=setting.backend,
        precision=setting.precision,
        optimizer=zgraph.AdamW(lr=1e-4),
        **fields,
    )


def compiled(setting: Setting, stage: int, *, prefetch: bool = True) -> Any:
    """The model and its plan, whose passes decide for the emulated link."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hardware.json"
        file.write_text(hardware_of(setting).model_dump_json())
        plan = plan_of(setting, stage, hardware=str(file), prefetch={"enabled": prefetch})
        return zgraph.compile(made(setting), plan)


def made(setting: Setting) -> gpt.GPT:
    with torch.device(setting.device):
        return gpt.make(setting.size)


def calibrated(setting: Setting) -> Setting:
    """The setting with what `zgraph.calibrate` finds of the device."""
    with freed(setting.device), emulated(setting.rate, setting.latency):
        (batch,) = batches(setting, 1)
        found = zgraph.calibrate(made(setting), plan_of(setting, 3), inputs=batch)
    return dataclasses.replace(setting, calibrated=found)


def batches(setting: Setting, count: int) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(t.to(setting.device) for t in gpt.data(setting.size, number)) for number in range(count)]


@contextlib.contextmanager
def freed(device: torch.device) -> Iterator[None]:
    """The next model needs the memory."""
    try:
        yield
    finally:
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


@contextlib.contextmanager
def ranked(setting: Setting, stage: int, *, prefetch: bool = True) -> Iterator[tuple[Any, Link]]:
    """The compiled model as one of two ranks, and its link, which takes no time yet."""
    with freed(setting.device), emulated() as link:
        model = compiled(setting, stage, prefetch=prefetch)
        try:
            yield model, link
        finally:
            model.zgraph.runtime.first_gathers.drop()  # what the last update has started


# -- what is hidden ---------------------------------------------------------------------------------------------------
def compute_alone(setting: Setting) -> float:
    """Seconds of a step in one process without a process group. It updates all rows, where a rank updates its own."""
    with freed(setting.device):
        (batch,) = batches(setting, 1)
        model = compiled(setting, 3)
        return measure(lambda: model.train_step(*batch), setting.device, setting.repeat)[0] / 1e3


def serialised(setting: Setting, stage: int) -> float:
    """Seconds of a step in which each transfer is waited for where it starts."""
    with ranked(setting, stage, prefetch=False) as (model, link):
        (batch,) = batches(setting, 1)
        link.rate, link.latency = setting.rate, setting.latency
        return measure(lambda: model.train_step(*batch), setting.device, setting.repeat)[0] / 1e3


@dataclass(frozen=True)
class Measured:
    """Of one ZeRO stage: the times; the profile of a step; what the simulator says of it, from the costs that passes decide
    from, and from these slowed down until computing takes as long as it was measured to; whether the host waits."""

    overlap: Overlap
    profile: Exposed
    forecast: Exposed
    fitted: Exposed
    host: Host


def overlapped(setting: Setting, stage: int, compute: float, serialised: float, trace: Path) -> Measured:
    """Steps over the link as the plan schedules them, one of them profiled into the file `trace`."""
    device = setting.device
    with ranked(setting, stage) as (model, link):
        (batch,) = batches(setting, 1)

        def step() -> None:
            model.train_step(*batch)

        measure(step, device, 1)
        clock = model.zgraph.runtime.clock
        clock.read()
        clock.steps.clear()
        unlimited = measure(step, device, setting.repeat)[0] / 1e3
        phases = median_step(clock)
        link.rate, link.latency = setting.rate, setting.latency
        limited = measure(step, device, setting.repeat)[0] / 1e3
        link.sent.clear()
        step()
        synchronize(device)
        alone = link.alone(list(link.sent), device, setting.repeat)
        profile = profiled(step, device, trace)
        forecast, fitted = forecasts(model, setting, phases["forward"] + phases["backward"])
        host = host_of(step, link, device)
    return Measured(Overlap(compute, unlimited, alone, serialised, limited), profile, forecast, fitted, host)


def forecasts(model: Any, setting: Setting, seconds: float) -> tuple[Exposed, Exposed]:
    """The simulator's, and its when forward and backward take `seconds` to compute."""
    known = hardware_of(setting)
    (program,) = [s.history().program for s in model.zgraph.programs.values() if s.differentiated]
    (update,) = [history.program for history in model.zgraph.updates.values()]

    def forecast(hardware: Hardware) -> StepForecast:
        return simulate_step(program, update, Costs(hardware, setting.backend == "inductor"))

    def exposed(step: StepForecast) -> Exposed:
        return Exposed(sum(t for p in step.programs for name, t in p.busy.items() if name != "compute"), step.exposed)

    plain = forecast(known)
    slower = seconds / plain.programs[0].busy["compute"]
    fitted = known.model_copy(
        update={
            "flops": {dtype: rate / slower for dtype, rate in known.flops.items()},
            "memory": known.memory / slower,
            "launch": known.launch * slower,
            "operators": {name: taken * slower for name, taken in known.operators.items()},
        }
    )
    return exposed(plain), exposed(forecast(fitted))


@dataclass(frozen=True)
class Host:
    """`waits`: what torch says of a step in which the host waits for the device, None if it does not. `seconds` until a step
    that was called while the device slept for `asleep` seconds had returned: torch does not see a wait for an event."""

    waits: str | None
    seconds: float
    asleep: float = 1.0


def host_of(step: Callable[[], None], link: Link, device: torch.device) -> Host:
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    waits = None
    try:
        step()
    except Exception as error:
        if "synchroniz" not in str(error):
            raise
        waits = str(error).splitlines()[0]
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    synchronize(device)
    link.sleep(Host.asleep)
    begin = time.perf_counter()
    step()
    seconds = time.perf_counter() - begin
    synchronize(device)
    return Host(waits, seconds)


# -- what a profile says ----------------------------------------------------------------------------------------------
def profiled(run: Callable[[], Any], device: torch.device, file: Path) -> Exposed:
    """Profile one step, and write its trace for chrome://tracing or Perfetto."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        run()
        synchronize(device)
    file.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(file))
    return exposed_in(json.loads(file.read_text())["traceEvents"])


def exposed_in(events: Sequence[dict[str, Any]]) -> Exposed:
    """From a trace: the link is the stream that sleeps. (On CPU what a wait slept is all that is seen of the link.)"""
    spans = [e for e in events if e.get("ph") == "X"]
    on_device = [e for e in spans if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not on_device:
        waited = sum(e["dur"] for e in spans if e["name"] == WAITED and e.get("cat") == "user_annotation") / 1e6
        return Exposed(waited, waited)
    streams = {e["args"]["stream"] for e in on_device if SPIN in e["name"]}
    if len(streams) != 1:
        raise ValueError(f"{len(streams)} streams of the trace sleep; the link is one")
    link, compute = (
        [(float(e["ts"]), e["ts"] + e["dur"]) for e in on_device if (e["args"]["stream"] in streams) is mine]
        for mine in (True, False)
    )
    return Exposed(uncovered(link, []) / 1e6, uncovered(link, compute) / 1e6)


# -- races ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Shaken:
    """Whether two runs of the same steps on one stream gave the same bits (else the next says nothing), and whether a run
    over a link beside, with everything held up at random, did; the tensors that differ."""

    same_twice: bool
    differ: tuple[str, ...]
    steps: int


def shaken(setting: Setting, stage: int, steps: int) -> Shaken:
    """Train the same steps three times from the same weights: each transfer where it starts, the same again, and shaken."""
    with deterministic(), ranked(setting, stage) as (model, link):
        given = batches(setting, 4)
        for at in range(WARMUP):
            model.train_step(*given[at])
        begin = held(model)
        ends = []
        for seed in (None, None, 0):
            put_back(model, begin)
            link.beside = seed is not None
            link.shake(seed)
            for at in range(steps):
                link.hold_up()
                model.train_step(*given[at % len(given)])
            synchronize(setting.device)
            ends.append(held(model))
        link.shake(None)
    once, twice, last = ends
    moved = any(not torch.equal(once[n], begin[n]) for n in once)
    if not moved or not all(v.isfinite().all() for v in once.values()):
        raise AssertionError("the steps trained nothing, or nothing finite")
    return Shaken(not differing(once, twice), differing(once, last), steps)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits each time (on CUDA, an embedding's gradient is else added up in any order)."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def held(model: Any) -> dict[str, torch.Tensor]:
    """A copy of this rank's weights and of the optimizer's states."""
    runtime = model.zgraph.runtime
    weights = {name: runtime.shards.local(name) for name in runtime.shards.params()}
    return {name: value.detach().clone() for name, value in {**weights, **runtime.updater.states.tensors}.items()}


def put_back(model: Any, values: dict[str, torch.Tensor]) -> None:
    runtime = model.zgraph.runtime
    runtime.first_gathers.drop()  # the last update has sent other weights
    with torch.no_grad():
        for name, param in runtime.shards.params().items():
            mine = param.to_local() if hasattr(param, "to_local") else param
            mine.copy_(values[name][: mine.shape[0]])
        for name, state in runtime.updater.states.tensors.items():
            state.copy_(values[name])
    runtime.updater.states.wrote_counts()


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> tuple[str, ...]:
    return tuple(name for name in one if not torch.equal(one[name], other[name]))


def small(setting: Setting) -> Setting:
    """A model small enough that a whole step fits into the queue of the device, for checks that need no size."""
    size = setting.size
    return dataclasses.replace(
        setting, size=dataclasses.replace(size, layers=min(2, size.layers), dim=min(512, size.dim))
    )
