"""zgraph's own operators. Both are marks in a graph that code generation removes: neither costs anything at run time.

`zgraph::output(x) -> y` stands before each output while the joint graph is traced. To AOTAutograd it makes a fresh
tensor, so that every output has a tangent of its own, also where the model returns views of one tensor or its inputs.
`zgraph::release(x)` says that a gathered buffer may not be read after this point; the verifier holds programs to it.
"""

from __future__ import annotations

import torch
from torch import fx

library = torch.library.Library("zgraph", "DEF")
library.define("output(Tensor x) -> Tensor")
library.define("release(Tensor x) -> ()")
library.impl("output", lambda x: x.clone(), "CompositeExplicitAutograd")
library.impl("release", lambda x: None, "CompositeExplicitAutograd")


def _fresh(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)


torch.library.register_fake("zgraph::output", _fresh, lib=library)
torch.library.register_fake("zgraph::release", lambda x: None, lib=library)
torch.library.register_autograd("zgraph::output", lambda ctx, grad: grad, lib=library)

OUTPUT = torch.ops.zgraph.output.default
RELEASE = torch.ops.zgraph.release.default

fx.node.has_side_effect(RELEASE)
