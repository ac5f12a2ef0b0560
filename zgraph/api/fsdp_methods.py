"""The methods that scripts for FSDP2 call on a model (`torch.distributed.fsdp.FSDPModule`), for a compiled model.

Gathers, releases and reductions are nodes of its programs, so methods that set when or how they happen do nothing: in FSDP2 they do not change
results either. Methods that would change results do so here too, or are refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from zgraph.errors import UnsupportedError
from zgraph.program.program import DATA_DIMS

_NOTHING_TO_DO = (
    "reshard",
    "set_is_last_backward",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params",
    "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group",
    "set_unshard_in_backward",
    "set_allocate_memory_from_process_group_for_comm",
    "set_symm_mem_for_comm",
)
# (why it is refused, what to do)
_REFUSED = {
    "set_custom_all_gather": (
        "gathers are nodes of the compiled programs",
        "the plan's passes can place and change them",
    ),
    "set_custom_reduce_scatter": (
        "reductions are nodes of the compiled programs",
        "the plan's passes can place and change them",
    ),
    "set_all_reduce_hook": (
        "reductions are nodes of the compiled programs",
        "hooks of parameters (register_hook), and model.zgraph.on_gradients, are given reduced gradients",
    ),
}
METHODS = (
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_gradient_divide_factor",
    "set_reduce_scatter_divide_factor",
    "set_post_optim_event",
    "reset_iter_state",
    "unshard",
    *_NOTHING_TO_DO,
    *_REFUSED,
)


def methods_of(
    sizes: Mapping[str, int], accumulate: Callable[[bool], None], zero_grad: Callable[[], None]
) -> dict[str, Callable[..., Any]]:
    """Return the methods by name. `sizes` are those of the mesh; `accumulate(True)` makes later backward passes
    accumulate without reducing."""
    divide = functools.partial(_set_gradient_divide_factor, math.prod(sizes.get(dim, 1) for dim in DATA_DIMS))
    return {
        **dict.fromkeys(_NOTHING_TO_DO, _nothing),
        **{name: functools.partial(_refuse, name) for name in _REFUSED},
        "set_requires_gradient_sync": functools.partial(_set_requires_gradient_sync, accumulate),
        "set_requires_all_reduce": functools.partial(_set_requires_all_reduce, sizes.get("replicate", 1) > 1),
        "set_gradient_divide_factor": divide,
        "set_reduce_scatter_divide_factor": divide,
        "set_post_optim_event": _wait_for,
        "reset_iter_state": functools.partial(_reset_iter_state, zero_grad),
        "unshard": _unshard,
    }


def is_ours(method: Any) -> bool:
    """Return whether a method is one of these, not the model's own."""
    return getattr(getattr(method, "func", method), "__module__", None) == __name__


def _set_requires_gradient_sync(
    accumulate: Callable[[bool], None], requires_gradient_sync: bool, *, recurse: bool = True
) -> None:
    """Make later backward passes reduce their gradients, or accumulate without reducing as inside `no_sync`.

    Raises `UnsupportedError` with `recurse=False`, `StepError` for a model in stages.
    """
    if not recurse:
        raise UnsupportedError(
            "set_requires_gradient_sync(…, recurse=False) is of one module's own parameters",
            why="all gradients of a backward are reduced, or none",
            hint="leave recurse out",
        )
    accumulate(not requires_gradient_sync)


def _set_requires_all_reduce(replicated: bool, requires_all_reduce: bool, *, recurse: bool = True) -> None:
    """Do nothing if FSDP2 would do nothing. Raises `UnsupportedError` if only the all-reduce of a reduction would be
    put off."""
    if replicated and not requires_all_reduce:
        raise UnsupportedError(
            "set_requires_all_reduce(False) is not supported on a mesh with replicate",
            why="a compiled backward reduces gradients over all of the mesh's data dimensions, or over none",
            hint="set_requires_gradient_sync(False) lets both wait; or leave it out: the numbers are the same",
        )


def _set_gradient_divide_factor(ranks: int, factor: float) -> None:
    """Do nothing for the number of ranks that gradients are averaged over. Raises `UnsupportedError` for any other
    factor."""
    if factor != ranks:
        raise UnsupportedError(
            f"gradients are averaged over {ranks} ranks, and not divided by {factor}",
            hint=f"multiply the loss by {ranks} / {factor}",
        )


def _reset_iter_state(zero_grad: Callable[[], None]) -> None:
    """Delete the gradients of an accumulation that failed, so that it can start afresh."""
    zero_grad()


def _wait_for(event: Any) -> None:
    """Make later work wait for an event that was recorded after a user's own optimizer."""
    event.wait()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: a program gathers a weight before its first use, releases it after its last, and waits for
    reductions itself."""


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    why, hint = _REFUSED[name]
    raise UnsupportedError(f"a compiled model has no use for {name}", why=why, hint=hint)


class _Gathered:
    """The handle that `unshard(async_op=True)` returns."""

    def wait(self) -> None:
        """Do nothing: there is nothing to wait for."""


def _unshard(async_op: bool = False) -> _Gathered | None:
    """Do nothing: `zgraph.full_weights` gathers weights for other code."""
    return _Gathered() if async_op else None
