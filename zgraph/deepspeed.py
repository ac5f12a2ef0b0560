"""DeepSpeed's knobs of communication, as fields of a plan: what its `zero_optimization` section says of buckets and prefetch.

    plan = zgraph.Plan(**communication({"stage": 3, "reduce_bucket_size": 5e8, "overlap_comm": True}), precision="bf16")

DeepSpeed counts elements, zgraph bytes; a cap here is never exceeded, where DeepSpeed's is a wish.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zgraph.errors import PlanError
from zgraph.record import did_you_mean, short

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


def _elements(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise PlanError(
            f"{short(value)} is no number of elements",
            where=f"zero_optimization.{key}",
            hint="a whole number, such as 5e8",
        )
    return int(value)
