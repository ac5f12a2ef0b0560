"""Collectives by DeepSpeed's names, which are torch's; each call's time and bytes can be logged.

    from zgraph.deepspeed import comm as dist

    dist.init_distributed()
    dist.configure(enabled=True)
    dist.all_reduce(gradients)
    dist.log_summary()

Calls of these functions are timed. The collectives of a compiled step run inside its programs: they are counted with their bytes
(`zgraph.deepspeed.comms_log`), and of their time only what a step waited for can be measured.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (
    P2POp,
    ProcessGroup,
    ReduceOp,
    destroy_process_group,
    get_process_group_ranks,
    is_available,
    is_initialized,
    new_group,
)
from torch.distributed.device_mesh import init_device_mesh

from zgraph.deepspeed.launch_environment import TORCH, rank_variables
from zgraph.errors import MeshError
from zgraph.units import shown_bytes

__all__ = [
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_base",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "configure",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "reset_log",
    "scatter",
    "send",
]

logger = logging.getLogger(__name__)

_LIMIT = timedelta(minutes=30)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Create the process group, unless there is one.

    The ranks come from the variables of torchrun, Slurm, MPI, AzureML or SageMaker; without them this process is the only
    rank. "nccl" without a GPU becomes gloo, with a warning. `timeout` is 30 minutes by default, or DEEPSPEED_TIMEOUT
    (minutes). Raises `MeshError` if there is no process group and `dist_init_required` is False, if the address of rank
    0 is unknown, and if this process has a group of its own beside ranks that a launcher has started.
    """
    if config is not None:
        configure(deepspeed_config=config)
    if dist.is_initialized():
        _refuse_alone()
        return
    if dist_init_required is False:
        raise MeshError(
            "there is no process group, and dist_init_required=False forbids to make one",
            hint="call torch.distributed.init_process_group before, or leave it out",
        )
    backend = _backend(dist_backend)
    limit = timeout or (
        timedelta(minutes=int(os.environ["DEEPSPEED_TIMEOUT"])) if "DEEPSPEED_TIMEOUT" in os.environ else _LIMIT
    )
    if init_method is not None:
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=limit)
        return
    variables = rank_variables(os.environ, distributed_port)
    if variables and not auto_mpi_discovery and not all(name in os.environ for name in TORCH):
        raise MeshError(
            "torch's variables are not set, and no others may be looked at",
            where="init_distributed(auto_mpi_discovery=False)",
            why=f"this process is rank {variables['RANK']} of {variables['WORLD_SIZE']} by those of another launcher",
            hint=f"leave it out; or set {', '.join(TORCH)}",
        )
    if not variables:
        logger.warning("no launcher has started this process: it is rank 0 of 1")
        alone: Any = dist  # (torch exports it, and does not say so)
        dist.init_process_group("gloo", store=alone.HashStore(), rank=0, world_size=1, timeout=limit)
        return
    os.environ.update(variables)
    if "nccl" in backend:
        torch.cuda.set_device(int(variables["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=limit)
    if verbose and dist.get_rank() == 0:
        logger.info("made a process group of %d ranks over %s", dist.get_world_size(), backend)


def _refuse_alone() -> None:
    """Raise `MeshError` if the process group is of this process alone, and a launcher has started several ranks."""
    launched = os.environ.get("WORLD_SIZE", "")
    if dist.get_world_size() == 1 and launched.isdigit() and int(launched) > 1:
        raise MeshError(
            f"the process group has this process alone, and WORLD_SIZE is {launched}",
            why="each rank would train a model of its own",
            hint="call init_distributed before what has made that group, such as a library that loads the model; or unset WORLD_SIZE",
        )


def _backend(asked: str | None) -> str:
    if asked not in (None, "nccl"):
        return str(asked)
    if torch.cuda.is_available():
        return "cpu:gloo,cuda:nccl"
    if asked == "nccl":
        logger.warning("nccl needs a GPU, and there is none: the process group is over gloo")
    return "gloo"


# -- what is logged -----------------------------------------------------------------------------------------------------------
class CommsLogger:
    """The log of collectives: the seconds of each call, by name and bytes, and the counts of those in compiled
    programs."""

    def __init__(self) -> None:
        self.enabled = False
        self.verbose = False
        self.debug = False
        self.prof_ops: list[str] = []
        self.calls: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.compiled: Counter[tuple[str, int]] = Counter()  # collectives of compiled programs, by (name, bytes)
        self.steps = 0  # the engines' steps in which `compiled` was counted
        self.waited: dict[str, list[float]] = defaultdict(list)  # seconds that a step waited for "gather" and "reduce"
        self.wants_sample = True  # an engine's next step is to measure what it waits for

    def wants(self, name: str) -> bool:
        return self.enabled and (not self.prof_ops or name in self.prof_ops)

    def add(self, name: str, size: int, seconds: float) -> None:
        self.calls[name][size].append(seconds)
        if self.verbose:
            logger.info("%s of %s: %.3f ms", name, shown_bytes(size), seconds * 1e3)

    def compiled_summary(self) -> dict[str, dict[int, dict[str, float]]]:
        """Return, for each collective of compiled programs by name and bytes, its count in all, its count per step
        and its bytes per step."""
        by_name: dict[str, dict[int, dict[str, float]]] = {}
        for (name, size), count in sorted(self.compiled.items()):
            each = count / max(self.steps, 1)
            by_name.setdefault(name, {})[size] = {"count": count, "count_per_step": each, "bytes_per_step": each * size}
        return by_name

    def waits(self) -> dict[str, float]:
        """Return the milliseconds that the last sampled step waited for gathers and for reductions; {} before the
        first sample."""
        return {part: seconds[-1] * 1e3 for part, seconds in self.waited.items()}

    def forget(self) -> None:
        """Delete what was measured and counted."""
        self.calls.clear()
        self.compiled.clear()
        self.waited.clear()
        self.steps = 0

    def summary(self) -> dict[str, dict[int, dict[str, float]]]:
        """Return, by name and bytes, the number of calls, their milliseconds in all and on average, and Gbit/s."""
        by_name: dict[str, dict[int, dict[str, float]]] = {}
        for name, sizes in self.calls.items():
            by_name[name] = {
                size: {
                    "count": len(times),
                    "total_latency_ms": sum(times) * 1e3,
                    "avg_latency_ms": sum(times) / len(times) * 1e3,
                    "tput_avg_gbps": size * 8 / 1e9 / max(sum(times) / len(times), 1e-12),
                    "msg_size_bytes": size,
                }
                for size, times in sorted(sizes.items())
            }
        return by_name


comms_logger = CommsLogger()


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Turn the log of collectives on or off, by arguments or by a configuration's section `comms_logger`. With `debug` a call's name
    in the log has that of the function that made it."""
    section = dict(deepspeed_config.get("comms_logger") or {}) if isinstance(deepspeed_config, dict) else {}
    given = {"enabled": enabled, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    section |= {name: value for name, value in given.items() if value is not None}
    if prof_all or (section.get("prof_all") and prof_ops is None):
        section["prof_ops"] = []
    comms_logger.enabled = bool(section.get("enabled", comms_logger.enabled))
    comms_logger.verbose = bool(section.get("verbose", comms_logger.verbose))
    comms_logger.debug = bool(section.get("debug", comms_logger.debug))
    comms_logger.prof_ops = list(section.get("prof_ops", comms_logger.prof_ops))


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Log what was measured, on rank 0, and measure again what an engine's next step waits for.

    With `return_dict` it is returned as well: "summary" of calls, "compiled" of compiled steps, "waited_ms" of one of
    them. With `show_straggler`, which all ranks must call, also how much longer the slowest rank waited than the
    fastest. Raises nothing if there were no calls.
    """
    measured, compiled, waits = comms_logger.summary(), comms_logger.compiled_summary(), comms_logger.waits()
    comms_logger.wants_sample = True
    late: dict[str, float] = {}
    if show_straggler:
        mine = {name: sum(v["total_latency_ms"] for v in sizes.values()) for name, sizes in measured.items()}
        everyone: list[Any] = [mine]
        if dist.is_initialized():
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
        late = {n: max(e.get(n, 0.0) for e in everyone) - min(e.get(n, 0.0) for e in everyone) for n in mine}
    if get_rank() == 0:
        lines = [f"{'collective':24}{'size':>12}{'calls':>8}{'total ms':>12}{'mean ms':>10}{'Gbit/s':>10}"]
        for name, sizes in measured.items():
            for size, row in sizes.items():
                lines.append(
                    f"{name:24}{shown_bytes(size):>12}{row['count']:>8}{row['total_latency_ms']:>12.2f}"
                    f"{row['avg_latency_ms']:>10.3f}{row['tput_avg_gbps']:>10.2f}"
                )
        lines += [f"{name}: the slowest rank waited {ms:.2f} ms longer than the fastest" for name, ms in late.items()]
        lines += _compiled_lines(compiled, waits)
        logger.info("collectives:\n%s", "\n".join(lines))
    if not return_dict:
        return None
    metadata = {"world_size": get_world_size(), "rank": get_rank()}
    straggling = late if show_straggler else None
    of_steps = {"compiled": compiled, "steps": comms_logger.steps, "waited_ms": waits}
    return {"summary": measured, "straggler_analysis": straggling, "metadata": metadata, **of_steps}


def _compiled_lines(compiled: dict[str, dict[int, dict[str, float]]], waits: dict[str, float]) -> list[str]:
    if not compiled:
        return []
    lines = [f"{'in a compiled step':24}{'size':>12}{'a step':>8}{'bytes a step':>14}"]
    for name, sizes in compiled.items():
        for size, row in sizes.items():
            total = shown_bytes(round(row["bytes_per_step"]))
            lines.append(f"{name:24}{shown_bytes(size):>12}{row['count_per_step']:>8.4g}{total:>14}")
    parts = ", ".join(f"{ms:.2f} ms for {part}s" for part, ms in waits.items())
    return [*lines, f"of these a step waited {parts}" if parts else "no step was looked at yet for what it waits for"]


def reset_log() -> None:
    """Delete what was measured and counted."""
    comms_logger.forget()


# -- collectives --------------------------------------------------------------------------------------------------------------


def _size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes of the first tensor, or list of tensors, among the arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.nbytes
        if isinstance(value, (list, tuple)) and value and all(isinstance(t, torch.Tensor) for t in value):
            return sum(t.nbytes for t in value)
    return 0


def _timed(function: Callable[..., Any], **names: str) -> Callable[..., Any]:
    """Return one of torch's collectives with its calls logged while the log is on.

    It takes DeepSpeed's own arguments as well: `names` are torch's for those that DeepSpeed calls otherwise. `log_name` is the name in the
    log; `prof`, log this call, whichever are logged; `debug`, the caller's name in the log.
    """

    @functools.wraps(function)
    def run(*args: Any, prof: bool = False, log_name: str | None = None, debug: Any = None, **kwargs: Any) -> Any:
        kwargs = {names.get(key, key): value for key, value in kwargs.items()}
        name = log_name or function.__name__
        if not (comms_logger.wants(name) or (prof and comms_logger.enabled)):
            return function(*args, **kwargs)
        if debug or comms_logger.debug:
            name = f"{name} | {debug if isinstance(debug, str) else sys._getframe(1).f_code.co_name}"
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        if kwargs.get("async_op") and result is not None:
            result.wait()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        comms_logger.add(name, _size(args, kwargs), time.perf_counter() - begin)
        return result

    shown, signature = {ours: theirs for theirs, ours in names.items()}, inspect.signature(function)
    parameters = [p.replace(name=shown.get(p.name, p.name)) for p in signature.parameters.values()]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


all_gather = _timed(dist.all_gather)
all_gather_into_tensor = _timed(dist.all_gather_into_tensor, tensor="input_tensor")
all_gather_object = _timed(dist.all_gather_object)
all_reduce = _timed(dist.all_reduce)
all_reduce_coalesced = _timed(dist.all_reduce_coalesced)
all_to_all = _timed(dist.all_to_all)
all_to_all_single = _timed(dist.all_to_all_single, tensor="input")
barrier = _timed(dist.barrier)
batch_isend_irecv = _timed(dist.batch_isend_irecv)
broadcast = _timed(dist.broadcast)
broadcast_object_list = _timed(dist.broadcast_object_list)
gather = _timed(dist.gather)
irecv = _timed(dist.irecv)
isend = _timed(dist.isend)
monitored_barrier = _timed(dist.monitored_barrier)
recv = _timed(dist.recv)
reduce = _timed(dist.reduce)
reduce_scatter = _timed(dist.reduce_scatter)
reduce_scatter_tensor = _timed(dist.reduce_scatter_tensor, output_tensor="output", tensor="input")
scatter = _timed(dist.scatter)
send = _timed(dist.send)


class _Works:
    """Several collectives that are waited for as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


@_timed
def all_gather_coalesced(
    output_tensors: list[torch.Tensor], input_tensors: list[torch.Tensor], group: Any = None, async_op: bool = False
) -> _Works | None:
    """Gather each input into the output of its place; with `async_op`, return what has to be waited for."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    works = _Works([dist.all_gather_into_tensor(whole, part, group, async_op=True) for whole, part in pairs])
    if async_op:
        return works
    works.wait()
    return None


# (older names of these)
all_gather_base = all_gather_into_tensor
allgather_fn = _timed(dist.all_gather_into_tensor)
inference_all_reduce = all_reduce
reduce_scatter_fn = reduce_scatter_tensor


# -- who is where -------------------------------------------------------------------------------------------------------------
def get_rank(group: Any = None) -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    """Return this process's rank on its node: LOCAL_RANK, else its rank."""
    return int(os.environ.get("LOCAL_RANK", get_rank()))


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    process_group: Any = group if group is not None else dist.group.WORLD
    return dist.get_global_rank(process_group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    return list(get_process_group_ranks(group if group is not None else dist.group.WORLD))


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """Return torch's DeviceMesh over all ranks."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(kind, mesh_shape, mesh_dim_names=mesh_dim_names)


def has_all_gather_into_tensor() -> bool:
    return True


def has_reduce_scatter_tensor() -> bool:
    return True


def has_all_reduce_coalesced() -> bool:
    return True


def has_coalescing_manager() -> bool:
    return True
