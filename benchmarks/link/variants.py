"""The ways of training the model that are compared, each a function from the model to its training step.

`fsdp_async` is `fully_shard` with what makes it overlap on a CPU, where streams do nothing and its collectives block:
gathers are started asynchronously (`_set_unshard_async_op`), each block's before the one before it has run
(`set_modules_to_forward_prefetch`), and reduce-scatters are waited for before the optimizer. It is the baseline that
says something; `fully_shard` as it comes has no overlap here at all.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from link import gpt, models

LR = 1e-3
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")  # how the names of products' costs begin


class NotInstalled(Exception):
    """A variant needs a package that is not there."""


@dataclass
class Contender:
    """`step` trains once on this rank's batch and returns its loss. `model` is there if zgraph compiled it. `at_rate` is told
    the link's rate once it is set, before the steps of which the time counts."""

    step: Callable[[], Tensor]
    model: Any = None
    at_rate: Callable[[float], None] = lambda rate: None


Batch = tuple[Tensor, Tensor]


def _trained(
    model: nn.Module, batch: Batch, parameters: list[nn.Parameter], before_update: Callable[[], None] | None = None
) -> Contender:
    optimizer = torch.optim.SGD(parameters, lr=LR)

    def step() -> Tensor:
        loss = model(*batch)
        loss.backward()
        if before_update is not None:
            before_update()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Contender(step)


def local(model: gpt.GPT, batch: Batch, compiled: bool) -> Contender:
    """No communication: what there is to compute. The ranks drift apart."""
    if compiled:
        model.compile(dynamic=False)
    return _trained(model, batch, list(model.parameters()))


def ddp(model: gpt.GPT, batch: Batch, compiled: bool) -> Contender:
    """Compiled as a whole, which dynamo cuts where buckets end."""
    wrapped: nn.Module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if compiled:
        wrapped.compile(dynamic=False)
    return _trained(wrapped, batch, list(model.parameters()))


def ddp_hook(name: str) -> Callable[[gpt.GPT, Batch, bool], Contender]:
    """DDP with one of torch's communication hooks: "fp16", "powersgd" (of rank 1, from the third step on), or "noop", which sends nothing."""

    def build(model: gpt.GPT, batch: Batch, compiled: bool) -> Contender:
        from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook

        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if name == "powersgd":
            os.environ["ZLINK_CALLBACKS_APART"] = "1"
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            hook = default_hooks.fp16_compress_hook if name == "fp16" else debugging_hooks.noop_hook
            wrapped.register_comm_hook(None, hook)
        return _trained(wrapped, batch, list(model.parameters()))

    return build


