"""DeepSpeed's options of communication, offloading and elasticity, as fields of a plan.

    plan = zgraph.Plan(**communication({"stage": 3, "reduce_bucket_size": 5e8, "overlap_comm": True}), precision="bf16")
    plan = zgraph.Plan(zero=3, **offloading({"offload_optimizer": {"device": "nvme", "nvme_path": "/mnt"}}), optimizer=zgraph.AdamW())
    plan = zgraph.Plan(**elastic({"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}))

DeepSpeed counts elements, zgraph bytes; a cap here is never exceeded, where DeepSpeed's may be.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from math import lcm
from typing import Any

from zgraph.deepspeed.keys import KEYS, names_in
from zgraph.errors import PlanError
from zgraph.names import did_you_mean
from zgraph.record import short

logger = logging.getLogger(__name__)

SIZES = {  # keys of the section that are counts of elements: the plan's fields, in bytes
    "allgather_bucket_size": "bucket.gather",
    "reduce_bucket_size": "bucket.reduce",
    "stage3_prefetch_bucket_size": "prefetch.ahead_bytes",
    "stage3_max_live_parameters": "prefetch.max_bytes",
    "stage3_max_reuse_distance": "prefetch.reuse_bytes",
}
_KEYS = (*SIZES, "stage3_param_persistence_threshold", "overlap_comm", "stage")


def communication(section: Mapping[str, Any], *, itemsize: int = 2) -> dict[str, Any]:
    """Return the fields of a `Plan` for the communication keys of DeepSpeed's `zero_optimization`.

    `itemsize` is the bytes of an element in what is gathered and reduced: 2 for bf16 and fp16, 4 for fp32. "auto"
    leaves a key to zgraph; keys of other kinds are skipped. Raises `PlanError` for a key that DeepSpeed does not have,
    and for a value that is not a number.
    """
    fields: dict[str, Any] = {}
    for key, value in section.items():
        _refuse_unknown(key, _KEYS)
        if value == "auto":
            continue
        if key in SIZES:
            record, field = SIZES[key].split(".")
            fields.setdefault(record, {})[field] = _elements(key, value) * itemsize
        elif key == "overlap_comm":
            fields.setdefault("prefetch", {})["enabled"] = value
        elif key == "stage3_param_persistence_threshold":
            fields["param_persistence_threshold"] = _elements(key, value)
        elif key == "stage":
            fields["zero"] = value
    return fields


def _refuse_unknown(key: str, mine: Collection[str]) -> None:
    """Raise `PlanError` for a key that `zero_optimization` does not have, with the nearest known key as the hint.

    Keys of `zero_optimization` that are not in `mine` are accepted: another function reads them.
    """
    if key not in mine and f"zero_optimization.{key}" not in KEYS:
        hint = did_you_mean(key, [*mine, *names_in("zero_optimization")])
        raise PlanError(f"unknown key {key!r}", where=f"zero_optimization.{key}", hint=hint)


# Bytes that an element of a sub-group takes on the device: float32 weight and gradient, and two moments (see sub_group_size).
UPDATED = 16
# Keys that are accepted and have no effect: they ask for what zgraph always does, or for nothing.
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
    """Return the fields of a `Plan` for the offloading keys of DeepSpeed's configuration.

    These are `offload_optimizer`, `offload_param` and `sub_group_size` of `zero_optimization`, and `cpu_checkpointing`
    and `partition_activations` of `activation_checkpointing`. Other keys of the two sections are skipped. Raises
    `PlanError` for an unknown key, a device that is not "none", "cpu" or "nvme", and "nvme" without its path.
    """
    offload: dict[str, Any] = {}
    for key, value in section.items():
        if key == "sub_group_size":
            offload["sub_group_bytes"] = _elements(key, value) * UPDATED
        elif key in ("offload_optimizer", "offload_param"):
            place = _place(key, value)
            offload["optimizer" if key == "offload_optimizer" else "parameters"] = place
            if key == "offload_optimizer" and place != "none" and value is not None and "ratio" in value:
                offload["ratio"] = value["ratio"]
        else:
            _refuse_unknown(key, ("offload_optimizer", "offload_param", "sub_group_size"))
    fields: dict[str, Any] = {"offload": offload}
    for key, value in (activation_checkpointing or {}).items():
        if key == "partition_activations":
            fields[key] = value
        elif key == "cpu_checkpointing":
            if not isinstance(value, bool):
                raise PlanError(f"{short(value)} is neither true nor false", where=f"activation_checkpointing.{key}")
            offload["activations"] = "cpu" if value else "none"
        elif f"activation_checkpointing.{key}" not in KEYS:
            raise PlanError(
                f"unknown key {key!r}",
                where=f"activation_checkpointing.{key}",
                hint="recompute says what is computed again",
            )
    return fields


def _place(key: str, value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "none"
    if not isinstance(value, Mapping):
        raise PlanError(f"{short(value)} is no section", where=f"zero_optimization.{key}", hint='{"device": "cpu"}')
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
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value % 1 != 0:
        raise PlanError(
            f"{short(value)} is no number of elements",
            where=f"zero_optimization.{key}",
            hint="a whole number, such as 5e8",
        )
    return int(value)


# -- elasticity -------------------------------------------------------------------------------------------------------
_ELASTIC: dict[str, Any] = {
    "enabled": False,
    "max_train_batch_size": 2000,
    "micro_batch_sizes": [2, 4, 6],
    "min_gpus": 1,
    "max_gpus": 10000,
    "min_time": 0,
    "prefer_larger_batch": True,
    "ignore_non_elastic_batch_info": False,
    "version": 0.2,
    "num_gpus_per_node": 1,
    "model_parallel_size": 1,
}
_LARGEST_FACTOR = 720720  # DeepSpeed's list of highly composite numbers ends with it


def elastic(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field `elastic` of a `Plan` for DeepSpeed's section `elasticity`, version 0.1 or 0.2; {} if it is not
    `enabled`.

    The batch is DeepSpeed's (`compute_elastic_config` of 0.19.6). Each candidate is a micro-batch size, or the least
    common multiple of all sizes, times the largest highly composite number that keeps it within `max_train_batch_size`;
    the batch is the candidate that the most numbers of GPUs divide. `worlds` are these numbers. Version 0.2 counts
    nodes of `num_gpus_per_node`; on a number of GPUs outside of `worlds` DeepSpeed changes the batch, and zgraph
    refuses. Keys without effect here are logged with the reason. Raises `PlanError` for an unknown key, an invalid
    value, and if no number of GPUs is left.
    """
    for key in section:
        if key not in _ELASTIC:
            raise PlanError(f"unknown key {key!r}", where=f"elasticity.{key}", hint=did_you_mean(key, _ELASTIC))
    given = _ELASTIC | dict(section)
    if not given["enabled"]:
        return {}
    for key in ("max_train_batch_size", "micro_batch_sizes"):
        if key not in section:
            raise PlanError(f"{key} is missing", where=f"elasticity.{key}", why="an elastic run needs it")
    _refuse_elastic(given)
    sizes = given["micro_batch_sizes"]
    most, least_gpus, most_gpus, node = (
        _rows(key, given[key]) for key in ("max_train_batch_size", "min_gpus", "max_gpus", "num_gpus_per_node")
    )
    node = node if str(given["version"]) == "0.2" else 1
    if most // node < max(sizes):
        raise PlanError(
            f"a micro-batch of {max(sizes)} on each of {node} GPUs is more than a batch of {most}",
            where="elasticity.max_train_batch_size",
            hint="leave that size out, or give a larger batch",
        )
    batch, nodes = _most_elastic(
        list(sizes), most // node, least_gpus // node, most_gpus // node, given["prefer_larger_batch"]
    )
    if not nodes:
        raise PlanError(
            f"no number of GPUs from {least_gpus} to {most_gpus} divides a batch of at most {most}",
            where="elasticity.min_gpus",
            hint="other bounds, or a larger batch",
        )
    for key, why in _ELASTIC_LEFT_OUT.items():
        if given[key]:
            logger.warning("elasticity.%s=%s is left out: %s", key, given[key], why)
    return {"elastic": {"batch": batch * node, "micro_batch": sorted(set(sizes)), "worlds": [n * node for n in nodes]}}


