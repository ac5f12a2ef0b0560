"""C++ kernels that are compiled several to a file: the same functions as Inductor's, one file each, gives."""

from __future__ import annotations

import sys

import pytest
import torch

import zgraph
from zgraph.torch_compat import kernel_files
from zgraph.torch_compat.kernel_files import KernelSource, compile_together, in_few_files

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


def test_code_says_in_how_many_files_its_kernels_are(monkeypatch):
    monkeypatch.setattr(kernel_files.async_compile, "get_compile_threads", lambda: 2)
    top = "from torch._inductor.async_compile import AsyncCompile\nasync_compile = AsyncCompile()\n"
    kernel = "a{} = async_compile.cpp_pybinding(['float*'], r'''\n''')\n"
    assert in_few_files(top + kernel.format(0)) == top + kernel.format(0)
    assert "AsyncCompile(files=2)" in in_few_files(top + "".join(map(kernel.format, range(5))))
    other = top.replace("from torch._inductor.async_compile", "from elsewhere")
    assert in_few_files(other + kernel.format(0) * 2) == other + kernel.format(0) * 2


def test_a_compiled_program_has_few_files(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(kernel_files.async_compile, "get_compile_threads", lambda: 1)
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
    assert len(kernels) == len(files) == 2 < sum(kernels)
    for p, q in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-10)  # (of float64)
