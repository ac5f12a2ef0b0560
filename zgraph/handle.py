"""`model.zgraph`: what a user asks of a compiled model, and how the model itself is made to run compiled."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zgraph.compiled import StepProgram
from zgraph.errors import ModelError
from zgraph.plan import Plan
from zgraph.report import Report
from zgraph.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable

# What a compiled module carries on top of its class, unless it owns such a name already.
_METHODS = ("no_sync",)


class Handle:
    """What is known of a compiled module, and what can be asked of it: `model.zgraph`."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @property
    def plan(self) -> Plan:
        """The plan that the model runs by now (see `recompile`)."""
        return self.runtime.plan

    @property
    def mesh(self) -> DeviceMesh | None:
        """The device mesh; None in one process without a process group."""
        return self.runtime.mesh

    @property
    def programs(self) -> dict[str, StepProgram]:
        """The programs made so far, by name: "train0", "eval1", … in the order of their first call.

        `.history()` of one gives the program after every pass, `.executables()` what of it is compiled, with its source.
        """
        return {step.name: step for entry in self.runtime.entries.values() for step in entry.programs()}

    def report(self) -> Report:
        """What was compiled: layouts, passes, collectives, and the kernels with the operators that each fused."""
        return Report(self.runtime)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the next one outside reduces the sum.

        At stages 0 and 1 `.grad` is meanwhile a DTensor of placement `Partial("avg")`: this rank's own sum. Stages 2
        and 3 keep only shards of gradients, so they reduce each time, inside as well; the numbers are the same.
        """
        with self.runtime.no_sync():
            yield

    def recompile(self, plan: Plan) -> None:
        """Run the same weights by another plan (another stage, backend or passes) on the same mesh.

        All ranks must call it. Programs are compiled again at the next calls; parameters stay the same objects, so
        optimizers keep working. Raises `ModelError` if the mesh or the layout of parameters would be another (stages 1
        to 3 share one), `RankMismatchError` if ranks give different plans.
        """
        from zgraph.sharding import layout

        old = self.runtime
        sizes = plan.resolve_mesh(old.mesh.size() if old.mesh is not None else 1)
        if sizes != old.sizes:
            raise ModelError(
                f"recompile keeps the mesh {old.sizes}, the plan has {sizes}",
                hint="compile a fresh model, and load a state dict",
            )
        if layout(old.module, sizes, plan.zero, plan.param_persistence_threshold) != old.shards.specs:
            raise ModelError(
                "the plan lays parameters out in another way",
                why="an optimizer holds the parameters as they are now",
                hint="stages 1, 2 and 3 share a layout; for stage 0 or another threshold compile a fresh model, and load a state dict",
            )
        old.agreement.vote("the plan of recompile", plan.hash())
        self.runtime = Runtime(
            old.module, old.forward_function, plan, sizes, old.mesh, old.shards, old.device, old.agreement
        )


def attach(module: nn.Module, runtime: Runtime) -> Handle:
    """Let the module's own `forward` run compiled. Its class and its parameters' names stay."""
    handle = Handle(runtime)
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return handle.runtime(*args, **kwargs)

    for name in _METHODS:
        if not hasattr(module, name):
            module.__dict__[name] = getattr(handle, name)
    module.__dict__["zgraph"] = handle
    module.__dict__["forward"] = forward
    module.__dict__["__deepcopy__"] = functools.partial(_deepcopy, module)
    module.__dict__["__reduce_ex__"] = _refuse_pickle
    return handle


def is_compiled(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("zgraph"), Handle)


def _deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A compiled copy with weights of its own; its programs are compiled when it is first called."""
    handle: Handle = module.__dict__["zgraph"]
    names = [n for n in ("zgraph", "forward", "__deepcopy__", "__reduce_ex__", *_METHODS) if _is_ours(module, n)]
    ours = {n: module.__dict__.pop(n) for n in names}
    try:
        twin: nn.Module = copy.deepcopy(module, memo)
    finally:
        module.__dict__.update(ours)
    old = handle.runtime
    shards = old.shards.adopt(twin)
    attach(
        twin,
        Runtime(twin, old.forward_function, old.plan, old.sizes, old.mesh, shards, old.device, old.agreement),
    )
    return twin


def _is_ours(module: nn.Module, name: str) -> bool:
    value = module.__dict__.get(name)
    return value is not None and (name not in _METHODS or getattr(value, "__self__", None) is module.__dict__["zgraph"])


def _refuse_pickle(protocol: int) -> Callable[..., Any]:
    raise ModelError(
        "a compiled model can't be pickled",
        why="its process groups and kernels belong to this process",
        hint="save model.state_dict() instead; compile the model again after loading",
    )
