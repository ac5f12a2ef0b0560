"""Saving and loading by DeepSpeed's calls: zgraph's checkpoints are written, and DeepSpeed's own can be read too.

The engine's counters and its schedule's position are saved under a key of their own, beside the script's
`client_state`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zgraph.checkpoint.loading import Weights, load, peek
from zgraph.checkpoint.source import MODEL, Source
from zgraph.deepspeed import client_optimizer, comm
from zgraph.deepspeed.full_values import load_whole
from zgraph.deepspeed.lr_schedulers import Scheduler
from zgraph.deepspeed.saved_rates import restore_rates
from zgraph.deepspeed.utils.logging import no_effect
from zgraph.deepspeed.zero import GatheredParameters
from zgraph.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from zgraph.api.handle import Handle

logger = logging.getLogger(__name__)

_OURS = "zgraph.deepspeed"  # the key of the engine's own part of a checkpoint's client state
_STATES = "zgraph.deepspeed.optimizer"  # the key of the states of an optimizer that plans do not support
_COUNTED = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


@dataclass(frozen=True)
class Wanted:
    """What `load_checkpoint` loads besides counters and the schedule."""

    states: bool  # the optimizer's states, and the random states
    weights: Weights  # the weights


class Checkpoints:
    """The methods of an engine that save and load."""

    module: nn.Module
    _training: Any
    _counters: Any

    @property
    def handle(self) -> Handle:
        """The handle of the compiled model."""
        raise NotImplementedError

    # -- checkpoints --------------------------------------------------------------------------------------------------
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything that a run needs to continue, into the folder `tag` ("global_step100") of `save_dir`; return
        True.

        See `zgraph.api.handle.Handle.save_checkpoint`. Within a step, the gradients of its micro-batches so far are not
        saved, with a warning: a run that loads the checkpoint begins this step anew. The states of an optimizer that plans
        do not support are saved per rank, and can only be loaded on the same number of ranks. All ranks must call it.
        """
        if not save_dir:
            raise ValueError("save_checkpoint needs a folder: save_dir is empty")
        if not save_latest:
            raise UnsupportedError(
                "save_checkpoint does not support save_latest=False",
                why="the file latest names the newest complete checkpoint, and readers rely on it",
                hint="save into another folder; load_checkpoint(tag=…) loads any by name",
            )
        counters, scheduler = self._counters, self._training.scheduler
        own = {name: getattr(counters, name) for name in _COUNTED}
        if self.managed_gradient_accumulation():  # type: ignore[attr-defined]
            own["micro_steps"] -= counters.micro_steps % self._batch.parts  # type: ignore[attr-defined]
        if callable(getattr(scheduler, "state_dict", None)):
            own["lr_scheduler"] = _plain(scheduler.state_dict())
        client = {**(client_state or {}), _OURS: own}
        if not self._training.planned and self._training.optimizer is not None:
            own["optimizer"] = {"type": type(self._training.optimizer).__name__, "ranks": comm.get_world_size()}
            client[_STATES] = client_optimizer.states_of(self._training.optimizer)
        chosen = f"global_step{counters.global_steps}" if tag is None else str(tag)
        with self._without_gradients():
            self.handle.save_checkpoint(save_dir, chosen, client, frozen=not exclude_frozen_parameters)
        return True

    @contextlib.contextmanager
    def _without_gradients(self) -> Iterator[None]:
        """Set the gradients of an unfinished step aside while the block runs, with a warning, and restore them
        afterwards."""
        waiting = [(p, p.grad) for p in self.module.parameters() if p.grad is not None]
        if waiting and comm.get_rank() == 0:
            logger.warning(
                "a checkpoint within a step: the gradients of its micro-batches so far are not in it, and a run that loads it begins this step anew"
            )
        for param, _ in waiting:
            param.grad = None
        try:
            yield
        finally:
            for param, grad in waiting:
                param.grad = grad

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Continue from a checkpoint written by zgraph or by DeepSpeed (ZeRO 0 to 3, universal).

        Returns (the checkpoint's path, the client state), or (None, None) with a warning if `load_dir` names none. Unless
        `load_optimizer_states`, the optimizer's states and the random states stay as they are; with `load_module_only` so do
        counters and schedule. If `load_module_strict` is False, weights are loaded that both have by the same name; a
        warning names the others, of which the model's stay as they are. `custom_load_fn(src=state_dict, dst=model)` loads
        them itself, of whole weights as they were saved, into whole parameters, of which those of rank 0 count; the optimizer's
        states are loaded by name and shape. A model in pipeline stages, or with divided weights, is cut in its first call:
        before it, weights, counters and the schedule are loaded at once, and the optimizer's and random states when the model
        is cut. All ranks must call it. Raises `CheckpointError`, and then has changed nothing but what `custom_load_fn` has.
        """
        chosen = tag if tag is None else str(tag)
        if chosen is None and not _names_one(Path(load_dir)):
            logger.warning("%s has no file latest, and no tag is given: nothing is loaded", load_dir)
            return None, None
        whole = load_optimizer_states and not load_module_only
        weights: Weights = "all" if load_module_strict else "some"
        if custom_load_fn is not None:
            self._load_weights(Path(load_dir), chosen, custom_load_fn)
            weights = "none"

        def go_on() -> tuple[Path, dict[str, Any]]:
            client = self._read(Path(load_dir), chosen, Wanted(states=whole, weights=weights))
            own, states = client.pop(_OURS, None), client.pop(_STATES, None)
            if whole and not self._training.planned and self._training.optimizer is not None:
                client_optimizer.load(self._training.optimizer, (own or {}).get("optimizer"), states)
            if not load_module_only:
                counts = own if isinstance(own, Mapping) else self._derived(Path(load_dir), chosen, whole)
                self._count_on(counts, scheduler=load_lr_scheduler_states)
                if not whole and load_lr_scheduler_states:
                    self._set_rates()
                elif whole and self._training.planned and self._training.optimizer is not None:
                    self._restore_rates(Path(load_dir), chosen, own is not None)
            return self.handle.saver.last.folder, client  # type: ignore[union-attr]

        deferred = self.handle.deferred
        if deferred is None:
            folder, client = go_on()
        else:
            source, client = peek(deferred.everyone, Path(load_dir).absolute(), chosen)
            folder, own, _ = source.folder, client.pop(_OURS, None), client.pop(_STATES, None)
            if weights != "none":
                _write_weights(self.module, source)
            if isinstance(own, Mapping) and not load_module_only:
                self._count_on(own, scheduler=load_lr_scheduler_states)
                if load_lr_scheduler_states:
                    self._set_rates()
            self.handle.when_placed(lambda: go_on() and None)
        return str(Path(load_dir) / chosen if chosen is not None else folder), client

    def _load_weights(self, load_dir: Path, tag: str | None, custom_load_fn: Callable[..., Any]) -> None:
        """Let the script's function load the weights of a checkpoint. Raises `UnsupportedError` for a model that is in stages."""
        handle = self.handle
        if any(p.is_meta for p in self.module.parameters()):
            raise UnsupportedError(
                "load_checkpoint does not support custom_load_fn for a model that is in stages",
                why="no rank has the parameters of other stages, and so none could load all of them",
                hint="load before the first step, when each rank has the whole model; or leave custom_load_fn out",
            )
        everyone = handle.runtime.everyone if handle.deferred is None else handle.deferred.everyone
        source, _ = peek(everyone, load_dir.absolute(), tag)
        state = {n.removeprefix(MODEL): source.whole(n) for n in source.tensors if n.startswith(MODEL)}
        self.load_module_state_dict(state, custom_load_fn=custom_load_fn)

    def _read(self, load_dir: Path, tag: str | None, wanted: Wanted) -> dict[str, Any]:
        """Load what is wanted; return the client state."""
        runtime = self.handle.runtime
        self.handle.saver.wait()
        client = dict(
            load(
                runtime,
                load_dir.absolute(),
                tag,
                fallback=False,
                optimizer=True if wanted.states else "keep",
                client_state=None,
                weights=wanted.weights,
            )
        )
        runtime.updater.settle()
        self._counters.skipped_before = runtime.updater.outcomes.skipped()
        return client

    def _derived(self, load_dir: Path, tag: str | None, whole: bool) -> dict[str, Any]:
        """Return the counters and the schedule's position for a checkpoint that no engine of zgraph wrote: it has none, and
        they are derived from the number of steps that it records."""
        runtime = self.handle.runtime
        steps, skipped, samples = runtime.updates, self._counters.skipped_before, runtime.samples
        if not whole:  # (the run time goes on from its own)
            known = peek(runtime.everyone, load_dir.absolute(), tag)[0].known
            steps, skipped, samples = known.steps or 0, known.skipped, known.samples or 0
        own = {
            "global_steps": steps,
            "global_samples": samples or steps * self._batch.total,  # type: ignore[attr-defined]
            "skipped_steps": skipped,
            "micro_steps": steps * self._batch.parts,  # type: ignore[attr-defined]
        }
        if hasattr(self._training.scheduler, "last_batch_iteration"):
            own["lr_scheduler"] = {"last_batch_iteration": steps - skipped - 1}
        return own

    def _count_on(self, own: Mapping[str, Any], *, scheduler: bool) -> None:
        for name in _COUNTED:
            setattr(self._counters, name, own[name])
        lr_scheduler = self._training.scheduler
        saved = own.get("lr_scheduler")
        if not scheduler or lr_scheduler is None:
            return
        position = next((name for name in ("last_batch_iteration", "last_epoch") if hasattr(lr_scheduler, name)), None)
        if saved is not None and (position is None or position in saved):
            lr_scheduler.load_state_dict(dict(saved))
        else:
            logger.warning("the checkpoint says nothing of a %s: it begins anew", type(lr_scheduler).__name__)

    def _set_rates(self) -> None:
        """Set the rates of the groups to those of the loaded schedule. (Otherwise they come with the optimizer's
        states.)"""
        scheduler = self._training.scheduler
        if isinstance(scheduler, Scheduler):
            scheduler.step(scheduler.last_batch_iteration)
        elif callable(getattr(scheduler, "get_last_lr", None)):
            for group, rate in zip(self._training.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate

    def _restore_rates(self, load_dir: Path, tag: str | None, ours: bool) -> None:
        """Give the groups the checkpoint's rates, as DeepSpeed does. (The run time takes over numbers of an optimizer that is the plan's alone: a
        schedule's rate would be that of its beginning for a step.)"""
        if not ours or self._training.scheduler is not None:
            known = peek(self.handle.runtime.everyone, load_dir.absolute(), tag)[0].known
            restore_rates(self._training.optimizer.param_groups, known)

    # -- state dicts ----------------------------------------------------------------------------------------------------
    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the model's own state dict, whose shards are DTensors; see `torch.nn.Module.state_dict`."""
        into: dict[str, Any] = {} if destination is None else {"destination": destination}
        state: dict[str, Any] = self.module.state_dict(prefix=prefix, keep_vars=keep_vars, **into)
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Iterable[nn.Parameter] | None = None,
        allowed_missing_keys: Iterable[str] | None = None,
    ) -> None:
        """Load the model's weights, of a state dict or of one under "module": whole tensors, equal on all ranks, or shards.

        `custom_load_fn(src=state_dict, dst=model)` loads them itself, into whole parameters, of which those of rank 0 count. Otherwise nothing
        has to be fetched, whatever `fetch_z3_params` and `z3_params_to_fetch` say. If `strict`, names may be missing that are in
        `allowed_missing_keys`, and no others. All ranks must call it. Raises `CheckpointError` for others, before anything is loaded.
        """
        state = checkpoint.get("module", checkpoint)
        if fetch_z3_params or z3_params_to_fetch is not None:
            no_effect(
                "load_module_state_dict(fetch_z3_params, z3_params_to_fetch)",
                "each rank takes its shards of whole tensors",
            )
        if custom_load_fn is not None:
            with GatheredParameters(self.module, modifier_rank=0):
                custom_load_fn(src=state, dst=self.module)
            return
        if strict and allowed_missing_keys is not None:
            names = self.module.state_dict().keys()
            missing, unknown = sorted(names - state.keys() - set(allowed_missing_keys)), sorted(state.keys() - names)
            if missing or unknown:
                raise CheckpointError(
                    "the state dict is of another model",
                    why=f"missing, besides those that may be: {missing}; not the model's: {unknown}",
                    hint="strict=False loads what there is",
                )
            strict = False
        load_whole(self.module, state, strict=strict)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Load a state dict that the engine's `state_dict` returned, whose names begin with "module."."""
        if assign:
            raise UnsupportedError(
                "an engine's load_state_dict does not support assign=True", hint="load without assign"
            )
        prefix = "module."
        self.load_module_state_dict({n.removeprefix(prefix): v for n, v in state_dict.items()}, strict)

    def consolidated_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """Return the whole weights in the host's memory on rank 0, and None on the others. All ranks must call it.

        Raises `UnsupportedError` for a model in stages.
        """
        if any(p.is_meta for p in self.module.parameters()):
            raise UnsupportedError(
                "one rank can't hold the whole weights of a pipeline",
                why="no rank has those of other stages",
                hint="engine.module.save_pretrained(dir) writes them, and gathers nothing",
            )
        first = comm.get_rank() == 0
        weights: dict[str, torch.Tensor] = {}
        whole: dict[int, torch.Tensor] = {}
        for name, value in self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters).items():
            if not isinstance(value, torch.Tensor):
                continue
            if id(value) not in whole:
                gathered = value.full_tensor() if isinstance(value, DTensor) else value
                whole[id(value)] = gathered.detach().cpu().clone() if first else gathered.new_empty(0)
            if first:
                weights[name] = whole[id(value)]
        return weights if first else None

    _zero3_consolidated_16bit_state_dict = consolidated_state_dict
    _consolidated_16bit_state_dict = consolidated_state_dict

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole weights into one file on rank 0, in the dtype of the model; return True. All ranks must call
        it.

        `engine.module.save_pretrained` writes safetensors, and gathers no weights on one rank.
        """
        state = self.consolidated_state_dict(exclude_frozen_parameters)
        path = Path(save_dir)
        failed: list[str | None] = [None]
        if state is not None:
            try:
                path.mkdir(parents=True, exist_ok=True)
                torch.save(state, path / save_filename)
            except OSError as error:
                failed = [f"{type(error).__name__}: {error}"]
        if comm.get_world_size() > 1:
            comm.broadcast_object_list(failed, src=0)
        if failed[0] is not None:
            raise CheckpointError("the weights could not be saved", where=str(path / save_filename), why=failed[0])
        return True

    save_fp16_model = save_16bit_model


def _write_weights(model: nn.Module, source: Source) -> None:
    """Write a checkpoint's weights into a model that is not cut yet.

    Only weights of the same name and shape are written: when the model is cut, the whole checkpoint is loaded and
    checked.
    """
    with torch.no_grad():
        for name, param in model.named_parameters(remove_duplicate=False):
            saved = source.tensors.get(MODEL + name)
            if saved is not None and tuple(saved.shape) == tuple(param.shape) and not param.is_meta:
                param.copy_(source.whole(MODEL + name))


def _names_one(folder: Path) -> bool:
    """Return whether a folder names its latest checkpoint, or is a checkpoint itself."""
    named = any((folder / name).exists() for name in ("latest", "latest_universal"))
    return named or any(folder.glob("*model_states.pt")) or (folder / ".metadata").exists()


def _plain(value: Any) -> Any:
    """Return a scheduler's state without functions, which cannot be saved: the scheduler that loads it has its own."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if not callable(v)}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
