"""Schedules of pipelines: tables of actions, what is wrong with some of them, and how long they take."""

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from types import SimpleNamespace

import pytest
from sweeps import sweep
from torch.distributed.pipelining import schedules as torchs

from zgraph.errors import PlanError
from zgraph.plan.pipeline_schedules.actions import Action, Kind
from zgraph.plan.pipeline_schedules.dependencies import Needs, waits
from zgraph.plan.pipeline_schedules.make_schedule import check_name, make_schedule
from zgraph.plan.pipeline_schedules.schedule import Schedule
from zgraph.plan.pipeline_schedules.user_tables import save_csv
from zgraph.plan.pipeline_schedules.validity import check, check_table
from zgraph.program.program import OutputRole
from zgraph.stages.activation_stash import stash_bytes
from zgraph.stages.gantt import picture
from zgraph.stages.runtime import PipelineRuntime
from zgraph.stages.simulation import Times, replay
from zgraph.stages.trace import trace_of

FIXED = {"gpipe": 1, "1f1b": 1, "zbvzerobubble": 2, "zbv": 2, "dualpipev": 2}
FREE = {"interleaved1f1b": 2, "loopedbfs": 2, "interleavedzerobubble": 2, "zb": 1}
NAMES = [*FIXED, *FREE]


def table(*rows, name="mine", stages=None, micro_batches=None):
    """A schedule from text: a string of actions for each rank."""
    made = [[Action.parse(cell) for cell in row.split()] for row in rows]
    actions = [action for row in made for action in row]
    stages = 1 + max(a.stage for a in actions) if stages is None else stages
    micro_batches = 1 + max(a.micro_batch for a in actions) if micro_batches is None else micro_batches
    return Schedule.from_rows(name, made, stages, micro_batches)


def text(schedule):
    return [" ".join(map(str, schedule.of(rank))) for rank in range(schedule.ranks)]


def equal_times(stages, forward=1.0):
    """A backward of twice the forward's time, half of it for each kind of gradients."""
    one = [forward] * stages
    return Times(one, input_gradients=one, weight_gradients=one)


def refusal(function, *args, **kwargs):
    with pytest.raises(PlanError) as caught:
        function(*args, **kwargs)
    return caught.value


def torchs_class(name, ranks, virtual, micro_batches):
    stages = [
        SimpleNamespace(stage_index=i * ranks, num_stages=ranks * virtual, group_rank=0, group_size=ranks, submod=None)
        for i in range(virtual)
    ]
    return torchs.get_schedule_class(name)(stages, n_microbatches=micro_batches)


# Actions


@pytest.mark.parametrize("written", ["0F0", "1I3", "1W3", "12B40"])
def test_an_actions_text_is_torchs_and_means_it(written):
    action = Action.parse(written)
    theirs = torchs._Action.from_str(written)
    assert str(action) == written == str(theirs)
    assert (action.stage, action.kind.value, action.micro_batch) == (theirs[0], theirs[1].value, theirs[2])


@pytest.mark.parametrize(
    "written", ["", "F", "0F", "F0", "0X0", "0f0", "-1F0", "0F0 1F0", "0SEND_F1", "٣F0", "0F" + "9" * 5000]
)
def test_what_is_no_action_is_refused_with_its_form(written):
    error = refusal(Action.parse, written)
    assert error.where == "schedule" and '"2F3"' in error.hint and len(error.what) < 150


# torch's schedules


