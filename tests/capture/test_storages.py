"""What a backward gives lies in memory of its own: the function that decides it."""

from __future__ import annotations

import torch

from zgraph.capture.storages import owned


def test_a_gradient_whose_elements_are_one_in_memory_is_copied():
    expanded, dense = torch.empty_strided((4,), (0,)), torch.ones(4)  # (no view: nothing else is on its memory)
    first, second = owned([expanded, dense], set())
    assert first.is_contiguous() and first.data_ptr() != expanded.data_ptr()
    assert second is dense
