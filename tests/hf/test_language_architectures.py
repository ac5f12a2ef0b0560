"""Language models of transformers: captured as they are, with the loss and the gradients of plain PyTorch."""

from __future__ import annotations

import pytest
from architectures import LANGUAGE, compare
from sweeps import sweep

pytest.importorskip("transformers")


# (Gradients that are sums of many are added in another order in a few: a handful of float32's roundings.)
@sweep("name", LANGUAGE, quick=[LANGUAGE.index("Mistral")])
def test_it_trains_as_in_plain_pytorch(name):
    loss, gradients = compare(name, "eager")
    assert loss == 0.0 and gradients <= 1e-6
