"""Compilations that run the same kernels are told from those that run others, by the code that runs."""

from __future__ import annotations

from typing import Any

from zgraph.codegen.executable import Executable, Kernel
from zgraph.codegen.same_kernels import difference

HEAD = "async_compile = AsyncCompile()\n\n\n"


def kernel(name: str, body: str) -> str:
    return f"{name} = async_compile.cpp_pybinding(['const float*', 'float*'], r'''\nextern \"C\" void kernel()\n{{\n{body}\n}}\n''')\n\n\n"


def executable(source: str, kernels: dict[str, int], library: dict[str, int] | None = None) -> Executable:
    launched = tuple(Kernel(name, ("add",), calls) for name, calls in kernels.items())
    called = tuple(Kernel(name, (name,), calls) for name, calls in (library or {}).items())
    program: Any = None
    return Executable(program, lambda values: values, source, launched, called)


ONE = executable(
    HEAD + kernel("cpp_fused_add_0", "a") + kernel("cpp_fused_mul_1", "b"),
    {"cpp_fused_add_0": 2, "cpp_fused_mul_1": 1},
    {"mm": 3},
)


def test_numbers_of_kernels_and_the_program_that_has_them_do_not_count():
    first = executable(HEAD + kernel("cpp_fused_mul_0", "b"), {"cpp_fused_mul_0": 1}, {"mm": 1})
    second = executable(HEAD + kernel("cpp_fused_add_0", "a"), {"cpp_fused_add_0": 2}, {"mm": 2})
    assert difference([ONE], [first, second]) is None


def test_other_code_other_counts_and_other_functions_count():
    others = [
        (
            HEAD + kernel("cpp_fused_add_0", "A") + kernel("cpp_fused_mul_1", "b"),
            {"cpp_fused_add_0": 2, "cpp_fused_mul_1": 1},
            {"mm": 3},
        ),
        (ONE.source, {"cpp_fused_add_0": 1, "cpp_fused_mul_1": 2}, {"mm": 3}),
        (ONE.source, {"cpp_fused_add_0": 2, "cpp_fused_mul_1": 1}, {"bmm": 3}),
        (HEAD, {"cpp_fused_add_0": 2, "cpp_fused_mul_1": 1}, {"mm": 3}),  # (code of a form that is not known)
    ]
    for source, kernels, library in others:
        assert "launches of kernels or library functions are others" in str(
            difference([ONE], [executable(source, kernels, library)])
        )


def test_eager_programs_have_no_kernels():
    assert difference([executable("one", {})], [executable("other", {})]) is None
