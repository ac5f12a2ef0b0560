"""Support for accelerate's Accelerator, which does not know compiled models: preparing, saving and loading them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zgraph.api.full_state_dict import as_held, full_optimizer_state, full_state_dict
from zgraph.api.uneven_batches import join_uneven_inputs, watch_batches
from zgraph.errors import CheckpointError, ModelError
from zgraph.plan.plan import Plan
from zgraph.runtime.compiled_models import is_compiled
from zgraph.torch_compat.private_names import refuse_release
from zgraph.update.optimizer import PlanOptimizer

FOLDER = "zgraph"
"""The subfolder of `save_state`'s folder with a compiled model's checkpoint; the second model's is "zgraph_1"."""


def refuse_other_engines() -> None:
    """Raise `ModelError` if accelerate was started for DeepSpeed, FSDP or Megatron-LM, in which it would wrap a compiled
    model."""
    state = sys.modules.get("accelerate.state")
    if state is None or not state.is_initialized():
        return
    refuse_release("accelerators")
    # (read where it is kept: to make an AcceleratorState, as users do, puts another distributed_type in FSDP's place)
    kind = str(state.AcceleratorState._shared_state["distributed_type"].value)
    if kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        raise ModelError(
            f"accelerate was started with distributed_type {kind}",
            where="distributed_type",
            why="it would run the model in that system's engine, around the programs that the plan makes",
            hint="zgraph plan --from-accelerate FILE -o plan.toml makes a plan of its file; start ranks with accelerate launch --multi_gpu",
        )


def refuse_dispatched(model: nn.Module) -> None:
    """Raise `ModelError` for a model whose weights or inputs accelerate's hooks move or cast in each call, as after `device_map` or
    `cpu_offload`."""
    hooks = sys.modules.get("accelerate.hooks")
    if hooks is None:
        return
    kinds = (hooks.AlignDevicesHook, hooks.CpuOffload, hooks.LayerwiseCastingHook, hooks.SequentialHook)
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        if not isinstance(hook, kinds):
            continue
        places = sorted({str(place) for place in getattr(model, "hf_device_map", {}).values()})
        spread = f" over {', '.join(places)}" if len(places) > 1 else ""
        raise ModelError(
            f"accelerate has dispatched the model{spread}",
            where=f"module {name!r}" if name else "the model itself",
            why=f"its {type(hook).__name__} moves or casts tensors in each call, in Python, which no graph can hold",
            hint=(
                "load the model without device_map, or with that of this rank's one device; offload in the plan stores what "
                "does not fit elsewhere, and zgraph.load_pretrained reads each rank's part alone. Where all weights are on one "
                "device already, accelerate.hooks.remove_hook_from_module(model, recurse=True) removes the hooks"
            ),
        )


def refuse_local_sgd() -> None:
    """Raise `ModelError` if it is accelerate's LocalSGD that enters the context manager which calls this."""
    library = sys.modules.get("accelerate.local_sgd")
    if library is not None and isinstance(sys._getframe(3).f_locals.get("self"), library.LocalSGD):
        raise ModelError(
            "accelerate's LocalSGD can't train a compiled model",
            why="ranks that hold parts of one model take each step together, and it averages models that each rank has whole",
            hint="local_steps in the plan, by which ranks or groups of them train by themselves for some steps; or leave LocalSGD out",
        )


class ForAccelerate:
    """The value of the attribute by which accelerate asks whether a model is prepared already.

    It is true for a compiled model in a process group, of one rank too. If accelerate's `mixed_precision` is set and the plan
    has no precision, asking raises `ModelError`, since accelerate would silently leave its autocast out.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __bool__(self) -> bool:
        asker = sys._getframe(1).f_locals.get("self")
        library = sys.modules.get("accelerate")
        if library is not None and isinstance(asker, library.Accelerator):
            _watch(asker)
            refuse_other_engines()
            _refuse_hook(asker)
        if self._handle.mesh is None:
            return False
        if library is not None:
            watch_batches(self._handle.forward.module, self._handle)
        state = sys.modules.get("accelerate.state")
        asked = "no" if state is None else state.AcceleratorState().mixed_precision
        if asked != "no" and self._handle.plan.precision == Plan().precision:
            raise ModelError(
                f"accelerate's mixed_precision is {asked!r}, and the plan's precision is float32",
                where="precision",
                why="a compiled model computes as its plan says",
                hint=f'precision="{asked}" in the plan, or mixed_precision="no"',
            )
        return True


def _refuse_hook(accelerator: Any) -> None:
    """Raise `ModelError` for gradients in fewer bits that accelerate's handler asks DistributedDataParallel for."""
    hook = getattr(accelerator.ddp_handler, "comm_hook", "no")
    if str(getattr(hook, "value", hook)) != "no":
        raise ModelError(
            f"accelerate's DistributedDataParallelKwargs has comm_hook={str(getattr(hook, 'value', hook))!r}",
            where="kwargs_handlers",
            why="it is for DistributedDataParallel, and a compiled model reduces its gradients as its plan says",
            hint="leave comm_hook out; wire in the plan sends gradients in fewer bits",
        )


