"""Equal layers are compiled once: programs cut into sections compute what whole ones do, and communicate in the same order."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lowering import WIDTH, WORLD, Blocks, compiled_parts, ordered
from ranks import Ranks
from sweeps import sweep
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.build.planned_step import programs
from zgraph.codegen import inductor, sections
from zgraph.codegen.executable import Executable, lowered
from zgraph.codegen.inductor import launches
from zgraph.codegen.join_sections import UnknownFormError
from zgraph.codegen.partition import split
from zgraph.codegen.sections import Section
from zgraph.program import collectives, transfers_to_host
from zgraph.program.aliases import is_view
from zgraph.program.node import Role, info
from zgraph.program.program import Program
from zgraph.torch_compat import inductor_code

DEPTH = 5  # of which three are alike
DEEP = 8  # where ranks reduce gradients, those of the last layers to run are waited for elsewhere


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs are cut as well."""
    monkeypatch.setattr(sections, "MIN_FEWER", 1)
    monkeypatch.setattr(sections, "MIN_SHARE", 0.0)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many nodes each graph has that Inductor is given."""
    found: list[int] = []
    compiled = inductor_code.compile_with_inductor

    def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(len(module.graph.nodes))
        return compiled(module, *args, **kwargs)

    monkeypatch.setattr(inductor_code, "compile_with_inductor", counted)
    yield found


def cut(part: Program, group: dict[str, str]) -> list[Section]:
    """The sections of a part of a step; the groups only name what it communicates in."""
    ready = lowered(part, group)
    held = {n for p, n in ready.input_items() if p.role not in inductor._LET_GO}
    return sections.sections(ready, held, set(ready.output_values()))


def parts_of(model: nn.Module, x: torch.Tensor, **plan: Any) -> list[Program]:
    parts = split(programs(model, zgraph.Plan(**{"mesh": {"dp": WORLD}, **plan}), (x,), WORLD).program)
    assert parts.backward is not None
    return [parts.forward, parts.backward]


# -- what is compiled ---------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_what_inductor_is_given_does_not_grow_with_the_depth(
    group: dict[str, str], cuts: None, graphs: list[int]
) -> None:
    found = []
    for layers in (DEPTH, DEPTH + 1):
        graphs.clear()
        forward = parts_of(Blocks(layers), torch.randn(16, WIDTH))[0]
        inductor.compile_inductor(forward, group)
        found.append(list(graphs))
    assert found[0] == found[1] and len(found[0]) == 3, "the first layer, one of those between, the last"


def test_a_model_of_few_layers_is_compiled_whole(group: dict[str, str], graphs: list[int]) -> None:
    compiled_parts(Blocks(4), (torch.randn(16, WIDTH),), group)
    assert len(graphs) == 2


class Alike(nn.Module):
    """Calls of one layer: nothing says where one ends."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Blocks(1).layers[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(DEPTH):
            x = self.inner(x)
        return x.pow(2).mean()


def widths(sizes: list[int]) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


@pytest.mark.parametrize("model", [Alike(), widths(list(range(8, 16)))], ids=["one layer", "no two equal"])
def test_a_model_without_equal_layers_is_compiled_whole(group: dict[str, str], cuts: None, model: nn.Module) -> None:
    width = WIDTH if isinstance(model, Alike) else 8
    wrapped = nn.Sequential(model, Sum())
    assert not any(cut(part, group) for part in parts_of(wrapped, torch.randn(16, width)))


@pytest.mark.parametrize(
    "plan",
    [{"mesh": {"dp": 4, "tp": 2}, "tensor_parallel": "auto"}, {"offload": {"activations": "cpu"}, "recompute": "none"}],
    ids=["exchanges", "moves"],
)
def test_what_ranks_divide_or_hosts_store_is_compiled_whole(
    group: dict[str, str], cuts: None, plan: dict[str, Any]
) -> None:
    groups = {**group, "tp": group["dp"]}
    parts = parts_of(Blocks(DEPTH), torch.randn(16, WIDTH), **plan)
    nodes = [n for part in parts for n in part.graph.nodes]
    assert any(
        info(n).role is Role.EXCHANGE or transfers_to_host.is_host_transfer(n) for n in nodes if n.op != "output"
    )
    assert not any(cut(part, groups) for part in parts)


class Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().sum()


# -- order and lives ----------------------------------------------------------------------------------------------
@sweep("bucket", [None, 0], quick=1)
@sweep("zero", [0, 2, 3], quick=1)
def test_the_order_of_the_generated_code_is_the_programs(
    group: dict[str, str], cuts: None, graphs: list[int], zero: int, bucket: int | None
) -> None:
    sizes = {"gather": bucket, "reduce": bucket}
    compiled = compiled_parts(Blocks(DEPTH), (torch.randn(16, WIDTH),), group, zero=zero, bucket=sizes)
    assert len(graphs) > 2, "nothing was cut"
    for executable in compiled:
        assert [n.name for n in launches(executable.source, executable.program)] == ordered(executable.program)
        assert len(executable.calls) == len(ordered(executable.program))


def test_a_transfer_may_be_in_flight_across_a_cut_and_its_operand_lives_until_it_is_done(
    group: dict[str, str], cuts: None
) -> None:
    model, x = Blocks(DEPTH), torch.randn(16, WIDTH)
    crossed = 0
    for part in parts_of(model, x, bucket={"gather": 0, "reduce": 0}):
        found = cut(part, group)
        for number, section in enumerate(found):
            for start in filter(collectives.is_start, section.nodes):
                wait = collectives.wait_of(start)
                if wait is None or wait in section.nodes:
                    continue
                crossed += 1
                operand = start.all_input_nodes[0]
                ends = next(n for n, s in enumerate(found) if wait in s.nodes)
                dead = [n for s in found[number : ends + 1] for n in s.drops]
                assert operand not in dead
                if operand.op != "placeholder":
                    assert operand in section.gives and operand in found[ends].after[wait]
    assert crossed, "no transfer is in flight at any cut"


def test_what_crosses_a_cut_is_dropped_behind_its_last_reader(group: dict[str, str], cuts: None) -> None:
    for part in parts_of(Blocks(DEPTH), torch.randn(16, WIDTH)):
        found = cut(part, group)
        results = set(found[0].nodes[0].graph.output_node().args[0])
        dead = [n for s in found for n in (*s.drops, *(v for own in s.after.values() for v in own))]
        assert len(dead) == len(set(dead))
        given = {n for s in found for n in s.gives}
        assert given - results == {n for n in dead if n.op != "placeholder"}
        for number, section in enumerate(found):
            assert not any(n in s.takes for n in section.drops for s in found[number + 1 :])


class Masked(nn.Module):
    """A mask that is a view of one vector, a constant, and positions: what each layer reads of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x.detach()[:, 0] > 0).unsqueeze(-1).expand(-1, WIDTH)
        zeros = torch.zeros(16, WIDTH)
        for layer in self.layers:
            x = x + torch.where(mask, layer(x).tanh().cos(), zeros).sin() * 0.5
        return x.square().mean()


def test_views_and_constants_do_not_cross_a_cut(group: dict[str, str], cuts: None) -> None:
    found = [s for part in parts_of(Masked(), torch.randn(16, WIDTH)) for s in cut(part, group)]
    assert found
    for node in {n for s in found for n in s.takes if n.op != "placeholder"}:
        assert not is_view(node) and "full" not in str(node.target), node.name


# -- numbers ------------------------------------------------------------------------------------------------------
class Drops(nn.Module):
    """Layers that draw: each from a seed of its own."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + F.dropout(F.silu(layer(x)), 0.25, training=self.training)
        return F.cross_entropy((self.norm(x) @ self.table.weight.t()).flatten(0, 1), tokens.flatten())


