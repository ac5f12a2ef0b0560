"""`PipelineEngine`: the engine of a model in stages, which runs whole steps.

The micro-batches run by the plan's schedule, so forward, backward and step can't be called on their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils.data import DistributedSampler, IterableDataset

from zgraph.deepspeed.dataloader import DeepSpeedDataLoader, RepeatingLoader
from zgraph.deepspeed.engine import DeepSpeedEngine
from zgraph.deepspeed.lr_schedulers import step_of
from zgraph.deepspeed.pipe.module import PipelineError, PipelineModule
from zgraph.deepspeed.pipe.topology import PipelineParallelGrid
from zgraph.deepspeed.unsupported import EngineMisuse
from zgraph.deepspeed.utils.logging import logger, no_effect
from zgraph.errors import StepError, UnsupportedError


class PipelineEngine(DeepSpeedEngine):
    """The engine of a `PipelineModule`."""

    module: PipelineModule
    _batch_fn: Callable[[Any], Any] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.managed_gradient_accumulation():  # type: ignore[attr-defined]
            raise EngineMisuse(
                "managed_gradient_accumulation=False is not supported with pipeline parallelism",
                hint="leave it out: train_batch is a whole step",
            )
        if type(self.module).get_additional_losses is not PipelineModule.get_additional_losses:
            no_effect("PipelineModule.get_additional_losses", "the loss that is reported is that of loss_fn alone")

    def train_batch(
        self, data_iter: Iterator[Any] | None = None, data: Any = None, targets: Any = None
    ) -> torch.Tensor:
        """Run one step; return the mean loss over micro-batches and data-parallel ranks, on all ranks.

        The rows are the micro-batches (inputs, labels) of one step from the iterator or `training_data`, or else `data` and
        `targets`, the rows of this rank's whole step. All ranks of a pipeline must read the same rows. Raises `StepError`
        for micro-batches of different sizes.
        """
        self._refuse_without_optimizer("train_batch")
        if not torch.is_grad_enabled():
            raise StepError(
                "train_batch() was called while gradients are disabled",
                hint="eval_batch, or call it outside of torch.no_grad()",
            )
        self.train()
        if data is None:
            data, targets = self._whole(self._take(data_iter))
        elif data_iter is not None:
            raise StepError("train_batch() was given both data_iter and data", hint="give one of them")
        self._fit_parts()
        advance = step_of(self.lr_scheduler, None, self.train_batch_size())
        self.tput_timer.start()
        with self._log.timed("train_batch"):
            loss = self.handle.train_step(data, targets)
        self._norm = self.handle.runtime.updater.grad_norm
        self._stepped(self._settle(), advance)
        self._counters.micro_steps += self._batch.parts
        mean = self._over_ranks(loss)
        self._losses = [mean] if self.monitor.enabled else []
        self._tell()
        if self.global_rank == 0 and self.tput_timer.due(self.tput_timer.global_step_count):
            seconds, rows = self.tput_timer.step_elapsed_time, self.train_batch_size()
            said = (self.global_steps, float(mean), seconds, rows / max(seconds, 1e-12))
            logger.info("steps: %d loss: %.4f iter time (s): %.3f samples/sec: %.3f", *said)
        return mean

    def eval_batch(  # type: ignore[override]
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Return the mean loss of one step's micro-batches, without gradients and in eval mode.

        Without `compute_loss`, return the last layer's output instead, on the ranks with the last stage, and None on
        others. With `return_logits`, return (loss, output). Every rank gets the loss, whatever `bcast_loss` says. Raises
        `UnsupportedError` for a `reduce_output` other than "avg".
        """
        if reduce_output != "avg":
            raise UnsupportedError(
                f"eval_batch() does not support reduce_output={reduce_output!r}",
                why="the loss of a step is the mean over its micro-batches",
                hint="reduce_output='avg'; or compute_loss=False, and take losses of the output",
            )
        data, targets = self._whole(self._take(data_iter, num_micro_batches))
        self.eval()
        with torch.no_grad():
            output = self.module(data) if return_logits or not compute_loss else None
            if not compute_loss:
                return output
            loss = self._over_ranks(self.module(data, targets))
        return (loss, output) if return_logits else loss

    def _whole(self, batches: Sequence[Any]) -> tuple[Any, Any]:
        """Join a step's micro-batches into (inputs, labels) of all its rows."""
        if self._batch_fn is not None:
            batches = [self._batch_fn(batch) for batch in batches]
        for batch in batches:
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise StepError(
                    "a pipeline's micro-batch is no pair (inputs, labels)",
                    hint="set_batch_fn(function) makes one of yours",
                )
        shapes = {tuple(tuple(t.shape) for t in pytree.tree_leaves(b) if isinstance(t, torch.Tensor)) for b in batches}
        if len(shapes) > 1:
            raise StepError(
                "the micro-batches of a step have different sizes", why=f"{len(shapes)} of them", hint="drop_last=True"
            )
        return tuple(_joined(part) for part in zip(*batches, strict=True))  # type: ignore[return-value]

    def _fit_parts(self) -> None:
        """Recompile if the engine's number of micro-batches is no longer the plan's."""
        handle = self.handle
        if handle.plan.micro_batches != self._batch.parts:
            handle.recompile(handle.plan.model_copy(update={"micro_batches": self._batch.parts}))

    def _over_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        mean = loss.detach().float().clone()
        if dist.is_initialized() and self.world_size > 1:
            dist.all_reduce(mean)
            mean /= self.world_size
        return mean

    # -- data -----------------------------------------------------------------------------------------------------------
    def training_loader(self, dataset: Any) -> DeepSpeedDataLoader:
        """Return the loader of `training_data`, whose rows come in the order of the data set, as DeepSpeed's pipelines read them."""
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            return self.deepspeed_io(dataset)
        sampler: Any = DistributedSampler(dataset, num_replicas=self._batch.ranks, rank=self.data_rank(), shuffle=False)
        return self.deepspeed_io(dataset, data_sampler=sampler)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Take micro-batches from an iterator from now on."""
        self._iterator = iter(iterator)

    def set_dataloader(self, loader: DeepSpeedDataLoader) -> None:
        """Take micro-batches from a loader from now on, starting over at its end."""
        self._training.loader = loader
        self._iterator = RepeatingLoader(loader)

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Set the function that makes the pair (inputs, labels) of an item of the data; None for none."""
        self._batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Do nothing: rows of another shape run by a program of their own."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Do nothing: what stages send each other is known from the program, masks included."""

    def get_additional_losses(self) -> None:
        """Return None: there are no losses beside that of `loss_fn` (see `PipelineModule.get_additional_losses`)."""

    # -- who is where -----------------------------------------------------------------------------------------------------
    @functools.cached_property
    def grid(self) -> PipelineParallelGrid:
        return self.module.mpu()

    @property
    def num_stages(self) -> int:
        return self.module.num_stages

    @property
    def stage_id(self) -> int:
        return self.grid.stage_id

    @property
    def micro_batches(self) -> int:
        return self._batch.parts

    def get_pipeline_parallel_rank(self) -> int:
        return self.stage_id

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == self.num_stages - 1

    def is_pipe_parallel(self) -> bool:
        return self.num_stages > 1

    # -- what there is not --------------------------------------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `PipelineError`: a pipeline runs whole steps."""
        raise _only_whole_steps("forward")

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `PipelineError`: a pipeline runs whole steps."""
        raise _only_whole_steps("backward")

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `PipelineError`: a pipeline runs whole steps."""
        raise _only_whole_steps("step")


