"""Every check and measurement that needs a GPU, on one process: `python benchmarks/gpu.py [--quick] [--only PART …]`.

A Llama of random weights, plain against compiled, without a process group and on a mesh of one rank:
loss and gradients in float32, the kernels that Inductor made, ordinary models beside plain ones (`gpu_models.py`), whole training
steps in float32 (against AdamW), with all that can be in the host's memory, and in fp16 (that no step waits for the device, and that
an overflow is skipped), checkpoints
saved beside steps, a step that is not finite, and in bfloat16 the time and peak memory of a step, with activations in the host's
memory too, against plain PyTorch and `torch.compile`. The update of 100 M parameters in 3 and in 300 tensors
against torch's fused and foreach AdamW, as a share of the copy bandwidth of the same run. Sparse attention (`gpu_attention.py`): each width and
dtype of its kernels beside whole attention with a mask in float64, and its time beside whole attention's.

What does not fit: activations in the host's memory hidden behind computing; the update of states there, on the host and on the device, beside
the time that its bytes take over the host's link in the same run; and under a bound on the allocator a model whose weights, gradients and
states are ten times that bound, which plain PyTorch can't train.

Over a link that is emulated on a stream of its own (`benchmarks/link/emulated.py`), a GPT as one of two ranks of ZeRO-2 and
ZeRO-3: what of the link's time a step hides, beside computing alone, the link alone and a step without prefetch; the exposed
communication that a profile shows, beside what the simulator forecasts; that the host never waits for the device; and that
200 steps in which all streams are held up at random give the weights of as many on one stream, bit for bit. `--gpt` is the
model's size, `--rate` the link's in GB/s in each direction; with `--calibrate` passes decide from costs that were measured
before. The profiles go to `--traces`, by default to $OUT.

Needs torch, Triton and transformers, and downloads nothing. A check that fails does not stop the others; the exit status is
1 then. The tables go to benchmarks/results/gpu.md.

`--device cpu --quick` is a dry run of the same code, and `--smoke` one of the part over the link, operator by operator and
without streams: their figures mean nothing, and are written only where `--output` says.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import gc
import itertools
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # (else its sums are not the same each time)

import gpu_attention
import torch
import torch.distributed as dist
from gpu_models import CASES, ON_CUDA, Compared, difference, gradients
from link import one_gpu
from link.one_gpu import measure, synchronize
from torch import nn

import zgraph

RESULTS = Path(__file__).parent / "results"
PARTS = ("numbers", "models", "steps", "checkpoints", "updates", "times", "attention", "fit", "link")


@dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    heads: int
    batch: int
    length: int
    vocabulary: int
    repeat: int


FULL = Size(hidden=2048, layers=8, heads=16, batch=4, length=1024, vocabulary=32000, repeat=20)
CHECK = Size(hidden=512, layers=4, heads=8, batch=2, length=256, vocabulary=4096, repeat=0)
BOUND_BYTES = 2 * 2**30  # of the allocator, for what does not fit
LARGE = Size(hidden=2048, layers=26, heads=16, batch=1, length=512, vocabulary=32000, repeat=3)  # ten times as much
QUICK = Size(hidden=64, layers=1, heads=4, batch=2, length=32, vocabulary=256, repeat=3)


@dataclass
class Results:
    """Rows of the tables, and what failed."""

    checks: list[tuple[str, str, str]] = field(default_factory=list)
    times: list[tuple[str, str, str, str]] = field(default_factory=list)
    updates: list[tuple[str, str, str, str]] = field(default_factory=list)
    attention: list[tuple[str, ...]] = field(default_factory=list)
    fit: list[tuple[str, str, str, str]] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    overlap: list[tuple[str, ...]] = field(default_factory=list)
    exposed: list[tuple[str, ...]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Whatever goes wrong inside is one failed row; the rest goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failures.append(what)
            self.checks.append(
                (what, "FAILED", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            )

    def check(self, what: str, ok: bool, found: str) -> None:
        self.checks.append((what, "ok" if ok else "FAILED", found))
        if not ok:
            self.failures.append(what)


# -- the model ----------------------------------------------------------------------------------------------------
def llama(size: Size, device: torch.device, dtype: torch.dtype) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(device, dtype)


def batch(size: Size, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, size.vocabulary, (size.batch, size.length), generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens}


def free(device: torch.device) -> None:
    """Let go of what models before held (they are cycles), also in torch's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def step(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach()


