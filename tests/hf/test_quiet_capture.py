"""Capturing a mixture of experts prints no tracebacks of torch's, which a user takes for a failure; nor does one that is refused."""

from __future__ import annotations

import logging

import pytest
import torch
from architectures import build
from torch import nn

import zgraph
from zgraph.errors import CaptureError

EXPERTS = ["Qwen3Moe", "DeepseekV3", "GptOss", "GraniteMoe", "Mixtral", "Olmoe", "Phimoe"]
KINDS = [{}, {"precision": "bf16"}, {"shapes": "dynamic"}]
CASES = [(name, fields) for name in EXPERTS for fields in KINDS]


@pytest.fixture
def heard(caplog, capfd):
    """A function that gives what torch has logged since it was called last, and everything that was printed, as a text."""

    def all_of_it() -> str:
        text = "\n".join([caplog.text, *capfd.readouterr()])
        caplog.clear()
        return text

    logger = logging.getLogger("torch")
    logger.addHandler(caplog.handler)
    try:
        yield all_of_it
    finally:
        logger.removeHandler(caplog.handler)


@pytest.mark.slow
@pytest.mark.parametrize("name, fields", CASES)
def test_a_mixture_of_experts_is_captured_without_a_traceback(name, fields, heard):
    pytest.importorskip("transformers")
    model, batch = build(name)
    heard()  # (transformers warns of gpt-oss' numbers, where an earlier test has closed the stream that it writes to)
    model = zgraph.compile(model, zgraph.Plan(backend="eager", **fields))
    model(**batch).loss.backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=not fields):  # (another program)
        model(**batch)
    assert "Traceback" not in (said := heard()), said


class Faulty(nn.Module):
    """Has an operator that does not take its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight)


def test_an_operator_that_can_not_be_traced_is_told_by_the_error_alone(heard):
    with pytest.raises(CaptureError, match="same reduction dim"):
        zgraph.compile(Faulty(), zgraph.Plan(backend="eager"))(torch.ones(8, 16))
    assert "Traceback" not in (said := heard()), said
