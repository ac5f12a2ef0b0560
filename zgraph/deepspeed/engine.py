"""`DeepSpeedEngine`: a compiled model behind DeepSpeed's interface.

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json", training_data=data)
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

The engine counts micro-batches and moves the schedule; all else is the compiled model's (`engine.module.zgraph`): sharding, reduction, clipping,
loss scale, update. [Note: accumulation] A backward that is not the last of a step runs in `no_sync`, and its loss is divided by their number. In a
`loss.backward()` of the script's own what comes in at the engine's outputs is divided (`_divided`), as DeepSpeed does it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zgraph.api.handle import Handle
from zgraph.capture.capture import find_loss
from zgraph.deepspeed import comm
from zgraph.deepspeed.checkpoints import Checkpoints
from zgraph.deepspeed.dataloader import DeepSpeedDataLoader, RepeatingLoader, Share
from zgraph.deepspeed.engine_settings import Settings
from zgraph.deepspeed.monitor import Monitor
from zgraph.deepspeed.step_log import StepLog
from zgraph.deepspeed.unsupported import EngineMisuse, Refused
from zgraph.deepspeed.utils.timer import ThroughputTimer
from zgraph.errors import ModelError, StepError


@dataclass
class Batch:
    """The sizes of a step: `rows` of a micro-batch, `parts` (micro-batches) of a step, data-parallel `ranks`."""

    rows: int
    parts: int
    ranks: int

    @property
    def total(self) -> int:
        """Rows of a step over all ranks."""
        return self.rows * self.parts * self.ranks


@dataclass
class Training:
    """What an engine trains with. `clips`: the largest norm of the gradients, for an optimizer that the plan does not run."""

    optimizer: Any = None  # an `EngineOptimizer`, or the script's own
    planned: bool = True  # the plan's update program is what updates
    scheduler: Any = None
    clips: float = 0.0
    skips: bool = False  # (bf16 with an optimizer of the script's own) an update that is not finite
    client: Any = None  # the script's own optimizer object
    collate_fn: Callable[..., Any] | None = None
    loader: DeepSpeedDataLoader | None = None
    report: Any = None


@dataclass
class Counters:
    """What an engine counts: micro-batches, steps (skipped ones too), rows, skipped steps."""

    micro_steps: int = 0
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    skipped_before: int = 0  # the run time's count
    backwards: int = 0  # since the last step


class OwnBackwards:
    """The `engine.backward` calls that run now, of all engines: they have divided their loss by the micro-batches."""

    count = 0


class DeepSpeedEngine(Checkpoints, Settings, Refused, nn.Module):  # type: ignore[misc]
    """See the module. `module` is the script's own model, compiled in place; `config` the configuration as it was given.

    Attributes that the engine has not are the model's.
    """

    def __init__(self, model: nn.Module, config: dict[str, Any], batch: Batch, training: Training) -> None:
        super().__init__()
        self.module = model
        self.config = config
        self._batch = batch
        self._training = training
        self._counters = Counters()
        self._log = StepLog(config)
        if self.handle.uncut is None:
            self._log.communication.watch(self.handle.runtime.clock)
        self._boundary: bool | None = None  # as set by set_gradient_accumulation_boundary
        self._outer = False  # inside of the script's no_sync()
        self._held = contextlib.ExitStack()  # the run time's no_sync(), while backward passes only accumulate
        self._holds = False
        self._applied = False
        self._norm: torch.Tensor | float | None = None
        self._iterator: Iterator[Any] | None = None
        self._losses: list[torch.Tensor] = []  # of the step that is under way, for monitors

    # -- what it stands on --------------------------------------------------------------------------------------------
    @property
    def handle(self) -> Handle:
        """What is known of the compiled model: `engine.module.zgraph`."""
        found = self.module.__dict__.get("zgraph")
        if not isinstance(found, Handle):
            raise StepError("the engine's model is no longer compiled", hint="call initialize again")
        return found

    @property
    def report(self) -> Any:
        """What became of each key of the configuration."""
        return self._training.report

    @property
    def optimizer(self) -> Any:
        return self._training.optimizer

    @property
    def basic_optimizer(self) -> Any:
        """The script's own optimizer object, else the engine's."""
        return self._training.client if self._training.client is not None else self._training.optimizer

    @property
    def lr_scheduler(self) -> Any:
        return self._training.scheduler

    @property
    def client_lr_scheduler(self) -> Any:
        return self._training.scheduler

    @property
    def training_dataloader(self) -> DeepSpeedDataLoader | None:
        return self._training.loader

    @property
    def monitor(self) -> Monitor:
        """What writes to TensorBoard and others: `engine.monitor.write_events([(name, value, position)])`."""
        return self._log.monitor

    @property
    def tput_timer(self) -> ThroughputTimer:
        """Rows a second: `engine.tput_timer.avg_samples_per_sec()`."""
        return self._log.throughput

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def global_rank(self) -> int:
        return comm.get_rank()

    @property
    def local_rank(self) -> int:
        return comm.get_local_rank()

    @property
    def world_size(self) -> int:
        return comm.get_world_size()

    @property
    def dp_world_size(self) -> int:
        """The ranks that see different rows."""
        return self._batch.ranks

    @property
    def mp_world_size(self) -> int:
        return self.world_size // self._batch.ranks

    # -- counters -----------------------------------------------------------------------------------------------------
    @property
    def micro_steps(self) -> int:
        return self._counters.micro_steps

    @property
    def global_steps(self) -> int:
        """Updates so far, those that were skipped included."""
        return self._counters.global_steps

    @property
    def global_samples(self) -> int:
        return self._counters.global_samples

    @property
    def skipped_steps(self) -> int:
        return self._counters.skipped_steps

    def was_step_applied(self) -> bool:
        """Whether the last `step()` has changed the weights."""
        return self._applied

    # -- sizes --------------------------------------------------------------------------------------------------------
    def train_batch_size(self) -> int:
        """Rows of a step over all ranks."""
        return self._batch.total

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch.rows

    def gradient_accumulation_steps(self) -> int:
        return self._batch.parts

    def get_batch_info(self) -> tuple[int, int, int]:
        """(rows of a step over all ranks, rows of a micro-batch, micro-batches of a step)."""
        return self._batch.total, self._batch.rows, self._batch.parts

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another number of micro-batches, for this many rows in all. Raises `ValueError` where they can't be divided so."""
        each = self._batch.rows * self._batch.ranks
        if train_batch_size < 1 or train_batch_size % each:
            raise ValueError(f"a step of {train_batch_size} rows can't be divided into micro-batches of {each} rows")
        self._batch.parts = train_batch_size // each

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Another number of rows in a micro-batch."""
        self._batch.rows = micro_batch_size

    # -- a micro-batch --------------------------------------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output."""
        if torch.is_grad_enabled():
            self.tput_timer.start()
        with self._log.timed("forward"):
            output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            self._accumulate(self._outer or not self._ends())
            for tensor in _tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._divided)
        return output

    def _divided(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of an output in a backward that the script itself started: a micro-batch's share of it."""
        share = self._share()
        return grad if OwnBackwards.count or share == 1 else grad * share

    def _share(self, scale_wrt_gas: bool = True) -> float:
        """What the gradients of a micro-batch are multiplied by: programs average over ranks, and a configuration may ask for the sum."""
        summed = self._batch.ranks if self.gradient_allreduce_op() == "sum" else 1  # type: ignore[attr-defined]
        return summed / self._batch.parts if scale_wrt_gas else summed

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, for a `backward()` of the script's own. (The loss scale is in the compiled backward.) Raises `EngineMisuse` for a loss that is
        no single number."""
        _refuse_no_number(loss)
        return loss

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """The backward of this micro-batch's loss, divided by the number of micro-batches unless `scale_wrt_gas` is False. Returns the loss
        so divided.

        Raises `StepError` for a loss that is no single number or depends on no parameter, `EngineMisuse` without an optimizer.
        """
        self._refuse_without_optimizer("backward")
        _refuse_no_number(loss)
        if not loss.requires_grad:
            raise StepError(
                "the loss depends on no parameter that trains",
                hint="call the engine outside of torch.no_grad(), and don't detach the loss",
            )
        self._accumulate(self._outer or not self._ends())
        share = self._share(scale_wrt_gas)
        OwnBackwards.count += 1
        try:
            with self._log.timed("backward"):
                (loss * share if share != 1 else loss).backward(retain_graph=retain_graph)
        finally:
            OwnBackwards.count -= 1
        self._counters.backwards += 1
        if self.monitor.enabled:
            self._losses.append(loss.detach())
        return loss / self._batch.parts if scale_wrt_gas and self._batch.parts > 1 else loss

    def _accumulate(self, on: bool) -> None:
        """Let backward passes from now on only accumulate, or reduce."""
        if on and not self._holds:
            self._held.enter_context(self.handle.no_sync())
        elif not on and self._holds:
            self._held.close()
        self._holds = on

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate. (Stages 2 and 3 keep shards of gradients alone, and reduce each time.) `step()` is refused
        inside."""
        if self._outer:
            raise EngineMisuse(
                "no_sync context manager reentry is unsupported", hint="leave it before entering it again"
            )
        self._outer = True
        try:
            yield
        finally:
            self._outer = False

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Backward passes inside are reduced together. Raises `EngineMisuse` inside of `no_sync`, and where `step()` alone ends a step."""
        self._refuse_unmanaged("coalesce_grad_reduction")
        if self._outer:
            raise EngineMisuse(
                "coalesce_grad_reduction cannot be nested inside another no_sync context", hint="leave that one first"
            )
        with self.no_sync():
            yield

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro-batch is the last of a step."""
        return self._ends()

    def _ends(self) -> bool:
        if self._boundary is not None:
            return self._boundary
        if not self.managed_gradient_accumulation():  # type: ignore[attr-defined]
            return False  # (step() itself is the end)
        return (self._counters.micro_steps + 1) % self._batch.parts == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next micro-batch is the last of a step, from now on: before its forward. Raises `EngineMisuse` where `step()` alone ends
        a step."""
        self._refuse_unmanaged("set_gradient_accumulation_boundary")
        self._boundary = is_boundary

    def _refuse_unmanaged(self, what: str) -> None:
        if not self.managed_gradient_accumulation():  # type: ignore[attr-defined]
            raise EngineMisuse(
                f"{what}() is not supported with managed_gradient_accumulation=False",
                hint="call step() where a step ends",
            )

    # -- a step -------------------------------------------------------------------------------------------------------
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch: update the weights if it was the last of a step, and move the schedule unless the update was skipped.

        All ranks must call it. Raises `StepError` where no backward ran, `EngineMisuse` inside of `no_sync` and without an optimizer.
        """
        if self._outer:
            raise EngineMisuse(
                "It is illegal to call Engine.step() inside no_sync context manager",
                hint="leave it first: the gradients are not reduced yet",
            )
        self._refuse_without_optimizer("step")
        self._applied = False
        if self._ends() or not self.managed_gradient_accumulation():  # type: ignore[attr-defined]
            self._accumulate(False)
            with self._log.timed("step"):
                self._update(lr_kwargs)
            self._tell()
        self._counters.micro_steps += 1

    def _tell(self) -> None:
        """Log what the configuration asks for of the step that has just ended."""
        losses, self._losses = self._losses, []
        self._log.stepped(self, float(torch.stack(losses).float().mean()) if losses else None)

    def _update(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        training = self._training
        applied = self._planned_update() if training.planned else self._own_update()
        if training.client is not None:
            training.client._opt_called = True  # (torch's schedulers warn where they run ahead)
        self._stepped(applied, lr_kwargs)

    def _stepped(self, applied: bool, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count an update, and move the schedule if it was not skipped."""
        counters = self._counters
        self._applied = applied
        if not applied:
            counters.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        counters.global_steps += 1
        managed = self.managed_gradient_accumulation()  # type: ignore[attr-defined]
        parts = self._batch.parts if managed else counters.backwards
        counters.global_samples += self._batch.rows * self._batch.ranks * parts
        counters.backwards = 0

    def _planned_update(self) -> bool:
        """One update of the plan's optimizer; whether it was not skipped."""
        self._norm = self._training.optimizer.step()
        return self._settle()

    def _settle(self) -> bool:
        """Whether the last update was not skipped. Raises `OverflowError` where the loss scale can't get smaller."""
        handle, counters = self.handle, self._counters
        if handle.skipped_steps is None:
            return True
        handle.runtime.updater.settle()
        skipped = handle.runtime.updater.outcomes.skipped()
        applied = skipped == counters.skipped_before
        counters.skipped_before = skipped
        self._training.optimizer.overflow = not applied
        if not applied:
            self._norm = float("inf")
        return applied

    def _own_update(self) -> bool:
        """One update by an optimizer of the script's own, that no plan has; whether it was not skipped."""
        training = self._training
        params = [p for p in self.module.parameters() if p.grad is not None]
        if not params:
            raise StepError("step() was called before backward(): no parameter has a gradient")
        self.handle.runtime.reduce_leftovers()
        norm = nn.utils.clip_grad_norm_(params, training.clips or float("inf"))
        self._norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        applied = not training.skips or bool(torch.isfinite(self._norm))
        if applied:
            training.optimizer.step()
        self.handle.zero_grad()
        return applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw the gradients away."""
        self.handle.zero_grad(set_to_none)

    def _refuse_without_optimizer(self, what: str) -> None:
        if self._training.optimizer is None:
            raise EngineMisuse(
                f"{what}() of an engine without an optimizer",
                hint='give initialize one, or the configuration: "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}',
            )

    # -- whole steps ----------------------------------------------------------------------------------------------------
    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One step: as many micro-batches as it has, from the iterator or `training_data`. Returns the mean loss over micro-batches and ranks.

        A micro-batch is what the model is called with (a tuple or list its arguments, a dict its named ones), and its output has the loss.
        """
        self.train()
        losses = []
        for batch in self._take(data_iter):
            loss = _loss_in(self._called(batch))
            self.backward(loss)
            self.step()
            losses.append(loss.detach())
        return self._mean(losses)

    def eval_batch(self, data_iter: Iterator[Any], num_micro_batches: int | None = None) -> torch.Tensor:
        """The mean loss over micro-batches and ranks, without gradients and in eval mode."""
        self.eval()
        with torch.no_grad():
            losses = [_loss_in(self._called(b)) for b in self._take(data_iter, num_micro_batches)]
        return self._mean(losses)

    def _called(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self(**batch)
        return self(*batch) if isinstance(batch, (tuple, list)) else self(batch)

    def _take(self, data_iter: Iterator[Any] | None, parts: int | None = None) -> list[Any]:
        """The micro-batches of one step."""
        if data_iter is None:
            if self._training.loader is None:
                raise StepError("train_batch() without data", hint="give it an iterator, or initialize training_data")
            if self._iterator is None:
                self._iterator = RepeatingLoader(self._training.loader)
            data_iter = self._iterator
        elif not hasattr(data_iter, "__next__"):
            data_iter = iter(data_iter)
        return [next(data_iter) for _ in range(parts or self._batch.parts)]

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        mean = torch.stack([loss.float().reshape(()) for loss in losses]).mean()
        if dist.is_initialized() and self.world_size > 1:
            dist.all_reduce(mean)
            mean /= self.world_size
        return mean

    # -- numbers ----------------------------------------------------------------------------------------------------------
    def get_global_grad_norm(self) -> float | None:
        """The 2-norm of all gradients of the last update, before clipping; infinite where it was skipped, None before the first."""
        return None if self._norm is None else float(self._norm)

    def get_lr(self) -> list[float]:
        """The learning rates of the groups, as the next update uses them."""
        return self._of_groups("lr")

    def set_lr(self, lr: float) -> None:
        """Another learning rate for all groups. (A schedule sets its own after the next update.)"""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """The groups' momenta: SGD's, or Adam's betas."""
        return [g["betas"] if "betas" in g else g.get("momentum", 0.0) for g in self._groups()]

    def _of_groups(self, name: str) -> list[Any]:
        return [group.get(name, 0.0) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    # -- others -----------------------------------------------------------------------------------------------------------
    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        **others: Any,
    ) -> DeepSpeedDataLoader:
        """A loader of this rank's micro-batches of a data set. Rows of routes other than "train" are not shuffled."""
        share = Share(self.data_rank(), self._batch.ranks)
        if data_sampler is None and route != "train":
            data_sampler = torch.utils.data.DistributedSampler(
                dataset, num_replicas=share.ranks, rank=share.rank, shuffle=False
            )
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self._batch.rows,
            share,
            sampler=data_sampler,
            collate_fn=collate_fn or self._training.collate_fn,
            drop_last=self.dataloader_drop_last(),  # type: ignore[attr-defined]
        )

    def data_rank(self) -> int:
        """This rank's place among those that see different rows."""
        mesh = self.handle.mesh
        if mesh is None:
            return 0
        place = 0
        for dim in ("replicate", "dp"):
            if dim in (mesh.mesh_dim_names or ()):
                place = place * mesh[dim].size() + mesh.get_local_rank(dim)
        return place

    get_data_parallel_rank = data_rank

    def compile(self, backend: str = "inductor", **options: Any) -> None:
        """Run by another of zgraph's backends, "inductor" or "eager". (Every step is compiled, also without this call.)"""
        handle = self.handle
        if backend != handle.plan.backend:
            handle.recompile(handle.plan.model_copy(update={"backend": backend}))

    @property
    def is_compiled(self) -> bool:
        return True

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Nothing to do: the backward of a step's last micro-batch reduces."""

    def _backward_epilogue(self) -> None:
        """Nothing to do: what a script calls after a `loss.backward()` of several engines."""

    def empty_partition_cache(self) -> None:
        """Let whole weights go that are kept for the next forward. All ranks must call it."""
        if self.handle.uncut is None:
            self.handle.runtime.unsharded.drop()

    def destroy(self) -> None:
        """Let what is under way end. The model stays compiled, and can be used and initialized again."""
        self._accumulate(False)
        if self.handle.uncut is None:
            self.handle.finish()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of a model's output."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors_in(list(output.values()))
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from _tensors_in(part)
    elif is_dataclass(output):
        yield from _tensors_in([getattr(output, part.name) for part in fields(output)])


def _refuse_no_number(loss: Any) -> None:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return
    what = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise EngineMisuse(f"the loss is no scalar tensor but {what}", hint="take its mean; or tensor.backward(gradient)")


def _loss_in(output: Any) -> torch.Tensor:
    """The loss in a model's output. Raises `ModelError` where there is none."""
    loss = find_loss(output)
    if loss is None:
        raise ModelError(
            "the model's output has no loss",
            hint="let forward return it; or call the engine, and engine.backward with the loss of its output",
        )
    return loss
