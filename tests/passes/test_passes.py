"""Each pass on a tiny graph: what goes in, what comes out, counted; and how passes are put together."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import models
import pytest
import torch
from gathered import GatheredBytes, aliases_of_gather, alive, gathers
from sweeps import sweep
from torch import nn

import zgraph
from zgraph.build.planned_step import programs, update_program
from zgraph.codegen.partition import split
from zgraph.errors import ContractError, PassError, PlanError, VerifyError
from zgraph.passes import PassManager, graph_pass
from zgraph.passes.canonicalize.cleanup import cleanup
from zgraph.passes.remat.recompute import recompute_all_but
from zgraph.passes.zero.keep_gathered import KeepOptions, keep_gathered
from zgraph.passes.zero.reduce_gradients import ReduceOptions, reduce_gradients
from zgraph.passes.zero.regather import regather
from zgraph.passes.zero.release import release
from zgraph.passes.zero.shard_parameters import shard_parameters
from zgraph.program import collectives, ops
from zgraph.program.aliases import aliases_of
from zgraph.program.node import NodeInfo, Phase, Role, info, tensor
from zgraph.program.program import InputRole, Level, OutputRole, Program

pytestmark = pytest.mark.core
aten = torch.ops.aten
Plan = zgraph.Plan


class Linear(nn.Module):
    """sum(tanh(x @ w.T)): one weight, which the backward reads only for x's gradient."""

    def __init__(self, rows: int = 4, columns: int = 3) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(rows, columns))

    def forward(self, x):
        return torch.tanh(x @ self.w.t()).sum()


class Two(nn.Module):
    """Two products one after another: the backward of the second reads its weight again."""

    def __init__(self, rows: int = 4) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rows, 3))
        self.b = nn.Parameter(torch.randn(5, rows))

    def forward(self, x):
        return (torch.tanh(x @ self.a.t()) @ self.b.t()).sum()


def captured(model: nn.Module, world: int = 2, inputs=None, **plan) -> Program:
    """The captured program for a plan, before any pass."""
    plan = Plan(**{"zero": 3, "backend": "eager", **plan})
    return programs(model, plan, inputs or (torch.randn(6, 3),), world).records[0].program.snapshot()


def after(program: Program, *passes) -> Program:
    return PassManager(passes).run(program).program


def count(program: Program) -> Counter[str]:
    """Nodes by phase and role, "forward gather" say, without those that only compute."""
    return Counter(
        f"{info(n).phase} {info(n).role}"
        for n in program.nodes
        if n.op == "call_function" and info(n).role is not Role.COMPUTE
    )


def made(model: nn.Module, stage: int, world: int = 2, **plan) -> Program:
    plan = Plan(**{"zero": stage, "backend": "eager", **plan})
    return programs(model, plan, (torch.randn(6, 3),), world).program


