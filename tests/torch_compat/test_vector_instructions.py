"""Kernels use the vector instructions that torch would find by compiling a test of each set."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._inductor import config, cpu_vec_isa

from zgraph.torch_compat.vector_instructions import choose_instructions


@pytest.mark.slow
def test_the_choice_is_torchs_own():
    choice = (
        "from torch._inductor.cpu_vec_isa import pick_vec_isa; print(pick_vec_isa(), pick_vec_isa().build_arch_flags())"
    )
    ours = f"from zgraph.torch_compat.vector_instructions import choose_instructions; choose_instructions(); {choice}"
    found = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        for code in (choice, ours)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("used, own", [("DEFAULT", None), ("AVX512", True), ("AVX512", False)])
def test_what_is_set_or_unknown_is_left_to_torch(monkeypatch, used, own):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: used)
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: pytest.fail("nothing is to be chosen"))
    with config.patch({"cpp.vec_isa_ok": own}):
        choose_instructions.__wrapped__()
