"""PyTorch's own databases of modules and operators by zgraph: equal to plain PyTorch, or refused for a reason that is known.

What is refused, and why, stands in docs/databases.md; `python -m tests.databases` writes it.
"""

from __future__ import annotations

import pytest
from sweeps import sweep

PARTS = 12  # of the whole, each a test of some minutes

# What a refusal may say. (Anything else that is not equal is a fault.)
REASONS = ("the model has lazy modules", "is sparse", "sparse Tensor", "begins within its storage")
# Of one operator alone: how many rows a tensor of repeats makes has no bound that a program could give memory to.
UNBOUNDED = {"repeat_interleave": "the model returns a tensor whose size depends on values"}

QUICK = [
    "nn.BatchNorm1d",
    "nn.GaussianNLLLoss",
    "nn.CTCLoss",
    "masked_select",
    "linalg_inv",
    "cov",
    "nn_functional_group_norm",
]


def faults(name: str, backend: str, samples: int) -> list[str]:
    from databases.__main__ import chosen
    from databases.comparison import compare

    found = []
    reasons = (*REASONS, UNBOUNDED[name]) if name in UNBOUNDED else REASONS
    cases = chosen("all", name, samples, exact=True)
    assert cases, name
    for case in cases:
        result = compare(case, backend)
        if result.verdict == "equal" or result.verdict == "void":
            continue
        if result.verdict == "refused" and any(reason in result.why for reason in reasons):
            continue
        found.append(f"{result.verdict}: {case.key}: {result.why}")
    return found


@sweep("name", QUICK, quick=2)
def test_some_samples_are_equal_on_eager(name: str) -> None:
    assert not faults(name, "eager", 1)


@pytest.mark.inductor
@pytest.mark.slow
def test_a_sample_is_equal_on_inductor() -> None:
    assert not faults("softmax", "inductor", 1)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_module_and_operator_on_eager(part: int) -> None:
    assert not [f for name in names()[part::PARTS] for f in faults(name, "eager", 6)]


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("part", range(8 * PARTS))
def test_every_module_and_operator_on_inductor(part: int) -> None:
    assert not [f for name in names()[part :: 8 * PARTS] for f in faults(name, "inductor", 1)]


def names() -> list[str]:
    from databases.cases import all_names

    return all_names()