class Three(Two):
    """Three products one after another: at the turn from forward to backward stands the third."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.randn(4, 5))

    def forward(self, x):
        return (torch.tanh(torch.tanh(x @ self.a.t()) @ self.b.t()) @ self.c.t()).sum()


# -- cleanup ---------------------------------------------------------------------------------------------------------
def test_cleanup_removes_marks_detaches_and_dead_nodes_and_nothing_else():
    """
    w -> t -> mm(x, .) -> tanh -> sum -> zgraph::output -> out        the mark goes
                          tanh -> detach -> tanh_backward             the detach goes
    """
    program = captured(Linear())
    before = Counter(str(n.target) for n in program.nodes if n.op == "call_function")
    dead = next(n for n in program.nodes if n.target is aten.tanh.default)
    with program.graph.inserting_after(dead):
        program.call(aten.neg.default, (dead,), NodeInfo(Phase.FORWARD), name="dead")
    stats = cleanup()(program)
    left = Counter(str(n.target) for n in program.nodes if n.op == "call_function")
    marks = {"zgraph.output.default", "aten.detach.default", "aten.alias.default"}
    assert left == Counter({k: v for k, v in before.items() if k not in marks})
    assert stats["identities"] == sum(before[m] for m in marks) > 0
    assert stats["dead"] == 1


# -- shard_parameters ------------------------------------------------------------------------------------------------
def test_a_parameter_enters_as_its_shard_and_is_gathered_before_its_first_use():
    """w[4, 3] -> t        becomes        w[2, 3] -> all_gather -> wait -> t"""
    program = after(captured(Linear()), cleanup(), shard_parameters())
    shard = program.input_nodes(InputRole.PARAMETER)["w"]
    assert tuple(tensor(shard).shape) == (2, 3)
    assert count(program) == {"forward gather": 1, "forward wait": 1}
    (start,) = gathers(program)
    wait = next(iter(start.users))
    assert start.args[0] is shard and start.next is wait and tuple(tensor(wait).shape) == (4, 3)
    assert wait.next is sorted(wait.users)[0]
    assert program.level is Level.DISTRIBUTED


def test_rows_that_ranks_do_not_divide_are_padded_and_cut_off_after_the_gather():
    """w[5, 3] over 3 ranks        ->        w[2, 3] -> all_gather[6, 3] -> wait -> slice[5, 3]"""
    program = after(captured(Linear(5), 3), cleanup(), shard_parameters())
    assert count(program) == {"forward gather": 1, "forward wait": 1, "forward layout": 1}
    (start,) = gathers(program)
    cut = next(n for n in program.nodes if info(n).role is Role.LAYOUT)
    assert tuple(tensor(start).shape) == (6, 3) and tuple(tensor(cut).shape) == (5, 3)


def test_a_parameter_of_fewer_rows_than_ranks_is_sharded_too():
    program = after(captured(Linear(1), 8), cleanup(), shard_parameters())
    (start,) = gathers(program)
    assert tuple(tensor(start).shape) == (8, 3) and tuple(tensor(start.args[0]).shape) == (1, 3)


def test_a_parameter_used_several_times_is_gathered_once():
    case = models.build("used_several_times")
    program = after(captured(case.model, 2, case.inputs), cleanup(), shard_parameters())
    assert Counter(info(n).param for n in gathers(program)) == Counter(list(program.params))


def test_unused_parameters_and_those_below_the_threshold_are_not_gathered():
    case = models.build("unused_parameter")
    program = after(captured(case.model, 2, case.inputs, param_persistence_threshold=6), cleanup(), shard_parameters())
    assert {info(n).param for n in gathers(program)} == {"layer.weight", "idle"}


# -- stages ----------------------------------------------------------------------------------------------------------
def test_zero3_gathers_again_in_backward():
    """b is read by the backward (tangent @ b), a is not: x needs no gradient. c is held: it is read at the turn."""
    program = made(Three(), 3)
    assert [info(n).param for n in gathers(program)] == ["a", "b", "c", "b"]
    again = gathers(program)[-1]
    assert again.args[0] is program.input_nodes(InputRole.PARAMETER)["b"]
    waits = [info(w).phase for start in gathers(program) for w in start.users]
    assert waits == [Phase.FORWARD, Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD]


def test_zero3_holds_a_weight_between_whose_uses_the_plan_lets_others_be_used():
    """Between the forward's b and the backward's only c is used, of 20 elements."""
    for reuse, regathered in ((4 * 20 - 1, ["b"]), (4 * 20, [])):
        history = programs(
            Three(), Plan(zero=3, backend="eager", prefetch={"reuse_bytes": reuse}), (torch.randn(6, 3),), 2
        )
        program = history.after("regather")
        assert [info(n).param for n in gathers(program, Phase.BACKWARD)] == regathered


def held_at_the_turn(program: Program) -> set[str]:
    """The parameters between whose last read in the forward and first in the backward no other one is read."""
    at = {node: i for i, node in enumerate(program.nodes)}
    reads: list[tuple[int, Phase, str]] = []
    for start in gathers(program):
        aliases = aliases_of_gather(start)
        for reader in {u for alias in aliases for u in alias.users} - set(aliases):
            if reader.op != "output" and reader.target is not ops.RELEASE:
                reads.append((at[reader], info(reader).phase, str(info(start).param)))
    found = set()
    for name in {n for _, _, n in reads}:
        last = max((i for i, phase, n in reads if n == name and phase is Phase.FORWARD), default=-1)
        first = min((i for i, phase, n in reads if n == name and phase is Phase.BACKWARD), default=len(at))
        if not any(last < i < first for i, _, _ in reads):
            found.add(name)
    return found


def assert_saves_what_is_held_at_the_turn(program: Program) -> None:
    """Nor a cast of any other weight, which is as large as it. (A gather that the forward only starts is no weight yet.)"""
    saved = {p.name for p in split(program).forward.outputs if p.role is OutputRole.SAVED}
    held = held_at_the_turn(program)
    wholes = {a: info(start).param for start in gathers(program) for w in start.users for a in aliases_of(w)}
    assert saved and {wholes[n] for n in wholes if n.name in saved} <= held
    for node in program.nodes:
        if node.name in saved and node.all_input_nodes and set(node.all_input_nodes) <= set(wholes):
            assert {wholes[a] for a in node.all_input_nodes} <= held, node


@pytest.mark.parametrize("name", ["uneven_mlp", "channels_last", "tied", "mixed_dtypes", "used_several_times"])
def test_zero3_saves_no_gathered_weight_but_what_is_used_at_the_turn(name):
    case = models.build(name)
    assert_saves_what_is_held_at_the_turn(programs(case.model, Plan(zero=3, backend="eager"), case.inputs, 3).program)


def test_zero3_saves_no_other_weight_with_inductor_either():
    case = models.build("mixed_dtypes")
    assert_saves_what_is_held_at_the_turn(programs(case.model, Plan(zero=3), case.inputs, 3).program)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero1_and_zero2_gather_only_in_forward(stage):
    program = made(Two(), stage)
    assert len(gathers(program, Phase.FORWARD)) == 2 and not gathers(program, Phase.BACKWARD)
    assert [p.name for p in program.outputs if p.role is OutputRole.UNSHARDED] == ["a", "b"]
    assert not any(n.target is ops.RELEASE for n in program.nodes)


def test_the_backward_of_stage_2_reads_the_weights_that_the_forward_kept():
    """b goes into the product transposed, so what the backward takes is a view of the kept one."""
    parts = split(made(Two(), 2))
    kept = {p.name: n for p, n in parts.forward.output_items() if p.role is OutputRole.UNSHARDED}
    views = {n.name for n in aliases_of(kept["b"])}
    assert len(views & {p.name for p in parts.backward.inputs}) == 1
    assert not any(collectives.is_start(n) and info(n).role is Role.GATHER for n in parts.backward.nodes)


def test_zero0_gathers_nothing_and_reduces_everything():
    assert count(made(Two(), 0)) == {"backward reduce": 2, "backward wait": 2}


def test_one_rank_communicates_nothing():
    for stage in range(4):
        assert not count(made(Two(), stage, world=1))


# -- keep_gathered ---------------------------------------------------------------------------------------------------
def test_weights_that_an_earlier_program_gathered_come_in_whole():
    """w[2, 3] -> all_gather -> wait -> t        becomes        w[4, 3] -> t"""
    program = after(
        captured(Linear(), zero=2), cleanup(), shard_parameters(), keep_gathered(KeepOptions(gathered_before=True))
    )
    assert not count(program)
    assert [(p.role, p.name) for p in program.inputs if p.name == "w"] == [(InputRole.UNSHARDED, "w")]
    assert tuple(tensor(program.input_nodes(InputRole.UNSHARDED)["w"]).shape) == (4, 3)


def test_weights_that_are_not_gathered_before_go_out_whole():
    program = after(captured(Linear(5), 2, zero=2), cleanup(), shard_parameters(), keep_gathered())
    (kept,) = [n for p, n in program.output_items() if p.role is OutputRole.UNSHARDED]
    assert tuple(tensor(kept).shape) == (5, 3)


# -- reduce_gradients ------------------------------------------------------------------------------------------------
def reduced(model: nn.Module, world: int, options: ReduceOptions | None = None, **plan) -> Program:
    return after(captured(model, world, **plan), cleanup(), shard_parameters(), reduce_gradients(options))


def test_a_sharded_gradient_is_reduce_scattered():
    """mm[4, 3] -> out        becomes        mm -> reduce_scatter "avg" [2, 3] -> wait -> out"""
    program = reduced(Linear(), 2)
    (start,) = [n for n in program.nodes if n.target is collectives.REDUCE_SCATTER]
    assert collectives.reduce_op_of(start) == "avg" and tuple(tensor(start).shape) == (2, 3)
    assert count(program)["backward layout"] == 0


def test_an_uneven_gradient_is_padded_before_it_is_scattered():
    """mm[5, 3] -> pad[6, 3] -> reduce_scatter[2, 3] -> wait"""
    program = reduced(Linear(5), 3)
    (start,) = [n for n in program.nodes if n.target is collectives.REDUCE_SCATTER]
    assert start.args[0].target is aten.constant_pad_nd.default and tuple(tensor(start.args[0]).shape) == (6, 3)


def test_hsdp_scatters_within_and_reduces_the_shards_between():
    """mm[4, 3] -> reduce_scatter @dp [2, 3] -> wait -> all_reduce @replicate [2, 3] -> wait"""
    program = reduced(Linear(), 4, mesh={"replicate": 2, "dp": 2})
    starts = [n for n in program.nodes if collectives.is_start(n) and info(n).role is Role.REDUCE]
    assert [(n.target, collectives.group_of(n)) for n in starts] == [
        (collectives.REDUCE_SCATTER, "dp"), (collectives.ALL_REDUCE, "replicate"),
    ]  # fmt: skip
    assert tuple(tensor(starts[1]).shape) == (2, 3)


def test_each_gradient_is_reduced_as_soon_as_it_is_made():
    """Its reduction starts right after it, and is waited for just before the next one starts."""
    program = reduced(Two(), 2)
    starts = [n for n in program.nodes if collectives.is_start(n) and info(n).role is Role.REDUCE]
    assert all(s.prev in s.all_input_nodes or collectives.is_wait(s.prev) for s in starts)
    first_wait = next(iter(starts[0].users))
    assert starts[0] < first_wait and first_wait.next is starts[1]


def test_a_micro_batch_that_only_accumulates_reduces_nothing():
    program = reduced(Two(), 2, ReduceOptions(reduce=False))
    assert not any(info(n).role is Role.REDUCE for n in program.nodes)
    grads = {p.name: tuple(tensor(n).shape) for p, n in program.output_items() if p.role is OutputRole.GRADIENT}
    assert grads == {"a": (4, 3), "b": (5, 4)}


def test_gradients_of_earlier_micro_batches_are_added_before_the_reduction():
    program = reduced(Two(), 2, ReduceOptions(accumulated=True))
    sums = [n for n in program.nodes if n.target is aten.add.Tensor and info(n).role is Role.ACCUMULATE]
    assert (
        {info(n).param for n in sums}
        == {"a", "b"}
        == {p.name for p in program.inputs if p.role is InputRole.ACCUMULATOR}
    )
    assert all(next(iter(n.users)).target in (collectives.REDUCE_SCATTER, aten.constant_pad_nd.default) for n in sums)


@pytest.mark.parametrize(
    "options", [ReduceOptions(), ReduceOptions(accumulated=True), ReduceOptions(reduce=False, accumulated=True)]
)
@pytest.mark.parametrize("name", ["shared_gradient", "gradient_of_forward"])
def test_parameters_that_share_one_gradient_are_each_reduced(name, options):
    case = models.build(name)
    program = after(captured(case.model, 2, case.inputs), cleanup(), shard_parameters(), reduce_gradients(options))
    starts = [n for n in program.nodes if collectives.is_start(n) and info(n).role is Role.REDUCE]
    assert len(starts) == (len(program.params) if options.reduce else 0)


# -- release ---------------------------------------------------------------------------------------------------------
def test_every_gathered_weight_is_released_right_after_its_last_reader():
    case = models.build("used_several_times")
    program = programs(case.model, Plan(zero=3, backend="eager"), case.inputs, 3).program
    waits = [w for start in gathers(program) for w in start.users]
    marks = [n for n in program.nodes if n.target is ops.RELEASE]
    assert {m.args[0] for m in marks} == set(waits) and len(marks) == len(waits)
    for mark in marks:
        readers = sorted({u for a in aliases_of(mark.args[0]) for u in a.users if u is not mark})
        assert readers[-1] < mark
        between = readers[-1].next
        while between is not mark:
            assert between.target is ops.RELEASE
            between = between.next


class GivesWeight(Linear):
    def forward(self, x):
        return super().forward(x), self.w.t()


def test_a_weight_of_which_the_model_returns_a_view_is_not_released():
    """Nor gathered again for it: what the model returns is the forward's own."""
    program = programs(GivesWeight(), Plan(zero=3, backend="eager"), (torch.randn(6, 3),), 2).program
    assert gathers(program) and not any(n.target is ops.RELEASE for n in program.nodes)


