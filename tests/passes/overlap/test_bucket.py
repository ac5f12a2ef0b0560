"""Which transfers become one: tensors of one layer, phase, dtype and mesh dimension, up to a size."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import Case, cases
from torch import fx, nn

import zgraph
from zgraph.build.planned_step import programs
from zgraph.errors import ContractError
from zgraph.passes import PassManager
from zgraph.passes.analysis.costs import Costs, Hardware, Link, size_of
from zgraph.passes.analysis.parameter_collectives import layers_of
from zgraph.passes.overlap.bucket import LATENCY_SHARE, bucket
from zgraph.program import collectives
from zgraph.program.node import Role, info, tensor
from zgraph.program.program import Program

pytestmark = pytest.mark.core


def machine(latency: float, bandwidth: float = 1e9) -> Costs:
    links = {"*": Link(bandwidth=bandwidth, latency=latency)}
    return Costs(Hardware(name="test", flops={"float32": 1e9}, memory=1e9, capacity=1, host=1.0, links=links))


def bucketed(model: nn.Module, inputs: Any, world: int, costs: Costs | None = None, **plan: Any) -> Program:
    """The program right after the pass."""
    plan = {"zero": 3, "backend": "eager", **plan}
    return programs(model, zgraph.Plan(**plan), inputs, world, costs).after("bucket")


def buckets(program: Program, *roles: Role) -> list[list[fx.Node]]:
    """The starts of each transfer, in order; one without a bucket is by itself."""
    found: dict[object, list[fx.Node]] = {}
    for node in program.nodes:
        if collectives.is_start(node) and info(node).role in (roles or (Role.GATHER, Role.REDUCE)):
            found.setdefault(info(node).bucket or node, []).append(node)
    return list(found.values())


def carried(start: fx.Node) -> int:
    """Bytes of the whole parameter or gradient; of an all-reduce, what it reduces."""
    return max(size_of(start), size_of(start.all_input_nodes[0]))


def names(members: list[fx.Node]) -> list[str]:
    return [str(info(n).param) for n in members]


def assert_alike(program: Program) -> None:
    layers = layers_of(program)
    for members in buckets(program):
        kinds = {
            (
                info(n).phase,
                info(n).role,
                info(n).mesh_dim,
                n.target,
                tensor(n).dtype,
                layers.get(str(info(n).param), str(info(n).param).rpartition(".")[0]),
            )
            for n in members
        }
        assert len(kinds) == 1, kinds
        assert all(a.next is b for a, b in pairwise(members)), "they start side by side"


# -- any network ----------------------------------------------------------------------------------------------------------
sizes = st.sampled_from([None, 0, 50, 200, 1000, 10**6])


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    case=cases(),
    chosen=st.lists(st.tuples(sizes, sizes, st.sampled_from([0.0, 1e-8, 1e-6, 1e-3])), min_size=3, max_size=3),
)
@pytest.mark.slow
def test_no_bucket_spans_two_layers_or_mixes_dtypes_phases_or_mesh_dimensions(case: Case, chosen: list) -> None:
    captured = case.plain().records[0].program
    for gather, reduce, latency in chosen:
        history = case.scheduled(captured, machine(latency), bucket={"gather": gather, "reduce": reduce})
        program = history.after("bucket")
        assert_alike(program)
        for role, size in ((Role.GATHER, gather), (Role.REDUCE, reduce)):
            for members in buckets(program, role):
                assert len(members) == 1 or size is None or sum(map(carried, members)) <= size
        stats = {r.name: r.stats for r in history.records}["bucket"]
        assert stats["gather_buckets"] == len(buckets(program, Role.GATHER))
        assert stats["reduction_buckets"] == len(buckets(program, Role.REDUCE))


# -- layers -----------------------------------------------------------------------------------------------------------------
def test_a_layer_is_the_shallowest_numbered_module_that_holds_no_more_than_half():
    case = models.stack(3)
    program = bucketed(case.model, case.inputs, 2)
    assert set(layers_of(program).values()) == {"layers.0", "layers.1", "layers.2"}
    alone = models.stack(1)
    program = bucketed(alone.model, alone.inputs, 2)
    assert set(layers_of(program).values()) <= {"layers.0.1", "layers.0.3"}, "layers.0 holds all there is"


def test_a_bucket_never_spans_two_layers():
    case = models.stack(4)
    program = bucketed(case.model, case.inputs, 2, bucket={"gather": 10**9, "reduce": 10**9})
    assert_alike(program)
    for members in buckets(program):
        assert len({name.split(".")[1] for name in names(members)}) == 1
    assert {len(m) for m in buckets(program, Role.GATHER)} >= {4}, "a layer is one"


@pytest.mark.parametrize("mesh", [{"dp": 4}, {"replicate": 2, "dp": 2}])
@pytest.mark.parametrize("name", ["mixed_dtypes", "tied", "channels_last", "frozen", "shared_gradient"])
def test_what_is_alike_is_put_together_whatever_the_model(name, mesh):
    case = models.build(name)
    program = bucketed(case.model, case.inputs, 4, mesh=mesh, bucket={"gather": 10**9, "reduce": 10**9})
    assert_alike(program)
    assert max(map(len, buckets(program))) > 1


def test_over_two_dimensions_each_has_buckets_of_its_own():
    """Of what is scattered within and averaged between, the second carries a half, so that twice as many fit."""
    case = models.stack(3, dim=8)
    mesh = {"replicate": 2, "dp": 2}
    layer = sum(4 * p.numel() for p in case.model.layers[0].parameters())
    program = bucketed(case.model, case.inputs, 4, mesh=mesh, bucket={"reduce": layer // 2 + 100})
    made = buckets(program, Role.REDUCE)
    by_dim = {dim: [len(m) for m in made if info(m[0]).mesh_dim == dim] for dim in mesh}
    assert sum(by_dim["dp"]) == sum(by_dim["replicate"]) == 12
    assert len(by_dim["dp"]) > len(by_dim["replicate"]) == 3


# -- sizes ------------------------------------------------------------------------------------------------------------------
def test_zero_bytes_mean_each_tensor_by_itself():
    case = models.stack(3)
    program = bucketed(case.model, case.inputs, 2, machine(1.0), bucket={"gather": 0, "reduce": 0})
    assert not any(info(n).bucket for n in program.nodes)
    assert any(info(n).bucket for n in bucketed(case.model, case.inputs, 2, machine(1.0)).nodes), "(as it can be)"


def test_a_size_bounds_buckets_but_not_the_tensor_that_exceeds_it_alone():
    case = models.stack(3, dim=8)  # per layer, in the order of use: 17x8, 17, 8x17, 8 floats
    weight = 17 * 8 * 4
    for size in (weight - 1, 2 * weight):
        program = bucketed(case.model, case.inputs, 2, bucket={"gather": size, "reduce": size})
        for members in buckets(program):
            assert len(members) == 1 or sum(map(carried, members)) <= size
        assert (max(map(len, buckets(program))) > 1) == (size > weight)


def test_gathers_and_reductions_have_sizes_of_their_own():
    case = models.stack(3)
    program = bucketed(case.model, case.inputs, 2, bucket={"gather": 0, "reduce": 10**6})
    assert max(map(len, buckets(program, Role.GATHER))) == 1 < max(map(len, buckets(program, Role.REDUCE)))


@pytest.mark.parametrize("world", [2, 4])
def test_by_default_tensors_are_put_together_until_latency_is_a_twentieth(world):
    """A transfer of b bytes takes (n - 1) * (latency + b / n / bandwidth): of enough bytes, latency is 5% of the second."""
    case = models.stack(3, dim=32)
    for latency in (1e-9, 1e-8, 1e-7, 1e-6):
        enough = latency * 1e9 / LATENCY_SHARE * world
        program = bucketed(case.model, case.inputs, world, machine(latency))
        assert_alike(program)
        layers = layers_of(program)
        for role in (Role.GATHER, Role.REDUCE):
            made = buckets(program, role)
            for members in made:
                size = sum(map(carried, members))
                assert size < 2 * enough + max(map(carried, members)), "it grows no further than it must"
                alike = [m for m in made if _kind(m, layers) == _kind(members, layers)]
                assert size >= enough or alike == [members], "a smaller one is all that its layer has"


def _kind(members: list[fx.Node], layers: dict[str, str]) -> tuple[Any, ...]:
    return info(members[0]).phase, layers[names(members)[0]]


def test_by_default_nothing_is_put_together_on_a_link_without_latency():
    case = models.stack(3)
    program = bucketed(case.model, case.inputs, 2, machine(0.0))
    assert not any(info(n).bucket for n in program.nodes)


def test_the_pass_is_run_once():
    case = models.stack(2)
    history = programs(case.model, zgraph.Plan(backend="eager"), case.inputs, 2)
    assert "bucketed" in history.after("bucket").facts
    assert "bucketed" not in history.after("reduce_gradients").facts
    with pytest.raises(ContractError, match="conflicts with"):
        PassManager([bucket()]).run(history.after("bucket").snapshot())
