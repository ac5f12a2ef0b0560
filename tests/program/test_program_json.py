"""A program that was written as JSON and read back is the same program: to look at, to verify and to run."""

from __future__ import annotations

import json
import math
import operator
import subprocess
import sys

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from zgraph.build.planned_step import programs
from zgraph.errors import UnsupportedError, ZgraphError
from zgraph.passes import verify_program
from zgraph.plan.plan import Plan
from zgraph.program.node import NodeInfo, Phase, has_info, info, set_info
from zgraph.program.program import InputRole, OutputRole, Port, Program
from zgraph.program.serialize import FORMAT, MAX_CONSTANT_BYTES, from_json, to_json
from zgraph.verification.virtual_ranks import run_virtual

pytestmark = pytest.mark.core


class Model(nn.Module):
    """An updated buffer, a constant, dropout, an operator with several results, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Parameter(torch.randn(5, 6), requires_grad=False)
        self.last = nn.Linear(6, 3, dtype=torch.bfloat16)

    def forward(self, tokens):
        table = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, math.inf])
        x = self.norm(self.embed(tokens)) * table.clamp(max=2)
        x = F.dropout(x, 0.25) + self.frozen.sum(0).topk(6).values
        return self.last(x.bfloat16()).float().square().mean()


@pytest.fixture(scope="module", params=["eager", "inductor"])
def history(request):
    torch.manual_seed(0)
    plan = Plan(mesh={"replicate": 2, "dp": -1}, backend=request.param)
    return programs(Model(), plan, (torch.arange(8) % 11,), 4)


def there_and_back(program: Program) -> Program:
    return from_json(json.loads(json.dumps(to_json(program), allow_nan=False)))


def values(program: Program) -> list[list[object]]:
    """Random values for every rank's placeholders."""
    generator = torch.Generator().manual_seed(1)

    def one(node: fx.Node) -> object:
        val = node.meta["val"]
        if val.dtype.is_floating_point:
            return torch.rand(val.shape, generator=generator).to(val.dtype)
        return torch.randint(3, val.shape, generator=generator, dtype=val.dtype)

    return [[one(n) for n in program.placeholders()] for _ in range(program.world)]


def run(program: Program) -> list[tuple[object, ...]]:
    states = [torch.Generator().manual_seed(r).get_state() for r in range(program.world)]
    return run_virtual(program, values(program), states)


def assert_same(a: Program, b: Program) -> None:
    for field in ("name", "inputs", "outputs", "mesh", "params", "level", "facts"):
        assert getattr(a, field) == getattr(b, field), field
    assert list(a.mesh) == list(b.mesh) and list(a.params) == list(b.params)
    assert [n.name for n in a.graph.nodes] == [n.name for n in b.graph.nodes]
    for mine, other in zip(a.graph.nodes, b.graph.nodes, strict=True):
        assert (mine.op, mine.target) == (other.op, other.target)
        assert repr((mine.args, dict(mine.kwargs))) == repr((other.args, dict(other.kwargs)))
        assert types(mine.meta.get("val")) == types(other.meta.get("val"))
        assert has_info(mine) == has_info(other) and (not has_info(mine) or info(mine) == info(other))


def types(val: object) -> object:
    if isinstance(val, torch.Tensor):
        return (val.dtype, tuple(val.shape), val.stride(), val.device)
    return [types(v) for v in val] if isinstance(val, (tuple, list)) else val


def test_a_program_after_every_pass_comes_back_the_same_and_verifies(history):
    for record in history.records:
        again = there_and_back(record.program)
        assert_same(record.program, again)
        verify_program(again)
        assert to_json(again) == to_json(record.program)


def test_a_loaded_program_computes_the_same_bits(history):
    for mine, other in zip(run(history.program), run(there_and_back(history.program)), strict=True):
        for x, y in zip(mine, other, strict=True):
            assert torch.equal(x, y)