def trained(monkeypatch: pytest.MonkeyPatch, whole: bool) -> tuple[list[torch.Tensor], list[Executable]]:
    """(loss and gradients of two backwards, what was compiled)."""
    with monkeypatch.context() as patch:
        patch.setattr(sections, "MIN_FEWER", 10**9 if whole else 1)
        patch.setattr(sections, "MIN_SHARE", 0.0)
        torch.manual_seed(0)
        model, tokens = Drops(DEPTH - 1), torch.randint(0, 40, (3, 11))
        zgraph.compile(model, zgraph.Plan(), inputs=(tokens,))
        torch.manual_seed(1)
        losses = []
        for _ in range(2):
            losses.append(model(tokens))
            losses[-1].backward()
        compiled = [e for step in model.zgraph.programs.values() for e in step.executables()]
        return [*(loss.detach() for loss in losses), *(p.grad for p in model.parameters())], compiled


@pytest.mark.inductor
def test_numbers_are_those_of_the_whole_program_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random ones as well: a seed is the one that the layer had."""
    mine, cut_up = trained(monkeypatch, whole=False)
    plain, whole = trained(monkeypatch, whole=True)
    assert [torch.equal(a, b) for a, b in zip(mine, plain, strict=True)] == [True] * len(plain)
    assert not torch.equal(mine[0], mine[1]), "each call draws anew"
    assert [is_joined(e) for e in cut_up if e.kernels] == [True, True]
    assert not any(map(is_joined, whole))
    for executable, other in zip(cut_up, whole, strict=True):
        assert [(k.name, k.calls) for k in executable.library] == [(k.name, k.calls) for k in other.library]


def is_joined(executable: Executable) -> bool:
    """Whether its code is that of sections."""
    return "\ndef call(args):" in executable.source


def gradients_of_blocks(zero: int, layers: int | None) -> list[torch.Tensor]:
    """On a rank: loss and gradients of a model of so many layers; None is plain PyTorch with the same."""
    torch.manual_seed(0)
    model, x = Blocks(layers or DEEP), torch.randn(8, WIDTH)
    if layers is not None:
        least = sections.MIN_FEWER, sections.MIN_SHARE
        sections.MIN_FEWER, sections.MIN_SHARE = 1, 0.0
        try:
            zgraph.compile(model, zgraph.Plan(zero=zero), inputs=(x,))
        finally:
            sections.MIN_FEWER, sections.MIN_SHARE = least
    loss = model(x)
    loss.backward()
    if layers is not None:
        compiled = [e for s in model.zgraph.programs.values() for e in s.executables() if e.kernels]
        assert is_joined(compiled[0]) and (zero == 3 or is_joined(compiled[1])), "nothing was cut"
    grads = [p.grad for p in model.parameters()]
    return [loss.detach(), *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads)]


def compare_with_plain(zero: int) -> float:
    """On a rank, all of which have the same batch: the largest relative difference from plain PyTorch."""
    mine, plain = gradients_of_blocks(zero, DEEP), gradients_of_blocks(zero, None)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(mine, plain, strict=True))


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.slow  # (numbers in one process: above; what ranks send, and when: the order of the generated code)
@pytest.mark.parametrize("zero", [1, 3])
def test_gradients_on_ranks_are_those_of_plain_pytorch(two: Ranks, zero: int) -> None:
    assert max(two.run(compare_with_plain, zero)) <= 1e-5


# -- generated code -----------------------------------------------------------------------------------------------
def test_code_of_an_unknown_form_is_compiled_whole(
    group: dict[str, str], cuts: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> None:
        raise UnknownFormError("a While is in it")

    monkeypatch.setattr(inductor, "join", refused)
    with caplog.at_level(logging.WARNING, "zgraph"):
        compiled = inductor.compile_inductor(parts_of(Blocks(DEPTH), torch.randn(16, WIDTH))[0], group)
    assert [n.name for n in launches(compiled.source, compiled.program)] == ordered(compiled.program)
    assert "compiles it whole" in caplog.text and "a While is in it" in caplog.text
