"""Saving and loading by DeepSpeed's calls: zgraph's checkpoints are written, DeepSpeed's own are read too.

The engine's counters and its schedule's position are part of what is saved, under a key of their own beside the script's `client_state`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zgraph.checkpoint.loading import peek
from zgraph.checkpoint.source import MODEL, Source
from zgraph.deepspeed import client_optimizer, comm
from zgraph.deepspeed.full_values import load_whole
from zgraph.deepspeed.lr_schedulers import Scheduler
from zgraph.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from zgraph.api.handle import Handle

logger = logging.getLogger(__name__)

_OURS = "zgraph.deepspeed"  # the key of the engine's own part of a checkpoint's client state
_STATES = "zgraph.deepspeed.optimizer"  # and of the states of an optimizer that no plan has
_COUNTED = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


class Checkpoints:
    """What an engine saves and loads."""

    module: nn.Module
    _training: Any
    _counters: Any

    @property
    def handle(self) -> Handle:
        """What is known of the compiled model."""
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
        """Save all that a run needs to go on, into the folder `tag` ("global_step100") of `save_dir`; returns True.

        See `zgraph.api.handle.Handle.save_checkpoint`. Between a backward and the end of a step the gradients of its micro-batches so far are
        not saved, with a warning: a run that is loaded begins this step anew. States of an optimizer that no plan has are saved as each rank has
        them, for as many ranks. All ranks must call it.
        """
        if not save_dir:
            raise ValueError("save_checkpoint needs a folder: save_dir is empty")
        if not save_latest:
            raise UnsupportedError(
                "save_checkpoint(save_latest=False)",
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
        """Gradients that wait for a step are set aside, with a warning; afterwards they wait as before."""
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
        """Go on from a checkpoint of zgraph's, or of DeepSpeed's own (ZeRO 0 to 3, universal). Returns (its path, the client state), or
        (None, None) with a warning where `load_dir` names none.

        Before the first call of a model in stages, or with divided weights, its weights, counters and schedule go on at once, and states and random
        states when it is cut, in that call. A checkpoint of another model is refused, also where `load_module_strict` is False. All ranks
        must call it. Raises `CheckpointError`: then nothing was changed.
        """
        if custom_load_fn is not None:
            raise UnsupportedError(
                "load_checkpoint(custom_load_fn=…)",
                why="weights are read by each rank's shards, and no state dict is made",
                hint="engine.load_module_state_dict(state_dict) with what your function makes",
            )
        chosen = tag if tag is None else str(tag)
        if chosen is None and not _names_one(Path(load_dir)):
            logger.warning("%s has no file latest, and no tag is given: nothing is loaded", load_dir)
            return None, None
        whole = load_optimizer_states and not load_module_only

        def load() -> tuple[Path, dict[str, Any]]:
            client = dict(self.handle.load_checkpoint(load_dir, chosen, optimizer=whole))
            own, states = client.pop(_OURS, None), client.pop(_STATES, None)
            if whole and not self._training.planned and self._training.optimizer is not None:
                client_optimizer.load(self._training.optimizer, (own or {}).get("optimizer"), states)
            if not load_module_only:
                self._go_on(own if isinstance(own, Mapping) else None, scheduler=load_lr_scheduler_states)
            return self.handle.saver.last.folder, client  # type: ignore[union-attr]

        uncut = self.handle.uncut
        if uncut is None:
            folder, client = load()
        else:
            source, client = peek(uncut.everyone, Path(load_dir).absolute(), chosen)
            folder, own, _ = source.folder, client.pop(_OURS, None), client.pop(_STATES, None)
            _write_weights(self.module, source)
            if isinstance(own, Mapping) and not load_module_only:
                self._count_on(own, scheduler=load_lr_scheduler_states)
                if load_lr_scheduler_states and isinstance(self._training.scheduler, Scheduler):
                    self._training.scheduler.step(self._training.scheduler.last_batch_iteration)  # (the rates as well)
            self.handle.when_cut(lambda: load() and None)
        return str(Path(load_dir) / chosen if chosen is not None else folder), client

    def _go_on(self, own: Mapping[str, Any] | None, *, scheduler: bool) -> None:
        """Count on from a checkpoint. One that no engine of zgraph's has saved says how many steps it has had."""
        counters, runtime = self._counters, self.handle.runtime
        runtime.updater.settle()
        counters.skipped_before = runtime.updater.outcomes.skipped()
        if own is None:
            steps, skipped = runtime.updates, counters.skipped_before
            own = {
                "global_steps": steps,
                "global_samples": runtime.samples or steps * self._batch.total,  # type: ignore[attr-defined]
                "skipped_steps": skipped,
                "micro_steps": steps * self._batch.parts,  # type: ignore[attr-defined]
                "lr_scheduler": {"last_batch_iteration": steps - skipped - 1},
            }
        self._count_on(own, scheduler=scheduler)

    def _count_on(self, own: Mapping[str, Any], *, scheduler: bool) -> None:
        for name in _COUNTED:
            setattr(self._counters, name, own[name])
        held = self._training.scheduler
        saved = own.get("lr_scheduler")
        if not scheduler or held is None or saved is None:
            return
        if "last_epoch" in saved or hasattr(held, "last_batch_iteration"):
            held.load_state_dict(dict(saved))
        else:
            logger.warning("the checkpoint says nothing of a %s: it begins anew", type(held).__name__)

    # -- state dicts ----------------------------------------------------------------------------------------------------
    def module_state_dict(self, exclude_frozen_parameters: bool = False, **_: Any) -> dict[str, Any]:
        """The model's own state dict: shards, as DTensors."""
        frozen = {n for n, p in self.module.named_parameters() if not p.requires_grad}
        state = self.module.state_dict()
        return {n: v for n, v in state.items() if not (exclude_frozen_parameters and n in frozen)}

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **_: Any) -> None:
        """Load the model's weights: whole tensors, alike on all ranks, or shards. All ranks must call it."""
        load_whole(self.module, state_dict.get("module", state_dict), strict=strict)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Load what the engine's `state_dict` gave: names begin with "module."."""
        if assign:
            raise UnsupportedError("load_state_dict(assign=True) of an engine", hint="load without assign")
        prefix = "module."
        self.load_module_state_dict({n.removeprefix(prefix): v for n, v in state_dict.items()}, strict)

    def consolidated_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """The whole weights in the host's memory, on rank 0; None on the others. All ranks must call it.

        Raises `UnsupportedError` for a model in stages.
        """
        if any(p.is_meta for p in self.module.parameters()):
            raise UnsupportedError(
                "whole weights of a model in stages on one rank",
                why="no rank has those of other stages",
                hint="engine.module.save_pretrained(dir) writes them, and gathers nothing",
            )
        first = comm.get_rank() == 0
        found: dict[str, torch.Tensor] = {}
        whole: dict[int, torch.Tensor] = {}
        for name, value in self.module_state_dict(exclude_frozen_parameters).items():
            if not isinstance(value, torch.Tensor):
                continue
            if id(value) not in whole:
                gathered = value.full_tensor() if isinstance(value, DTensor) else value
                whole[id(value)] = gathered.detach().cpu().clone() if first else gathered.new_empty(0)
            if first:
                found[name] = whole[id(value)]
        return found if first else None

    _zero3_consolidated_16bit_state_dict = consolidated_state_dict
    _consolidated_16bit_state_dict = consolidated_state_dict

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole weights in the dtype that the model holds into one file, by rank 0; returns True. All ranks must call it.

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
    """Let a model that is not cut yet have a checkpoint's weights, as far as they are its own: when it is cut they are loaded, and checked."""
    with torch.no_grad():
        for name, param in model.named_parameters(remove_duplicate=False):
            saved = source.tensors.get(MODEL + name)
            if saved is not None and tuple(saved.shape) == tuple(param.shape) and not param.is_meta:
                param.copy_(source.whole(MODEL + name))


def _names_one(folder: Path) -> bool:
    """Whether a folder says which checkpoint is the latest, or is one itself."""
    named = any((folder / name).exists() for name in ("latest", "latest_universal"))
    return named or any(folder.glob("*model_states.pt")) or (folder / ".metadata").exists()


def _plain(value: Any) -> Any:
    """A scheduler's state without the functions in it, which it has itself."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if not callable(v)}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
