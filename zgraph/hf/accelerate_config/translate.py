"""The translation of a file of `accelerate config` into a plan, with a report on each of its keys.

Its DeepSpeed section is read as accelerate's DeepSpeedPlugin reads it, and its FSDP section as its
FullyShardedDataParallelPlugin does. Defaults are accelerate's; the report names them.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from zgraph.deepspeed.plan_draft import Draft
from zgraph.deepspeed.read_config import check
from zgraph.deepspeed.report import Report
from zgraph.hf.accelerate_config.deepspeed_section import read_deepspeed
from zgraph.hf.accelerate_config.fsdp_section import read_fsdp
from zgraph.hf.accelerate_config.keys import KEYS
from zgraph.hf.accelerate_config.mesh import set_mesh
from zgraph.hf.accelerate_config.precision import set_precision
from zgraph.hf.accelerate_config.read import read
from zgraph.names import did_you_mean


class Translated(NamedTuple):
    """What a file becomes."""

    report: Report  # the verdict on each key, and the plan
    world: int  # the number of ranks that it is for


def report(path: str | PathLike[str], *, world: int | None = None, model: Any = None) -> Translated:
    """Return a report on each key of a file of `accelerate config`, with the plan that it makes unless a key is refused.

    `world`: the number of ranks; without it the file's `num_processes`. "auto" in a DeepSpeed file that it names is filled by the
    `model`. Raises `PlanError` if a file can't be read.
    """
    file = Path(path)
    given = read(file)
    draft = Draft(given, 1)
    check(draft, KEYS, "accelerate")
    kind = _kind(draft)
    draft.world = _world(draft, kind, world)
    _leave_out(draft, kind)
    if kind == "DEEPSPEED":
        read_deepspeed(draft, file.parent, model)
    else:
        if kind == "FSDP":
            read_fsdp(draft)
        elif kind is not None:
            draft.apply("distributed_type", "zero", 0, "each rank has all weights, as DistributedDataParallel has it")
        set_mesh(draft, kind)
        set_precision(draft, kind)
    _rest(draft)
    return Translated(draft.finish(), draft.world)


_KINDS = {  # what a distributed_type is here
    **dict.fromkeys(("NO", "DEEPSPEED", "FSDP"), ""),
    **dict.fromkeys(("MULTI_GPU", "MULTI_CPU"), "DDP"),
}
_ELSEWHERE = (
    *("MULTI_XPU", "MULTI_HPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_NEURON"),
    *("XLA", "TPU", "MEGATRON_LM"),
)
_SECTIONS = {"deepspeed_config": ("DEEPSPEED",), "fsdp_config": ("FSDP",), "parallelism_config": ("DEEPSPEED", "FSDP")}


def _kind(draft: Draft) -> str | None:
    """Return "DEEPSPEED", "FSDP", "DDP" or "NO"; None if the file is refused for it."""
    key = "distributed_type"
    given = draft.get(key)
    if given is None:
        if not draft.is_refused(key):
            draft.refuse(key, "accelerate takes no file without it", "MULTI_GPU, MULTI_CPU, FSDP, DEEPSPEED or NO")
        return None
    name = given.upper()
    if name == "MEGATRON_LM":
        draft.refuse(
            key, "Megatron-LM has its own models", 'a mesh in a plan: mesh = {"pp": 2, "dp": -1, "tp": 4} for any model'
        )
    elif name in _ELSEWHERE:
        draft.refuse(key, "zgraph runs on GPUs of CUDA, and on CPUs", "MULTI_GPU or MULTI_CPU")
    elif name not in _KINDS:
        draft.refuse(key, f"there is no type {given}", did_you_mean(name, (*_KINDS, *_ELSEWHERE)))
    else:
        return _KINDS[name] or name
    return None


def _world(draft: Draft, kind: str | None, world: int | None) -> int:
    """Return the number of ranks, and record where it is from."""
    key = "num_processes"
    given = draft.get(key)
    if kind == "NO":
        if given is not None:
            draft.say(key, "no effect here", "distributed_type NO starts one process")
        return world or 1
    if world is not None:
        if given is not None and given != world:
            draft.say(key, "no effect here", f"the plan is for {world} ranks, as was asked")
        elif given is not None:
            draft.say(key, "applied", f"the plan is for {world} rank(s)")
        return world
    if given is None or given < 1:
        if kind is not None:
            draft.refuse(key, "the file does not say how many ranks there are", "give a number, or --world")
        return 1
    draft.say(key, "applied", f"the plan is for {given} rank(s)")
    return int(given)


def _leave_out(draft: Draft, kind: str | None) -> None:
    """Tell the keys of sections that accelerate does not read for this `distributed_type`."""
    for section, kinds in _SECTIONS.items():
        if kind is not None and kind not in kinds:
            for name in draft.get(section) or {}:
                if f"{section}.{name}" in KEYS:
                    draft.say(
                        f"{section}.{name}", "no effect here", f"distributed_type is {draft.get('distributed_type')}"
                    )


def _rest(draft: Draft) -> None:
    place = draft.get("compute_environment")
    if place is not None and place.upper() != "LOCAL_MACHINE":
        draft.refuse("compute_environment", "only files for machines of one's own are read", "LOCAL_MACHINE")
    elif place is not None:
        draft.say("compute_environment", "equivalent", "ranks run on the machines where they are started")
    if draft.get("num_machines") is not None and "num_machines" not in draft.rows:
        draft.say(
            "num_machines", "no effect here", "it is for the launcher: accelerate launch, torchrun, or zgraph launch"
        )
    key = "dynamo_config.dynamo_backend"
    backend = draft.get(key)
    if backend is None:
        return
    if backend.upper() == "NO":
        draft.say(key, "equivalent", "torch.compile is not asked for; every step is compiled by the plan")
    elif backend.upper() in ("INDUCTOR", "EAGER"):
        note = "leave it out of the file that ranks start with: torch.compile around a compiled model is refused"
        draft.apply(key, "backend", backend.lower(), note)
    else:
        draft.refuse(key, f"a plan has no backend {backend}", "INDUCTOR or EAGER, or leave it out")
