"""The tables of torch.distributed.pipelining's schedules; everything that schedules need of its private parts is here.

torch's classes compute the whole table when they are created, from little more than the number of stages and ranks. So
they are created with stages that have nothing else, and only their tables are read. Two tables come from the functions
that these classes call instead:

- 1F1B. The table of torch's class numbers the last rank's forwards from 1 (nothing in torch runs it: the class has a loop
  of its own), and the class refuses fewer micro-batches than stages, which 1F1B can do.
- Zero bubble with one stage a rank (ZB-H1, https://arxiv.org/abs/2401.10241). It is the class's own table; only the rule
  of the interleaved schedule, that micro-batches divide into rounds, has no meaning there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules

from zgraph.plan.pipeline_schedules.actions import Action, Kind

__all__ = ["rows_of"]

_KINDS = {kind.value for kind in Kind}


def rows_of(name: str, ranks: int, virtual: int, micro_batches: int) -> list[list[Action | None]]:
    """Return, for each rank, the actions of torch's schedule of this name (`get_schedule_class`), with `virtual`
    stages on each rank.

    Raises `ValueError`, or `AssertionError`, with torch's words, for numbers that the schedule can't have.
    """
    if name == "1F1B" or (name == "InterleavedZeroBubble" and virtual == 1):
        table: list[Any] = [_one_stage(rank, ranks, micro_batches, name != "1F1B") for rank in range(ranks)]
    else:
        schedule_class = schedules.get_schedule_class(name)
        stages = [_stage(index, ranks, virtual) for index in range(virtual)]
        single = issubclass(schedule_class, schedules.PipelineScheduleSingle)
        order: Any = schedule_class(stages[0] if single else stages, n_microbatches=micro_batches).pipeline_order
        table = [order[rank] for rank in range(ranks)]
    return [[action for theirs in row for action in _ours(theirs)] for row in table]


def _stage(index: int, ranks: int, virtual: int) -> Any:
    """Return a stand-in for a stage of rank 0, with what torch's classes read of it. Their tables are of all ranks,
    whichever asks."""
    return SimpleNamespace(
        stage_index=index * ranks, num_stages=ranks * virtual, group_rank=0, group_size=ranks, submod=None
    )


def _one_stage(rank: int, ranks: int, micro_batches: int, zero_bubble: bool) -> list[Any]:
    """Return a rank's row of 1F1B or ZB-H1: the first rank runs as many forwards ahead as there are ranks behind it,
    the last none."""
    ahead = schedules._get_warmup_ops(rank, 1, micro_batches, ranks, micro_batches, multiply_factor=1)
    return schedules._get_1f1b_rank_ops(
        1,
        ranks,
        ahead,
        micro_batches - ahead,
        ahead,
        rank,
        lambda _: rank,
        lambda _: rank,
        # ZB-H1 delays the backwards of weights by `rank` micro-batches: 1F1B stores that many fewer on this rank than on the first.
        num_1f1b_microbatches=rank if zero_bubble else 0,
        enable_zero_bubble=zero_bubble,
    )


def _ours(theirs: Any) -> list[Action | None]:
    """Return torch's action as actions of ours.

    A pair that torch may overlap becomes its two actions; what computes nothing is left out.
    """
    if theirs is None:
        return [None]
    if theirs.sub_actions is not None:
        return [action for part in theirs.sub_actions for action in _ours(part)]
    kind = theirs.computation_type.value
    return [Action(Kind(kind), theirs.stage_index, theirs.microbatch_index)] if kind in _KINDS else []
