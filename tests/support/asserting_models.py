"""Models that assert something about values. (pytest rewrites the asserts of test files, so they are not there.)"""

import torch
from torch import nn


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        torch._assert_async((grad < 100).all(), "gradient too large")
        return grad * 2


class Net(nn.Module):
    """Two layers; `check` is what is asserted of the input of the second."""

    def __init__(self, check):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.check = check

    def forward(self, x):
        h = torch.relu(self.first(x))
        h = getattr(self, self.check)(h)
        return self.second(h).square().mean()

    def statement(self, h):
        assert (h < 100).all(), "too large"
        return h

    def negated(self, h):
        assert not (h > 100).any(), "too large"
        return h

    def conjunction(self, h):
        assert (h < 100).all() and (h >= 0).all(), "too large"
        return h

    def built(self, h):
        limit = 100
        assert (h < limit).all(), f"too large for {limit}"
        return h

    def bare(self, h):
        assert (h < 100).all()
        return h

    def function(self, h):
        torch._assert((h < 100).all(), "too large")
        return h

    def asynchronous(self, h):
        torch._assert_async((h < 100).all(), "too large")
        return h

    def unnamed(self, h):
        torch._assert_async((h < 100).all())
        return h

    def number(self, h):
        assert h.max().item() < 100, "too large"
        return h

    def checked(self, h):
        torch._check_value(h.max().item() < 100, lambda: "too large")
        return h

    def checked_all(self, h):
        torch._check_tensor_all(h < 100, lambda: "too large")
        return h

    def checkpointed(self, h):
        return torch.utils.checkpoint.checkpoint(self.statement, h, use_reentrant=False)

    def raised(self, h):
        if self.training and (h > 100).any():
            raise ValueError("too large")
        return h

    def raised_with_a_text(self, h):
        if not (h < 100).all():
            most = "100"
            raise ValueError(f"more than {most}")
        return h

    def handled(self, h):
        try:
            if (h > 100).any():
                raise ValueError("too large")
        except ValueError:
            h = h / 1000
        return h

    def in_python(self, h):
        assert h.shape[-1] == 4, "not of four columns"
        return h


class OfGradient(Net):
    def forward(self, x):
        return Twice.apply(self.first(x)).sum()