# -- checks -------------------------------------------------------------------------------------------------------
def check_numbers(results: Results, size: Size, device: torch.device, where: str) -> None:
    """Loss and gradients in float32 against plain PyTorch, whose own spread from run to run is a row too."""
    plain = llama(size, device, torch.float32)
    inputs = batch(size, device)
    runs = []
    for _ in range(2):
        loss = step(plain, inputs)
        runs.append({"loss": loss, **gradients(plain)})
    results.check(f"{where}: plain PyTorch, twice", True, str(difference(runs[1], runs[0])))
    for backend in ("eager", "inductor"):
        what = f"{where}: loss and gradients, backend {backend}"
        with results.attempt(what):
            model = copy.deepcopy(plain)
            zgraph.compile(model, zgraph.Plan(backend=backend), inputs=inputs)
            loss = step(model, inputs)
            found = difference({"loss": loss, **gradients(model)}, runs[0])
            results.check(what, found.within, str(found))
            if backend == "inductor" and not results.kernels:
                results.kernels = kernel_lines(model)


def check_models(results: Results, device: torch.device) -> None:
    """Ordinary models, sizes, streams and precisions, against plain PyTorch on the same device."""
    for (name, case), backend in itertools.product(CASES.items(), ("eager", "inductor")):
        if device.type == "cuda" or name not in ON_CUDA:
            with results.attempt(f"{name}, backend {backend}"):
                results.check(f"{name}, backend {backend}", *case(Compared(device, backend)))


