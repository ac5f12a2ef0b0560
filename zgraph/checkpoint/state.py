"""The contents of a compiled model's checkpoint: its tensors by name, and what is known of the run besides.

A parameter is saved under every name it has, so that plain PyTorch finds it. Buffers are saved by rank 0; in a
pipeline, a buffer that a stage's forward changes is saved by that stage. Optimizer states are saved by the names of
parameters, whatever groups they are in.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zgraph.checkpoint.source import MODEL, OPTIMIZER
from zgraph.errors import CheckpointError, StepError
from zgraph.torch_compat.dtensors import detached
from zgraph.update.build_update import MASTER
from zgraph.update.owned_parameters import mesh_of
from zgraph.update.resume import Known

if TYPE_CHECKING:
    from zgraph.runtime.runtime import Runtime

WORDS = 624  # of 32 bits, in a Mersenne twister


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong in checkpoints, under every name they have."""
    buffers = {}
    for path, child in module.named_modules(remove_duplicate=False):
        for key, buffer in child._buffers.items():
            if buffer is not None and not buffer.is_meta and key not in child._non_persistent_buffers_set:
                buffers[f"{path}.{key}" if path else key] = buffer
    return buffers


def extra_states(module: nn.Module) -> dict[str, Any]:
    """Return what modules' own `get_extra_state` returns, by the modules' paths."""
    return {
        path: child.get_extra_state()
        for path, child in module.named_modules()
        if type(child).get_extra_state is not nn.Module.get_extra_state
    }


def frozen_of(runtime: Runtime) -> list[str]:
    """Return the parameters, under every name they have, that are not trained and have no optimizer state. The result
    is the same on all ranks of a stage."""
    optimizer = runtime.updater.optimizer
    if optimizer is not None:
        runtime.updater.make_states()
    trained = optimizer.state if optimizer is not None else {}
    named = runtime.module.named_parameters(remove_duplicate=False)
    return [name for name, param in named if not param.requires_grad and not trained.get(param)]


