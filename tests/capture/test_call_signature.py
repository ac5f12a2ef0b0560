"""What a program is cached by, and what of it ranks compare."""

import pytest
import torch
from torch import nn

from zgraph.capture.call_signature import shared, signature


@pytest.mark.core
def test_ranks_compare_the_kind_of_a_device_not_its_number():
    one, other = (
        "float32[4]@cuda:0; device(type='cuda', index=0); f#140",
        "float32[4]@cuda:1; device(type='cuda', index=1); f#977",
    )
    assert shared(one) == shared(other)
    assert shared(one) != shared(one.replace("cuda", "cpu"))


@pytest.mark.core
def test_shapes_modes_and_frozen_parameters_are_part_of_a_signature():
    model = nn.Linear(4, 4)
    keys = {signature(model, (torch.zeros(2, 4),), {}), signature(model, (torch.zeros(3, 4),), {})}
    model.eval()
    keys.add(signature(model, (torch.zeros(2, 4),), {}))
    model.weight.requires_grad_(False)
    keys.add(signature(model, (torch.zeros(2, 4),), {}))
    with torch.no_grad():
        keys.add(signature(model, (torch.zeros(2, 4),), {}))
    assert len(keys) == len({shared(k) for k in keys}) == 5