def _watch(accelerator: Any) -> None:
    """Make an accelerator that prepares a compiled model save and load it by all ranks together, and refuse to join uneven ones."""
    if "get_state_dict" not in accelerator.__dict__:
        refuse_release("accelerators")
        for name, does in (
            ("get_state_dict", _get_state_dict),
            ("save_state", _save_state),
            ("load_state", _load_state),
            ("join_uneven_inputs", join_uneven_inputs),
        ):
            setattr(accelerator, name, functools.partial(does, accelerator, getattr(accelerator, name)))


def _compiled(accelerator: Any) -> list[nn.Module]:
    return [m for m in accelerator._models if is_compiled(m)]


def _get_state_dict(accelerator: Any, own: Callable[..., Any], model: nn.Module, unwrap: bool = True) -> Any:
    """Return whole tensors on the main process and {} on the others, as accelerate does for a model of FSDP's."""
    inner = accelerator.unwrap_model(model)
    if not is_compiled(inner) or inner.__dict__["zgraph"].mesh is None:
        return own(model, unwrap=unwrap)
    return full_state_dict(inner, ranks=[0])


def _parted(accelerator: Any) -> list[tuple[Any, nn.Module]]:
    """Return the optimizers, as accelerate wraps them, of compiled models' parameters, each with its model."""
    pairs = []
    for optimizer in accelerator._optimizers:
        param_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        pairs += [(optimizer, m) for m in _compiled(accelerator) if any(id(p) in param_ids for p in m.parameters())][:1]
    return pairs


def _without(accelerator: Any, does: Callable[[], Any]) -> Any:
    """Call a function while the accelerator's lists lack compiled models and their optimizers."""
    models, optimizers = accelerator._models, accelerator._optimizers
    ours = {id(o) for o, _ in _parted(accelerator)}
    accelerator._models = [m for m in models if not is_compiled(m)]
    accelerator._optimizers = [o for o in optimizers if id(o) not in ours]
    try:
        return does()
    finally:
        accelerator._models, accelerator._optimizers = models, optimizers


def _name(kind: str, number: int) -> str:
    return kind if number == 0 else f"{kind}_{number}"


def _save_state(accelerator: Any, own: Callable[..., Any], output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Save as accelerate does, with a checkpoint of each compiled model beside the other files, which any number of
    ranks can load."""
    models, parted = _compiled(accelerator), _parted(accelerator)

    def save(others: Any, weights: Any, folder: str) -> None:
        for number, model in enumerate(models):
            model.zgraph.save_checkpoint(folder, _name(FOLDER, number))  # type: ignore[union-attr, operator]
        for number, (optimizer, model) in enumerate(parted):
            inner = _inner(optimizer)
            if not isinstance(inner, PlanOptimizer):
                state = full_optimizer_state([model], inner, ranks=[0])
                if accelerator.is_main_process:
                    torch.save(state, os.path.join(folder, _name(f"{FOLDER}_optimizer", number)))

    hook = accelerator.register_save_state_pre_hook(save)
    try:
        return _without(accelerator, lambda: own(output_dir, *args, **kwargs))
    finally:
        hook.remove()


def _load_state(accelerator: Any, own: Callable[..., Any], input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Load as accelerate does, with the checkpoint of each compiled model that `save_state` wrote on any number of
    ranks."""
    models, parted = _compiled(accelerator), _parted(accelerator)

    def load(others: Any, folder: str) -> None:
        for number, model in enumerate(models):
            if not os.path.isdir(os.path.join(folder, _name(FOLDER, number))):
                raise CheckpointError(
                    "the folder has no state of a compiled model",
                    where=str(folder),
                    why=f"it has no folder {_name(FOLDER, number)}: it was saved of a model that was not compiled",
                    hint="model.load_checkpoint(folder, optimizer=False) for its weights; or save_state of the compiled model",
                )
            model.zgraph.load_checkpoint(folder, _name(FOLDER, number))  # type: ignore[union-attr, operator]
        for number, (optimizer, _) in enumerate(parted):
            inner = _inner(optimizer)
            if not isinstance(inner, PlanOptimizer):
                path = os.path.join(folder, _name(f"{FOLDER}_optimizer", number))
                inner.load_state_dict(as_held(torch.load(path, mmap=True, weights_only=True), inner))

    hook = accelerator.register_load_state_pre_hook(load)
    try:
        return _without(accelerator, lambda: own(input_dir, *args, **kwargs))
    finally:
        hook.remove()


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    while not isinstance(getattr(optimizer, "optimizer", None), type(None)):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]