_ELASTIC_LEFT_OUT = {
    "min_time": "there is no scheduler here that it could tell: torchrun restarts as soon as ranks are gone or there",
    "ignore_non_elastic_batch_info": "this section alone is read; batch sizes elsewhere in the config mean nothing here",
}


def _refuse_elastic(given: Mapping[str, Any]) -> None:
    """Raise `PlanError` for an invalid value."""
    if str(given["version"]) not in ("0.1", "0.2"):
        raise PlanError(
            f"there is no version {short(given['version'])}",
            where="elasticity.version",
            hint="0.1 or 0.2: there are no others",
        )
    sizes = given["micro_batch_sizes"]
    if not isinstance(sizes, (list, tuple)) or not sizes:
        raise PlanError(f"{short(sizes)} is no list of sizes", where="elasticity.micro_batch_sizes", hint="[2, 4, 6]")
    for size in sizes:
        _rows("micro_batch_sizes", size)
    for key in ("max_train_batch_size", "min_gpus", "max_gpus", "num_gpus_per_node"):
        _rows(key, given[key])
    if (parts := _rows("model_parallel_size", given["model_parallel_size"])) > 1:
        raise PlanError(
            f"the model is divided into {parts} parts",
            where="elasticity.model_parallel_size",
            why="how a model is divided is said by the plan's mesh",
            hint="leave it out",
        )