def check_steps(results: Results, size: Size, device: torch.device) -> None:
    """Ten whole steps with clipping, accumulation and a schedule, against torch's AdamW."""
    inputs = batch(size, device)
    for backend in ("eager", "inductor"):
        what = f"ten training steps in float32, backend {backend}"
        with results.attempt(what):
            plain = llama(size, device, torch.float32)
            plan = zgraph.Plan(
                backend=backend,
                optimizer=zgraph.AdamW(lr=1e-3),
                lr_schedule=zgraph.Cosine(total_steps=10, warmup_steps=2),
                grad_clip=1.0,
                micro_batches=2,
            )
            mine = zgraph.compile(copy.deepcopy(plain), plan)
            optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, foreach=False)
            for at in range(10):
                mine.train_step(**inputs)
                for half in range(2):
                    rows = slice(half * size.batch // 2, (half + 1) * size.batch // 2)
                    (plain(**{k: v[rows] for k, v in inputs.items()}).loss / 2).backward()
                nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
                optimizer.param_groups[0]["lr"] = plan.lr_schedule.at(at, 1e-3, 0.9).lr  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()
            weights = [{n: p.detach() for n, p in m.named_parameters()} for m in (mine, plain)]
            found = difference(*weights)
            results.check(what, found.error < 1e-4, str(found))


def check_offload(results: Results, size: Size, device: torch.device) -> None:
    """Five steps with all that can be in the host's memory are those with all on the device, and hold less of it."""
    inputs = batch(size, device)
    for backend, on in itertools.product(("eager", "inductor"), ("host", "device")):
        what = f"five steps with all in the host's memory, updated on the {on}, backend {backend}"
        with results.attempt(what):
            found, peaks = [], []
            for place in ("none", "cpu"):
                away = {**dict.fromkeys(("activations", "optimizer", "parameters"), place), "update_on": on}
                plan = zgraph.Plan(backend=backend, optimizer=zgraph.AdamW(lr=1e-3), grad_clip=1.0, offload=away)
                model = zgraph.compile(llama(size, device, torch.float32), plan)
                free(device)
                for _ in range(5):
                    model.train_step(**inputs)
                peaks.append(torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0)
                found.append({n: p.detach().to(device).clone() for n, p in model.named_parameters()})
                del model
            far = difference(found[1], found[0])
            shown = f"{far}; peak {peaks[1] / 2**20:.0f} MiB, on the device {peaks[0] / 2**20:.0f} MiB"
            results.check(what, far.error < 1e-4 and peaks[1] <= peaks[0], shown)


def check_checkpoints(results: Results, size: Size, device: torch.device) -> None:
    """What a save in the background holds is of its step, though the next ones run at once; it blocks for little more than its copy."""
    inputs = batch(size, device)

    def compiled() -> Any:
        plan = zgraph.Plan(precision="fp16", optimizer=zgraph.AdamW(lr=1e-4), grad_clip=1.0, ema=0.99)
        return zgraph.compile(llama(size, device, torch.float32), plan)

    def held(model: Any) -> dict[str, torch.Tensor]:
        states = model.zgraph.optimizer.state
        return {n: p.detach() for n, p in model.named_parameters()} | {
            f"{n}.{k}": v for n, p in model.named_parameters() for k, v in states[p].items()
        }

    what = "a checkpoint saved beside steps, and loaded"
    with results.attempt(what), tempfile.TemporaryDirectory() as folder:
        model, took = compiled(), []
        for _ in range(3):
            for _ in range(3):
                model.train_step(**inputs)
            synchronize(device)
            start = time.perf_counter()
            model.save_checkpoint(folder, async_=True, keep_last=1)
            took.append(time.perf_counter() - start)
            saved = {n: t.clone() for n, t in held(model).items()}
        for _ in range(3):
            model.train_step(**inputs)
        model.zgraph.finish()
        other = compiled()
        other.load_checkpoint(folder)
        wrong = [n for n, t in held(other).items() if not torch.equal(t, saved[n])]
        rooms = {n: torch.empty_like(t, device="cpu", pin_memory=device.type == "cuda") for n, t in saved.items()}
        synchronize(device)
        start = time.perf_counter()
        for name, tensor in saved.items():
            rooms[name].copy_(tensor, non_blocking=True)
        synchronize(device)
        copied = time.perf_counter() - start
        shown = f"{len(saved)} tensors, {len(wrong)} differ; blocked {took[-1] * 1e3:.1f} ms, the copy alone {copied * 1e3:.1f} ms"
        results.check(what, not wrong, shown)
    what = "a step that is not finite is named, and its update is not made"
    with results.attempt(what):
        plan = zgraph.Plan(precision="bf16", optimizer=zgraph.AdamW(lr=1e-4), on_nonfinite="stop")
        model = zgraph.compile(llama(size, device, torch.float32), plan)
        model.train_step(**inputs)
        bad = model.model.layers[0].mlp.down_proj
        with torch.no_grad():
            bad.weight[0, 0] = float("inf")
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        try:
            for _ in range(2):  # (on CUDA it is told at the next step)
                model.train_step(**inputs)
            said = "nothing"
        except zgraph.errors.NonFiniteError as error:
            said = str(error)
        same = all(torch.equal(p, before[n]) for n, p in model.named_parameters())
        named = "layers.0.mlp" in said
        results.check(what, same and named, "model.layers.0.mlp" if named else said.splitlines()[0])


def check_half(results: Results, size: Size, device: torch.device) -> None:
    """fp16 steps run without waiting for the device, and one that overflows is skipped."""
    inputs = batch(size, device)
    with results.attempt("fp16: no step waits for the device"):
        plan = zgraph.Plan(precision="fp16", optimizer=zgraph.AdamW(lr=1e-4), grad_clip=1.0, ema=0.99)
        model = zgraph.compile(llama(size, device, torch.float32), plan)
        for _ in range(3):
            loss = model.train_step(**inputs).loss
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                loss = model.train_step(**inputs).loss
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        skipped = int(model.zgraph.skipped_steps)
        results.check("fp16: no step waits for the device", bool(loss.isfinite()), f"loss {float(loss):.3f}")
    with results.attempt("fp16: a step that overflows is skipped"):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        model(**inputs).loss.mul(float("inf")).backward()
        model.step()
        same = all(torch.equal(p, before[n]) for n, p in model.named_parameters())
        now = int(model.zgraph.skipped_steps)
        results.check("fp16: a step that overflows is skipped", same and now == skipped + 1, f"{now} skipped in all")


def kernel_lines(model: Any) -> list[str]:
    lines = []
    for part in model.zgraph.report().parts:
        fused, library = sum(k.calls for k in part.kernels), sum(k.calls for k in part.library)
        lines.append(f"- {part.name}: {len(part.kernels)} fused kernels in {fused} launches, {library} library calls")
        lines += [f"  - {k.calls} x `{k.name}`: {', '.join(k.operators)}" for k in part.kernels]
        lines += [f"  - {k.calls} x `{k.name}`" for k in part.library]
    return lines


# -- measurements -------------------------------------------------------------------------------------------------
def measure_steps(results: Results, size: Size, device: torch.device, skip: list[str]) -> None:
    """A step is forward and backward, in bfloat16, no update."""
    inputs = batch(size, device)

    def compiled(model: nn.Module) -> nn.Module:
        torch._dynamo.reset()
        return torch.compile(model)  # type: ignore[return-value]

    variants: dict[str, Callable[[nn.Module], nn.Module]] = {
        "plain PyTorch": lambda model: model,
        "torch.compile": compiled,
        "zgraph, eager": lambda model: zgraph.compile(model, zgraph.Plan(backend="eager")),
        "zgraph, inductor": lambda model: zgraph.compile(model, zgraph.Plan()),
        "zgraph, inductor, activations in the host's memory": lambda model: zgraph.compile(
            model, zgraph.Plan(offload={"activations": "cpu"})
        ),
    }
    for name, prepare in variants.items():
        if name in skip:
            continue
        with results.attempt(f"time of {name}"):
            model = prepare(llama(size, device, torch.bfloat16))
            start = time.perf_counter()
            step(model, inputs)
            synchronize(device)
            first = time.perf_counter() - start
            median, fastest, peak = measure(lambda model=model: step(model, inputs), device, size.repeat)
            results.times.append(
                (name, f"{first:.1f} s", f"{median:.2f} ms (fastest {fastest:.2f})", f"{peak:.2f} GiB")
            )
            del model
            free(device)


class Weights(nn.Module):
    """Nothing but parameters, to be updated."""

    def __init__(self, shapes: list[tuple[int, ...]], device: torch.device) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(s, device=device)) for s in shapes)

    def forward(self) -> torch.Tensor:
        raise NotImplementedError


