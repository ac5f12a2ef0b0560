"""`DeepSpeedEngine`: a compiled model behind DeepSpeed's interface.

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json", training_data=data)
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

The engine counts micro-batches and steps the schedule; the compiled model (`engine.module.zgraph`) does the rest: sharding, reduction, clipping,
loss scale, update. [Note: accumulation] A backward that is not the last of a step runs in `no_sync`, and each loss is divided by the number of
micro-batches. If the script calls `loss.backward()` itself, the gradients of the engine's outputs are divided instead (`_divided`), as in DeepSpeed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zgraph.api.handle import Handle
from zgraph.capture.capture import find_loss
from zgraph.deepspeed.checkpoints import Checkpoints
from zgraph.deepspeed.compile_options import fields_of
from zgraph.deepspeed.dataloader import DeepSpeedDataLoader, Reading, RepeatingLoader, Share
from zgraph.deepspeed.engine_attributes import Attributes
from zgraph.deepspeed.engine_settings import Settings
from zgraph.deepspeed.lr_schedulers import is_scheduler, refuse_another_optimizers, step_of
from zgraph.deepspeed.monitor import Monitor
from zgraph.deepspeed.step_log import StepLog
from zgraph.deepspeed.unsupported import EngineMisuse, Unsupported
from zgraph.deepspeed.utils.logging import logger, no_effect
from zgraph.deepspeed.utils.timer import ThroughputTimer
from zgraph.errors import ModelError, StepError, divided_penalty


@dataclass
class Batch:
    """The sizes of a step."""

    rows: int  # rows of a micro-batch on one rank
    parts: int  # micro-batches of a step
    ranks: int  # data-parallel ranks

    @property
    def total(self) -> int:
        """Rows of a step over all ranks."""
        return self.rows * self.parts * self.ranks


@dataclass
class Training:
    """The objects that an engine trains with."""

    optimizer: Any = None  # an `EngineOptimizer`, or the script's own
    planned: bool = True  # the plan's update program updates the weights
    zeros: bool = False  # the optimizer has begun with an update of zero gradients
    scheduler: Any = None  # the scheduler that the engine steps
    client_scheduler: Any = None  # the scheduler that the script gave: an object, or a function of the optimizer
    clips: float = 0.0  # the largest norm of the gradients (0: any), for an optimizer that the plan does not run
    skips: bool = False  # skip an update whose gradients are not finite (bf16 with the script's own optimizer)
    stepping: bool = False  # the engine steps the script's own optimizer now
    client: Any = None  # the script's own optimizer object
    collate_fn: Callable[..., Any] | None = None  # makes a micro-batch of examples
    loader: DeepSpeedDataLoader | None = None  # the loader of `training_data`
    report: Any = None  # what became of each key of the configuration
    data: Any = None  # the script's `training_data`
    mpu: Any = None  # the script's object for groups of ranks


@dataclass
class Counters:
    """The counters of an engine."""

    micro_steps: int = 0  # micro-batches
    global_steps: int = 0  # updates, skipped ones included
    global_samples: int = 0  # rows over all data-parallel ranks
    skipped_steps: int = 0  # updates that were skipped
    skipped_before: int = 0  # the runtime's count of skipped updates before the last one
    backwards: int = 0  # calls of `backward` since the last step


class OwnBackwards:
    """The number of `engine.backward` calls that run now, over all engines: these have divided their loss already."""

    count = 0


class DeepSpeedEngine(Checkpoints, Settings, Unsupported, Attributes):  # type: ignore[misc]
    """A compiled model with DeepSpeed's interface; see the module's docstring.

    `module` is the script's own model, compiled in place; `config` is the configuration as it was given. Attributes
    that the engine does not have are the model's.
    """

    def __init__(self, model: nn.Module, config: dict[str, Any], batch: Batch, training: Training) -> None:
        super().__init__()
        self.module = model
        self.config = config
        self._batch = batch
        self._training = training
        self._counters = Counters()
        self._log = StepLog(config)
        if self.handle.deferred is None:
            self._log.communication.watch(self.handle.runtime.clock)
        self._boundary: bool | None = None  # as set by set_gradient_accumulation_boundary
        self._outer = False  # inside of the script's no_sync()
        self._held = contextlib.ExitStack()  # the runtime's no_sync(), while backward passes only accumulate
        self._holds = False
        self._applied = False
        self._norm: torch.Tensor | float | None = None
        self._iterator: Iterator[Any] | None = None
        self._losses: list[torch.Tensor] = []  # the losses of the current step, for monitors

    # -- what it stands on --------------------------------------------------------------------------------------------
    @property
    def handle(self) -> Handle:
        """The handle of the compiled model: `engine.module.zgraph`."""
        handle = self.module.__dict__.get("zgraph")
        if not isinstance(handle, Handle):
            raise StepError("the engine's model is no longer compiled", hint="call initialize again")
        return handle

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
    def client_optimizer(self) -> Any:
        """What the script gave `initialize` as `optimizer`, or what its function made; None if the optimizer is the
        configuration's."""
        return self._training.client

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler that `step` steps; a script may set another one of the engine's optimizer, or None."""
        return self._training.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        refuse_another_optimizers(scheduler, (self.optimizer, self.client_optimizer))
        if scheduler is not None and not is_scheduler(scheduler):
            scheduler = scheduler(self.client_optimizer or self.optimizer)
        self._training.scheduler = scheduler

    @property
    def client_lr_scheduler(self) -> Any:
        """What the script gave `initialize` as `lr_scheduler`; None if the scheduler is the configuration's."""
        return self._training.client_scheduler

    @property
    def training_dataloader(self) -> DeepSpeedDataLoader | None:
        return self._training.loader

    @property
    def monitor(self) -> Monitor:
        """The writer to TensorBoard and others: `engine.monitor.write_events([(name, value, position)])`."""
        return self._log.monitor

    @property
    def tput_timer(self) -> ThroughputTimer:
        """The clock of rows per second: `engine.tput_timer.avg_samples_per_sec()`."""
        return self._log.throughput

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    # -- counters (which a script may set, to go on from numbers of its own) ---------------------------------------------
    @property
    def micro_steps(self) -> int:
        return self._counters.micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self._counters.micro_steps = value

    @property
    def global_steps(self) -> int:
        """Updates so far, skipped ones included."""
        return self._counters.global_steps

    @global_steps.setter
    def global_steps(self, value: int) -> None:
        self._counters.global_steps = value

    @property
    def global_samples(self) -> int:
        return self._counters.global_samples

    @global_samples.setter
    def global_samples(self, value: int) -> None:
        self._counters.global_samples = value

    @property
    def skipped_steps(self) -> int:
        return self._counters.skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, value: int) -> None:
        self._counters.skipped_steps = value

    def was_step_applied(self) -> bool:
        """Return whether the last `step()` has changed the weights."""
        return self._applied

    # -- sizes --------------------------------------------------------------------------------------------------------
    def train_batch_size(self) -> int:
        """Return the rows of a step over all ranks."""
        return self._batch.total

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch.rows

    def gradient_accumulation_steps(self) -> int:
        return self._batch.parts

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (rows of a step over all ranks, rows of a micro-batch, micro-batches of a step)."""
        return self._batch.total, self._batch.rows, self._batch.parts

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches to reach this many rows over all ranks. Raises `ValueError` if no
        number of micro-batches does."""
        each = self._batch.rows * self._batch.ranks
        if train_batch_size < 1 or train_batch_size % each:
            raise ValueError(f"a step of {train_batch_size} rows can't be divided into micro-batches of {each} rows")
        self._batch.parts = train_batch_size // each

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the number of rows in a micro-batch."""
        self._batch.rows = micro_batch_size

    # -- a micro-batch --------------------------------------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own output."""
        if torch.is_grad_enabled():
            self.tput_timer.start()
        with self._log.timed("forward"), self._autocast():
            output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            self._accumulate(self._outer or not self._ends())
            for tensor in _tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._divided)
        return output

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context that `torch_autocast` asks for. (Without it, a script's own autocast around the engine is captured.)"""
        if self.torch_autocast_enabled():  # type: ignore[attr-defined]
            return torch.autocast(self.device.type, self.torch_autocast_dtype())
        return contextlib.nullcontext()

    def _divided(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Scale an output's gradient (None where none reaches it) to the micro-batch's share, in a backward that the
        script itself started."""
        share = self._share()
        return grad if grad is None or OwnBackwards.count or share == 1 else grad * share

    _divided.only_scales = True  # type: ignore[attr-defined]

    def _share(self, scale_wrt_gas: bool = True) -> float:
        """Return the factor of a micro-batch's gradients: 1 / micro-batches, times the ranks if the configuration asks
        for their sum.

        (Programs average over ranks.)
        """
        summed = self._batch.ranks if self.gradient_allreduce_op() == "sum" else 1  # type: ignore[attr-defined]
        return summed / self._batch.parts if scale_wrt_gas else summed

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss unchanged, for a `backward()` of the script's own: the compiled backward applies the loss
        scale.

        Raises `EngineMisuse` if the loss is not a single number.
        """
        _refuse_no_number(loss)
        return loss

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run the backward of this micro-batch's loss, divided by the number of micro-batches unless `scale_wrt_gas` is
        False; return the divided loss.

        Raises `StepError` for a loss that depends on no parameter, `EngineMisuse` for one that is not a single number and
        without an optimizer.
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
        """Make later backward passes accumulate without reducing (`on`), or reduce again."""
        if on and not self._holds:
            self._held.enter_context(self.handle.no_sync())
        elif not on and self._holds:
            self._held.close()
        self._holds = on

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes inside accumulate without reducing.

        (ZeRO stages 2 and 3 keep only shards of gradients, and reduce each time.) `step()` is refused inside.
        """
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
        """Reduce the gradients of the backward passes inside together.

        Raises `EngineMisuse` inside of `no_sync`, and if only `step()` ends a step (`managed_gradient_accumulation` is
        false).
        """
        self._refuse_unmanaged("coalesce_grad_reduction")
        if self._outer:
            raise EngineMisuse(
                "coalesce_grad_reduction cannot be nested inside another no_sync context", hint="leave that one first"
            )
        with self.no_sync():
            yield

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether this micro-batch is the last of a step."""
        return self._ends()

    def _ends(self) -> bool:
        if self._boundary is not None:
            return self._boundary
        if not self.managed_gradient_accumulation():  # type: ignore[attr-defined]
            return False  # (step() itself is the end)
        return (self._counters.micro_steps + 1) % self._batch.parts == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the micro-batches from the next forward on are the last of a step.

        Raises `EngineMisuse` if only `step()` ends a step (`managed_gradient_accumulation` is false).
        """
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
        """End a micro-batch: if it was the last of a step, update the weights, and step the schedule unless the update
        was skipped.

        All ranks must call it. Raises `StepError` if no backward ran, `EngineMisuse` inside of `no_sync` and without an optimizer.
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
        """Log what the configuration asks for about the step that has just ended."""
        losses, self._losses = self._losses, []
        self._log.stepped(self, float(torch.stack(losses).float().mean()) if losses else None)

    def _update(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        training = self._training
        advance = step_of(self.lr_scheduler, lr_kwargs, self.train_batch_size())
        applied = self._planned_update() if training.planned else self._own_update()
        if training.client is not None:
            training.client._opt_called = True  # (torch's schedulers warn where they run ahead)
        self._stepped(applied, advance)

    def _stepped(self, applied: bool, advance: Callable[[], Any]) -> None:
        """Count an update, and step the schedule, by `advance`, unless the update was skipped."""
        counters = self._counters
        self._applied = applied
        if not applied:
            counters.skipped_steps += 1
        else:
            advance()
        counters.global_steps += 1
        managed = self.managed_gradient_accumulation()  # type: ignore[attr-defined]
        parts = self._batch.parts if managed else counters.backwards
        counters.global_samples += self._batch.rows * self._batch.ranks * parts
        counters.backwards = 0

    def _planned_update(self) -> bool:
        """Run one update of the plan's optimizer; return whether it was applied, not skipped."""
        self._norm = self._training.optimizer.optimizer.step()
        return self._settle()

    def _settle(self) -> bool:
        """Wait for the last update and return whether it was applied. Raises `OverflowError` if the loss scale can't
        get smaller."""
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
        """Run one update of the script's own optimizer, which the plan does not run; return whether it was applied,
        not skipped."""
        training = self._training
        params = [p for p in self.module.parameters() if p.grad is not None]
        if not params:
            raise StepError("step() was called before backward(): no parameter has a gradient")
        self.handle.runtime.reduce_leftovers()
        norm = nn.utils.clip_grad_norm_(params, training.clips or float("inf"))
        self._norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        applied = not training.skips or bool(torch.isfinite(self._norm))
        if applied:
            training.stepping = True
            try:
                training.optimizer.step()
            finally:
                training.stepping = False
        self.handle.zero_grad()
        return applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Delete the gradients."""
        self.handle.zero_grad(set_to_none)

    def _refuse_without_optimizer(self, what: str) -> None:
        if self._training.optimizer is None:
            raise EngineMisuse(
                f"{what}() needs an optimizer, and the engine has none",
                hint='give initialize one, or the configuration: "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}',
            )

    # -- whole steps ----------------------------------------------------------------------------------------------------
    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Run one step on micro-batches from the iterator or `training_data`; return the mean loss over micro-batches
        and ranks.

        The model is called with each micro-batch: a tuple or list is its arguments, a dict its named ones. Its output must
        have the loss.
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
        """Return the mean loss over micro-batches and ranks, without gradients and in eval mode."""
        self.eval()
        with torch.no_grad():
            losses = [_loss_in(self._called(b)) for b in self._take(data_iter, num_micro_batches)]
        return self._mean(losses)

    def _called(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self(**batch)
        return self(*batch) if isinstance(batch, (tuple, list)) else self(batch)

    def _take(self, data_iter: Iterator[Any] | None, parts: int | None = None) -> list[Any]:
        """Return the micro-batches of one step."""
        if data_iter is None:
            if self._iterator is None:
                if self._training.loader is None:
                    raise StepError(
                        "train_batch() was called without data", hint="give it an iterator, or initialize training_data"
                    )
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
        """Return the 2-norm of all gradients of the last update, before clipping; inf if it was skipped, None before
        the first."""
        return None if self._norm is None else float(self._norm)

    def get_lr(self) -> list[float]:
        """Return the learning rates of the groups for the next update."""
        return self._of_groups("lr")

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all groups. (A schedule sets its own after the next update.)"""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def get_type(self) -> list[Any]:
        """Return what each group says of its type; 0.0 for one that says nothing."""
        return self._of_groups("type")

    def get_mom(self) -> list[Any]:
        """Return the momentum of each group: SGD's, or Adam's betas."""
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
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Return a loader of this rank's micro-batches of a data set. Rows are not shuffled for routes other than
        "train". `num_local_io_workers` processes read them, or this one by default."""
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
            reading=Reading(self.dataloader_drop_last(), pin_memory, num_local_io_workers or 0),  # type: ignore[attr-defined]
        )

    def training_loader(self, dataset: Any) -> DeepSpeedDataLoader:
        """Return the loader of `training_data`."""
        return self.deepspeed_io(dataset)

    def set_data_post_process_func(self, post_process_func: Callable[..., Any]) -> None:
        """Set the function `post_process_func(micro_batch, {})` that changes each micro-batch of `training_data`."""
        if self.training_dataloader is not None:
            self.training_dataloader.post_process_func = post_process_func

    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Switch to another of zgraph's backends, "inductor" or "eager". (Every step is compiled, with or without
        this call.)

        `compile_kwargs` are arguments of torch.compile: `dynamic` becomes the plan's `shapes`. `report` says what became of each that asks for
        anything. Raises `UnsupportedError` for other backends, and for options that a plan has not.
        """
        options = dict(compile_kwargs or {})
        if options.pop("backend", backend) != backend:
            logger.warning("the backend of compile_kwargs is left out: the argument backend takes precedence")
        options |= {"schedule": schedule, "compiled_autograd_enabled": compiled_autograd_enabled}
        asked, rows = fields_of(backend, options)
        handle, report = self.handle, self.report
        changed = {name: value for name, value in asked.items() if value != getattr(handle.plan, name)}
        if changed:
            handle.recompile(handle.plan.model_copy(update=changed))
        for row in rows:
            if row.verdict == "no effect here":
                no_effect(f"{row.key[:-1]}={row.value!r})", row.said)
        other_rows = [row for row in report.rows if not row.key.startswith("engine.compile(")]
        self._training.report = replace(report, rows=(*other_rows, *rows))

    @property
    def is_compiled(self) -> bool:
        return True

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: the backward of a step's last micro-batch has reduced, in the buckets of the plan."""

    def _backward_epilogue(self) -> None:
        """Do nothing: scripts call it after a `loss.backward()` of several engines."""

    def empty_partition_cache(self) -> None:
        """Free the whole weights that are kept for the next forward. All ranks must call it."""
        if self.handle.deferred is None:
            self.handle.runtime.unsharded.drop()

    def destroy(self) -> None:
        """Wait for the work in progress. The model stays compiled, and can be used and initialized again."""
        self._accumulate(False)
        if self.handle.deferred is None:
            self.handle.finish()


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model's output."""
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
    if isinstance(loss, DTensor):
        raise divided_penalty(EngineMisuse, module="engine.module")
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return
    what = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise EngineMisuse(f"the loss is no scalar tensor but {what}", hint="take its mean; or tensor.backward(gradient)")


def _loss_in(output: Any) -> torch.Tensor:
    """Return the loss in a model's output. Raises `ModelError` if there is none."""
    loss = find_loss(output)
    if loss is None:
        raise ModelError(
            "the model's output has no loss",
            hint="let forward return it; or call the engine, and engine.backward with the loss of its output",
        )
    return loss
