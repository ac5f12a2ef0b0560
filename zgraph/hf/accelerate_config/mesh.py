"""The mesh of a plan from a file of `accelerate config`: copies of shards by FSDP's strategy, and what its parallelism_config divides."""

from __future__ import annotations

import math

from zgraph.deepspeed.plan_draft import Draft
from zgraph.deepspeed.report import shown

_SIZES = {
    "dp_replicate": "replicate",
    "dp_shard": "dp",
    "cp": "cp",
    "sp": "cp",
    "tp": "tp",
}  # the dimensions' names here


def parallel_key(name: str) -> str:
    """Return the key of the size "dp_shard", "tp", … of parallelism_config."""
    return f"parallelism_config.parallelism_config_{name}_size"


def set_mesh(draft: Draft, kind: str | None) -> None:
    """Set the mesh for FSDP, DistributedDataParallel or one process."""
    if kind == "FSDP" and draft.get("parallelism_config"):
        _parallel(draft)
    elif kind is not None and "mesh" not in draft.fields:
        draft.fields["mesh"] = {"dp": draft.world}


def sizes_of(draft: Draft) -> dict[str, int] | None:
    """Return the sizes of parallelism_config by accelerate's names, 1 where it says none; None if one is refused."""
    sizes = {}
    for name in _SIZES:
        size = draft.get(parallel_key(name), 1)
        if size < 1:
            draft.refuse(parallel_key(name), f"{size} is no number of ranks", "1 or more")
        sizes[name] = int(size)
    if any(draft.is_refused(parallel_key(name)) for name in _SIZES):
        return None
    product = math.prod(sizes.values())
    if product != draft.world:
        last = next((name for name in reversed(_SIZES) if sizes[name] > 1), "dp_shard")
        draft.refuse(
            parallel_key(last),
            f"the sizes make {product} ranks, and there are {draft.world}",
            "sizes whose product is that",
        )
        return None
    return sizes


def _parallel(draft: Draft) -> None:
    if draft.get("fsdp_config.fsdp_version", 1) != 2:
        for name in draft.get("parallelism_config"):
            draft.refuse(f"parallelism_config.{name}", "accelerate has it with FSDP 2 alone", "fsdp_version: 2")
        return
    sizes = sizes_of(draft)
    if sizes is None:
        return
    if sizes["sp"] > 1:
        draft.refuse(parallel_key("sp"), "accelerate has it with DeepSpeed alone", "cp_size, which FSDP 2 has")
        return
    mesh = {here: sizes[name] for name, here in _SIZES.items() if name != "sp" and (sizes[name] > 1 or here == "dp")}
    draft.fields["mesh"] = mesh
    for name, here in _SIZES.items():
        key, size = parallel_key(name), draft.get(parallel_key(name))
        if size is None:
            continue
        draft.origins[f"mesh.{here}"] = key
        if size == 1:
            draft.say(key, "equivalent", "it asks for nothing")
        else:
            draft.say(key, "applied", f"mesh.{here} = {shown(size)}")
    if sizes["cp"] > 1:
        note = "keys and values are passed around, as torch's context parallelism does"
        draft.apply(parallel_key("cp"), "context_attention", "ring", note)