def shapes_of(tensors: int, parameters: int) -> list[tuple[int, ...]]:
    """About so many parameters: equal matrices, or for many tensors layers of four matrices and eight vectors."""
    if tensors < 12:
        return [(parameters // tensors // 1024, 1024)] * tensors
    layers = tensors // 12
    h = max(8, round((parameters / layers / 12) ** 0.5 / 64) * 64)
    return [(3 * h, h), (h, h), (4 * h, h), (h, 4 * h), (3 * h,), (4 * h,), *[(h,)] * 6] * layers


def copy_time(elements: int, device: torch.device, repeat: int) -> float:
    """Milliseconds of a float32 copy."""
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    return measure(lambda: target.copy_(source), device, repeat)[0]


def measure_updates(results: Results, parameters: int, device: torch.device, repeat: int) -> None:
    """The update alone, in float32: 28 bytes a parameter are moved at least (AdamW reads p, g, m, v; writes p, m, v)."""
    copied = copy_time(parameters, device, repeat)
    bandwidth = parameters * 8 / copied * 1e3
    results.updates.append(("copy_", "", f"{copied:.3f} ms", f"{bandwidth / 1e12:.2f} TB/s"))
    for tensors in (3, 300):
        shapes = shapes_of(tensors, parameters)
        count = sum(torch.Size(s).numel() for s in shapes)
        for name in ("fused", "foreach", "zgraph"):
            with results.attempt(f"update of {tensors} tensors, {name}"):
                model: Any = Weights(shapes, device)
                grads = [torch.randn_like(p) for p in model.parameters()]
                if name == "zgraph":
                    run = zgraph.compile(model, zgraph.Plan(optimizer=zgraph.AdamW(lr=1e-3))).step
                else:
                    run = torch.optim.AdamW(model.parameters(), lr=1e-3, **{name: True}).step

                def step(model: Any = model, grads: Any = grads, run: Any = run) -> None:
                    for p, g in zip(model.parameters(), grads, strict=True):
                        p.grad = g
                    run()

                start = time.perf_counter()
                step()
                synchronize(device)
                first = time.perf_counter() - start
                median, _, _ = measure(step, device, repeat)
                share = count * 28 / (median / 1e3) / bandwidth
                results.updates.append(
                    (f"{len(shapes)} tensors, {name}", f"{first:.1f} s", f"{median:.3f} ms", f"{share:.0%} of copy_")
                )
                if name == "zgraph" and device.type == "cuda":
                    results.check(f"update of {tensors} tensors at 85% of copy_", share >= 0.85, f"{share:.0%}")
                del model, grads, run, step
                free(device)


# -- what does not fit ----------------------------------------------------------------------------------------------
def host_rates(device: torch.device) -> tuple[float, float]:
    """Bytes a second from the device to the host's pinned memory and back, in copies of 256 MiB."""
    here = torch.empty(2**28, dtype=torch.uint8, device=device)
    there = torch.empty(2**28, dtype=torch.uint8, pin_memory=device.type == "cuda")
    down, up = (
        measure(lambda a=a, b=b: a.copy_(b, non_blocking=True), device, 5)[0] for a, b in ((there, here), (here, there))
    )
    return 2**28 / down * 1e3, 2**28 / up * 1e3


def measure_hidden(results: Results, size: Size, device: torch.device) -> None:
    """Steps with activations in the host's memory, beside steps that keep them."""
    inputs, times = batch(size, device), {}
    for place in ("none", "cpu"):
        model = zgraph.compile(llama(size, device, torch.bfloat16), zgraph.Plan(offload={"activations": place}))
        times[place], _, peak = measure(lambda model=model: step(model, inputs), device, size.repeat)
        moved = model.zgraph.forecast().moved
        results.fit.append((f"activations: {place}", f"{times[place]:.2f} ms", f"{peak:.2f} GiB", str(moved)))
        del model
        free(device)
    ratio = times["cpu"] / times["none"]
    copies = max(moved.get(way, 0) / rate * 1e3 for way, rate in zip(("d2h", "h2d"), host_rates(device), strict=True))
    what = "activations go and come behind computing: at most 1.10 of keeping them, where copies take no longer"
    ok = ratio <= 1.10 or copies > times["none"] or device.type != "cuda"
    results.check(what, ok, f"{ratio:.2f}; copies alone {copies:.2f} ms")


def measure_host_updates(results: Results, parameters: int, device: torch.device, repeat: int) -> None:
    """An update of states in the host's memory, beside what its moves take over the link alone."""
    rates = host_rates(device)
    for on in ("host", "device"):
        with results.attempt(f"update of states in the host's memory, on the {on}"):
            away = {"optimizer": "cpu", "update_on": on}
            model: Any = Weights(shapes_of(300, parameters), device)
            zgraph.compile(model, zgraph.Plan(optimizer=zgraph.AdamW(lr=1e-3), offload=away))
            grads = [torch.randn_like(p) for p in model.parameters()]

            def step(model: Any = model, grads: Any = grads) -> None:
                for p, g in zip(model.parameters(), grads, strict=True):
                    p.grad = g
                model.step()

            median, _, peak = measure(step, device, repeat)
            count = sum(p.numel() for p in model.parameters())
            down, up = (8, 4) if on == "host" else (12, 8)  # bytes a parameter: of gradients and weights, or of states
            bound = max(count * down / rates[0], count * up / rates[1]) * 1e3
            results.fit.append(
                (
                    f"update on the {on}",
                    f"{median:.2f} ms",
                    f"{peak:.2f} GiB",
                    f"{median / bound:.2f} of the link's {bound:.2f} ms",
                )
            )
            del model, grads, step
            free(device)


def measure_large(results: Results, size: Size, device: torch.device, bound: int) -> None:
    """A model of ten times the bound on the allocator's bytes: plain PyTorch runs out of memory, zgraph trains within it."""
    inputs = batch(size, device)
    cuda = device.type == "cuda"
    free(device)
    if cuda:
        torch.cuda.set_per_process_memory_fraction(
            bound / torch.cuda.get_device_properties(device).total_memory, device
        )
    try:
        if cuda:
            with results.attempt("a model of ten times the memory, plain"):
                try:
                    model: Any = llama(size, device, torch.float32)
                    optimizer = torch.optim.AdamW(model.parameters())
                    step(model, inputs)
                    optimizer.step()
                    ran = True
                except torch.OutOfMemoryError:
                    ran = False
                model = optimizer = None
                free(device)
                results.check(
                    "a model of ten times the memory: plain PyTorch can't",
                    not ran,
                    "out of memory" if not ran else "it ran",
                )
        with torch.device("meta"):
            model = llama(size, torch.device("meta"), torch.float32)
        weights = sum(p.nbytes for p in model.parameters())
        away = dict.fromkeys(("activations", "optimizer", "parameters"), "cpu")
        model = zgraph.compile(
            model, zgraph.Plan(zero=3, optimizer=zgraph.AdamW(lr=1e-4), offload=away, memory_budget=bound)
        )
        losses: list[float] = []

        def train() -> None:
            losses.append(float(model.train_step(**inputs).loss))

        median, _, peak = measure(train, device, size.repeat)
        shown = f"{4 * weights / bound:.1f} times the bound, losses {losses[0]:.3f} to {losses[-1]:.3f}"
        results.fit.append((f"{weights / 4e6:.0f} M parameters", f"{median:.0f} ms", f"{peak:.2f} GiB", shown))
        fits = peak * 2**30 <= bound and losses[-1] < losses[0]
        results.check(
            "a model of ten times the memory trains",
            fits or not cuda,
            f"{peak:.2f} of {bound / 2**30:.2f} GiB; {shown}",
        )
    finally:
        if cuda:
            torch.cuda.set_per_process_memory_fraction(1.0, device)


# -- over a link ---------------------------------------------------------------------------------------------------
def measure_overlap(results: Results, setting: one_gpu.Setting, traces: Path) -> None:
    """What of the link's time is hidden, by the clock and by a profile, and whether the host waits."""

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.2f} ms"

    compute = one_gpu.compute_alone(setting)
    for stage in (2, 3):
        with results.attempt(f"ZeRO-{stage} over the emulated link"):
            file = traces / f"zero{stage}-{setting.device.type}.json"
            found = one_gpu.overlapped(setting, stage, compute, one_gpu.serialised(setting, stage), file)
            o = found.overlap
            results.overlap.append(
                (
                    f"ZeRO-{stage}",
                    *map(ms, (o.compute, o.unlimited, o.link, o.serialised, o.step)),
                    f"{o.over_bound:.2f}",
                    f"{o.hidden:.0%}",
                )
            )
            for name, exposed in (
                ("measured in a profile", found.profile),
                ("forecast", found.forecast),
                ("forecast, computing as measured", found.fitted),
            ):
                share = f"{exposed.exposed / exposed.busy:.0%}" if exposed.busy else "-"
                results.exposed.append((f"ZeRO-{stage}", name, ms(exposed.busy), ms(exposed.exposed), share))
            host = found.host
            if setting.device.type != "cuda":
                continue  # (there is nothing to wait for)
            results.check(f"ZeRO-{stage}: no step waits for the device", host.waits is None, host.waits or "none does")
            what = f"ZeRO-{stage}: a step is given to a device that sleeps for {host.asleep:.0f} s"
            results.check(what, host.seconds < host.asleep / 2, f"in {ms(host.seconds)}")


def check_races(results: Results, setting: one_gpu.Setting, steps: int) -> None:
    """Steps with everything held up at random against steps on one stream."""
    for stage in (2, 3):
        what = f"ZeRO-{stage}: {steps} steps with random delays on every stream"
        with results.attempt(what):
            found = one_gpu.shaken(one_gpu.small(setting), stage, steps)
            where = (
                f"{len(found.differ)} tensors differ: {', '.join(found.differ[:3])}" if found.differ else "bit for bit"
            )
            if not found.same_twice:
                where += "; but steps on one stream differ from each other too"
            results.check(what, found.same_twice and not found.differ, where)


# -- the report ---------------------------------------------------------------------------------------------------
def conditions(device: torch.device) -> str:
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "none"
    what = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU ({platform.machine()}): a dry run, not a figure"
    )
    return (
        f"{datetime.date.today()}; {what}; torch {torch.__version__}, CUDA {torch.version.cuda}, Triton {version}, "
        f"Python {platform.python_version()}, zgraph {zgraph.__version__}"
    )


