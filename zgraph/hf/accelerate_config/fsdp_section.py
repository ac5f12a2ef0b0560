"""The FSDP section of a file of `accelerate config`, of either version, as fields of a plan."""

from __future__ import annotations

from typing import Any

from zgraph.deepspeed.plan_draft import Draft
from zgraph.deepspeed.report import shown
from zgraph.hf.accelerate_config.read import truth
from zgraph.names import did_you_mean

_STRATEGIES = (
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "HYBRID_SHARD_ZERO2",
)  # in torch's order, from 1
_ZERO = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
_WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_WHOLE = "each rank keeps whole weights, of which FSDP frees its part between steps"
_START = (
    "start ranks with torchrun, zgraph launch, or accelerate launch --multi_gpu: by this file it would wrap the model"
)


def key_of(name: str) -> str:
    return f"fsdp_config.fsdp_{name}"


def read_fsdp(draft: Draft) -> None:
    """Set the plan's fields for the section `fsdp_config`."""
    draft.say("distributed_type", "applied", f"the plan divides the weights, by fsdp_config; {_START}")
    version = draft.get(key_of("version"), 1)
    if version not in (1, 2):
        draft.refuse(key_of("version"), f"there is no version {version}", "1 or 2")
        return
    said = f"the section is read as FSDP {version} has it"
    draft.say(
        key_of("version"), "equivalent", said if draft.get(key_of("version")) else f"{said}: accelerate's default"
    )
    zero = _of_version_1(draft) if version == 1 else _of_version_2(draft)
    _offload(draft, zero)
    _wrapping(draft)
    _state_dicts(draft, version)
    _checkpointing(draft, version)


def _named(draft: Draft, key: str, names: tuple[str, ...]) -> str | None:
    """Return one of `names`, which a key gives by name or by number from 1; None, and refused, if it gives none."""
    value = draft.get(key)
    name = str(value).upper().removeprefix("_")
    if name.isdigit() and 0 < int(name) <= len(names):
        return names[int(name) - 1]
    if name in names:
        return name
    draft.refuse(key, f"{shown(value)} is none of its values", did_you_mean(str(value), names))
    return None


# -- what is sharded --------------------------------------------------------------------------------------------------------
def _of_version_1(draft: Draft) -> int | None:
    """Set the ZeRO stage and the mesh, and return the stage; None if it is refused."""
    key, other = key_of("sharding_strategy"), key_of("reshard_after_forward")
    note = ""
    if draft.get(key) is None and draft.get(other) is not None:
        key, other = other, key
        note = "accelerate 1.15 reads this key for FSDP 2 alone, and trains FULL_SHARD whatever it says"
    elif draft.get(other) is not None:
        draft.say(other, "no effect here", "fsdp_sharding_strategy says it")
    given = draft.get(key)
    strategy = "FULL_SHARD" if given is None else _named(draft, key, _STRATEGIES)
    if strategy is None:
        return None
    zero = _ZERO[strategy]
    notes = [note if strategy != "FULL_SHARD" else "", _WHOLE if zero == 2 else ""]
    if given is None:
        notes.append("accelerate's default")
    draft.apply(key, "zero", zero, "; ".join(filter(None, notes)))
    if strategy.startswith("HYBRID"):
        _hybrid(draft, key, zero)
    return zero