def _most_elastic(sizes: list[int], most: int, least_gpus: int, most_gpus: int, larger: bool) -> tuple[int, list[int]]:
    """Return the batch of at most `most` rows that the most numbers of GPUs divide into micro-batches, and these
    numbers."""
    candidates: list[tuple[int, int, int]] = []
    worlds: dict[int, list[int]] = {}
    for base in {*sizes, lcm(*sizes)}:
        if base <= most:
            batch = base * _highly_composite(most // base)
            gpus = range(max(1, least_gpus), min(most_gpus, batch) + 1)
            worlds[batch] = [n for n in gpus if any(batch % (n * size) == 0 for size in sizes)]
            candidates.append((len(worlds[batch]), batch if larger else -batch, batch))
    batch = max(candidates)[2]
    return batch, worlds[batch]


def _highly_composite(most: int) -> int:
    """Return the largest number up to `most` (and 720720) that has more divisors than any smaller one."""
    products = [(1, 1)]  # (number, how many divisors it has)
    for prime in (2, 3, 5, 7, 11, 13):
        for number, divisors in list(products):
            power = 1
            while (number := number * prime) <= min(most, _LARGEST_FACTOR):
                power += 1
                products.append((number, divisors * power))
    best = largest = 0
    for number, divisors in sorted(products):
        if divisors > best:
            best, largest = divisors, number
    return largest


def _rows(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{short(value)} is no number of them", where=f"elasticity.{key}", hint="a whole number from 1")
    return value


def publishing(section: Mapping[str, Any], low: str = "bf16") -> dict[str, Any]:
    """Return the arguments of `model.save_pretrained` for `stage3_gather_16bit_weights_on_model_save` of
    `zero_optimization`.

    If it is true, they are the `dtype` that DeepSpeed's `save_16bit_model` writes: `low`, which is "bf16" or "fp16" as
    the configuration enables it. Otherwise {}: weights are written in the dtype in which ranks store them (DeepSpeed's
    ZeRO stage 3 writes none at all). Nothing is gathered in either case. Raises `PlanError` for another key, and for a
    value that is neither true nor false.
    """
    known = "stage3_gather_16bit_weights_on_model_save"
    for key, value in section.items():
        if key != known:
            raise PlanError(f"unknown key {key!r}", where=f"zero_optimization.{key}", hint=did_you_mean(key, (known,)))
        if not isinstance(value, bool):
            raise PlanError(f"{short(value)} is neither true nor false", where=f"zero_optimization.{key}")
    return {"dtype": low} if section.get(known) else {}
