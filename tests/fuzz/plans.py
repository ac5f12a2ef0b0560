"""Random plans and meshes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .case import Case

MESHES: dict[str, list[dict[str, int]]] = {
    "virtual": [
        {"dp": 2},
        {"dp": 3},
        {"dp": 4},
        {"replicate": 2},
        {"replicate": 2, "dp": 2},
        {"tp": 2},
        {"tp": 4},
        {"dp": 2, "tp": 2},
        {"replicate": 2, "tp": 2},
        {"cp": 2},
        {"cp": 4},
        {"dp": 2, "cp": 2},
        {"replicate": 2, "cp": 2},
        {"cp": 2, "tp": 2},
        {"pp": 2},
        {"pp": 3},
        {"pp": 2, "dp": 2},
        {"pp": 2, "replicate": 2},
        {"pp": 2, "tp": 2},
        {"pp": 2, "cp": 2},
        {"pp": 2, "replicate": 2, "dp": 2},
        {"dp": 2, "cp": 2, "tp": 2},
    ],
    "ranks": [
        {"dp": 1},
        {"dp": 2},
        {"dp": 2},
        {"dp": 3},
        {"dp": 4},
        {"replicate": 2},
        {"replicate": 2, "dp": 2},
        {"tp": 2},
        {"cp": 2},
        {"dp": 2, "tp": 2},
        {"dp": 2, "cp": 2},
        {"pp": 2},
        {"pp": 3},
        {"pp": 2, "dp": 2},
    ],
}

SCHEDULES = ("1f1b", "gpipe", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zb", "zbv", "dualpipev")


def mesh(rng: random.Random, run: str) -> tuple[dict[str, int], int]:
    """A mesh and its number of ranks; an empty one where there is no process group."""
    if run not in MESHES:
        return {}, 1
    found = rng.choice(MESHES[run])
    world = 1
    for size in found.values():
        world *= size
    return dict(found), world


def draw(rng: random.Random, case: Case, mesh: dict[str, int], low: bool) -> tuple[tuple[str, Any], ...]:
    """The plan's fields, as plain values."""
    plan: dict[str, Any] = {"backend": "inductor" if case.run == "inductor" else "eager"}
    if mesh:
        plan["mesh"] = mesh
    plan["zero"] = rng.randint(0, 3)
    if low:
        plan["precision"] = "bf16"
    count = rng.choice([1, 1, 2, 4])
    if "pp" in mesh:
        plan["schedule"] = rng.choice(SCHEDULES)
        count = 4 if plan["schedule"] == "dualpipev" else rng.choice([2, 4])
    if count > 1:
        plan["micro_batches"] = count
    _memory(rng, plan, case)
    if rng.random() < 0.2:
        plan["bucket"] = {"gather": rng.choice([0, 256, 4096]), "reduce": rng.choice([0, 256, 4096])}
    if rng.random() < 0.15:
        plan["prefetch"] = {"enabled": rng.random() < 0.5}
    if rng.random() < 0.15:
        plan["param_persistence_threshold"] = rng.choice([10, 70])
    if "tp" in mesh and rng.random() < 0.3:
        plan["sequence_parallel"] = True
    if "tp" in mesh and rng.random() < 0.15:
        plan["partition_activations"] = True
    if "tp" in mesh and rng.random() < 0.2:
        plan["async_tensor_parallel"] = rng.choice(["off", 2])
    if "cp" in mesh:
        plan["sequence_dim"] = rng.choice(["auto", 1])
        plan["context_attention"] = rng.choice(["auto", "auto", "heads", "ring"])
    if rng.random() < 0.3:
        plan["grad_clip"] = 0.1
    if rng.random() < 0.4:
        plan["optimizer"] = dict(rng.choice(OPTIMIZERS))
        if rng.random() < 0.15 and case.run != "virtual":
            plan["offload"] = {**plan.get("offload", {}), "optimizer": "cpu"}
    return tuple(plan.items())


OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"name": "SGD", "lr": 0.1},
    {"name": "SGD", "lr": 0.05, "momentum": 0.9},
    {"name": "SGD", "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"name": "Adam", "lr": 0.01, "eps": 1e-3},
    {"name": "AdamW", "lr": 0.01, "eps": 1e-3, "weight_decay": 0.1},
    {"name": "AdamW", "lr": 0.01, "eps": 1e-3, "amsgrad": True},
    {"name": "Adagrad", "lr": 0.05, "eps": 1e-3},
)
"""(`eps` is large: a gradient that is nothing but rounding must stay a small update.)"""


def _memory(rng: random.Random, plan: dict[str, Any], case: Case) -> None:
    if rng.random() < 0.3:
        plan["recompute"] = rng.choice(["none", "full", ["b*"], ["b0"]])
    if rng.random() < 0.05:
        plan["memory_budget"] = rng.choice(["64KiB", "1MiB"])
    if rng.random() < 0.08:
        plan["offload"] = {"activations": "cpu", "least_bytes": 0}
    if plan["zero"] == 3 and rng.random() < 0.06:
        plan["offload"] = {**plan.get("offload", {}), "parameters": "cpu"}
    if rng.random() < 0.06:
        plan["tiles"] = {"loss": 2} if "cross entropy" in case.loss and rng.random() < 0.7 else {"b0": 2}