def test_a_pipeline_goes_on_from_a_loaded_program():
    from zgraph.build.pass_pipeline import build
    from zgraph.passes import PassManager

    plan = Plan()
    whole = programs(Model(), plan, (torch.arange(8) % 11,), 4)
    steps = build(plan)
    at = next(i for i, p in enumerate(steps) if p.name == "shard_parameters")
    rest = PassManager(steps[at:]).run(there_and_back(whole.records[at].program))
    assert_same(whole.program, rest.program)


def test_a_file_without_transfers_gets_them_when_it_is_loaded(history):
    """Files of before `NodeInfo.transfer`: which nodes are one transfer is found from the graph, once."""
    for record in history.records:
        data = to_json(record.program)
        for row in data["nodes"]:
            row.get("info", {}).pop("transfer", None)
        assert_same(record.program, from_json(data))
    assert any(info(n).transfer for n in history.program.nodes if has_info(n))


def test_fake_values_are_of_the_loaded_programs_own_mode(history):
    again = there_and_back(history.program)
    vals = [n.meta["val"] for n in again.placeholders()]
    assert all(isinstance(v, FakeTensor) and v.fake_mode is again.fake_mode for v in vals)
    assert again.fake_mode is not history.program.fake_mode


# Single values.


def by_hand(*calls: tuple) -> Program:
    """A program of one input `x: f32[2, 3]` and these calls of (target, args after x, kwargs)."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    graph = fx.Graph()
    x = graph.placeholder("x")
    set_info(x, NodeInfo(Phase.FORWARD, source="model.py:3", module="layers.0"))
    with mode:
        x.meta["val"] = torch.empty(2, 3)
    graph.output((x,))
    program = Program(
        name="by_hand",
        module=fx.GraphModule(nn.Module(), graph),
        inputs=[Port(InputRole.INPUT, "x", 0)],
        outputs=[],
        mesh={"dp": 2},
        params={},
        fake_mode=mode,
    )
    made = x
    for target, args, kwargs in calls:
        with program.graph.inserting_before(program.output_node()):
            made = program.call(target, (made, *args), NodeInfo(Phase.FORWARD), name="made", kwargs=kwargs)
    program.set_outputs([(Port(OutputRole.OUTPUT, "y", 0), made)])
    return program


aten = torch.ops.aten


@pytest.mark.parametrize(
    "call",
    [
        (aten.clamp.default, (-math.inf, math.inf), {}),
        (aten.mul.Tensor, (-0.0,), {}),
        (aten.add.Tensor, (True,), {}),
        (aten.full_like.default, (1 - 2j,), {"dtype": torch.complex64}),
        (aten._to_copy.default, (), {"dtype": torch.float8_e4m3fn, "memory_format": torch.contiguous_format}),
        (
            aten.empty_like.default,
            (),
            {"device": torch.device("cpu"), "layout": torch.strided, "pin_memory": None},
        ),
        (aten.permute.default, ([1, 0],), {}),
        (aten.topk.default, (2,), {}),
        (torch.ops._c10d_functional.all_gather_into_tensor.default, (2, "dp"), {}),
    ],
)
def test_every_kind_of_argument_comes_back(call):
    program = by_hand(call)
    assert_same(program, there_and_back(program))


def test_nan_comes_back_as_nan():
    again = there_and_back(by_hand((aten.add.Tensor, (math.nan,), {})))
    assert math.isnan(again.nodes[1].args[1])


def test_results_of_several_tensors_and_slices_of_them_come_back():
    program = by_hand((aten.split.Tensor, (1,), {}), (operator.getitem, (slice(0, 2, None),), {}))
    again = there_and_back(program)
    assert_same(program, again)
    assert again.nodes[2].args[1] == slice(0, 2)


def test_values_on_a_gpu_come_back_where_there_is_none():
    program = by_hand()
    with program.fake_mode:
        program.placeholders()[0].meta["val"] = torch.empty(2, 3, device="cuda:1")
    assert there_and_back(program).placeholders()[0].meta["val"].device == torch.device("cuda:1")


# Constants.


def with_constant(held: torch.Tensor) -> Program:
    program = by_hand()
    program.module.register_buffer("table", held)
    with program.graph.inserting_before(program.output_node()):
        node = program.graph.get_attr("table")
    set_info(node, NodeInfo(Phase.FORWARD))
    program.set_outputs([(Port(OutputRole.OUTPUT, "y", 0), node)])
    return program


@pytest.mark.parametrize(
    "held",
    [
        torch.randn(3, 4).t(),
        torch.tensor(True),
        torch.tensor([math.nan, math.inf]),
        torch.randn(5).bfloat16(),
        torch.empty(0, 3),
        torch.tensor([1 + 2j]),
        torch.ones(1).expand(4),
        torch.arange(12).view(3, 4)[1:, ::2],
    ],
    ids=["transposed", "scalar", "not finite", "bfloat16", "empty", "complex", "expanded", "part"],
)
def test_a_constants_bits_come_back(held):
    again = there_and_back(with_constant(held)).module.table
    assert again.stride() == held.stride()
    torch.testing.assert_close(again, held, rtol=0, atol=0, equal_nan=True)


def test_a_constant_that_is_fake_comes_back_fake():
    with FakeTensorMode():
        held = torch.empty(1 << 20, 8)
    again = there_and_back(with_constant(held))
    assert isinstance(again.module.table, FakeTensor) and again.module.table.shape == held.shape


def test_a_constant_above_a_mebibyte_is_refused():
    to_json(with_constant(torch.zeros(MAX_CONSTANT_BYTES, dtype=torch.uint8)))
    with pytest.raises(UnsupportedError, match="'table' is too large"):
        to_json(with_constant(torch.zeros(MAX_CONSTANT_BYTES + 1, dtype=torch.uint8)))


# Refusals.


def test_what_is_no_operator_is_refused_with_its_node():
    program = by_hand()
    with program.graph.inserting_before(program.output_node()):
        program.graph.call_function(print, (program.placeholders()[0],), name="shout")
    with pytest.raises(UnsupportedError, match="no JSON form") as caught:
        to_json(program)
    assert caught.value.where == "node 'shout'"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(format=FORMAT + 1), f"is of format {FORMAT + 1}"),
        (lambda d: d.pop("format"), "states no format version"),
        (lambda d: d.pop("nodes"), "damaged"),
        (lambda d: d["nodes"][1].update(target="aten.no_such.default"), "no operator 'aten.no_such.default'"),
        (lambda d: d["nodes"][1].update(target="load_library.x.y"), "no operator"),
        (lambda d: d["nodes"][1].update(target="os.system"), "no operator 'os.system'"),
        (lambda d: d["nodes"][1].update(op="call_nothing"), "damaged"),
        (lambda d: d["nodes"].reverse(), "no node before it defines"),
        (lambda d: d["nodes"].insert(1, d["nodes"][0]), "two nodes 'x'"),
        (lambda d: d["nodes"][0]["info"].update(phase="sideways"), "damaged"),
        (lambda d: d["nodes"][0]["val"]["tensor"].update(dtype="float31"), "no dtype 'float31'"),
        (lambda d: d["nodes"][1]["args"].append({"pickle": "gASVCg=="}), "tagged 'pickle'"),
    ],
)
def test_a_file_that_means_no_program_is_refused_with_the_reason(change, says):
    data = to_json(by_hand((aten.neg.default, (), {})))
    change(data)
    with pytest.raises(ZgraphError) as caught:
        from_json(data)
    assert says in str(caught.value)


@pytest.mark.slow
def test_a_fresh_process_knows_the_operators_of_every_program():
    code = (
        "import torch, zgraph.program.serialize\n"
        "for name in ('output', 'release', 'shift', 'check', 'region'):\n"
        "    getattr(torch.ops.zgraph, name).default\n"
        "torch.ops.prims.inductor_seeds.default\n"
        "print(torch._C._dispatch_has_kernel_for_dispatch_key('zgraph::region', 'CompositeExplicitAutograd'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr
