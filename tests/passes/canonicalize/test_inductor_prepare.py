"""What torch's joint-graph passes replace: no record, no strides and no number of what stays is another one afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from sweeps import sweep
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.torch_compat import inductor_code

LOSSES = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
    "smooth_l1": F.smooth_l1_loss,
    "binary": lambda out, target: F.binary_cross_entropy_with_logits(out, target),
}
TARGETS = {"zeros": torch.zeros_like, "ones": torch.ones_like, "full": lambda out: torch.full_like(out, 0.25)}
OTHERS = {
    "times one": lambda m, x: (m(x) * torch.ones_like(x)).square().mean(),
    "plus zero": lambda m, x: (m(x) + torch.zeros_like(x)).square().mean(),
    "minus zero": lambda m, x: (m(x) - torch.zeros_like(x)).sin().mean(),
    "by one": lambda m, x: (m(x) / torch.ones_like(x)).square().mean(),
    "same dtype": lambda m, x: m(x).to(x.dtype).square().mean(),
    "there and back": lambda m, x: m(x).to(torch.float64).to(x.dtype).square().mean(),
    "transposed twice": lambda m, x: m(x).t().t().square().mean(),
    "viewed twice": lambda m, x: m(x).view(-1).view(x.shape).square().mean(),
    "other strides": lambda m, x: (m(x)[:, ::2] * x.new_ones(6, 4)).view(-1).square().mean(),
    "expanded": lambda m, x: (m(x)[:1].expand(6, 8) * torch.ones_like(x)).view(-1).square().mean(),
    "transposed constant": lambda m, x: (m(x).t() + torch.zeros_like(x).t()).contiguous().view(-1).square().mean(),
    "weight": lambda m, x: (m.weight * torch.ones_like(m.weight)).square().sum() + (m.weight + 0).sum() + m(x).mean(),
    "constant": lambda m, x: (m(x) * 0 + torch.ones_like(x)).sum() + (m.bias * torch.zeros(8)).sum(),
    "mean of ones": lambda m, x: (m(x) * torch.ones_like(x).softmax(-1)).sum(),
    "softmax": lambda m, x: (m(x) * 3.0 - (m(x) * 3.0).amax(-1, True)).exp().sum(),
}


class Model(nn.Module):
    def __init__(self, loss, layer: nn.Module) -> None:
        super().__init__()
        self.loss, self.layer = loss, layer

    def forward(self, x):
        return self.loss(self.layer, x)


def same(loss, layer, x, backend="inductor"):
    def made() -> nn.Module:
        torch.manual_seed(0)
        return Model(loss, layer())

    plain, mine = made(), zgraph.compile(made(), zgraph.Plan(backend=backend))
    expected, found = plain(x), mine(x)
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    for (name, p), q in zip(mine.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=lambda said, name=name: f"{name}: {said}")


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
CASES = [(name, target) for name in LOSSES for target in TARGETS]


@sweep("case", CASES, quick=(0,), ids=lambda c: " ".join(c))
def test_losses_against_constants(case):
    loss, target = LOSSES[case[0]], TARGETS[case[1]]
    same(lambda m, x: loss(m(x), target(m(x))), lambda: nn.Linear(8, 8), X)


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.slow
def test_losses_of_images_against_constants(target):
    same(lambda m, x: F.mse_loss(m(x), TARGETS[target](m(x))), lambda: nn.Conv2d(3, 2, 3), IMAGES)


@sweep("name", list(OTHERS), quick=(0,))
def test_operators_that_do_nothing(name):
    same(OTHERS[name], lambda: nn.Linear(8, 8), X)


class Straight(torch.autograd.Function):
    """Its gradient is a value of the forward, times one."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return x * torch.ones_like(x)


def test_a_gradient_that_is_a_value_of_the_forward_is_its_own():
    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(1.0, 5.0))

        def forward(self, x):
            return Straight.apply(self.weight) + x.sum()

    model = zgraph.compile(Weight(), zgraph.Plan(backend="inductor"))
    for _ in range(2):
        model(torch.ones(2)).backward()
    torch.testing.assert_close(model.weight.grad, 2 * model.weight.detach())
    found = zgraph.verify(Weight(), zgraph.Plan(backend="inductor"), 2, (torch.ones(2),))
    assert found.ok, found


def test_what_torch_replaces_by_a_value_of_another_dtype_is_cast(monkeypatch):
    """(As torch 2.11 does with what a loss scatters its gradient into.)"""

    def replaced(module, mode, pads):
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default):
            with module.graph.inserting_after(node), mode:
                wide = module.graph.call_function(torch.ops.prims.convert_element_type.default, (node, torch.float32))
                wide.meta = {**node.meta, "val": node.meta["val"].float()}
            node.replace_all_uses_with(wide, delete_user_cb=lambda user, wide=wide: user is not wide)

    monkeypatch.setattr(inductor_code, "inductor_joint_passes", replaced)
    plan = zgraph.Plan(backend="inductor", precision="bf16")
    history = zgraph.programs(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), plan, (X,), 1)
    casts = [n for n in history.program.nodes if n.name.endswith("_cast")]
    assert casts and all(n.meta["val"].dtype is torch.bfloat16 for n in casts)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.slow
def test_products_are_padded_by_their_sizes(monkeypatch, dynamic):
    """(On CUDA; pretended of this machine.) The products of the head are, those of the first layer are not, and none with sizes that are symbols."""
    from torch._inductor.fx_passes import pad_mm

    monkeypatch.setattr(pad_mm, "check_device", lambda one, other: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    model = nn.Sequential(nn.Linear(3, 512), nn.ReLU(), nn.Linear(512, 2001, bias=False))
    inputs = (torch.randn(512, 3),)
    sizes = {"input": {0: zgraph.Size("rows", max=1024)}} if dynamic else {}
    plan = zgraph.Plan(mesh={"dp": 1}, dynamic=sizes)
    program = zgraph.programs(model, plan, inputs, 1).program
    pads = program.graph.find_nodes(op="call_function", target=torch.ops.aten.constant_pad_nd.default)
    assert len(pads) == (0 if dynamic else 4), [n.format_node() for n in pads]
    mine, plain = copy.deepcopy(model), model
    zgraph.compile(mine, plan)
    for module in (mine, plain):
        module(*inputs).square().mean().backward()
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-9)
