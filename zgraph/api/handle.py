"""`model.zgraph`: the methods of a compiled model, and how the model itself is made to run compiled."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zgraph.api import fsdp_methods
from zgraph.api.accelerators import ForAccelerate, refuse_local_sgd
from zgraph.api.conversions import unwatch_conversions, watch_conversions
from zgraph.api.full_weights import generate_of, keep_whole
from zgraph.api.local_weights import watch_state_dicts
from zgraph.api.peft_adapters import is_adapted, save_adapters, unwatch_allocators, watch_allocators
from zgraph.api.transformers_methods import replace_methods, return_methods
from zgraph.build.resolve_auto_offload import placed_as
from zgraph.build.step_program import StepProgram
from zgraph.build.unmatched_patterns import refuse_unmatched
from zgraph.capture.replaced_forward import Forward
from zgraph.capture.tensor_parallel_layout import as_divided
from zgraph.checkpoint.loading import load
from zgraph.checkpoint.pretrained import is_pretrained
from zgraph.checkpoint.saving import Saver
from zgraph.checkpoint.write_pretrained import publish
from zgraph.errors import ModelError, StepError, refuse_no_bool, refuse_unless
from zgraph.inspection.explain import Explanation, explain
from zgraph.inspection.inspection import Inspection
from zgraph.inspection.make_inspection import of_runtime
from zgraph.inspection.recorder import record
from zgraph.inspection.run_report import Report
from zgraph.machine.measured_costs import agreed_costs, at_disk_rate
from zgraph.parameters.foreign_shards import watch_loads
from zgraph.parameters.layout import planned_layout
from zgraph.parameters.mixed_precision import release
from zgraph.passes import History
from zgraph.passes.analysis.simulator import StepForecast, simulate_step
from zgraph.plan.plan import Plan, plan_of
from zgraph.program.program import STAGE_DIM, TENSOR_DIM
from zgraph.program.remark import Remark
from zgraph.runtime.compiled_models import Compiled, remember
from zgraph.runtime.pad_to_buckets import Padding
from zgraph.runtime.runtime import Runtime
from zgraph.runtime.timings import Timings
from zgraph.runtime.train_step import train_step
from zgraph.stages.partition_model import DeferredPipeline, made_again
from zgraph.stages.runtime import PipelineRuntime
from zgraph.stages.step import forward_only, refuse_gradients
from zgraph.stages.step import train_step as train_step_in_stages
from zgraph.torch_compat.private_names import refuse_release
from zgraph.torch_compat.submodules import unwatch, watch
from zgraph.update.optimizer import PlanOptimizer
from zgraph.update.owned_parameters import mesh_of

if TYPE_CHECKING:
    from collections.abc import Callable

# The handle's methods that are put on a compiled module, unless it owns such a name already (see `_owns`).
_METHODS = (
    "no_sync",
    "step",
    "train_step",
    "eval_step",
    "zero_grad",
    "save_checkpoint",
    "load_checkpoint",
    "save_pretrained",
)
# The methods put on a module with PEFT's adapters: the module's name for each, and the handle's.
_OF_ADAPTERS = {"save_pretrained": "save_adapters", "merge_and_unload": "merge_and_unload", "unload": "unload"}
# All names that zgraph sets in a compiled module's `__dict__`.
_OWN = (
    *("zgraph", "forward", "_call_impl", "_ddp_params_and_buffers_to_ignore", "_is_accelerate_prepared"),
    *("__deepcopy__", "__reduce_ex__", "generate"),
    *dict.fromkeys([*_METHODS, *_OF_ADAPTERS]),
    *fsdp_methods.METHODS,
)


class Handle(Compiled):
    """The handle of a compiled module, `model.zgraph`: its plan, programs, steps, checkpoints and reports."""

    def __init__(self, runtime: Runtime | DeferredPipeline, loss_fn: Callable[..., Any] | None = None) -> None:
        self._runtime = runtime
        self.loss_fn = loss_fn
        self.forward: Forward  # (set by `attach`)
        self.whole: bool | None = None  # inside `full_weights`: whether this rank has the weights
        self._accumulates = False  # whether a model that is not divided yet will accumulate (see `accumulate`)
        self._when_cut: list[Callable[[], None]] = []  # the actions that wait for the cut (see `when_placed`)

    @property
    def runtime(self) -> Runtime:
        """The runtime of the model.

        Raises `StepError` inside `zgraph.full_weights`, and before the first call of a model in stages or with divided
        weights: the partitioning is only known after capture.
        """
        if self.whole is not None:
            raise StepError(
                "the compiled model can't run, be saved or be inspected inside full_weights",
                why="the model's parameters are whole tensors there, which its programs know nothing of",
                hint="leave the with block first",
            )
        if isinstance(self._runtime, DeferredPipeline):
            staged = self._runtime.staged
            raise StepError(
                "the model is not cut into stages yet" if staged else "the model's weights are not divided yet",
                where=f"mesh.{STAGE_DIM if staged else TENSOR_DIM}",
                why="where, and so which parameters this rank holds, is found in its first call",
                hint="zgraph.compile(model, plan, inputs=…) does it at once",
            )
        return self._runtime

    @runtime.setter
    def runtime(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def saver(self) -> Saver:
        """The object that saves this model's checkpoints."""
        saver = self.runtime.saver
        assert isinstance(saver, Saver)
        return saver

    @property
    def deferred(self) -> DeferredPipeline | None:
        """The deferred model before the first call of a model in stages or with divided weights; None for every
        other model."""
        return self._runtime if isinstance(self._runtime, DeferredPipeline) else None

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Runtime:
        """Return the runtime. If a model in stages or with divided weights is not cut yet, cut it for a call with these
        arguments.

        All ranks must call it.
        """
        if isinstance(self._runtime, DeferredPipeline):
            self._runtime = started(self._runtime.runtime(args, kwargs))
            self._runtime.accumulating = self._accumulates
            waiting, self._when_cut = self._when_cut, []
            for action in waiting:
                action()
        return self.runtime

    def when_placed(self, action: Callable[[], None]) -> None:
        """Run an action as soon as a model in stages or with divided weights is cut; at once for every other model."""
        if self.deferred is None:
            action()
        else:
            self._when_cut.append(action)

    def eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward with whole weights. Raises `StepError` on a rank that has none."""
        if not self.whole:
            raise StepError(
                "the model was called inside full_weights on a rank that has no whole weights",
                where="ranks",
                hint="name this rank in full_weights(model, ranks=…), or call the model on those that are named",
            )
        return self.forward.captured(self._runtime.module, *args, **kwargs)

    def adopt_forward(self, function: Callable[..., Any]) -> None:
        """Capture another forward, which takes the module first, from the next call on. Raises `ModelError` for a
        model that is cut into stages."""
        if isinstance(self._runtime, PipelineRuntime):
            raise ModelError(
                "the forward of a model in stages was replaced",
                where=f"mesh.{STAGE_DIM}",
                why="where it is cut, and which parameters each rank holds, was found in the forward before",
                hint="replace it before zgraph.compile",
            )
        self._runtime.forward_function = function
        if isinstance(self._runtime, Runtime):
            self._runtime.forwards_replaced += 1

    @property
    def plan(self) -> Plan:
        """The plan that the model runs by (see `recompile`), resolved for the present ranks.

        For an elastic plan, `elastic.rows` are the rows of a step on each rank, and `micro_batches` the number of
        micro-batches that they are cut into.
        """
        return self._runtime.plan

    @property
    def mesh(self) -> DeviceMesh | None:
        """The device mesh; None in one process without a process group."""
        return self._runtime.everyone.mesh

    @property
    def samples(self) -> int:
        """The number of rows that the run has been trained on, over all ranks, the same on every rank.

        It counts the rows of every forward in train mode with gradients, also those of steps that were skipped for an
        overflow. Checkpoints save and restore it, so that a resumed run can continue at the same position of its data,
        on any number of ranks.
        """
        return self.runtime.samples

    @property
    def padding(self) -> Padding:
        """How much of what this rank's calls have computed with was padding (`shapes = {"buckets": …}`): `.share`,
        `.calls` by bucket. Zero without buckets."""
        return self.runtime.buckets.padding if self.runtime.buckets is not None else Padding()

    @property
    def programs(self) -> dict[str, StepProgram]:
        """The programs made so far, by name ("train0", "eval1", …), in the order of their first call.

        `.history()` of a program has it after every pass; `.executables()` are its compiled parts, with their source.
        """
        return {step.name: step for entry in self.runtime.entries.values() for step in entry.every_program()}

    @property
    def updates(self) -> dict[str, History]:
        """The history of each update program through its passes: "update0", … (one for each set of parameters with
        gradients)."""
        return self.runtime.updater.programs.histories()

    def report(self) -> Report:
        """Return a report on what was compiled: layouts, passes, collectives, and the kernels with the operators that
        each fused.

        `str()` of it is text; a notebook shows the page that `zgraph report` writes.
        """
        return Report(self.runtime)

    def inspect(self) -> Inspection:
        """Return the data of all commands: the programs after every pass, their simulation, missed optimizations,
        measurements."""
        return of_runtime(self.runtime)

    def explain(self, what: str) -> Explanation:
        """Explain a node, a parameter, a pass, the "peak", or what was "missed": reason, cost, remedy.

        Raises `TargetError` with the nearest name for an unknown one, `StepError` before the first program is compiled.
        """
        inspection = self.inspect()
        if not inspection.ways:
            raise StepError("there is no program yet", hint="zgraph.compile(…, inputs=…), or a first step")
        return explain(inspection, what)

    def remarks(self) -> list[Remark]:
        """Return the optimizations that passes could not apply, with reason, cost and remedy, the costliest first."""
        return self.runtime.remarks()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes inside accumulate without reducing; the next one outside reduces the sum.

        At ZeRO stages 0 and 1 `.grad` is meanwhile a DTensor of placement `Partial("avg")`: this rank's own sum. Stages 2
        and 3 keep only shards of gradients, so they reduce each time, inside as well; the results are the same.
        """
        refuse_local_sgd()
        with self.runtime.no_sync():
            yield

    def accumulate(self, only: bool) -> None:
        """Make later backward passes accumulate without reducing, as inside `no_sync`, or reduce again. Raises
        `StepError` for a model in stages."""
        if self.deferred is not None and not self.deferred.staged:
            self._accumulates = only
            return
        with self.runtime.no_sync():  # (raises for a model in stages)
            pass
        self.runtime.accumulating = only

    # -- steps --------------------------------------------------------------------------------------------------------
    def step(self) -> torch.Tensor | None:
        """Update the weights from the gradients of the backward passes since the last step, and delete these gradients.

        The update is that of the plan's `optimizer`, after clipping (`grad_clip`), with the learning rate of `lr_schedule`.
        Returns the norm of all gradients before clipping (0-dim float32, on the device) if the plan clips by it, else None.
        All ranks must call it. (A model in stages has no step outside of `train_step`.) Raises `StepError` without a backward
        before it or an optimizer in the plan, `OverflowError` if fp16's loss scale can't get smaller, and `PlanError` if a
        field of the optimizer was changed that can't be: then the gradients are kept for another `step()`.
        """
        return self.runtime.updater.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Delete the gradients, as the module's own `zero_grad` does, and exclude their backward passes from the
        next step's check (`on_nonfinite`)."""
        module = self._runtime.module
        type(module).zero_grad(module, set_to_none)
        if self.deferred is None:
            self.runtime.updater.zeroed()

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a whole training step: forward, backward, accumulation, reduction, clipping, update, deletion of gradients.

        The arguments are those of the model's forward for this rank's whole batch, whose tensors are cut on dimension 0
        into the plan's `micro_batches`; what forward does not take goes to `loss_fn` (see `zgraph.compile`). Returns the
        model's output, detached: scalars averaged over micro-batches, tensors joined along the dimension that has the rows
        (those without rows are the last micro-batch's). Without an optimizer in the plan the gradients are left in `.grad`.
        With `loss_average="token"` each micro-batch and rank is weighted by its number of targets
        (`zgraph.runtime.train_step.count_targets`). Raises `StepError` for a batch that the micro-batches do not divide
        (unless by token) or that does not have the rows of an elastic plan, and for an output without a loss. With an
        optimizer in the plan, a step that raises anything leaves no gradients: the next one starts afresh.
        """
        self.forward.settle(self.plan.mesh.get(STAGE_DIM, 1) != 1)
        runtime = self.cut(args, kwargs)
        if isinstance(runtime, PipelineRuntime):
            return train_step_in_stages(runtime, self.loss_fn, args, kwargs)
        return train_step(runtime, runtime.module, self.loss_fn, args, kwargs)

    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output in eval mode and without gradients, and restore the modules' modes afterwards."""
        module = self._runtime.module
        modules = [m for m in module.modules() if m.training]
        module.eval()
        try:
            with torch.no_grad():
                return module(*args, **kwargs)
        finally:
            for module in modules:
                module.training = True

    def finish(self) -> None:
        """Wait for a late update (`offload.delayed_after`) and for a checkpoint that is saved in the background.

        Call it before the weights are used for anything but the next step. Raises what went wrong with the checkpoint,
        and what the next step would raise if the last one was not finite (`on_nonfinite`). All ranks must call it.
        """
        self.runtime.updater.finish()
        self.runtime.updater.settle()
        self.saver.wait()

    # -- checkpoints --------------------------------------------------------------------------------------------------
    def save_checkpoint(
        self,
        dir: str | PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        async_: bool = False,
        *,
        keep_last: int | None = None,
        frozen: bool = True,
    ) -> str:
        """Save everything that a run needs to continue, into the folder `tag` (such as "step100") of `dir`; return the tag.

        Saved are weights, buffers (rank 0's; in a pipeline, buffers that a stage changes are that stage's), optimizer states
        wherever they are stored, counters, loss scale, averages, each rank's random states, and the plan. `client_state` is
        what you add: plain values, arrays, tensors, objects with `state_dict()`; it may differ between ranks. Each rank
        writes what it holds. When this returns, the checkpoint is complete, on disk and named by `latest`; otherwise there
        is none.

        With `async_` it returns once everything is copied to the host's memory; later errors are raised by the next save or
        load, or by `finish()`. `keep_last`: remove all but this many of the newest checkpoints. `frozen=False`: leave out
        weights that require no gradient; loading then keeps the model's own. All ranks must call it. Raises
        `CheckpointError` if it can't be written (the run can continue), `StepError` while gradients wait for `step()`.
        """
        _refuse_no_folder(dir)
        return self.saver.save(
            self.runtime, Path(dir).absolute(), tag, client_state, async_=async_, keep_last=keep_last, frozen=frozen
        )

    def load_checkpoint(
        self,
        dir: str | PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        *,
        fallback: bool = False,
        optimizer: bool | Literal["keep"] = True,
        strict: bool = True,
    ) -> dict[str, Any]:
        """Continue from a checkpoint, saved by any plan on any number of ranks; return the client state saved with it.

        `tag`: by default the last one saved. `dir` may be a checkpoint itself. Everything is read and checked before anything
        is changed. `client_state`: objects with `load_state_dict()`, each of which gets the saved value of its key.
        `fallback`: if a checkpoint is damaged, load the newest one that is not, with a warning. `optimizer=False`: load
        weights only, for a new run of steps; "keep": load weights only, and go on with the states, counts and random states
        that there are. `strict=False`: load the weights that both have by the same name; a warning names those that only one of
        them has. The model's stay as they are, and their states begin anew. Each rank loads its own random states, or keeps
        its present ones if the checkpoint has none for it. All ranks must call it. Raises `CheckpointError` for a checkpoint
        that is damaged, another model's or another optimizer's; then nothing was changed.
        """
        _refuse_no_folder(dir)
        refuse_no_bool("load_checkpoint(strict=…)", strict)
        objects = client_state is None or isinstance(client_state, dict)
        refuse_unless(objects, "load_checkpoint(client_state=…)", client_state, "a dict of objects or None")
        self.saver.wait()
        return load(
            self.runtime,
            Path(dir).absolute(),
            tag,
            fallback=fallback,
            optimizer=optimizer,
            client_state=client_state,
            weights="all" if strict else "some",
        )

    def save_adapters(self, *args: Any, **kwargs: Any) -> Any:
        """Run PEFT's own `save_pretrained` of a model with adapters, with their weights gathered. All ranks must
        call it."""
        return save_adapters(self.forward.module, *args, **kwargs)

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> Any:
        """Return PEFT's base model with the adapters merged, whole and plain on each rank. This model is no longer
        compiled. All ranks must call it."""
        return self._undone().merge_and_unload(*args, **kwargs)

    def unload(self, *args: Any, **kwargs: Any) -> Any:
        """Return PEFT's base model without adapters, whole and plain on each rank. This model is no longer compiled.
        All ranks must call it."""
        return self._undone().unload(*args, **kwargs)

    def _undone(self) -> Any:
        """Turn the model back into the plain one, with whole weights, as before `zgraph.compile`; return it."""
        model = self.forward.module
        if self.deferred is None or self.deferred.staged:
            keep_whole(model)
        detach(model)
        return model

    def save_pretrained(
        self,
        dir: str | PathLike[str],
        *,
        dtype: str | torch.dtype | None = None,
        max_shard_size: str | int = "5GB",
        averaged: bool = False,
        state_dict: Mapping[str, Any] | None = None,
        is_main_process: bool = True,
        save_function: Callable[..., Any] | None = None,
    ) -> None:
        """Write the weights as safetensors that `from_pretrained` reads, with the config of a transformers model.

        Names and tensors are those of transformers' own `save_pretrained`, or of a plain module's state dict, with a tied
        tensor under its first name. No rank gathers weights: each writes its rows into the files. Weights are those of the
        last step, each in the dtype of the model; `dtype` ("fp32", "bf16", "fp16", or one of torch's) casts floating-point
        ones, from their fp32 master weights if there are some. `averaged`: write the plan's moving average (`ema`) instead.
        `max_shard_size`: the most bytes of tensors in a file, as a number or "5GB"; a larger tensor gets a file of its own.
        `state_dict`, `is_main_process` (which transformers' Trainer passes) and `save_function` (which users of accelerate
        pass) have no effect, since each rank writes its part.

        Everything is written beside the files of `dir` first, and then put in place by renames; other files stay. All ranks
        must call it. Raises `CheckpointError` on every rank if it can't be written, `UnsupportedError` for quantized models
        and adapters and for tensors in `state_dict` that are not the model's, `StepError` for `averaged` without `ema` and
        after an update that failed.
        """
        folder = Path(dir).absolute()
        publish(
            self.runtime, folder, dtype=dtype, max_shard_size=max_shard_size, averaged=averaged, state_dict=state_dict
        )

    @property
    def optimizer(self) -> PlanOptimizer | None:
        """The plan's optimizer as a `torch.optim.Optimizer`, whose groups can be read and changed; None if the plan
        has none."""
        return self.runtime.updater.optimizer

    @property
    def loss_scale(self) -> torch.Tensor | None:
        """fp16's loss scale, 0-dim float32 on the device; None without loss scaling."""
        return self.runtime.updater.states.scale("scale")

    @property
    def skipped_steps(self) -> torch.Tensor | None:
        """The number of steps skipped because a gradient, or by the plan's `on_nonfinite` the loss, was not finite:
        0-dim int64 on the device.

        None if no step is ever skipped.
        """
        return self.runtime.updater.states.skipped()

    def grad_norms(self) -> dict[str, torch.Tensor]:
        """Return the 2-norm of each parameter's gradient over all ranks, by name; in a pipeline, for this rank's
        stages. All ranks must call it.

        Gradients exist between a backward and `step()`: call it between them, or in a hook of `on_gradients`.
        """
        return self.runtime.updater.grad_norms()

    def on_gradients(self, hook: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[], None]:
        """Call `hook(gradients by name)` before each update, with averaged gradients; return a function that removes
        the hook.

        In a pipeline the hook gets the gradients of this rank's stages; if several stages use a parameter, this stage's
        part of its gradient.
        """
        hooks = self.runtime.updater.hooks
        hooks.append(hook)
        return lambda: hooks.remove(hook)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Replace the weights by their moving averages (the plan's `ema`) inside the block. Raises `StepError`
        without `ema`."""
        with self.runtime.updater.averaged():
            yield

    def timings(self, *, tokens: int | None = None, peak_flops: float | None = None) -> Timings:
        """Return where the time of the last steps went, on every rank. All ranks must call it. See `zgraph.runtime.timings.Timings`.

        `tokens`: the tokens of one rank's step, for tokens/s. `peak_flops`: FLOP/s of one device, for the model FLOP/s
        utilisation. The next step runs under torch's profiler, to measure the exposed communication.
        """
        return self.runtime.timings(tokens, peak_flops)

    def forecast(self) -> StepForecast:
        """Forecast a step of one micro-batch from the costs that the model is scheduled by (the plan's `hardware`).

        The step consists of the newest training program and the newest update program. With the hardware of
        `zgraph.calibrate` the forecast is what this machine takes, else a lower bound. Raises `StepError` before the first
        training program is compiled, and for a model in stages.
        """
        if isinstance(self.runtime, PipelineRuntime):
            raise StepError(
                "one rank of a pipeline has no forecast of its own",
                where="mesh.pp",
                why="what a step takes depends on all stages and their schedule",
                hint="zgraph forecast TARGET --plan PLAN --world N shows all of it",
            )
        trained = [step for step in self.programs.values() if step.differentiated]
        if not trained:
            raise StepError("there is no training program yet", hint="zgraph.compile(…, inputs=…), or a first step")
        updates = [history.program for history in self.updates.values()]
        update, late = updates[-1] if updates else None, bool(self.runtime.updater.options.late())
        return simulate_step(trained[-1].history().program, update, self.runtime.costs, late)

    def recompile(self, plan: Plan) -> None:
        """Run the same weights by another plan (another ZeRO stage, backend, passes or micro-batches) on the same mesh.

        The optimizer's states, the step count, the loss scale and the learning rates are kept. A model in stages keeps its
        stages: micro-batches and schedule may change if each rank has the same stages by the new schedule.

        All ranks must call it. Programs are compiled again at the next calls; parameters stay the same objects, so
        optimizers keep working. Raises `ModelError` if the mesh or the layout of parameters would change (ZeRO stages 1 to 3
        share one), `RankMismatchError` if ranks give different plans, `StepError` if another optimizer would go on from
        weights in the middle of a round of local steps.
        """
        old = self.runtime
        world = max(1, len(old.everyone.ranks))
        plan = plan_of(plan)
        plan, sizes = plan.for_world(world), plan.resolve_mesh(world)
        mesh = mesh_of(old.sizes, old.held)
        if sizes != mesh:
            raise ModelError(
                f"recompile keeps the mesh {mesh}, the plan has {sizes}",
                hint="compile a fresh model, and load a state dict",
            )
        refuse_unmatched(plan, old.module)
        plan = placed_as(plan, old.plan)
        if not plan.offload.same(old.plan.offload):
            raise ModelError(
                "the plan offloads otherwise", where="offload", hint="compile a fresh model, and load a state dict"
            )
        wanted = as_divided(planned_layout(old.module, old.sizes, plan), old.shards.specs, old.sizes)
        if wanted != old.shards.specs:
            raise ModelError(
                "the plan lays parameters out in another way",
                why="an optimizer holds the parameters as they are now",
                hint="stages 1, 2 and 3 share a layout; for stage 0 or another threshold compile a fresh model, and load a state dict",
            )
        if old.plan.local_steps is not None and plan.local_steps is None:
            raise ModelError(
                "recompile can't leave local_steps out",
                where="local_steps",
                why="what the optimizer keeps is each group's own, and groups would go on apart",
                hint="save a checkpoint's weights, and load them into a fresh model",
            )
        if type(plan.optimizer) is not type(old.plan.optimizer):
            old.updater.rounds.refuse_open("recompile can't change the optimizer")
        old.everyone.vote("the plan of recompile", plan.hash())
        runtime: Runtime
        if isinstance(old, PipelineRuntime):
            runtime = made_again(old, old.module, old.shards, plan)
        else:
            costs = at_disk_rate(agreed_costs(plan, old.device, old.agreement, old.mesh), old.agreement, old.tiers)
            context = replace(old.context, sizes=sizes, costs=costs)
            runtime = Runtime(old.module, old.forward_function, plan, old.shards, context)
        runtime.updater.adopt(old.updater, copies=False)
        runtime.accumulating = old.accumulating
        runtime.samples, runtime.own_steps, runtime.backwards = old.samples, old.own_steps, old.backwards
        runtime.saver = old.saver
        runtime.recorder = old.recorder.of(runtime) if old.recorder is not None else None
        old.first_gathers.drop()
        if plan.takes_local_steps:
            watch_state_dicts(old.module)
        self.runtime = runtime


def started(runtime: Runtime) -> Runtime:
    """Give a new runtime the object that saves its checkpoints, and a recorder if it is to be recorded; return it.
    All ranks must call it."""
    runtime.saver = Saver()
    record(runtime)
    return runtime


def attach(module: nn.Module, runtime: Runtime | DeferredPipeline, loss_fn: Callable[..., Any] | None = None) -> Handle:
    """Make the module's own `forward` run compiled. Its class and its parameters' names stay."""
    handle = Handle(runtime, loss_fn)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if handle.whole is not None:
            return handle.eager(args, kwargs)
        if handle.deferred is not None and handle.deferred.staged:
            refuse_gradients()
        runtime = handle.cut(args, kwargs)
        if isinstance(runtime, PipelineRuntime):
            return forward_only(runtime, args, kwargs)
        return runtime(*args, **kwargs)

    handle.forward = Forward(module, run, handle.adopt_forward, functools.partial(_is_ours, module))

    for name in _METHODS:
        if not _owns(module, name):
            module.__dict__[name] = getattr(handle, name)
    for name, method in fsdp_methods.methods_of(runtime.sizes, handle.accumulate, handle.zero_grad).items():
        if not _owns(module, name):
            module.__dict__[name] = method
    if is_adapted(module):
        for name, ours in _OF_ADAPTERS.items():
            if hasattr(module, name):  # (adapters that make prompts can't be merged)
                module.__dict__.setdefault(name, getattr(handle, ours))
    module.__dict__["zgraph"] = handle
    module.__dict__["forward"] = handle.forward.compiled
    module.__dict__["_call_impl"] = handle.forward
    module.__dict__["_ddp_params_and_buffers_to_ignore"] = _NotForDDP()
    module.__dict__["_is_accelerate_prepared"] = ForAccelerate(handle)
    generate = generate_of(module)
    if generate is not None and "generate" not in module.__dict__:
        module.__dict__["generate"] = generate
    module.__dict__["__deepcopy__"] = functools.partial(_deepcopy, module)
    module.__dict__["__reduce_ex__"] = _refuse_pickle
    if handle.mesh is not None:
        watch_loads(module)
        watch(module)
    watch_allocators(module)
    watch_conversions(module, divided=handle.mesh is not None)
    replace_methods(module, divided=handle.mesh is not None)
    if runtime.plan.takes_local_steps:
        watch_state_dicts(module)
    remember(module)
    return handle


def detach(module: nn.Module) -> None:
    """Make a compiled module's own `forward` run again, as before `attach`. Its parameters stay as they are."""
    forward: Forward = module.__dict__["zgraph"].forward
    for name in [n for n in _OWN if _is_ours(module, n)]:
        del module.__dict__[name]
    if forward.captured is not type(module).forward:
        module.__dict__["forward"] = types.MethodType(forward.captured, module)
    unwatch(module)
    unwatch_allocators(module)
    unwatch_conversions(module)
    return_methods(module)
    release(module)


def _owns(module: nn.Module, name: str) -> bool:
    """Return whether a module has a method of this name that must not be replaced.

    (Replaced are transformers' own `save_pretrained`, which would gather the weights on one rank, and `zero_grad`,
    which ours calls.)
    """
    if name == "zero_grad":
        return False
    if name == "save_pretrained" and is_pretrained(module):
        return not str(getattr(type(module), name).__module__).startswith("transformers.")
    return hasattr(module, name)


def _deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a compiled copy with its own weights; its programs are compiled when it is first called."""
    handle: Handle = module.__dict__["zgraph"]
    handle.forward.refuse_copy()
    names = [n for n in _OWN if _is_ours(module, n)]
    ours = {n: module.__dict__.pop(n) for n in names}
    try:
        twin: nn.Module = copy.deepcopy(module, memo)
    finally:
        module.__dict__.update(ours)
    for param in twin.parameters():
        param.grad = None  # (a copy of a plain parameter has none, one of a DTensor has)
    if handle.deferred is not None:
        attach(twin, replace(handle.deferred, module=twin), handle.loss_fn)
        return twin
    old = handle.runtime
    shards = old.shards.adopt(twin)
    runtime: Runtime
    if isinstance(old, PipelineRuntime):
        runtime = made_again(old, twin, shards, old.plan)
    else:
        runtime = Runtime(twin, old.forward_function, old.plan, shards, old.context)
    runtime.updater.adopt(old.updater, copies=True)
    runtime.samples, runtime.own_steps = old.samples, old.own_steps
    runtime.saver = Saver()
    attach(twin, runtime, handle.loss_fn)
    return twin


def _is_ours(module: nn.Module, name: str) -> bool:
    """Return whether the module's attribute of this name is zgraph's, not the user's."""
    value = module.__dict__.get(name)
    if name not in _OWN or value is None:
        return False
    if name in fsdp_methods.METHODS:
        return fsdp_methods.is_ours(value)
    return name not in {*_METHODS, *_OF_ADAPTERS} or getattr(value, "__self__", None) is module.__dict__["zgraph"]


class _NotForDDP:
    """The value of the attribute that DistributedDataParallel reads first, the names of parameters to leave out:
    iterating it raises `ModelError`."""

    def __iter__(self) -> Iterator[str]:
        asks: types.FrameType | None = sys._getframe(1)
        while asks is not None:
            if asks.f_globals.get("__name__") == "accelerate.accelerator":
                refuse_release("accelerators")  # (this release does not ask whether a model is prepared)
            asks = asks.f_back
        raise ModelError(
            "a compiled model can't be wrapped by DistributedDataParallel",
            where="the model",
            why="its programs average gradients over the ranks of the plan's mesh themselves",
            hint="leave it out: model(…), loss.backward() and model.step(), or model.train_step(…)",
        )


def _refuse_pickle(protocol: int) -> Callable[..., Any]:
    raise ModelError(
        "a compiled model can't be pickled, nor copied by copy.copy",
        where="the model",
        why="its process groups and kernels belong to this process, and its run time to one model",
        hint="copy.deepcopy(model) is a compiled copy; to store it save model.state_dict(), and compile the model again after loading",
    )


def _refuse_no_folder(dir: Any) -> None:
    refuse_unless(isinstance(dir, str | PathLike), "a checkpoint's dir", dir, "the path of a folder")