def render(results: Results, device: torch.device, check: Size, timed: Size, setting: one_gpu.Setting) -> str:
    def table(above: str, head: tuple[str, ...], rows: list[Any]) -> list[str]:
        if not rows:
            return []
        return [above, "", *(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)), ""]

    link = f"{setting.rate / 1e9:g} GB/s, {setting.latency * 1e6:g} µs"
    return "\n".join(
        [
            "# On one GPU",
            "",
            f"`{' '.join(['python benchmarks/gpu.py', *sys.argv[1:]])}`. Conditions: {conditions(device)}.",
            "",
            *table(
                f"Checks: a Llama in float32 (TF32 off), {check}; over the emulated link, a GPT of two layers.",
                ("check", "", "difference from plain PyTorch, or what was found"),
                results.checks,
            ),
            *table(
                f"A step (forward and backward, bfloat16), {timed}; the median of {timed.repeat}, after 4 steps.",
                ("", "first step", "step", "peak memory"),
                results.times,
            ),
            *table(
                "An update by AdamW in float32, about 100 M parameters; the median of the same number.",
                ("", "first step", "update", "bandwidth"),
                results.updates,
            ),
            *table(
                "Attention forward and backward, causal, 2 rows of 16 heads of width 64 in bfloat16: whole, and of the tiles of a layout.",
                ("", "tiles", "time", "peak memory", "TFLOP/s of what is shown"),
                results.attention,
            ),
            *table(
                "What does not fit: whole steps and updates with the host's memory, over its link.",
                ("", "time", "peak memory of the device", ""),
                results.fit,
            ),
            *table(
                f"A whole step as one of two ranks over an emulated link of {link}: {setting.size}, {setting.precision}, "
                f"{setting.backend}; the median of {setting.repeat}. Hidden is the share of the link's time by which the step "
                "is not longer than over a link that takes none.",
                (
                    "",
                    "compute alone",
                    "link takes no time",
                    "link alone",
                    "prefetch off",
                    "step",
                    "of the longer of compute and link",
                    "hidden",
                ),
                results.overlap,
            ),
            *table(
                "What of the link's time is exposed. The forecasts are from what passes decide from "
                f"({one_gpu.hardware_of(setting).name}), and from that slowed down until forward and backward compute for as "
                "long as they were measured to.",
                ("", "", "link busy", "exposed", ""),
                results.exposed,
            ),
            *(["Kernels of the float32 check:", "", *results.kernels, ""] if results.kernels else []),
        ]
    )


