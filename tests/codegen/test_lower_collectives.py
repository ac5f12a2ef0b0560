"""Collectives as their transport takes them: over gloo a reduce-scatter is an all-reduce of which the rank keeps its rows,
elsewhere a bucket is one collective."""

from __future__ import annotations

import models
import pytest
import torch
from networks import ALONE
from networks import inputs as inputs_of
from sweeps import product

import zgraph
from zgraph.build.planned_step import programs
from zgraph.codegen.executable import lowered
from zgraph.codegen.partition import split
from zgraph.passes.analysis.simulator import bucket_of
from zgraph.program import collectives
from zgraph.program.node import Role, info, tensor
from zgraph.program.program import Program
from zgraph.verification.virtual_ranks import run_virtual

pytestmark = pytest.mark.core
MESHES = [{"dp": 3}, {"replicate": 2, "dp": 2}]


def over(backend: str, rank: int, monkeypatch: pytest.MonkeyPatch, program: Program) -> Program:
    """What is compiled for this rank. (No group is there: mesh dimensions keep their names, so that virtual ranks can run it.)"""
    monkeypatch.setattr("zgraph.torch_compat.process_groups.backend_of", lambda group, device: (backend, rank))
    return lowered(program, {})


def world(mesh: dict[str, int]) -> int:
    return mesh["dp"] * mesh.get("replicate", 1)


def backward(name: str, mesh: dict[str, int], **plan) -> Program:
    case = models.build(name)
    plan = zgraph.Plan(zero=3, backend="eager", mesh=mesh, **plan)
    part = split(programs(case.model, plan, case.inputs, world(mesh)).program).backward
    assert part is not None
    return part


@product("mesh, name", MESHES, ["uneven_mlp", "channels_last", "mixed_dtypes"], together=1)
def test_over_gloo_a_reduce_scatter_is_an_all_reduce_of_which_a_rank_keeps_its_rows(name, mesh, monkeypatch):
    """Also where gathers are on their way: beside one, gloo's own reduce-scatter would corrupt memory."""
    program = backward(name, mesh)
    scatters = {n.name for n in program.nodes if n.target is collectives.REDUCE_SCATTER}
    expected = run_virtual(program, inputs_of(program))
    for rank in range(world(mesh)):
        ready = over("gloo", rank % mesh["dp"], monkeypatch, program)
        assert not any(n.target is collectives.REDUCE_SCATTER for n in ready.nodes)
        reduced = {n.name for n in ready.nodes if n.target is collectives.ALL_REDUCE}
        assert scatters <= reduced, "each keeps its name, which errors and the order read back speak of"
        found = run_virtual(ready, inputs_of(program))[rank]
        for port, mine, theirs in zip(program.outputs, found, expected[rank], strict=True):
            assert torch.equal(mine, theirs), (rank, port)
            assert mine.untyped_storage().nbytes() == mine.numel() * mine.element_size(), "the whole is let go"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_over_gloo_a_gather_is_zgraphs_own(phase, precision, monkeypatch):
    """gloo's own form of it corrupts memory when several are on their way. In half precision what is gathered is a cast."""
    case = models.build("uneven_mlp")
    alone = {"enabled": False, "reuse_bytes": 0}
    plan = zgraph.Plan(zero=3, backend="eager", mesh={"dp": 3}, prefetch=alone, precision=precision)
    program = getattr(split(programs(case.model, plan, case.inputs, 3).program), phase)
    gathers = {n.name for n in program.nodes if n.target is collectives.ALL_GATHER}
    expected = run_virtual(program, inputs_of(program))
    ready = over("gloo", 0, monkeypatch, program)
    assert not any(n.target is collectives.ALL_GATHER for n in ready.nodes)
    assert gathers and {n.name for n in ready.nodes if n.target is collectives.GATHER_APART} == gathers
    found = run_virtual(ready, inputs_of(program))[0]
    for port, mine, theirs in zip(program.outputs, found, expected[0], strict=True):
        if isinstance(mine, torch.Tensor):
            assert torch.equal(mine, theirs), port


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_what_is_compiled_is_a_copy(backend, monkeypatch):
    program = backward("uneven_mlp", {"dp": 3})
    before = [(n.name, n.target, n.args) for n in program.nodes]
    over(backend, 0, monkeypatch, program)
    assert [(n.name, n.target, n.args) for n in program.nodes] == before


@pytest.mark.parametrize("role", [Role.GATHER, Role.REDUCE])
def test_elsewhere_a_bucket_is_one_collective_under_the_name_of_its_first(role, monkeypatch):
    case = models.build("even_mlp")
    part = split(programs(case.model, zgraph.Plan(zero=3, backend="eager"), case.inputs, 4).program)
    program = part.forward if role is Role.GATHER else part.backward
    starts = [n for n in program.nodes if collectives.is_start(n) and info(n).role is role]
    joined = [bucket_of(n) for n in starts if info(n.prev).bucket != info(n).bucket or info(n).bucket is None]
    assert any(len(b) > 1 for b in joined)
    ready = over("nccl", 0, monkeypatch, program)
    by_name = {n.name: n for n in ready.nodes}
    for bucket in joined:
        made = by_name[bucket[0].name]
        if len(bucket) == 1:
            assert made.target is bucket[0].target
            continue
        assert made.target is collectives.COALESCED[bucket[0].target]
        assert [a.name for a in made.args[0]] == [n.all_input_nodes[0].name for n in bucket], "no tensor is copied"
        assert not any(n.name in by_name for n in bucket[1:])
        shapes = [tensor(part).shape for part in sorted(made.users)]
        assert shapes == [tensor(n).shape for n in bucket]
        assert all(collectives.is_wait(u) for part in made.users for u in part.users if u.op != "output")


def test_a_transfer_by_itself_stays_as_it_is(monkeypatch):
    program = backward("uneven_mlp", {"dp": 3}, **ALONE)
    ready = over("nccl", 0, monkeypatch, program)
    targets = [
        [n.target for n in p.nodes if n.op == "call_function" and info(n).role is Role.REDUCE] for p in (program, ready)
    ]
    assert targets[0] == targets[1]