@sweep("most", [8, 4], quick=1)
@sweep("name", NAMES, quick=4)
def test_every_size_is_a_training_step_or_refused_for_a_reason_that_is_known(name, most):
    """All of ranks 1 to 8, micro-batches 1 to 16, and 1 to 4 stages a rank; those refused are exactly those that can't be had. (Or half of
    each.)"""
    for ranks in range(1, most + 1):
        for virtual in range(1, most // 2 + 1):
            for count in range(1, 2 * most + 1):
                case = (name, ranks, count, virtual)
                if name in FIXED and virtual != FIXED[name]:
                    assert refusal(make_schedule, *case).where == "virtual_stages", case
                elif cannot(name, ranks, virtual, count):
                    error = refusal(make_schedule, *case)
                    assert error.where == "micro_batches" and "torch says" in error.why, case
                    for fits in re.findall(r"\d+", error.hint):
                        assert not cannot(name, ranks, virtual, int(fits)), case
                else:
                    is_a_step(make_schedule(*case), ranks, virtual, count)


def cannot(name, ranks, virtual, count):
    if name == "dualpipev":
        return count < 2 * ranks
    in_rounds = name == "interleaved1f1b" or (name in ("interleavedzerobubble", "zb") and virtual > 1)
    return in_rounds and count % max(1, count // ranks) != 0


def is_a_step(schedule, ranks, virtual, count):
    check(schedule)
    assert (schedule.ranks, schedule.virtual, schedule.micro_batches) == (ranks, virtual, count)
    assert schedule.stages == ranks * virtual
    done = [action for rank in range(ranks) for action in schedule.of(rank)]
    assert len(done) == len(set(done))
    every = {(stage, n) for stage in range(ranks * virtual) for n in range(count)}
    of_kind = {kind: {(a.stage, a.micro_batch) for a in done if a.kind is kind} for kind in Kind}
    assert of_kind[Kind.F] == of_kind[Kind.B] | of_kind[Kind.I] == every
    assert of_kind[Kind.I] == of_kind[Kind.W] and not of_kind[Kind.B] & of_kind[Kind.I]
    assert schedule.apart == bool(of_kind[Kind.I])
    timeline = replay(schedule, equal_times(schedule.stages))
    assert timeline.busy == tuple([3.0 * virtual * count] * ranks)
    assert timeline.makespan >= 3 * virtual * count + (ranks - 1)
    assert 0 <= timeline.bubble < 1
    assert picture(timeline).count("|") == 2 * ranks


def test_names_are_known_in_any_case_and_mean_what_they_are_short_for():
    assert make_schedule("DualPipeV", 2, 4).rows == make_schedule("dualpipev", 2, 4).rows
    assert make_schedule("zbv", 4, 8).rows == make_schedule("ZBVZeroBubble", 4, 8).rows
    assert make_schedule("ZB", 4, 8, 2).rows == make_schedule("InterleavedZeroBubble", 4, 8).rows
    assert [make_schedule(name, 2, 4).virtual for name in NAMES] == [{**FIXED, **FREE}[name] for name in NAMES]


def test_1f1b_is_the_papers():
    assert text(make_schedule("1f1b", 3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_1f1b_with_fewer_micro_batches_than_stages_runs_all_forwards_first():
    assert text(make_schedule("1f1b", 4, 2)) == [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
        "2F0 2F1 2B0 2B1",
        "3F0 3B0 3F1 3B1",
    ]


def test_gpipe_and_looped_bfs_run_forwards_before_backwards():
    assert text(make_schedule("gpipe", 2, 2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert text(make_schedule("loopedbfs", 2, 2, 2))[0] == "0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0"


@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "LoopedBFS"]
)
def test_tables_are_those_of_torchs_classes(name):
    theirs = torchs_class(name, 4, 2, 8).pipeline_order
    flat = [
        [str(part) for action in theirs[rank] if action for part in (action.sub_actions or [action])]
        for rank in range(4)
    ]
    assert [row.split() for row in text(make_schedule(name, 4, 8))] == flat


@pytest.mark.parametrize("ranks, count", [(1, 3), (2, 4), (4, 8), (4, 3), (8, 16)])
def test_zb_with_one_stage_a_rank_is_the_table_of_torchs_class(ranks, count):
    theirs = torchs_class("InterleavedZeroBubble", ranks, 1, count).pipeline_order
    assert [row.split() for row in text(make_schedule("zb", ranks, count))] == [
        [str(action) for action in theirs[rank] if action] for rank in range(ranks)
    ]


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_v_schedules_place_stages_like_a_v(name):
    schedule = make_schedule(name, 4, 8)
    assert [schedule.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert schedule.rank_of == (0, 1, 2, 3, 3, 2, 1, 0)


def test_looped_schedules_place_stages_round_and_round():
    assert make_schedule("interleaved1f1b", 2, 4, 3).rank_of == (0, 1, 0, 1, 0, 1)


def test_an_unknown_name_is_refused_with_the_nearest():
    error = refusal(make_schedule, "1f1", 2, 4)
    assert error.where == "schedule" and "'1f1b'" in error.hint
    for name in ("", "pipedream", "module.function", "file.txt"):
        assert refusal(check_name, name).where == "schedule"
    for name in (*NAMES, "1F1B", "a/b.csv", "package.module:function"):
        check_name(name)


def test_numbers_that_can_not_be_are_refused_with_their_keys():
    assert refusal(make_schedule, "1f1b", 0, 4).where == "mesh.pp"
    assert refusal(make_schedule, "1f1b", 2, 0).where == "micro_batches"
    assert refusal(make_schedule, "zb", 2, 4, 0).where == "virtual_stages"
    assert "interleaved1f1b" in refusal(make_schedule, "1f1b", 2, 4, 2).hint


def test_a_refusal_names_the_numbers_of_micro_batches_that_fit():
    assert refusal(make_schedule, "interleaved1f1b", 4, 9).hint == "8 or 10 would fit"
    assert refusal(make_schedule, "dualpipev", 4, 3).hint == "8 would fit"


# A user's own


def test_a_saved_schedule_is_read_again_the_same(tmp_path):
    for name in NAMES:
        schedule = make_schedule(name, 3, 6)
        path = str(tmp_path / f"{name}.csv")
        save_csv(schedule, path)
        assert replace(make_schedule(path, 3, 6), name=schedule.name) == schedule


def test_torch_reads_what_was_saved(tmp_path):
    schedule = make_schedule("interleaved1f1b", 2, 4)
    save_csv(schedule, tmp_path / "mine.csv")
    theirs = torchs_class("LoopedBFS", 2, 2, 4)
    theirs._load_csv(str(tmp_path / "mine.csv"))
    assert [[str(a) if a else "" for a in theirs.pipeline_order[rank]] for rank in range(2)] == [
        [str(a) if a else "" for a in row] for row in schedule.rows
    ]


@pytest.mark.parametrize("kind", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_what_torch_saved_is_read_without_its_transfers(name, kind, tmp_path):
    path = str(tmp_path / "theirs.csv")
    torchs_class(name, 4, 2, 8)._dump_csv(path, format=kind)
    read, made = make_schedule(path, 4, 8), make_schedule(name, 4, 8)
    assert text(read) == text(made) and read.rank_of == made.rank_of


@pytest.mark.parametrize(
    "content, where, said",
    [
        ("0F0,0B0\n1F0,1X0\n", "schedule", "row 2, cell 2: '1X0' is no action"),
        ("0F0,0B0,1F0,1B0\n", "schedule", "has 1 rows, and the mesh has 2 ranks"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n", "micro_batches", "is for 2 micro-batches, and the plan has 1"),
        ("0F0,0B0\n2F0,2B0\n", "schedule", "no action of stage 1"),
        ("0F0,0B0,1F0,1B0\n,,\n", "schedule", "gives rank 1 nothing to do"),
        ("", "micro_batches", "is for 0 micro-batches"),
        ("0F0,0B0\n1F0,0B0\n", "schedule", "stage 0 stands on rank 0 and, in 0B0, on rank 1"),
        (b"\xff\xfe0F0", "schedule", "can't be read"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused(content, where, said, tmp_path):
    path = tmp_path / "wrong.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    error = refusal(make_schedule, str(path), 2, 1)
    assert error.where == where and said in error.what


def test_a_file_that_is_not_there_and_one_with_other_stages_are_refused(tmp_path):
    assert "can't be read" in refusal(make_schedule, str(tmp_path / "none.csv"), 2, 4).what
    save_csv(make_schedule("1f1b", 2, 4), tmp_path / "two.csv")
    assert refusal(make_schedule, str(tmp_path / "two.csv"), 2, 4, 2).where == "virtual_stages"


def test_a_file_may_give_ranks_different_numbers_of_stages(tmp_path):
    path = tmp_path / "uneven.csv"
    path.write_text("0F0,,2F0,2B0,,0B0\n,1F0,,,1B0\n")
    schedule = make_schedule(str(path), 2, 1)
    assert (schedule.stages, schedule.virtual, schedule.rank_of) == (3, 2, (0, 1, 0))
    check(schedule)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of the user's, and gives the name of a function in it."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(body):
        name = f"users_schedule_{abs(hash(body))}"
        (tmp_path / f"{name}.py").write_text(f"def table(ranks, stages, micro_batches):\n    {body}\n")
        return f"{name}:table"

    return write


def test_a_users_function_gives_a_schedule_of_text_or_actions(module):
    own = module("return [[f'{r}{k}{m}' for k in 'FB' for m in range(micro_batches)] for r in range(stages)]")
    assert text(make_schedule(own, 3, 4)) == text(make_schedule("gpipe", 3, 4))
    same = module(
        "from zgraph.plan.pipeline_schedules.make_schedule import make_schedule as make; "
        "return make('zb', ranks, micro_batches, stages // ranks).rows"
    )
    assert make_schedule(same, 3, 6, 2).rows == make_schedule("zb", 3, 6, 2).rows


@pytest.mark.parametrize(
    "body, said",
    [
        ("return None", "gave no table"),
        ("return ['0F0', '0B0']", "gave no table"),
        ("return [[1, 2], [3]]", "rank 0, place 0: '1' is no action but int"),
        (
            "from zgraph.plan.pipeline_schedules.actions import Action; return [[Action('F', -1, 0)], []]",
            "'-1F0' is no action",
        ),
        ("return [['0F0'], ['one']]", "rank 1, place 0: 'one' is no action"),
        ("raise KeyError('no such size')", "failed for 2 ranks, 2 stages and 1 micro-batches"),
        ("return [['0F0', '0B0'], ['1F0', '1B0', '2F0']]", "is of stage 2"),
    ],
)
def test_a_function_that_gives_no_schedule_is_refused(body, said, module):
    error = refusal(make_schedule, module(body), 2, 1)
    assert error.where == "schedule" and said in error.what


@pytest.mark.parametrize("name", ["no_such_module_anywhere:table", "json:no_such_function"])
def test_a_function_that_is_not_there_is_refused(name):
    assert "can't be loaded" in refusal(make_schedule, name, 2, 1).what


def test_a_users_module_that_fails_is_refused_with_what_it_raised(tmp_path, monkeypatch):
    (tmp_path / "users_broken_schedule.py").write_text("raise RuntimeError('not today')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "not today" in refusal(make_schedule, "users_broken_schedule:table", 2, 1).why


def test_a_users_action_counts_whatever_its_kind_is_written_as(module):
    own = module(
        "from zgraph.plan.pipeline_schedules.actions import Action; return [[Action(k, r, 0) for k in 'FIW'] for r in range(2)]"
    )
    assert text(make_schedule(own, 2, 1)) == ["0F0 0I0 0W0", "1F0 1I0 1W0"]


# What is wrong with a table


@pytest.mark.parametrize(
    "rows, said",
    [
        (["0F0 0B0 0B0", "1F0 1B0"], "0B0 stands twice on rank 0"),
        (["0F0", "1F0 1B0"], "rank 0 has neither 0B0 nor 0I0 and 0W0"),
        (["0B0", "1F0 1B0"], "rank 0 lacks 0F0"),
        (["0F0 0B0", "1F0 1B0 0F0"], "stage 0 stands on rank 0 and, in 0F0, on rank 1"),
        (["0B0 0F0", "1F0 1B0"], "0B0 stands before 0F0 on rank 0"),
        (["0I0 0F0 0W0", "1F0 1B0"], "0I0 stands before 0F0 on rank 0"),
        (["0F0 0W0 0I0", "1F0 1B0"], "0W0 stands before 0I0 on rank 0"),
        (["0F0 0I0", "1F0 1B0"], "0I0 without 0W0"),
        (["0F0 0W0", "1F0 1B0"], "0W0 without 0I0"),
        (["0F0 0B0 0W0", "1F0 1B0"], "rank 0 has both 0B0 and 0W0"),
        (["0F0 0I0 0W0 0B0", "1F0 1B0"], "rank 0 has both 0B0 and 0I0"),
        (["0F0 0B0 0F1 0B1", "1F0 1B0"], "0F1 on rank 0 is of micro-batch 1"),
        (["0F0 0B0", "1F0 1B0 2F0 2B0"], "2F0 on rank 1 is of stage 2"),
    ],
)
def test_a_table_that_is_no_step_is_refused_with_what_is_wrong(rows, said):
    schedule = table(*rows, stages=2, micro_batches=1)
    for refuse in (check, check_table):
        error = refusal(refuse, schedule)
        assert error.where == "schedule" and said in error.what


def test_an_action_of_a_negative_stage_is_refused():
    rows = [[Action(Kind.F, 0, 0), Action(Kind.B, 0, 0), Action(Kind.F, -1, 0)]]
    assert "is of stage -1" in refusal(check, Schedule.from_rows("mine", rows, 1, 1)).what


def test_a_deadlock_is_shown_as_its_cycle():
    error = refusal(check, table("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert "deadlocks" in error.what
    assert (
        error.why
        == "rank 0 waits in 0B0 for 1B0, which stands behind 1F1 on rank 1, which waits for 0F1, which stands behind 0B0 on rank 0"
    )


def test_a_rank_that_waits_for_itself_is_a_deadlock():
    error = refusal(check, table("1F0 0F0 1B0 0B0"))
    assert error.why == "rank 0 waits in 1F0 for 0F0, which stands behind 1F0 on rank 0"


def test_a_cycle_leaves_out_ranks_that_only_wait_for_it():
    error = refusal(check, table("0F0 0B0", "1F0 1B0", "3F0 2F0 3B0 2B0"))
    assert error.why == "rank 2 waits in 3F0 for 2F0, which stands behind 3F0 on rank 2"


def test_random_tables_deadlock_exactly_where_their_waits_have_a_cycle():
    """Against the standard library's topological sort; and each cycle that is shown is one."""
    chance = random.Random(0)
    deadlocks = 0
    for _ in range(300):
        schedule = shuffled(chance)
        waiting = waits(schedule)
        sorter = TopologicalSorter(waiting)
        for rank in range(schedule.ranks):
            row = schedule.of(rank)
            for before, after in pairwise(row):
                sorter.add(after, before)
        try:
            sorter.prepare()
        except CycleError:
            deadlocks += 1
            is_a_cycle(schedule, waiting, refusal(check, schedule).why)
        else:
            check(schedule)
            replay(schedule, equal_times(schedule.stages))
    assert 30 < deadlocks < 270


def shuffled(chance):
    """A schedule with some actions of its rows exchanged, each after its forward as before."""
    schedule = make_schedule(chance.choice(["1f1b", "zb", "interleaved1f1b", "zbv"]), chance.randint(1, 4), 4)
    while True:
        rows = [list(schedule.of(rank)) for rank in range(schedule.ranks)]
        for _ in range(chance.randint(1, 3)):
            row = chance.choice(rows)
            a, b = chance.randrange(len(row)), chance.randrange(len(row))
            row[a], row[b] = row[b], row[a]
        made = replace(schedule, rows=tuple(map(tuple, rows)))
        try:
            check_table(made)
        except PlanError:
            continue
        return made


def is_a_cycle(schedule, waiting, why):
    first = re.match(r"rank (\d+) waits in (\w+) ", why)
    rank, head = int(first[1]), Action.parse(first[2])
    begun = head
    for needed, behind, there in re.findall(r"for (\w+)(?:, which stands behind (\w+))? on rank (\d+)", why):
        assert Action.parse(needed) in waiting[head]
        row = schedule.of(int(there))
        head = Action.parse(behind or needed)
        assert row.index(head) <= row.index(Action.parse(needed))
        rank = int(there)
    assert head == begun and rank == int(first[1])


def test_an_action_waits_for_its_own_stage_and_its_neighbours():
    waiting = {str(a): " ".join(map(str, needed)) for a, needed in waits(make_schedule("zb", 2, 1)).items()}
    assert waiting == {"0F0": "", "1F0": "0F0", "1I0": "1F0", "1W0": "1I0", "0I0": "0F0 1I0", "0W0": "0I0"}
    assert waits(make_schedule("1f1b", 2, 1))[Action.parse("0B0")] == (Action.parse("0F0"), Action.parse("1B0"))


# Graphs that are no chain


def test_a_skip_connection_can_make_a_deadlock_of_what_a_chain_would_run():
    schedule = table("0F0 0B0", "2F0 2B0", "1F0 1B0")
    check(schedule)
    check(schedule, Needs(((), (0,), (0, 1)), ((1, 2), (2,), ())))
    backwards = Needs(((2,), (0,), (1,)), ((1,), (2,), (0,)))
    error = refusal(check, schedule, backwards)
    assert (
        error.why
        == "rank 0 waits in 0F0 for 2F0 on rank 1, which waits for 1F0 on rank 2, which waits for 0F0 on rank 0"
    )


def test_stages_that_do_not_depend_on_each_other_need_not_wait():
    schedule = table("1F0 1B0 0F0 0B0")
    refusal(check, schedule)
    check(schedule, Needs(((), ()), ((), ())))


def test_needs_of_another_number_of_stages_are_refused():
    assert "is for 2 stages, and the model has 3" in refusal(check, make_schedule("1f1b", 2, 2), Needs.chain(3)).what


def test_a_skip_connections_transfer_delays_its_reader():
    schedule = table("0F0 0B0", "1F0 1B0", "2F0 2B0")
    skip = Needs(((), (0,), (0, 1)), ((1, 2), (2,), ()))
    slow = {(0, 2): 10.0, (2, 0): 20.0}
    spans = replay(schedule, equal_times(3), lambda a, b: slow.get((a, b), 0.0), skip).spans
    assert spans[2][0].begin == 11.0 and spans[0][1].begin == spans[2][1].end + 20.0


# How long it takes


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_equal_stages_is_that_of_the_formula(name):
    for p in range(1, 9):
        for m in range(1, 17):
            timeline = replay(make_schedule(name, p, m), equal_times(p))
            assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
            assert timeline.makespan == pytest.approx(3 * (m + p - 1))


def test_interleaving_divides_the_bubble_by_the_stages_a_rank():
    for p in range(1, 9):
        for v in range(1, 5):
            for m in range(p, 17, p):
                timeline = replay(make_schedule("interleaved1f1b", p, m, v), equal_times(p * v))
                assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1)), (p, v, m)


def test_zero_bubble_is_at_least_15_percent_shorter_than_1f1b_at_the_same_peak_memory():
    plain, zero = make_schedule("1f1b", 4, 8), make_schedule("zb", 4, 8)
    times = equal_times(4)
    assert replay(plain, times).makespan == 33.0
    assert replay(zero, times).makespan <= 0.85 * 33.0
    assert max(stash_bytes(zero, [100] * 4)) == max(stash_bytes(plain, [100] * 4)) == 400


def test_v_schedules_leave_less_idle_than_1f1b():
    """With two stages a rank of half the size, so that a step is the same work."""
    plain = replay(make_schedule("1f1b", 4, 8), equal_times(4))
    for name in ("zbv", "dualpipev", "interleavedzerobubble"):
        assert replay(make_schedule(name, 4, 8), equal_times(8, 0.5)).makespan < plain.makespan


def test_a_slow_stage_is_busy_while_others_wait_for_it():
    times = Times([1, 1, 4, 1], [2, 2, 8, 2])
    timeline = replay(make_schedule("1f1b", 4, 8), times)
    assert timeline.busy == (24, 24, 96, 24)
    assert timeline.makespan == sum(timeline.spans[2][0][1:2]) + 96 + 2 + 2
    assert timeline.idle[2] == timeline.makespan - 96


def test_transfers_overlap_with_compute_and_go_one_after_another_between_two_ranks():
    schedule = table("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    spans = replay(schedule, Times([1, 1], [1, 1]), lambda a, b: 5.0).spans
    assert [(s.begin, s.end) for s in spans[0][:2]] == [(0, 1), (1, 2)]
    assert [s.begin for s in spans[1]] == [6, 11, 12, 13]
    assert [s.begin for s in spans[0][2:]] == [18, 23]


def test_transfers_between_stages_of_one_rank_take_no_time():
    schedule = make_schedule("zbv", 1, 2)
    asked = []
    replay(schedule, equal_times(2), lambda a, b: asked.append((a, b)) or 1.0)
    assert asked == []


def test_transfers_in_both_directions_do_not_wait_for_each_other():
    schedule = make_schedule("zbv", 2, 4)
    pairs = set()
    replay(schedule, equal_times(4), lambda a, b: pairs.add((a, b)) or 0.5)
    assert pairs == {(0, 1), (1, 0), (2, 3), (3, 2)}


def test_a_whole_backward_takes_what_its_two_kinds_of_gradients_do():
    one = make_schedule("1f1b", 2, 2)
    halves = Times([1, 2], input_gradients=[3, 4], weight_gradients=[5, 6])
    assert replay(one, halves).spans == replay(one, Times([1, 2], [8, 10])).spans
    assert halves.of(Action.parse("1B0")) == 10
    with pytest.raises(ValueError, match="no times"):
        replay(make_schedule("zb", 2, 2), Times([1, 2], [8, 10]))


def test_a_replay_of_a_deadlock_is_refused():
    refusal(replay, table("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), equal_times(2))


# Memory


def test_gpipe_stores_every_micro_batch_and_1f1b_as_many_as_ranks_are_left():
    saved = [10, 20, 30, 40]
    assert stash_bytes(make_schedule("gpipe", 4, 8), saved) == (80, 160, 240, 320)
    assert stash_bytes(make_schedule("1f1b", 4, 8), saved) == (40, 60, 60, 40)
    assert stash_bytes(make_schedule("1f1b", 4, 2), saved) == (20, 40, 60, 40)


def test_backwards_of_inputs_leave_the_part_that_weights_need():
    schedule = table("0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2")
    assert stash_bytes(schedule, [100]) == (300,)
    assert stash_bytes(schedule, [100], 0.5) == (200,)
    assert stash_bytes(schedule, [100], 0.0) == (100,)


def test_stages_of_one_rank_are_stored_together():
    assert stash_bytes(table("0F0 1F0 1B0 0B0"), [5, 7]) == (12,)


# What is shown


def test_a_picture_shows_each_actions_micro_batch_kind_and_time():
    timeline = replay(make_schedule("1f1b", 2, 3), Times([0.001] * 2, [0.002] * 2))
    assert picture(timeline).splitlines() == [
        "rank 0 |0-1-....0===2-1===..2===|",
        "rank 1 |..0-0===1-1===2-2===....|",
        "bubble 25.0%, makespan 12.000 ms",
        "0- forward, 0= backward, . idle",
    ]


def test_a_picture_tells_a_ranks_stages_and_halves_of_backwards_apart():
    lines = picture(replay(make_schedule("zbv", 1, 1), equal_times(2))).splitlines()
    assert lines[0] == "rank 0 |0a-0b-0b~0b+0a~0a+|"
    assert lines[-1] == "0- forward, 0~ backward of inputs, 0+ backward of weights, . idle"


def test_a_picture_is_no_wider_than_asked():
    timeline = replay(make_schedule("interleaved1f1b", 4, 16, 4), equal_times(16))
    assert {len(line) for line in picture(timeline, 60).splitlines()[:4]} == {len("rank 0 ||") + 60}


def test_a_picture_leaves_out_a_number_that_would_hide_what_its_action_is():
    assert picture(replay(make_schedule("1f1b", 1, 1), Times([1], [1])), 2).startswith("rank 0 |-=|")


def test_a_picture_of_a_step_that_takes_no_time_is_empty():
    assert picture(replay(make_schedule("1f1b", 2, 2), Times([0, 0], [0, 0]))).startswith("rank 0 ||\nrank 1 ||")


def test_a_trace_has_every_action_at_its_time_on_its_ranks_process():
    timeline = replay(make_schedule("zbv", 2, 4), equal_times(4))
    trace = json.loads(json.dumps(trace_of(timeline)))
    drawn = {(e["pid"], e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    assert drawn == {(r, str(a), b * 1e6, (e - b) * 1e6) for r, row in enumerate(timeline.spans) for a, b, e in row}


def test_names_are_checked_without_torch():
    code = "import sys; from zgraph.plan.pipeline_schedules.make_schedule import check_name; check_name('zb'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_programs_are_compiled_in_one_order_on_all_ranks(monkeypatch):
    monkeypatch.setattr("zgraph.stages.runtime.check_capacity", lambda *_: None)

    # They are compared as they are made, and ranks have sets in different orders.
    class Backwards(frozenset):
        def __and__(self, other):
            return sorted(frozenset.__and__(self, other), reverse=True)

    made = []
    step = SimpleNamespace(
        first_gathers=lambda: None, forward=lambda: None, backward=lambda *_: None, backward_apart=lambda *_: None, keeps=False,
        differentiated=True, captured=SimpleNamespace(outputs=[SimpleNamespace(role=OutputRole.GRADIENT)]),
        summing_backward=lambda _, apart: made.append(apart),
    )  # fmt: skip
    runtime = SimpleNamespace(plan=SimpleNamespace(micro_batches=4), once=True)
    PipelineRuntime.prepare(runtime, step, Backwards({Kind.B, Kind.W}))
    assert made == [False, True]
