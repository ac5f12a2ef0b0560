"""Training with sparse attention on ranks, beside plain PyTorch whose attention gets the layouts' masks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import zgraph
from zgraph.verification.masked_attention import masks_of

RATE = 0.1


def distance_after_training(plain: nn.Module, plan: zgraph.Plan, steps: Sequence[Sequence[torch.Tensor]]) -> float:
    """Train by a plan with SGD of this `RATE`; return how far this rank's weights are from those of one process.

    Each step has the batches of all ranks, or one that all ranks read. The model gives its loss.
    """
    rank = torch.distributed.get_rank()
    compiled: Any = zgraph.compile(copy.deepcopy(plain), plan)
    for number, batches in enumerate(steps):
        torch.manual_seed(number)
        compiled.train_step(batches[rank % len(batches)])
        torch.manual_seed(number)
        with masks_of(plain, plan.attention):
            (sum(plain(batch) for batch in batches) / len(batches)).backward()
        for param in plain.parameters():
            param.data -= RATE * param.grad
            param.grad = None
    state = zgraph.full_state_dict(compiled)
    return max(float((p.detach() - state[n]).abs().max()) for n, p in plain.named_parameters())
