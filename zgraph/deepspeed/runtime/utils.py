"""DeepSpeed's helpers, where scripts import them from."""

import random

import numpy as np
import torch

from zgraph.deepspeed.utils.memory import memory_status, see_memory_usage

__all__ = ["memory_status", "see_memory_usage", "set_random_seed"]


def set_random_seed(seed: int) -> None:
    """Seed the random numbers of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # (numpy takes no larger ones)
    torch.manual_seed(seed)
