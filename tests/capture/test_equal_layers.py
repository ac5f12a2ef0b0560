"""Equal layers are traced once: the joint graph is the one that a trace of all of them gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sweeps import sweep
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zgraph
from zgraph.build.planned_step import programs
from zgraph.capture import capture, equal_layers
from zgraph.program.node import module_of, source_of
from zgraph.torch_compat.tensor_storage import storage_key

ROWS = torch.linspace(-1, 1, 3 * 5 * 8).reshape(3, 5, 8)
PLAN = zgraph.Plan(backend="eager")


class Seen(BaseException):
    """The joint graph is there: no pass has to run for what is compared here."""


def joint_of(monkeypatch: pytest.MonkeyPatch, model: nn.Module, *args: Any) -> tuple[list[Any], int]:
    """(the joint graph of a model's capture, without names, how many calls AOTAutograd was given)."""
    found, given = [], []
    torch._dynamo.reset()
    export = capture.aot.export_joint

    def seen(joint: fx.GraphModule, *_: Any) -> None:
        found.append(_rows(joint.graph))
        raise Seen

    with monkeypatch.context() as patch:
        patch.setattr(capture, "_program", seen)
        patch.setattr(
            capture.aot,
            "export_joint",
            lambda module, *rest: given.append(len(module.graph.nodes)) or export(module, *rest),
        )
        with pytest.raises(Seen):
            programs(model, PLAN, args, 1)
    return found[0], sum(given)


def _rows(graph: fx.Graph) -> list[Any]:
    names = {node: f"n{i}" for i, node in enumerate(graph.nodes)}
    memories: dict[int, int] = {}
    numbers = [n for node in graph.nodes if (n := node.meta.get("seq_nr")) is not None]
    regions = [n for node in graph.nodes if (n := node.meta.get("ac_graph_id")) is not None]

    def of_value(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [of_value(x) for x in value]
        if not isinstance(value, torch.Tensor):
            return repr(value)
        memory = memories.setdefault(storage_key(value), len(memories))
        bytes_ = value.untyped_storage().nbytes()
        return (value.dtype, value.shape, value.stride(), value.storage_offset(), value.requires_grad, memory, bytes_)

    rows = []
    for node in graph.nodes:
        if node.op == "output":
            given = [
                (names[x], repr(d))
                for x, d in zip(node.args[0], node.meta["desc"], strict=True)
                if isinstance(x, fx.Node)
            ]
            rows.append(given)
            continue
        kept = [node.meta.get(k) for k in ("partitioner_tag", "autograd_backward", "is_gradient_acc", "recompute")]
        number, region = node.meta.get("seq_nr"), node.meta.get("ac_graph_id")
        rows.append(
            (
                node.op,
                node.target if node.op == "call_function" else "",  # (constants have numbers)
                repr(fx.node.map_arg((node.args, node.kwargs), lambda n: names[n])),
                of_value(node.meta.get("val")),
                kept,
                None if number is None else number - min(numbers),
                None if region is None else region - min(regions),
                repr(node.meta.get("desc")),
                module_of(node.meta),
                source_of(node.meta),
            )
        )
    return rows


def both(monkeypatch: pytest.MonkeyPatch, model: nn.Module, *args: Any) -> float:
    """The share of a model's calls that AOTAutograd is given, after a comparison of the joint graphs."""
    monkeypatch.setattr(equal_layers, "MIN_FEWER", 1)
    mine, fewer = joint_of(monkeypatch, model, *args)
    monkeypatch.setattr(equal_layers, "_longest_run", lambda graph: None)
    theirs, every = joint_of(monkeypatch, model, *args)
    for one, other in zip(mine, theirs, strict=True):
        assert one == other
    return fewer / every


class Block(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)
        self.dropout, self.scale = dropout, scale

    def forward(self, x, shift=None):
        inner = F.gelu(self.wide(self.norm(x)))
        gate = torch.sigmoid(inner[..., ::2]).repeat_interleave(2, -1)
        inner = F.dropout(inner * gate, self.dropout)
        x = x + self.narrow(inner) * self.scale
        return x if shift is None else x + shift.transpose(0, 1)[: x.shape[1]].unsqueeze(0)


class Stack(nn.Module):
    """Blocks behind an embedding, in front of a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.enter, self.layers, self.leave = nn.Linear(8, 8), nn.ModuleList(blocks), nn.Linear(8, 4)

    def run(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x):
        return self.leave(self.run(self.enter(x)).tanh()).pow(2).mean()


def blocks(count: int = 8, **how: Any) -> list[Block]:
    return [Block(**how) for _ in range(count)]


class Reversed(Stack):
    def run(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class WithBias(Stack):
    """All layers read one parameter, whose gradient is a sum over them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.bias = nn.Parameter(torch.ones(8, 6))

    def run(self, x):
        for layer in self.layers:
            x = layer(x, self.bias)
        return x


class Carried(Stack):
    """Each layer takes two values of the one before."""

    def run(self, x):
        first = x
        for layer in self.layers:
            x, first = layer(x) + first, x * 0.5
        return x + first


class Checkpointed(Stack):
    def run(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 * x * x  # (not what autograd would make of it)


class WithFunction(Block):
    def forward(self, x):
        return super().forward(Cubed.apply(x)) + torch.tensor([0.5])


class Pair(nn.Module):
    """Two stacks; every layer of the second reads what the first gives."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.ModuleList(blocks()), nn.ModuleList(blocks())

    def forward(self, x):
        given = x
        for layer in self.left:
            given = layer(given)
        for layer in self.right:
            x = layer(x + given * 0.1)
        return x.mean()


class Table(Stack):
    """Layers that read buffers of their own, and a view of what the one before gave."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        for i, layer in enumerate(self.layers):
            layer.register_buffer("table", torch.full((8,), float(i)))

    def run(self, x):
        for layer in self.layers:
            x = layer(x.flatten(0, 1)).view(3, 5, 8) * layer.table.cos()
        return x


def frozen(model: nn.Module, *layers: int) -> nn.Module:
    for at in layers:
        model.layers[at].requires_grad_(False)
    return model


class Counting(Block):
    """Each layer writes to a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(5)

    def forward(self, x):
        return super().forward(self.batch(x))


MODELS = {
    "a stack": lambda: Stack(*blocks()),
    "a stack in reverse": lambda: Reversed(*blocks()),
    "with dropout": lambda: Stack(*blocks(dropout=0.25)),
    "one bias for all": lambda: WithBias(*blocks()),
    "two values carried": lambda: Carried(*blocks()),
    "two stacks": lambda: Pair(),
    "layers that count": lambda: Stack(*(Counting() for _ in range(8))),
    "checkpointed": lambda: Checkpointed(*blocks()),
    "a function of the user's, and a constant": lambda: Stack(*(WithFunction() for _ in range(8))),
    "buffers of their own": lambda: Table(*blocks()),
    "two kinds in turn": lambda: Stack(*(Block(scale=1.0 + i % 2) for i in range(14))),
    "three kinds in turn": lambda: Stack(*(Block(scale=1.0 + i % 3) for i in range(21))),
    "all frozen": lambda: frozen(Stack(*blocks()), *range(8)),
    "the first frozen": lambda: frozen(Stack(*blocks()), 0, 1),
    "one weight for all": lambda: tied(Stack(*blocks())),
    "in evaluation": lambda: Stack(*blocks(dropout=0.25)).eval().requires_grad_(False),
    "recurrent in depth": lambda: Stack(*(nn.Sequential(Block(), Block()) for _ in range(8))),
}


def tied(model: Stack) -> Stack:
    for layer in model.layers:
        layer.wide.weight, layer.narrow.bias = model.layers[0].wide.weight, model.layers[0].narrow.bias
    return model


QUICK = ("one bias for all", "two kinds in turn", "layers that count", "checkpointed")


@sweep("name", MODELS, quick=[list(MODELS).index(n) for n in QUICK])
def test_the_joint_graph_is_that_of_a_whole_trace(monkeypatch, name):
    assert both(monkeypatch, MODELS[name](), ROWS) < 0.95


class Returned(Stack):
    """What each layer gives is returned."""

    def forward(self, x):
        every = [x]
        for layer in self.layers:
            every.append(layer(every[-1]))
        return self.leave(every[-1]).mean(), *every


class Skipping(Stack):
    """The first half of the layers is read again by the second, in reverse."""

    def run(self, x):
        kept = []
        for at, layer in enumerate(self.layers):
            x = layer(x if at < len(self.layers) // 2 else x + kept.pop())
            kept.append(x)
        return x


class Summed(Stack):
    def run(self, x):
        return sum(layer(x) for layer in self.layers)


class Penalised(Stack):
    """The loss reads a weight of each layer."""

    def forward(self, x):
        return super().forward(x) + sum(layer.wide.weight.pow(2).mean() for layer in self.layers)


class Numbered(Stack):
    def run(self, x):
        for at, layer in enumerate(self.layers):
            x = layer(x) * (1 + at)
        return x


OTHERS = {
    "outputs of each layer": lambda: Returned(*blocks()),
    "skips": lambda: Skipping(*blocks()),
    "layers beside each other": lambda: Summed(*blocks()),
    "a penalty of each": lambda: Penalised(*blocks()),
    "a number of each": lambda: Numbered(*blocks()),
    "one frozen in the middle": lambda: frozen(Stack(*blocks(12)), 6),
    "one other in the middle": lambda: Stack(*blocks(6), Block(scale=2.0), *blocks(6)),
}


@sweep("name", OTHERS, quick=3)
def test_what_differs_from_layer_to_layer_stays(monkeypatch, name):
    both(monkeypatch, OTHERS[name](), ROWS)


def test_few_layers_are_traced_whole(monkeypatch):
    assert both(monkeypatch, Stack(*blocks(5)), ROWS) == 1.0


@pytest.mark.slow
def test_sizes_that_differ_are_traced_whole_and_right():
    torch.manual_seed(0)
    plain = Stack(*blocks())
    mine = zgraph.compile(_copied(plain), PLAN)
    for rows in (3, 4, 2, 6):
        x = torch.randn(rows, 5, 8)
        for model in (plain, mine):
            model.zero_grad()
            model(x).backward()
        for one, other in zip(plain.parameters(), mine.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


def _copied(model: nn.Module) -> nn.Module:
    other = Stack(*blocks())
    other.load_state_dict(model.state_dict())
    return other


@sweep("name", ["a stack", "one bias for all", "two stacks", "checkpointed", "one weight for all"], quick=(1,))
def test_training_is_plain_pytorchs_bit_for_bit(monkeypatch, name):
    monkeypatch.setattr(equal_layers, "MIN_FEWER", 1)
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = MODELS[name]()
        if compiled:
            zgraph.compile(model, PLAN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(ROWS).backward()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
