"""DeepSpeed's schedulers, where scripts import them from, with their names and those of their numbers as constants (`WARMUP_MIN_LR`)."""

from zgraph.deepspeed.lr_schedulers import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

__all__ = ["VALID_LR_SCHEDULES", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = VALID_LR_SCHEDULES
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
globals().update(
    {
        name.upper(): name
        for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
        for name in kind.record.model_fields
        if name != "name"
    }
)