def _hybrid(draft: Draft, key: str, zero: int) -> None:
    """Set a mesh whose shards are within a machine."""
    machines = draft.get("num_machines", 1)
    if machines < 1 or draft.world % machines:
        draft.refuse("num_machines", f"{draft.world} ranks can't be divided over {machines} machines", "another number")
        return
    mesh = {"replicate": machines, "dp": draft.world // machines}
    draft.fields["mesh"] = mesh
    draft.origins["mesh"] = key
    draft.say(key, "applied", f"zero = {zero}, mesh = {shown(mesh)}: shards within a machine, and a copy on each")
    if draft.get("num_machines") is not None:
        draft.say("num_machines", "applied", f"mesh.replicate = {machines}")


def _of_version_2(draft: Draft) -> int | None:
    """Set the ZeRO stage, and return it; None if it is refused."""
    if draft.get(key_of("sharding_strategy")) is not None:
        draft.say(key_of("sharding_strategy"), "no effect here", "FSDP 2 has fsdp_reshard_after_forward in its place")
    key = key_of("reshard_after_forward")
    reshard = truth(draft.get(key, True))
    if not isinstance(reshard, bool):
        draft.refuse(key, f"{shown(reshard)} is neither true nor false", "true for FULL_SHARD, false for SHARD_GRAD_OP")
        return None
    note = "" if reshard else _WHOLE
    draft.apply(key, "zero", 3 if reshard else 2, note if draft.get(key) is not None else "accelerate's default")
    return 3 if reshard else 2


def _offload(draft: Draft, zero: int | None) -> None:
    key = key_of("offload_params")
    given = draft.get(key)
    if given is None or zero is None:
        return
    if not given:
        draft.say(key, "equivalent", "nothing is offloaded")
    elif zero != 3:
        draft.refuse(key, f"the plan's zero is {zero}: weights stay whole on the device", "FULL_SHARD; or leave it out")
    else:
        note = 'states of a plan\'s own optimizer go there as well with offload = {optimizer = "cpu"}'
        draft.apply(key, "offload.parameters", "cpu", note)


# -- the rest ---------------------------------------------------------------------------------------------------------------
def _wrapping(draft: Draft) -> None:
    key = key_of("auto_wrap_policy")
    if draft.get(key) is not None and _named(draft, key, _WRAPS) is not None:
        draft.say(key, "no effect here", "modules are not wrapped: each parameter is gathered before its own first use")
    key = key_of("backward_prefetch")
    if draft.get(key) is None:
        return
    said = {
        "BACKWARD_PRE": "gathers start ahead of their use: prefetch in a plan says how far",
        "BACKWARD_POST": "how early gathers start is decided by forecast times; prefetch in a plan bounds it",
        "NO_PREFETCH": "gathers overlap with computing; prefetch = {enabled = false} in a plan turns it off",
    }
    name = _named(draft, key, _PREFETCHES)
    if name is not None:
        draft.say(key, "equivalent" if name == "BACKWARD_PRE" else "no effect here", said[name])


def _state_dicts(draft: Draft, version: int) -> None:
    key = key_of("state_dict_type")
    name = _named(draft, key, _STATE_DICTS) if draft.get(key) is not None else None
    if name == "LOCAL_STATE_DICT" and version == 2:
        draft.refuse(key, "FSDP 2 has none", "SHARDED_STATE_DICT or FULL_STATE_DICT")
    elif name == "SHARDED_STATE_DICT":
        draft.say(key, "equivalent", "checkpoints are shards, which load on any number of ranks")
    elif name is not None:
        said = (
            "checkpoints are shards; whole weights: save_pretrained, accelerator.get_state_dict, zgraph.full_state_dict"
        )
        draft.say(key, "no effect here", said)


def _checkpointing(draft: Draft, version: int) -> None:
    key, away = key_of("activation_checkpointing"), key_of("activation_checkpointing_offload")
    given: Any = draft.get(key)
    if given:
        draft.apply(
            key, "recompute", "full", "all but each layer's inputs; recompute in a plan takes patterns of modules"
        )
    elif given is not None:
        draft.say(key, "equivalent", "it asks for nothing")
    if draft.get(away) is None:
        return
    if not draft.get(away):
        draft.say(away, "equivalent", "it asks for nothing")
    elif not given or version != 2:
        why = "accelerate has it with FSDP 2 and fsdp_activation_checkpointing alone"
        draft.refuse(away, why, "fsdp_version: 2 and fsdp_activation_checkpointing: true")
    else:
        draft.apply(away, "offload.activations", "cpu")
