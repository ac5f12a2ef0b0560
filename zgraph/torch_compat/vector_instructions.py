"""Which vector instructions Inductor's kernels use, known without compiling a test of each set.

By itself torch compiles and loads a program with its vector headers for each set that the processor has, in each new
cache folder: 5 s of the processor's time before the first kernel (three sets, an AMD EPYC). What the tests find is known
here: torch's own kernels run with these instructions, so its library has the functions for them, and a compiler of C++20,
which torch's headers need, has their flags.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def choose_instructions() -> None:
    """Let torch choose, for this process, the instructions that its own kernels run with here.

    Where the user has set `TORCHINDUCTOR_VEC_ISA_OK`, or torch's own kernels use fewer instructions than the processor
    has, torch tests them.
    """
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    used = torch.backends.cpu.get_cpu_capability()
    widest = used == "AVX512" or (used == "AVX2" and not torch.cpu._is_avx512_supported())
    if widest and config.cpp.vec_isa_ok is None:
        with config.patch({"cpp.vec_isa_ok": True}):
            pick_vec_isa()  # (torch keeps the list that it makes)