# -- write_in_place --------------------------------------------------------------------------------------------------
def test_each_new_value_is_written_after_the_last_reader_of_the_old_one():
    plan = Plan(zero=3, backend="eager", optimizer=zgraph.LAMB(weight_decay=0.1), ema=0.9)
    history = update_program(Two(), plan, 2)
    before, program = history.records[0].program, history.program
    mutated = {(p.of, p.name) for p in before.outputs if p.role is OutputRole.MUTATION}
    assert not any(n.target is aten.copy_.default for n in before.nodes)
    at = {n: i for i, n in enumerate(program.nodes)}
    written = set()
    for port, place in program.input_items():
        writes = [u for u in place.users if u.target is aten.copy_.default and u.args[0] is place]
        if writes:
            written.add((port.role, port.name))
            assert len(writes) == 1 and all(at[u] <= at[writes[0]] for u in place.users)
    assert written == mutated and not any(p.role is OutputRole.MUTATION for p in program.outputs)
    assert {name for _, name in written} >= {"a", "b", "a/exp_avg", "b/exp_avg_sq", "a/ema", "/step"}


# -- recompute -------------------------------------------------------------------------------------------------------
def test_what_is_not_saved_is_computed_again_before_its_first_use_in_the_backward():
    """tanh, read by tanh_backward, is made again from mm; the forward's own tanh stays for the sum."""
    program = after(captured(Linear()), cleanup())
    assert recompute_all_but(program, saved={"mm"}) == 1
    tanhs = [n for n in program.nodes if n.target is aten.tanh.default]
    assert [info(n).phase for n in tanhs] == [Phase.FORWARD, Phase.BACKWARD]
    assert info(tanhs[1]).copy_of == tanhs[0].name and tanhs[1].args == tanhs[0].args
    assert {p.name for p in split(program).forward.outputs if p.role is OutputRole.SAVED} == {"mm"}