def _only_whole_steps(what: str) -> PipelineError:
    return PipelineError(
        f"a pipeline has no {what} of its own",
        why="its stages run the micro-batches of a step by a schedule",
        hint="engine.train_batch(data_iter), engine.eval_batch(data_iter)",
    )


def _joined(parts: Sequence[Any]) -> Any:
    """Concatenate the rows of several micro-batches."""
    if len(parts) == 1:
        return parts[0]
    structure = pytree.tree_structure(parts[0])
    if any(pytree.tree_structure(part) != structure for part in parts):
        raise StepError("the micro-batches of a step have different structures", hint="give all of them the same ones")
    columns = [pytree.tree_leaves(part) for part in parts]
    joined = [_column(column) for column in zip(*columns, strict=True)]
    return pytree.tree_unflatten(joined, structure)


def _column(values: Sequence[Any]) -> Any:
    """Join the leaves of several micro-batches: concatenate tensors by rows, and keep other values, which must be
    equal."""
    first = values[0]
    if isinstance(first, torch.Tensor) and first.dim():
        return torch.cat(list(values))
    if any(not bool(first == other) for other in values[1:]):
        raise StepError(
            "the micro-batches of a step have different values that are no rows",
            why=f"one has {first!r}, another {next(v for v in values if not bool(first == v))!r}",
            hint="make it a tensor with a row for each row of the micro-batch",
        )
    return first
