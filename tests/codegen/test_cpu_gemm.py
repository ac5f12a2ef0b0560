"""Float32 products of Inductor's code: by the library that is the faster one, with the numbers of the other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zgraph
from zgraph.codegen import cpu_gemm
from zgraph.torch_compat import onednn

pytestmark = pytest.mark.inductor

MANY = 2**23  # FLOP


class Kernels:
    """Says what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def mm(self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        self.calls.append("mm")
        return torch.mm(a, b, out=out)

    def addmm(self, bias: Any, a: Any, b: Any, *, alpha: float, beta: float, out: torch.Tensor) -> torch.Tensor:
        self.calls.append("addmm")
        return torch.addmm(bias, a, b, alpha=alpha, beta=beta, out=out)

    def bmm(self) -> str:
        return "bmm"


@pytest.fixture
def product() -> Any:
    made = onednn.onednn_product()
    if made is None:
        pytest.skip("this torch has no oneDNN, or these processors have nothing like AVX-512")
    return made


def close(mine: torch.Tensor, wanted: torch.Tensor, terms: int) -> bool:
    """Sums of so many terms of size 1 grow like the root of their number, and each term that is added may round them once."""
    return bool((mine - wanted).abs().max() <= torch.finfo(torch.float32).eps * (128 + terms) * terms**0.5)


@pytest.mark.parametrize(
    "m, k, n", [(256, 256, 128), (17, 999, 1201), (7, 999, 1201), (1, 4096, 1024), (1024, 1, 8192), (333, 129, 101)]
)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_products_of_all_layouts(product: Any, m: int, k: int, n: int, turned: tuple[bool, bool]) -> None:
    kernels = Kernels()
    mine: Any = cpu_gemm.Products(kernels, product)
    a = torch.randn(k, m).t() if turned[0] else torch.randn(m, k)
    b = torch.randn(n, k).t() if turned[1] else torch.randn(k, n)
    bias, into = torch.randn(n), torch.empty(m, n)
    wanted = a.double() @ b.double()
    assert mine.mm(a, b, out=into) is into and close(into, wanted, k)
    assert close(mine.addmm(bias, a, b, alpha=1, beta=1, out=into), wanted + bias, k)
    assert (kernels.calls == []) == (min(m, k, n) >= 16 and 2 * m * k * n >= MANY)


def test_a_sum_may_be_written_over_its_own_term(product: Any) -> None:
    mine: Any = cpu_gemm.Products(Kernels(), product)
    a, b, rows = torch.randn(256, 256), torch.randn(256, 256), torch.randn(256, 256)
    wanted = rows.double() + a.double() @ b.double()
    assert close(mine.addmm(rows, a, b, alpha=1, beta=1, out=rows), wanted, 256)


def test_all_others_are_torchs(product: Any) -> None:
    kernels = Kernels()
    mine: Any = cpu_gemm.Products(kernels, product)
    a, b, into = torch.randn(256, 256), torch.randn(256, 256), torch.empty(256, 256)
    mine.mm(torch.randn(256, 300)[:, :256], b, out=into)
    mine.mm(a.double(), b.double(), out=into.double())
    mine.mm(a[:8], b, out=into[:8])
    mine.mm(a, b, out=into.t())
    mine.addmm(into, a, b, alpha=2, beta=1, out=torch.empty(256, 256))
    assert kernels.calls == ["mm", "mm", "mm", "mm", "addmm"]
    assert mine.bmm() == "bmm"


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.down(self.up(x).relu()), y)


@pytest.mark.slow
def test_a_model_trains_as_with_torchs_products(product: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any) -> None:
        calls.append(args)
        product(*args)

    monkeypatch.setattr(cpu_gemm, "onednn", lambda: counted)
    torch.manual_seed(0)
    plain, inputs = Wide(), (torch.randn(64, 256), torch.randn(64, 256))
    mine = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(mesh={"dp": 1}, zero=0))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (mine, plain)]
    for _ in range(3):
        losses = [model(*inputs) for model in (mine, plain)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(*losses)
    assert len(calls) == 3 * 5
