"""An optimizer of a kind that plans do not support, which steps by itself: the script's own, or torch's by its name in the configuration.

Its states are saved per rank, and loaded on the same number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zgraph.deepspeed import comm
from zgraph.deepspeed.optimizers import TORCHS_OWN
from zgraph.errors import CheckpointError, PlanError


def torchs_own(config: Mapping[str, Any]) -> Callable[[Any], torch.optim.Optimizer] | None:
    """Return the function that makes the optimizer which a configuration names if it is one of `TORCHS_OWN`; None for
    others. The function raises `PlanError` for numbers that the optimizer does not take."""
    given = config.get("optimizer")
    section: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    kind = section.get("type")
    if kind not in TORCHS_OWN:
        return None

    def made(params: Any) -> torch.optim.Optimizer:
        numbers = dict(section.get("params") or {})
        try:
            new: torch.optim.Optimizer = getattr(torch.optim, kind)(params, **numbers)
        except (TypeError, ValueError) as error:
            raise PlanError(
                f"torch's {kind} can't be made", where="optimizer.params", why=str(error), hint="its own arguments"
            ) from error
        return new

    return made


def states_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state dict with this rank's part of each tensor."""
    state_dict = optimizer.state_dict()
    state, shards = {}, {}
    for number, values in state_dict["state"].items():
        state[str(number)] = {k: v.to_local() if isinstance(v, DTensor) else v for k, v in values.items()}
        shards[str(number)] = [k for k, v in values.items() if isinstance(v, DTensor)]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in state_dict["param_groups"]]
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    return {"state": state, "shards": shards, "groups": groups, "sizes": sizes}


def load(
    optimizer: torch.optim.Optimizer, saved_by: Mapping[str, Any] | None, states: Mapping[str, Any] | None
) -> None:
    """Load what `states_of` returned; `saved_by` names the optimizer and the number of ranks.

    Raises `CheckpointError` if the checkpoint has no states, or has those of another optimizer, other parameters or other
    shards.
    """
    name, ranks = type(optimizer).__name__, comm.get_world_size()
    if saved_by is None or states is None:
        raise _refused(f"the checkpoint has no states of {name}")
    if saved_by != {"type": name, "ranks": ranks}:
        raise _refused(
            f"the checkpoint has states of {saved_by['type']} on {saved_by['ranks']} rank(s), and this is {name} on {ranks}"
        )
    if states["sizes"] != [len(group["params"]) for group in optimizer.param_groups]:
        raise _refused(f"the groups of {name} are others than those that were saved")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = {
        int(n): {k: _shard(params[int(n)], v) if k in states["shards"][n] else v for k, v in values.items()}
        for n, values in states["state"].items()
    }
    own_groups = optimizer.state_dict()["param_groups"]
    groups = [{**mine, **saved} for mine, saved in zip(own_groups, states["groups"], strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _shard(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a state as a DTensor that is sharded like its parameter."""
    if not isinstance(param, DTensor) or value.shape != param.to_local().shape:
        raise _refused(f"a state of a parameter of sizes {list(param.shape)} has other shards: {list(value.shape)}")
    return DTensor.from_local(
        value.to(param.device), param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
    )


def _refused(what: str) -> CheckpointError:
    return CheckpointError(
        what,
        why="an optimizer that no plan has keeps its states by itself, and they are saved as each rank has them",
        hint="load_checkpoint(load_optimizer_states=False), or go on with the ranks and the ZeRO stage that saved it",
    )
