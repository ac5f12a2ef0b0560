"""zgraph's own operators. Those that do not run are replaced or removed by code generation.

`zgraph::output(x) -> y` is inserted before each output while the joint graph is traced. To AOTAutograd it makes a
fresh tensor, so that every output has a tangent of its own, also where the model returns views of one tensor or its
inputs. `zgraph::release(x)` says that a gathered buffer may not be read after this point; the verifier holds programs
to it. `zgraph::shift(x, ranks, group, by=1) -> y` starts a transfer: each rank sends x to the next one of the group, or
to that which is `by` behind it, the last one to the first, and receives y from the one as far before. Which ranks these
are differs from rank to rank, and programs do not. `zgraph::gather(x, ranks, group) -> y` starts an all-gather into newly allocated memory. It runs:
torch's functional all-gather over gloo corrupts memory (see `zgraph.codegen.lower_collectives`). `zgraph::check(x,
message) -> y` raises `AssertionError` with the message unless x is true. It runs; y is a copy of x.
`zgraph::region(inputs, program) -> outputs` is a part of the program whose sizes depend on values (see
`zgraph.program.regions`). It runs.
"""

from __future__ import annotations

import torch
from torch import fx

from zgraph.errors import AssertionError

library = torch.library.Library("zgraph", "DEF")
library.define("output(Tensor x) -> Tensor")
library.define("release(Tensor x) -> ()")
library.define("shift(Tensor x, int ranks, str group, int by=1) -> Tensor")
library.define("gather(Tensor x, int ranks, str group) -> Tensor")
library.define("check(Tensor x, str message) -> Tensor")
library.define("region(Tensor[] inputs, str program) -> Tensor[]")
library.impl("output", lambda x: x.clone(), "CompositeExplicitAutograd")
library.impl("release", lambda x: None, "CompositeExplicitAutograd")


def _check(x: torch.Tensor, message: str) -> torch.Tensor:
    if not bool(x):
        raise AssertionError(message, why="an assertion of the model's does not hold")
    return x.clone()


library.impl("check", _check, "CompositeExplicitAutograd")


def _whole(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return x.new_empty((x.shape[0] * ranks, *x.shape[1:]))


def _gather(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    into = torch.ops._c10d_functional.all_gather_into_tensor_out.default
    return into(x, ranks, group, out=_whole(x, ranks, group))  # type: ignore[no-any-return]


library.impl("gather", _gather, "CompositeExplicitAutograd")


def _fresh(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)


torch.library.register_fake(
    "zgraph::output", torch.empty_like, lib=library
)  # (with memory of its own for each element)
torch.library.register_fake("zgraph::check", lambda x, message: _fresh(x), lib=library)
torch.library.register_fake("zgraph::release", lambda x: None, lib=library)
torch.library.register_fake("zgraph::gather", _whole, lib=library)
torch.library.register_fake("zgraph::shift", lambda x, ranks, group, by=1: torch.empty_like(x), lib=library)
torch.library.register_autograd("zgraph::output", lambda ctx, grad: grad, lib=library)

OUTPUT = torch.ops.zgraph.output.default
RELEASE = torch.ops.zgraph.release.default
REGION = torch.ops.zgraph.region.default
SHIFT = torch.ops.zgraph.shift.default
GATHER = torch.ops.zgraph.gather.default
CHECK = torch.ops.zgraph.check.default

fx.node.has_side_effect(RELEASE)
fx.node.has_side_effect(CHECK)
