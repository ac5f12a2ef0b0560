"""One walk over a module gives what torch's own generators give."""

import torch
from torch import nn

from zgraph.torch_compat.modules import registered


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        self.again = self.first
        self.tied = nn.Linear(2, 3)
        self.tied.weight = self.first[0].weight
        self.register_parameter("none", None)
        self.register_buffer("none_either", None)
        self.register_buffer("one", torch.ones(1), persistent=False)
        self.inner = nn.ModuleDict({"a": self.tied, "b": nn.Identity()})
        self.inner.register_buffer("same", self.one)
        self.gone = None
        self.add_module("nothing", None)


class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        return self.b.named_parameters(f"{prefix}b", recurse, remove_duplicate)


def test_it_gives_what_torch_gives():
    for model in (Shared(), Chosen(), nn.Linear(1, 1)):
        found = registered(model)
        assert [id(m) for m in found.modules] == [id(m) for m in model.modules()]
        assert [(n, id(p)) for n, p in found.parameters.items()] == [(n, id(p)) for n, p in model.named_parameters()]
        assert [id(b) for b in found.buffers] == [id(b) for b in model.buffers()]
