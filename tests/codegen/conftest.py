"""For tests of generated code: a process group for code that is only read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._inductor.async_compile
import torch.distributed as dist
from lowering import WORLD
from torch.testing._internal.distributed.fake_pg import FakeStore

from zgraph.torch_compat import kernel_files


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code is generated and read, not run: nothing compiles its kernels, which would take most of the time."""
    monkeypatch.setattr(torch._inductor.async_compile.AsyncCompile, "cpp_pybinding", lambda *_: None)
    monkeypatch.setattr(kernel_files, "compile_together", lambda kernels, files: dict.fromkeys(kernels))


@pytest.fixture
def group(not_compiled: None) -> Iterator[dict[str, str]]:
    """A process group that does nothing, for the code of eight ranks."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield {"dp": str(dist.group.WORLD.group_name)}
    dist.destroy_process_group()