def test_drawn_numbers_are_never_drawn_again():
    case = models.build("dropout")
    program = after(captured(case.model, 2, case.inputs), cleanup())
    random = [n for n in program.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
    recompute_all_but(program, saved=set())
    assert [n for n in program.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())] == random


# -- how much is gathered at once ------------------------------------------------------------------------------------
def layer_bytes(model: nn.Module, world: int) -> int:
    """Of one layer of a stack: rows are padded to a multiple of the ranks."""
    shapes = [p.shape for p in model.layers[0].parameters()]
    return sum(4 * -(-shape[0] // world) * world * shape[1:].numel() for shape in shapes)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@sweep("depth", [2, 5, 24], quick=(1,))
def test_zero3_never_holds_more_than_its_cap_which_is_three_layers_at_any_depth(depth, backend):
    """By default: what is needed at once, which is a layer, and two of the largest layers."""
    case = models.stack(depth)
    history = programs(case.model, Plan(zero=3, backend=backend), case.inputs, 3)
    stats = {r.name: r.stats for r in history.records}["overlap"]
    off = programs(case.model, Plan(zero=3, backend=backend, prefetch={"enabled": False}), case.inputs, 3)
    needed, layer = max(alive(off.program)), sum(4 * p.numel() for p in case.model.layers[0].parameters())
    assert stats["cap_bytes"] == needed + 2 * layer <= 3 * layer_bytes(case.model, 3)
    assert needed < max(alive(history.program)) <= stats["cap_bytes"]
    assert stats["gathered_bytes"] == max(alive(history.program))


def test_zero2_holds_every_layer():
    """(So that the bound above can fail.)"""
    case = models.stack(6)
    parts = split(programs(case.model, Plan(zero=2, backend="eager"), case.inputs, 3).program)
    kept = {p.name for p in parts.forward.outputs if p.role is OutputRole.UNSHARDED}
    assert kept == {n for n, _ in case.model.named_parameters()}


@pytest.fixture
def four_ranks():
    """This process as rank 0 of 4, whose collectives transfer nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


@sweep("stage, bucket", [(stage, bucket) for stage in (2, 3) for bucket in (None, 0)], quick=1)
def test_a_run_holds_no_more_gathered_bytes_than_the_cap(four_ranks, stage, bucket):
    case = models.stack(12, dim=8)
    model = zgraph.compile(case.model, Plan(zero=stage, backend="eager", bucket={"gather": bucket}))
    one = layer_bytes(case.model, 4)
    inputs = tuple(x[:6] for x in case.inputs)
    model(*inputs).backward()  # (compiles)
    for p in model.parameters():
        p.grad = None
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    with GatheredBytes() as seen:
        model(*inputs).backward()
    assert seen.gathers >= 4 * 12
    if stage == 3:
        records = model.zgraph.programs["train0"].history().records
        stats = {r.name: r.stats for r in records}["overlap"]
        assert one / 2 <= seen.peak <= stats["cap_bytes"] <= 3 * one
        assert seen.peak <= stats["gathered_bytes"]
    else:
        assert seen.peak >= 12 * one


# -- the pass manager ------------------------------------------------------------------------------------------------
calls: list[str] = []


@graph_pass("noting", "notes that it ran", provides=("noted",))
def noting(program):
    calls.append("noting")


@graph_pass("needing", "needs what noting gives", requires=("noted",))
def needing(program):
    calls.append("needing")


@graph_pass("refusing", "stands against what noting gives", conflicts=("noted",))
def refusing(program):
    calls.append("refusing")


@graph_pass("failing", "raises")
def failing(program):
    raise ZeroDivisionError("on purpose")


@graph_pass("breaking", "leaves a program that is none")
def breaking(program):
    node = next(n for n in program.nodes if n.target is aten.tanh.default)
    node.meta.pop("zgraph")


@graph_pass("count_matmuls", "counts the matrix products")
def count_matmuls(program):
    return {"matmuls": sum("mm" in str(node.target) for node in program.nodes)}


@graph_pass("tanh_to_relu", "puts relu for the forward's tanh")
def tanh_to_relu(program):
    changed = 0
    for node in program.nodes:
        if node.target is aten.tanh.default:
            node.target = aten.relu.default
            changed += 1
    return {"changed": changed}


@pytest.mark.parametrize("passes,words", [
    ((noting(), needing(), noting()), "'noting' stands twice"),
    ((noting(), needing(), refusing()), "conflicts with ['noted']"),
    ((needing(), noting()), "put it after ['noting']"),
    ((needing(),), "requires ['noted'], which no pass before it provides"),
    ((noting(), regather()), "requires ['sharded']"),
    ((cleanup(), noting(), shard_parameters(), keep_gathered(), regather()), "conflicts with ['kept']"),
    ((cleanup(), noting(), shard_parameters(), keep_gathered(), release()), "conflicts with ['kept']"),
])  # fmt: skip
def test_passes_that_do_not_fit_are_refused_before_any_runs(passes, words):
    calls.clear()
    program = captured(Linear())
    with pytest.raises(ContractError) as caught:
        PassManager(passes).run(program)
    assert words in str(caught.value)
    assert not calls and program.level is Level.CAPTURED


def test_facts_that_a_program_has_already_count_as_provided():
    program = captured(Linear())
    after(program, noting())
    PassManager([needing()]).run(program)
    with pytest.raises(ContractError, match="can't run here"):
        PassManager([refusing()]).run(program)


@pytest.mark.parametrize("bad,error", [(failing, PassError), (breaking, VerifyError)])
def test_a_failing_pass_writes_what_is_needed_to_replay_it(tmp_path, monkeypatch, bad, error):
    from zgraph.program.printer import render
    from zgraph.program.serialize import from_json

    monkeypatch.setenv("ZGRAPH_REPRO_DIR", str(tmp_path))
    with pytest.raises(error) as caught:
        after(captured(Linear()), cleanup(), bad(), shard_parameters())
    (folder,) = tmp_path.iterdir()
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
    assert str(folder) in told and bad.contract.name in told
    rest = json.loads((folder / "pipeline.json").read_text())
    assert rest["passes"] == [bad.contract.name, "shard_parameters"]
    again = from_json(json.loads((folder / "program.json").read_text()))
    assert render(again) == (folder / "program.txt").read_text()
    with pytest.raises(PassError):
        PassManager([bad()]).run(again)


def test_snapshots_do_not_change_when_later_passes_run():
    history = programs(Three(), Plan(zero=3, backend="eager"), (torch.randn(6, 3),), 2)
    assert [r.name for r in history.records] == [
        "capture",
        "cleanup",
        "sliding_windows",
        "packed_documents",
        "compact_masks",
        "checkpoint",
        "shard_parameters",
        "regather",
        "reduce_gradients",
        "defer_gradients",
        "bucket",
        "overlap",
        "release",
    ]
    assert not count(history.after("cleanup"))
    assert "backward gather" not in count(history.after("shard_parameters"))
    assert "backward reduce" not in count(history.after("regather"))
    assert "forward release" not in count(history.after("reduce_gradients"))
    for one, two in itertools.pairwise(
        r.program for r in history.records
    ):  # (what a pass has left as it was is one graph)
        assert (one.graph is two.graph) == (one.module.code == two.module.code)
    last = history.program.snapshot()
    nodes = len(history.program.nodes)
    after(last, noting())
    for mark in [n for n in last.nodes if n.target is ops.RELEASE]:
        last.graph.erase_node(mark)
    last.set_outputs([])
    assert len(history.program.nodes) == nodes and history.program.outputs and "noted" not in history.program.facts


def test_records_tell_times_counts_and_summaries():
    history = programs(Two(), Plan(zero=3, backend="eager"), (torch.randn(6, 3),), 2)
    record = next(r for r in history.records if r.name == "shard_parameters")
    assert record.stats == {"gathers": 2, "gathered_bytes": (4 * 3 + 5 * 4) * 4}
    assert record.seconds > 0 and record.verify_seconds > 0 and "shards" in record.summary
    with pytest.raises(KeyError, match="no pass 'nothing' ran"):
        history.after("nothing")


# -- a pass of the user's own ----------------------------------------------------------------------------------------
def order(*user: str) -> list[str]:
    plan = Plan(zero=3, backend="eager", passes=user)
    return [r.name for r in programs(Two(), plan, (torch.randn(6, 3),), 2).records]


def test_a_users_pass_stands_where_the_plan_says():
    ref = f"{__name__}:count_matmuls"
    assert order(f"{ref} after cleanup")[1:3] == ["cleanup", "count_matmuls"]
    assert order(f"{ref} before cleanup")[:2] == ["capture", "count_matmuls"]
    assert order(f"{ref} before release")[-3:] == ["overlap", "count_matmuls", "release"]
    assert order(ref)[-1] == "count_matmuls"


def test_a_users_pass_can_stand_by_another_of_the_users():
    mine = (f"{__name__}:count_matmuls after cleanup", f"{__name__}:noting before count_matmuls")
    assert order(*mine)[1:4] == ["cleanup", "noting", "count_matmuls"]


def test_a_users_pass_sees_and_changes_the_program():
    plan = Plan(zero=3, backend="eager", passes=(f"{__name__}:tanh_to_relu after cleanup", f"{__name__}:count_matmuls"))
    history = programs(Two(), plan, (torch.randn(6, 3),), 2)
    stats = {r.name: r.stats for r in history.records}
    assert stats["tanh_to_relu"] == {"changed": 1} and stats["count_matmuls"]["matmuls"] >= 4
    assert not any(n.target is aten.tanh.default for n in history.program.nodes)


@pytest.mark.parametrize("ref,words", [
    ("no_such_module:thing", "can't be loaded"),
    (f"{__name__}:nothing", "can't be loaded"),
    (f"{__name__}:captured", "is no pass but function"),
    (f"{__name__}:noting after nothing", "not in the pipeline"),
])  # fmt: skip
def test_a_users_pass_that_is_not_there_is_refused(ref, words):
    with pytest.raises(PlanError, match=words):
        order(ref)


def test_options_of_another_type_are_refused():
    with pytest.raises(TypeError, match="options of type ReduceOptions"):
        reduce_gradients(KeepOptions())
    with pytest.raises(TypeError, match="takes no options"):
        cleanup(KeepOptions())
