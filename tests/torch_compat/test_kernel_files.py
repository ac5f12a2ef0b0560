"""C++ kernels that are compiled several to a file: the same functions as Inductor's, one file each, gives."""

from __future__ import annotations

import sys

import pytest
import torch

import zgraph
from zgraph.errors import LoweringError
from zgraph.torch_compat import kernel_files
from zgraph.torch_compat.kernel_files import (
    KernelSource,
    compile_kernels,
    compile_together,
    kernels_together,
    places_of,
)

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"
SCALE = (
    ["const float*", "float*", "const int64_t", "const float"],
    f"""
{HEADER}
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0, const float by)
{{
    if (ks0 < 0) throw std::runtime_error("below zero");
    for (int64_t x0 = 0; x0 < ks0; x0 += 1) out_ptr0[x0] = by * in_ptr0[x0];
}}
""",
)
COUNT = (
    ["int64_t*", "const bool*"],
    f"""
{HEADER}
extern "C"  void  kernel(int64_t* out_ptr0, const bool* in_ptr0)
{{
    #pragma GCC ivdep
    for (int64_t x0 = 0; x0 < 3; x0 += 1) out_ptr0[x0] += in_ptr0[x0];
}}
""",
)
OF_ANOTHER_FORM = (
    ["float*"],
    f"""
#include <cmath>
{HEADER}
#define HALF 0.5f
extern "C"  void  kernel(float* out_ptr0)
{{
    out_ptr0[0] = HALF;
}}
""",
)


@pytest.fixture(scope="module")
def functions():
    sources = [KernelSource(*each) for each in (SCALE, COUNT, OF_ANOTHER_FORM)]
    compiled = compile_together(sources, 1)
    return [compiled[source] for source in sources]


def test_kernels_of_one_file_take_tensors_and_numbers(functions):
    scale, count, half = functions
    x, result, total = torch.randn(5), torch.zeros(5), torch.zeros(3, dtype=torch.int64)
    scale(x, result, 4, 2.0)
    assert torch.equal(result, torch.cat([2 * x[:4], torch.zeros(1)]))
    count(total, torch.tensor([True, False, True]))
    assert total.tolist() == [1, 0, 1]
    half(result)
    assert result[0] == 0.5


def test_only_kernels_of_the_known_form_share_a_file(functions):
    scale, count, half = (f.__self__.__file__ for f in functions)
    assert scale == count != half


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.zeros(1), torch.zeros(1), 1), "wrong number of arguments"),
        ((torch.zeros(1), torch.zeros(1), -1, 1.0), "below zero"),
    ],
    ids=["few arguments", "an error of the kernel"],
)
def test_errors_of_kernels_are_errors_of_python(functions, args, message):
    with pytest.raises(RuntimeError, match=message):
        functions[0](*args)


def test_an_argument_that_is_no_number_is_an_error(functions):
    with pytest.raises(TypeError):
        functions[0](torch.zeros(1), torch.zeros(1), "one", 1.0)


def test_a_kernel_that_is_called_before_it_is_compiled_compiles_itself():
    x, result = torch.ones(2), torch.zeros(2)
    KernelSource(*SCALE)(x, result, 2, 3.0)
    assert result.tolist() == [3.0, 3.0]


def test_equal_kernels_are_compiled_once_and_all_code_inside_is_compiled_at_the_end():
    one, other = {"a": KernelSource(*SCALE), "b": KernelSource(*COUNT)}, {"c": KernelSource(*SCALE), "d": 4}
    ends = []
    with kernels_together() as waiting:
        compile_kernels(one, ())
        with kernels_together():
            compile_kernels(other, ())
        waiting.then(lambda: ends.append(isinstance(other["c"], KernelSource)))
        assert isinstance(one["a"], KernelSource) and isinstance(other["c"], KernelSource)
    assert ends == [False] and other["d"] == 4
    assert one["a"] is other["c"] is not one["b"]


def test_kernels_are_found_where_they_were_compiled(monkeypatch):
    scope = {"a": KernelSource(*SCALE), "b": KernelSource(*OF_ANOTHER_FORM)}
    compile_kernels(scope, ())
    places = places_of(scope)
    assert places is not None and {place.kernel for place in places} == {"a", "b"}
    monkeypatch.setattr(kernel_files, "compile_together", None)  # (a call of it is an error)
    again = {"a": KernelSource(*SCALE), "b": KernelSource(*OF_ANOTHER_FORM)}
    compile_kernels(again, places)
    result = torch.zeros(2)
    again["a"](torch.ones(2), result, 2, 3.0)
    assert result.tolist() == [3.0, 3.0]


def test_a_kernel_of_an_earlier_program_is_not_compiled_again(monkeypatch):
    first = KernelSource(*SCALE)
    function = compile_together([first], 1)[first]
    monkeypatch.setattr(kernel_files, "_started", None)  # (a call of it is an error)
    again = KernelSource(*SCALE)
    assert compile_together([again], 1)[again] is function
    other = torch._inductor.config.patch("cpp.enable_floating_point_contract_flag", "fast")
    with other, pytest.raises(TypeError):  # (other settings make other code)
        compile_together([again], 1)


def test_an_error_inside_compiles_nothing_and_kernels_still_run():
    scope = {"a": KernelSource(*SCALE)}
    with pytest.raises(ValueError, match="stop"), kernels_together():
        compile_kernels(scope, ())
        raise ValueError("stop")
    result = torch.zeros(1)
    scope["a"](torch.ones(1), result, 1, 3.0)
    assert result.item() == 3.0


def test_a_kernel_that_does_not_compile_is_an_error_with_a_remedy():
    with pytest.raises(LoweringError, match=r"(?s)can't be compiled.*CppCompileError.*CXX"):
        compile_kernels({"a": KernelSource(SCALE[0], SCALE[1].replace("ks0;", "unknown;"))}, ())


def test_a_compiled_program_has_few_files(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(kernel_files, "_threads", lambda: 1)
    layers = [
        torch.nn.Sequential(
            torch.nn.Linear(8, 9), torch.nn.GELU(), torch.nn.Linear(9, 8), torch.nn.LayerNorm(8), torch.nn.GELU()
        )
        for _ in range(2)
    ]
    model = torch.nn.Sequential(*layers).double()
    plain = [p.detach().clone().requires_grad_() for p in model.parameters()]
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.func.functional_call(
        model, dict(zip(dict(model.named_parameters()), plain, strict=True)), (x,)
    ).sum().backward()
    before = set(sys.modules)
    handle = zgraph.compile(model, zgraph.Plan())
    handle(x).sum().backward()
    new = [getattr(sys.modules[name], "__file__", None) for name in set(sys.modules) - before]
    files = {file for file in new if str(file).endswith(".main.so")}
    kernels = [len(e.kernels) for e in handle.zgraph.programs["train0"].executables()]
    assert len(files) == 1 < sum(kernels)  # (forward and backward together)
    for p, q in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-10)  # (of float64)