@contextlib.contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run?")
    parser.add_argument(
        "--smoke", action="store_true", help="the part over the link on CPU: --device cpu --only link …"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--output", type=Path, help="the file to write (default: benchmarks/results/gpu.md, for cuda)")
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help='what not to time ("torch.compile")')
    parser.add_argument("--gpt", default="h200", choices=one_gpu.GPTS, help="the size of the model over the link")
    parser.add_argument("--rate", type=float, default=50.0, help="GB/s of the emulated link, each way")
    parser.add_argument(
        "--backend", default="inductor", choices=["inductor", "eager"], help="for what is over the link"
    )
    parser.add_argument("--calibrate", action="store_true", help="let passes decide from measured costs")
    parser.add_argument("--steps", type=int, default=200, help="with random delays")
    parser.add_argument(
        "--traces",
        type=Path,
        default=Path(os.environ.get("OUT") or Path(tempfile.gettempdir()) / "zgraph-traces"),
        help="the folder of the profiles (default: $OUT)",
    )
    args = parser.parse_args()
    if args.smoke:
        args.device, args.only, args.backend, args.quick = "cpu", ("link",), "eager", True
        args.steps = min(args.steps, 8)
    return args


def setting_of(args: argparse.Namespace, device: torch.device) -> one_gpu.Setting:
    if args.quick:
        rate, precision = (1e9, "bf16") if device.type == "cuda" else (5e7, "fp32")
        return one_gpu.Setting(one_gpu.GPTS["tiny"], rate, device, 1e-4, args.backend, precision, QUICK.repeat)
    return one_gpu.Setting(one_gpu.GPTS[args.gpt], args.rate * 1e9, device, backend=args.backend)


