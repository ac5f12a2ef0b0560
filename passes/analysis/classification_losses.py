"""Finds where a program computes a classification loss: by torch's own operators, or by those that they are decomposed
into.
"""

from __future__ import annotations

import torch
from torch import fx

from zgraph.program import collectives

aten = torch.ops.aten

LOOK_UPS = {aten.nll_loss_forward.default, aten.gather.default}
"""Operators that pick the target of each row."""


def normalised(node: fx.Node) -> fx.Node | None:
    """Return the logits of a log-softmax, given its node; where it is decomposed, given the logarithm of the sum of
    exponentials.

    Returns None for any other node.
    """
    if node.target is aten._log_softmax.default:
        return node.args[0]  # type: ignore[return-value]
    if node.target is not aten.log.default:
        return None
    for target in (aten.sum.dim_IntList, aten.exp.default, aten.sub.Tensor):
        node = node.all_input_nodes[0]
        while collectives.is_wait(node) or collectives.is_start(node):
            node = node.all_input_nodes[0]
        if node.target is not target:
            return None
    return node.all_input_nodes[0]
