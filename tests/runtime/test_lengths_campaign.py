"""Random batches of 1 to 8 rows, 3 to 200 long: losses and gradients are plain PyTorch's, in few programs, and memory does not grow.

Larger runs are started by hand (`tests/support/lengths_campaign.py`); docs/features/lengths.md has what they gave.
"""

from __future__ import annotations

import lengths_campaign
import pytest
from lengths_campaign import MODELS, TOLERANCE, Outcome

pytestmark = pytest.mark.slow
BATCHES = 8
# The first one at its sizes, one for all, and one for each size that is 1 on some rank; of images and words one for each number of images.
MOST = dict.fromkeys(MODELS, 4) | {"qwen2_vl": 2}


def check(found: Outcome, name: str, backend: str) -> None:
    assert found.loss < TOLERANCE[backend] and found.gradient < TOLERANCE[backend], found
    assert len(found.programs) <= MOST[name], found


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("name", MODELS)
def test_on_one_rank(name, zero):
    pytest.importorskip("transformers")
    check(lengths_campaign.run(name, zero, "eager", BATCHES), name, "eager")


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_on_inductor(name):
    pytest.importorskip("transformers")
    check(lengths_campaign.run(name, 0, "inductor", BATCHES), name, "inductor")


@pytest.mark.gloo
@pytest.mark.parametrize("name, zero", [*((name, 3) for name in MODELS), ("gpt2", 1), ("llama", 2), ("t5", 0)])
def test_ranks_with_different_lengths(two, name, zero):
    pytest.importorskip("transformers")
    for found in two.run(lengths_campaign.run, name, zero, "eager", BATCHES):
        check(found, name, "eager")