def main() -> int:
    args = parsed()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "this needs a CUDA device, and there is none; --smoke and --device cpu --quick are dry runs",
            file=sys.stderr,
        )
        return 2
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    check, timed = (QUICK, QUICK) if args.quick else (CHECK, FULL)
    setting = setting_of(args, device)
    results = Results()
    if "numbers" in args.only:
        with results.attempt("no process group"):
            check_numbers(results, check, device, "no process group")
        with results.attempt("a mesh of one rank"), one_rank(device):
            check_numbers(results, check, device, "a mesh of one rank")
    if "models" in args.only:
        check_models(results, device)
    if "steps" in args.only:
        with results.attempt("whole steps"):
            check_steps(results, check, device)
            check_half(results, check, device)
            check_offload(results, check, device)
    if "checkpoints" in args.only:
        with results.attempt("checkpoints"):
            check_checkpoints(results, check, device)
    if "updates" in args.only:
        with results.attempt("updates"):
            measure_updates(results, 10**8 if device.type == "cuda" and not args.quick else 10**6, device, timed.repeat)
    if "times" in args.only:
        with results.attempt("times"):
            measure_steps(results, timed, device, args.skip)
    if "attention" in args.only:
        gpu_attention.check_all(results, device, 130 if args.quick else 1000)
        gpu_attention.measure_all(results, device, (256,) if args.quick else (8192, 32768), timed.repeat)
    if "fit" in args.only:
        quick = args.quick or device.type != "cuda"
        with results.attempt("hidden activations"):
            measure_hidden(results, timed, device)
        with results.attempt("updates on the host"):
            measure_host_updates(results, 10**6 if quick else 10**8, device, timed.repeat)
        with results.attempt("a model of ten times the memory"):
            measure_large(results, QUICK if quick else LARGE, device, 2**24 if quick else BOUND_BYTES)
    if "link" in args.only:
        with results.attempt("over the emulated link"):
            if args.calibrate:
                setting = one_gpu.calibrated(setting)
            check_races(results, setting, args.steps)
            measure_overlap(results, setting, args.traces)
    text = render(results, device, check, timed, setting)
    print(text)
    output = args.output or (RESULTS / "gpu.md" if device.type == "cuda" else None)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
    for failure in results.failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
