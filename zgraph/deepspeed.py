"""DeepSpeed's knobs of communication and of offloading, as fields of a plan.

    plan = zgraph.Plan(**communication({"stage": 3, "reduce_bucket_size": 5e8, "overlap_comm": True}), precision="bf16")
    plan = zgraph.Plan(zero=3, **offloading({"offload_optimizer": {"device": "nvme", "nvme_path": "/mnt"}}), optimizer=zgraph.AdamW())

DeepSpeed counts elements, zgraph bytes; a cap here is never exceeded, where DeepSpeed's is a wish.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zgraph.errors import PlanError
from zgraph.names import did_you_mean
from zgraph.record import short

# (key of the section) -> (field of the plan, field of its record)
_SIZES = {
    "allgather_bucket_size": ("bucket", "gather"),
    "reduce_bucket_size": ("bucket", "reduce"),
    "stage3_prefetch_bucket_size": ("prefetch", "ahead_bytes"),
    "stage3_max_live_parameters": ("prefetch", "max_bytes"),
    "stage3_max_reuse_distance": ("prefetch", "reuse_bytes"),
}
_KEYS = (*_SIZES, "stage3_param_persistence_threshold", "overlap_comm", "stage")


def communication(section: Mapping[str, Any], *, itemsize: int = 2) -> dict[str, Any]:
    """The fields of a `Plan` that mean what these keys of DeepSpeed's `zero_optimization` mean.

    `itemsize` is the bytes of an element in what is gathered and reduced: 2 for bf16 and fp16, 4 for fp32. "auto" leaves
    a key to zgraph. Raises `PlanError` for a key that is none of communication's, and for a value that is no number.
    """
    fields: dict[str, Any] = {}
    for key, value in section.items():
        if key not in _KEYS:
            raise PlanError(f"unknown key {key!r}", where=f"zero_optimization.{key}", hint=did_you_mean(key, _KEYS))
        if value == "auto":
            continue
        if key in _SIZES:
            record, field = _SIZES[key]
            fields.setdefault(record, {})[field] = _elements(key, value) * itemsize
        elif key == "overlap_comm":
            fields.setdefault("prefetch", {})["enabled"] = value
        elif key == "stage3_param_persistence_threshold":
            fields["param_persistence_threshold"] = _elements(key, value)
        else:
            fields["zero"] = value
    return fields


# What an element of a sub-group brings to the device: float32 weight and gradient, and two moments (see sub_group_size).
_UPDATED = 16
# Keys that ask for what is always so here, or for nothing.
_ALWAYS = (
    "pin_memory",
    "buffer_count",
    "buffer_size",
    "max_in_cpu",
    "fast_init",
    "pipeline_read",
    "pipeline_write",
    "pipeline",
)


def offloading(section: Mapping[str, Any], activation_checkpointing: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The field `offload` of a `Plan` that means what `offload_optimizer`, `offload_param` and `sub_group_size` of DeepSpeed's
    `zero_optimization` mean, and `cpu_checkpointing` of its `activation_checkpointing`.

    Raises `PlanError` for another key, a device that is neither "none", "cpu" nor "nvme", and "nvme" without its path.
    """
    found: dict[str, Any] = {}
    for key, value in section.items():
        if key == "sub_group_size":
            found["sub_group_bytes"] = _elements(key, value) * _UPDATED
        elif key in ("offload_optimizer", "offload_param"):
            found["optimizer" if key == "offload_optimizer" else "parameters"] = _place(key, value)
            if key == "offload_optimizer" and value and "ratio" in value:
                found["ratio"] = value["ratio"]
        else:
            known = ("offload_optimizer", "offload_param", "sub_group_size")
            raise PlanError(f"unknown key {key!r}", where=f"zero_optimization.{key}", hint=did_you_mean(key, known))
    for key, value in (activation_checkpointing or {}).items():
        if key != "cpu_checkpointing":
            raise PlanError(
                f"unknown key {key!r}",
                where=f"activation_checkpointing.{key}",
                hint="recompute says what is computed again",
            )
        found["activations"] = "cpu" if value else "none"
    return {"offload": found}


def _place(key: str, value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "none"
    unknown = [k for k in value if k not in ("device", "nvme_path", "ratio", *_ALWAYS)]
    if unknown:
        known = ("device", "nvme_path", "ratio", *_ALWAYS)
        raise PlanError(
            f"unknown key {unknown[0]!r}",
            where=f"zero_optimization.{key}.{unknown[0]}",
            hint=did_you_mean(unknown[0], known),
        )
    device = value.get("device", "none")
    if device not in ("none", "cpu", "nvme") or (device == "nvme" and not value.get("nvme_path")):
        raise PlanError(
            f"{short(dict(value))} is no place",
            where=f"zero_optimization.{key}",
            hint='"device" "cpu", or "nvme" with its "nvme_path"',
        )
    return f"nvme:{value['nvme_path']}" if device == "nvme" else str(device)


def _elements(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise PlanError(
            f"{short(value)} is no number of elements",
            where=f"zero_optimization.{key}",
            hint="a whole number, such as 5e8",
        )
    return int(value)
