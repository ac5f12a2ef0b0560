"""Functions that `torch.compile` calls as a whole, while other threads capture models."""

import torch
from torch.fx import traceback

from zgraph.torch_compat import autograd_state


def test_a_call_needs_no_table_of_another_threads_capture(monkeypatch):
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)  # (another thread's capture sets it)
    autograd_state.untraced(traceback.current_meta.clear)()  # (and puts another table in place)


def test_torch_compile_breaks_its_graph_there():
    traced = []
    inner = autograd_state.untraced(lambda x: (traced.append(torch.compiler.is_compiling()), x * 2)[1])
    x = torch.ones(3)
    assert torch.equal(torch.compile(lambda x: inner(x + 1) + 1, backend="eager")(x), torch.full((3,), 5.0))
    assert traced == [False]