def tensors_of(runtime: Runtime, left_out: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Return what this rank writes, by names in the checkpoint: the model's own tensors, no copies. A part that several
    ranks hold is written by one of them, with bytes balanced between them; a tensor that is no DTensor by the first
    rank. `left_out`: names of weights that no rank writes."""
    shards, optimizer = runtime.shards, runtime.updater.optimizer
    beyond = set(left_out)
    tensors = {MODEL + n: detached(t) for n, t in of_module(runtime).items() if n not in beyond}
    if optimizer is not None:
        runtime.updater.make_states()
        names = {id(p): n for n, p in shards.params().items() if runtime.counts(n)}
        for param, param_state in optimizer.state.items():
            if id(param) in names:  # (else it was replaced, or is another stage's to write)
                tensors |= {f"{OPTIMIZER}{names[id(param)]}.{key}": value for key, value in param_state.items()}
    tensors |= synchronized(runtime, tensors)
    loads: dict[int, list[int]] = {}
    apart = {OPTIMIZER + n for n in runtime.updater.rounds.apart()}  # (those of a parameter belong together)
    return {n: t for n, t in tensors.items() if is_mine(t, runtime.mesh, loads, balanced=n not in apart)}


def synchronized(runtime: Runtime, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what is saved, of the tensors `held`, in place of weights that each rank has of its own: the last that all
    ranks had."""
    tensors: dict[str, torch.Tensor] = {}
    common = runtime.updater.rounds.synchronized()
    names: dict[int, list[str]] = {}
    for name, param in runtime.module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    for name, weight in common.items():
        tensors |= {MODEL + n: weight for n in names[id(runtime.shards.params()[name])]}
        tensors[f"{OPTIMIZER}{name}.{MASTER}"] = weight
    return {n: t.detach().to(held[n].dtype) for n, t in tensors.items() if n in held}


def of_module(runtime: Runtime) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that the ranks of this stage write (all of them without a pipeline), under
    every name they have."""
    counted = {id(p) for n, p in runtime.shards.params().items() if runtime.counts(n)}
    params: dict[str, torch.Tensor] = {
        n: p for n, p in runtime.module.named_parameters(remove_duplicate=False) if id(p) in counted
    }
    buffers = persistent_buffers(runtime.module)
    first = {id(b): n for n, b in reversed(list(runtime.module.named_buffers(remove_duplicate=False)))}
    return params | {n: b for n, b in buffers.items() if runtime.has_buffer(first[id(b)])}


def is_mine(
    tensor: torch.Tensor, mesh: DeviceMesh | None, loads: dict[int, list[int]], *, balanced: bool = True
) -> bool:
    """Return whether this rank, among those of a stage's mesh, writes its part of the tensor. `loads`: the bytes
    assigned to each replica up to now, by the number of replicas; the tensor's are added. What is not `balanced` is
    written by the first replica."""
    if mesh is None:
        return True
    if not isinstance(tensor, DTensor):
        return not any(mesh.get_coordinate() or ())
    replica, replicas = 0, 1
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            replica = replica * tensor.device_mesh.size(dim) + tensor.device_mesh.get_local_rank(dim)
            replicas *= tensor.device_mesh.size(dim)
    load = loads.setdefault(replicas, [0] * replicas)
    chosen = load.index(min(load)) if balanced else 0
    load[chosen] += tensor.numel() * tensor.element_size()
    return chosen == replica


def refuse_unsaved(runtime: Runtime) -> None:
    """Raise `StepError` where gradients wait for an update: no checkpoint holds them, and they would be lost."""
    waiting = [n for n, p in runtime.shards.params().items() if p.grad is not None]
    if runtime.updater.optimizer is not None and waiting:
        raise StepError(
            f"a checkpoint can't be saved between backward() and step(): {len(waiting)} gradients wait ({waiting[0]}, …)",
            why="checkpoints hold no gradients: they would be lost",
            hint="save after model.step(); or zero the gradients first, if they are not wanted",
        )


def known_of(runtime: Runtime, left_out: Collection[str] = ()) -> Known:
    """Return what is known of a run besides its tensors."""
    updater = runtime.updater
    groups = [
        {k: v for k, v in g.items() if k != "params"}
        for g in (updater.optimizer.param_groups if updater.optimizer else ())
    ]
    scale = {k: v.item() for k, v in updater.states.of_scale().items()}
    skipped = updater.states.skipped()
    return Known(
        steps=runtime.updates,
        skipped=0 if skipped is None else int(skipped),
        samples=runtime.samples,
        groups=groups,
        loss_scale=scale or None,
        plan=runtime.plan.model_dump(mode="json"),
        programs=dict(runtime.votes.digests),
        mesh=mesh_of(runtime.sizes, updater.held),
        world=max(1, len(runtime.everyone.ranks)),
        left_out=list(left_out),
    )


# -- random states --------------------------------------------------------------------------------------------------
def random_states(device: torch.device) -> dict[str, Any]:
    """Return the random states of torch, Python, NumPy and this rank's device, as JSON."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    states = {
        "torch": base64.b64encode(bytes(torch.get_rng_state().tolist())).decode(),
        "python": [version, list(numbers), gauss],
        "numpy": [str(name), [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
    }
    if device.type == "cuda":
        states["cuda"] = base64.b64encode(bytes(torch.cuda.get_rng_state(device).tolist())).decode()
    return states


class RandomStates:
    """Saved random states, checked on construction so that `restore()` does not fail. Raises `CheckpointError` for what
    is no random state."""

    def __init__(self, saved: dict[str, Any], device: torch.device) -> None:
        self.device = device
        try:
            self.torch = _bytes(saved["torch"])
            if self.torch.numel() != torch.get_rng_state().numel():
                raise ValueError(f"torch's has {self.torch.numel()} bytes")
            torch.Generator().set_state(self.torch)
            version, (*words, position), gauss = saved["python"]
            self.python = (version, (*_twister(words, position), position), None if gauss is None else float(gauss))
            random.Random().setstate(self.python)
            name, words, position, has_gauss, cached = saved["numpy"]
            if has_gauss not in (0, 1):
                raise ValueError(f"has_gauss is {has_gauss!r}"[:80])
            keys = np.array(_twister(words, position), dtype=np.uint32)
            self.numpy = (name, keys, position, has_gauss, float(cached))
            np.random.RandomState().set_state(self.numpy)  # type: ignore[arg-type]
            self.cuda = _bytes(saved["cuda"]) if "cuda" in saved and device.type == "cuda" else None
            if self.cuda is not None:
                torch.Generator(device).set_state(self.cuda)
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise CheckpointError(
                "the random states of the checkpoint can't be read", why=f"{type(error).__name__}: {error}"[:300]
            ) from None

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # type: ignore[arg-type]
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def _twister(words: Any, position: Any) -> list[int]:
    """Return the words of a Mersenne twister's state. Raises `ValueError` for a bad word or position: NumPy would read
    outside of them."""
    sound = len(words) == WORDS and all(type(w) is int and 0 <= w < 2**32 for w in words)
    if not sound or type(position) is not int or not 0 <= position <= WORDS:
        raise ValueError(f"{len(words)} words, position {position!r}"[:80])
    return list(words)