def _sharded(model: gpt.GPT, compiled: bool) -> None:
    if compiled:
        for block in model.blocks:
            block.compile(dynamic=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def fsdp(model: gpt.GPT, batch: Batch, compiled: bool) -> Contender:
    """fully_shard by block, as its documentation shows it."""
    _sharded(model, compiled)
    return _trained(model, batch, list(model.parameters()))


class _Reductions:
    """fully_shard's reduce-scatter (its interface): started here, waited for by `wait`."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, Tensor]] = []  # (an input stays as long as it may be read)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=True)
        self.started.append((work, input_tensor))

    def wait(self) -> None:
        for work, _ in self.started:
            work.wait()
        self.started.clear()


def fsdp_async(model: gpt.GPT, batch: Batch, compiled: bool) -> Contender:
    _sharded(model, compiled)
    sharded: Any = model
    blocks: list[Any] = list(model.blocks)
    reductions = _Reductions()
    sharded._set_unshard_async_op(True)
    sharded.set_modules_to_forward_prefetch([blocks[0]])
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
    for module in (sharded, *blocks):
        module.set_custom_reduce_scatter(reductions)
    return _trained(model, batch, list(model.parameters()), reductions.wait)


def deepspeed_zero3(model: gpt.GPT, batch: Batch, compiled: bool) -> Contender:
    """As ZeRO-3 for a model this small: its defaults would put all gradients in one bucket, and keep all weights whole."""
    try:
        import deepspeed  # type: ignore[import-not-found]
    except ImportError as error:
        raise NotInstalled("deepspeed") from error
    block = sum(p.numel() for p in model.blocks[0].parameters())
    config = {
        "train_micro_batch_size_per_gpu": len(batch[0]),
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": block,
            "stage3_prefetch_bucket_size": block,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 2 * block,
        },
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step() -> Tensor:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Contender(step)


def zgraph_zero(
    stage: int, link_error: float = 1.0, product_error: float = 1.0, **wire: str
) -> Callable[[gpt.GPT, Batch, bool], Contender]:
    """Calibrated; `wire` is what is sent in few bits. With errors the link, or matrix products, are taken to be so many times as fast
    as they are."""

    def build(model: gpt.GPT, batch: Batch, compiled: bool) -> Contender:
        import zgraph

        plan = zgraph.Plan(zero=stage, optimizer=zgraph.SGD(lr=LR), wire=wire)
        machine = zgraph.calibrate(model, plan, batch)
        trained = zgraph.compile(model, plan)
        costs = _Calibrated(trained, plan, machine, link_error, product_error)
        return Contender(lambda: trained.train_step(*batch), trained, costs)

    return build


def zgraph_auto(model: gpt.GPT, batch: Batch, compiled: bool) -> Contender:
    """ZeRO-3 that chooses the formats of what it sends, for each rate."""
    import zgraph

    plan = zgraph.Plan(zero=3, optimizer=zgraph.SGD(lr=LR), wire={"auto": True, "max_error": 0.02})
    trained = zgraph.compile(model, plan)
    return Contender(lambda: trained.train_step(*batch), trained, _AtRates(trained, lambda rate: plan))


def zgraph_itself(hardware: str | None, adapt: str = "off") -> Callable[[gpt.GPT, Batch, bool], Contender]:
    """ZeRO-3 of who calls `compile` and nothing else, at each rate, with `adapt` once what becomes of the schedule is known; or by the costs
    of data sheets, which know of no rate."""

    def build(model: gpt.GPT, batch: Batch, compiled: bool) -> Contender:
        import zgraph

        plan = zgraph.Plan(zero=3, optimizer=zgraph.SGD(lr=LR), hardware=hardware, adapt=adapt)
        trained = zgraph.compile(model, plan)

        def step() -> Tensor:
            return trained.train_step(*batch)

        if hardware is not None:
            return Contender(step, trained)
        at_rate = _AtRates(trained, lambda rate: plan) if adapt == "off" else _Adapted(trained, lambda rate: plan, step)
        return Contender(step, trained, at_rate)

    return build


class _AtRates:
    """Compiles a model for a link of each rate, by a plan that is made when the link first has it. The weights stay."""

    def __init__(self, model: Any, plan_at: Callable[[float], Any]) -> None:
        self.model = model
        self.plan_at = plan_at
        self.plans: dict[float, Any] = {}
        self.now: float | None = None

    def __call__(self, rate: float) -> None:
        if rate == self.now:
            return
        if rate not in self.plans:
            self.plans[rate] = self.plan_at(rate)
        self.model.zgraph.recompile(self.plans[rate])
        self.now = rate


class _Adapted(_AtRates):
    """Trains at each rate until ranks have agreed on what becomes of the schedule."""

    def __init__(self, model: Any, plan_at: Callable[[float], Any], step: Callable[[], Any]) -> None:
        super().__init__(model, plan_at)
        self.step = step

    def __call__(self, rate: float) -> None:
        super().__call__(rate)
        while not (told := self.model.zgraph.runtime.told()):
            self.step()
        print(f"{rate} Gbit/s: {told}", flush=True)


class _Calibrated(_AtRates):
    """By what `zgraph.calibrate` has found: its operators at the start, the link as it is now; each wrong by a factor."""

    def __init__(
        self, model: Any, plan: Any, machine: Any, link_error: float = 1.0, product_error: float = 1.0
    ) -> None:
        super().__init__(model, self._plan)
        self.plan = plan
        self.link_error = link_error
        operators = {
            what: seconds / (product_error if what.startswith(PRODUCTS) else 1.0)
            for what, seconds in machine.operators.items()
        }
        self.machine = machine.model_copy(update={"operators": operators})
        folder = [tempfile.mkdtemp(prefix="zgraph-overlap-") if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)  # (a plan names a file, and plans must be equal)
        self.folder = Path(folder[0])
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)

    def _plan(self, rate: float) -> Any:
        from zgraph.machine.link_benchmark import measure_link

        runtime = self.model.zgraph.runtime
        link = measure_link(runtime.groups["dp"], runtime.sizes["dp"], runtime.device, runtime.agreement)
        own = self.machine.links["dp"]  # (what transfers take from computing was measured in training steps)
        of_link = {"bandwidth": link.bandwidth * self.link_error, "latency": link.latency / self.link_error}
        link = link.model_copy(update=of_link | {"work": own.work, "start": own.start})
        file = self.folder / f"{rate}.json"
        if dist.get_rank() == 0:
            file.write_text(self.machine.model_copy(update={"links": {"dp": link}}).model_dump_json())
        dist.barrier()
        return self.plan.model_copy(update={"hardware": str(file)})


BUILDERS: dict[str, tuple[Callable[[gpt.GPT, Batch, bool], Contender], bool]] = {
    "local-eager": (local, False),
    "local-compiled": (local, True),
    "ddp-eager": (ddp, False),
    "ddp-compiled": (ddp, True),
    "ddp_fp16-eager": (ddp_hook("fp16"), False),
    "ddp_powersgd-eager": (ddp_hook("powersgd"), False),
    "ddp_noop-eager": (ddp_hook("noop"), False),
    "fully_shard-eager": (fsdp, False),
    "fully_shard-compiled": (fsdp, True),
    "fsdp_async-eager": (fsdp_async, False),
    "fsdp_async-compiled": (fsdp_async, True),
    "deepspeed-zero3": (deepspeed_zero3, False),
    "zgraph-zero2": (zgraph_zero(2), True),
    "zgraph-zero3": (zgraph_zero(3), True),
    "zgraph-link4": (zgraph_zero(3, link_error=4.0), True),
    "zgraph-link0.25": (zgraph_zero(3, link_error=0.25), True),
    "zgraph-products4": (zgraph_zero(3, product_error=4.0), True),
    "zgraph-products0.25": (zgraph_zero(3, product_error=0.25), True),
    "zgraph-itself": (zgraph_itself(None), True),
    "zgraph-adapted": (zgraph_itself(None, "once"), True),
    "zgraph-sheet": (zgraph_itself("default"), True),
    "zgraph-bf16": (zgraph_zero(3, gather="bf16", reduce="bf16"), True),
    "zgraph-int8": (zgraph_zero(3, gather="int8", reduce="int8"), True),
    "zgraph-int4": (zgraph_zero(3, gather="int4", reduce="int4"), True),
    "zgraph-auto": (zgraph_auto, True),
}


def build(name: str, model: str, size: gpt.Size, rank: int) -> Contender:
    """Raises `NotInstalled` where a package is missing."""
    builder, compiled = BUILDERS[name]
    return builder(models.make(model, size), gpt.data(size, rank), compiled)


def reference_losses(name: str, size: gpt.Size, rank: int, world: int, steps: int) -> list[float]:
    """That rank's losses in data-parallel training, by one process that computes all ranks' batches one after another."""
    model = models.make(name, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    batches = [gpt.data(size, r) for r in range(world)]
    losses = []
    for _ in range(steps):
        for r, batch in enumerate(batches):
            loss = model(*batch)
            (loss / world).backward()
            if r == rank:
                losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses
