"""Explains an out-of-memory error: where it happened, what the forecast says about that point, the largest live
tensors, and what would have fitted.

On CUDA the allocator is asked, on a CPU the system. Nothing here communicates: the other ranks may be anywhere.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from zgraph import errors
from zgraph.build.what_if import what_fits
from zgraph.codegen.executable import Executable, failing_node
from zgraph.passes.analysis.live_memory import Life, lives, memory_of
from zgraph.program.node import info
from zgraph.program.program import InputRole, Program
from zgraph.runtime.memory import room_of
from zgraph.units import shown_bytes

if TYPE_CHECKING:
    from zgraph.build.step_program import StepProgram
    from zgraph.runtime.rank import Rank

SHOWN = 5  # tensors listed
FORECAST_ERROR = 0.03  # the forecast's error, as a share of the memory


class OutOfMemoryError(errors.OutOfMemoryError, torch.OutOfMemoryError):
    """See `zgraph.errors.OutOfMemoryError`; caught by `except torch.OutOfMemoryError` as well."""


@contextlib.contextmanager
def explained(
    runtime: Rank, running: Executable | Program | None = None, step: StepProgram | None = None
) -> Iterator[None]:
    """Turn an allocation failure inside, while `running` runs, into `OutOfMemoryError` with its explanation. The hint
    says what would have fitted of `step`, by default the last training step compiled.

    Without `running` it is a training step that runs, and the failure is outside of its programs: in the loss function,
    in a part of the model that is not compiled, or in the backward of one of these.
    """
    try:
        yield
    except Exception as error:
        if not _is_exhausted(error) or isinstance(error, errors.OutOfMemoryError):
            raise
        if step is None:
            step = _last_trained(runtime)
        if running is not None:
            raise _explanation(error, runtime, running, step) from error
        if step is None:
            raise  # (nothing is compiled yet that a forecast could speak of)
        raise _explanation(error, runtime, step.history().program, step, outside=True) from error


def _last_trained(runtime: Rank) -> StepProgram | None:
    """Return the training step compiled last, None if there is none."""
    trained = [s for e in runtime.entries.values() for s in e.programs() if s.differentiated]
    return trained[-1] if trained else None


def _is_exhausted(error: Exception) -> bool:
    """Return whether an error means that memory ran out. A CPU's allocator, and that of pinned memory, raise a
    RuntimeError with only the text to tell.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    texts = ("DefaultCPUAllocator: ", "CUDA error: out of memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _explanation(
    error: Exception, runtime: Rank, running: Executable | Program, step: StepProgram | None, outside: bool = False
) -> OutOfMemoryError:
    room = room_of(runtime.device)
    node = failing_node(error, running) if isinstance(running, Executable) else None
    program = running.program if isinstance(running, Executable) else running
    held_text = f"{shown_bytes(room.held)} are held" if room.held is not None else "what is held is not counted"
    why = [
        f"the allocator: {str(error).strip().splitlines()[0]}",
        f"in this process {held_text}, {shown_bytes(room.free)} are left on {runtime.device}",
    ]
    there = lives(program, runtime.costs.fused)
    if node is not None:
        at = list(program.graph.nodes).index(node)
    else:
        totals = [sum(by.values()) for by in memory_of(program, runtime.costs.fused)]
        at = totals.index(max(totals))
    there = [life for life in there if life.born <= at < life.gone]
    kinds: Counter[str] = Counter()
    for life in there:
        kinds[life.category] += life.bytes
    if step is not None and not program.input_nodes(InputRole.STATE):
        kinds["optimizer states and waiting gradients"] = step.outside.held
    total = kinds.total()
    parts = ", ".join(f"{k} {shown_bytes(v)}" for k, v in kinds.most_common() if v)
    why.append(f"the forecast {'here' if node is not None else 'at its peak'}: {shown_bytes(total)} ({parts})")
    besides = max(0, room.held - total) if room.held is not None else 0
    if room.held is not None:
        why.append(f"held besides what the forecast knows: {shown_bytes(besides)}")
    why += ["the largest that live:", *(f"  {_line(life)}" for life in sorted(there, key=lambda i: -i.bytes)[:SHOWN])]
    hint = "a smaller batch"
    if step is not None and step.differentiated:
        held_now = room.held if room.held is not None else total
        budget = int((held_now + room.free - besides) * (1 - FORECAST_ERROR))
        traceback.clear_frames(error.__traceback__)  # (frees what the program made: trying needs memory as well)
        try:
            hint = what_fits(runtime.plan, runtime.module, step.captured, runtime.costs, runtime.device, budget)
        except Exception:
            hint = f"memory_budget={budget}, which is checked before anything runs (there is no room to try it here)"
    what = f"out of memory in {program.name}"
    if outside:
        what = f"out of memory outside of {program.name}, in the loss or in what else of the step is not compiled"
    if node is None:
        return OutOfMemoryError(what, why="\n".join(why), hint=hint)
    what += f", at {node.name} of {_module(info(node).module)}"
    return OutOfMemoryError(what, where=info(node).source or None, why="\n".join(why), hint=hint)


def _module(name: str) -> str:
    return name or "the model itself"


def _line(life: Life) -> str:
    record = info(life.node)
    of = f"parameter {record.param}" if record.param else _module(record.module)
    source = f" · {record.source}" if record.source else ""
    val = life.node.meta.get("val")
    shape = f" {str(val.dtype).removeprefix('torch.')}{list(val.shape)}" if isinstance(val, torch.Tensor) else ""
    return f"{shown_bytes(life.bytes):>10}  {life.category:12} {life.node.name}{shape} · {of}{source}"
