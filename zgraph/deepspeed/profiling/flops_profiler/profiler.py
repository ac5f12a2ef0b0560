"""DeepSpeed's `flops_profiler`: the operations of a plain model's forward, counted by torch's FlopCounterMode.

Only matmuls, convolutions and attention are counted, which dominate a model's operations; DeepSpeed counts elementwise operators too. The engine
profiles a compiled model itself: `"flops_profiler": {"enabled": true}`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zgraph.deepspeed.utils.logging import no_effect
from zgraph.errors import StepError
from zgraph.program.flops import BEYOND_TORCH
from zgraph.units import columns

logger = logging.getLogger("zgraph.deepspeed")

__all__ = ["FlopsProfiler", "get_model_profile"]


class FlopsProfiler:
    """A counter of the operations of a model's calls between `start_profile` and `stop_profile`."""

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.ds_engine = ds_engine
        if recompute_fwd_factor:
            no_effect("FlopsProfiler(recompute_fwd_factor)", "a forward is counted alone, without its backward")
        self._counter: FlopCounterMode | None = None
        self._begin = self._seconds = 0.0
        self._fast = True  # whether torch runs whole encoder layers by operators of its own

    def start_profile(self, ignore_list: Any = None) -> None:
        """Start to count."""
        if ignore_list:
            no_effect(
                "start_profile(ignore_list)", "it leaves no operation out of the sums, and the table has all modules"
            )
        self._fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # (its fused operators are counted as nothing)
        self._counter = FlopCounterMode(display=False, custom_mapping=BEYOND_TORCH)
        self._counter.__enter__()
        self._begin = time.perf_counter()

    def stop_profile(self) -> None:
        """Stop to count. The counts can still be read. Raises `StepError` before `start_profile`."""
        if self._counter is None:
            raise StepError("stop_profile() before start_profile()")
        self._seconds = time.perf_counter() - self._begin
        self._counter.__exit__(None, None, None)
        torch.backends.mha.set_fastpath_enabled(self._fast)

    def reset_profile(self) -> None:
        """Delete the counts."""
        self._counter = None

    end_profile = reset_profile

    def get_total_flops(self, as_string: bool = False) -> Any:
        return _text(self._counted().get_total_flops(), "FLOPS", as_string)

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return the multiply-adds: half of the floating-point operations."""
        return _text(self._counted().get_total_flops() // 2, "MACs", as_string)

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Return the seconds between start and stop."""
        return f"{self._seconds * 1e3:.2f} ms" if as_string else self._seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        return _text(sum(p.numel() for p in self.model.parameters()), "", as_string)

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Log the counts of the whole model at a step, and with `detailed` those of its modules down to a depth; or write them
        into a file."""
        if top_modules != 1:
            no_effect("print_model_profile(top_modules)", "the table has all modules of each depth")
        head = f"step {profile_step}: parameters {self.get_total_params(True)}, {self.get_total_flops(True)}, {self.get_total_duration(True)}"
        text = "\n".join([head, *self._table(module_depth)]) if detailed else head
        if output_file:
            Path(output_file).write_text(text + "\n")
        else:
            logger.info("%s", text)

    def _table(self, depth: int) -> list[str]:
        """Return a line for each module that was called, down to a depth (-1: all), with its operations and its share of all."""
        total = max(self._counted().get_total_flops(), 1)
        rows = [["module", "FLOPs", "share"]]
        known = [type(self.model).__name__ + f".{name}".rstrip(".") for name, _ in self.model.named_modules()]
        place = {name: at for at, name in enumerate(known)}  # (torch's counts are in no order)
        counted = self._counted().get_flop_counts()
        for name, counts in sorted(counted.items(), key=lambda item: (place.get(item[0], len(place)), item[0])):
            if name != "Global" and not 0 <= depth < name.count("."):
                flops = sum(counts.values())
                rows.append([name, _text(flops, "FLOPS", True), f"{flops / total:.1%}"])
        return columns(rows, left=(0,))

    def _counted(self) -> FlopCounterMode:
        if self._counter is None:
            raise StepError("nothing was counted", hint="start_profile(), a call of the model, stop_profile()")
        return self._counter


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Any = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Count (floating-point operations, multiply-adds, parameters) of one forward of a plain model.

    The input is `args` and `kwargs`, or ones of `input_shape`. Raises `StepError` for a call without any, and for a `mode` other
    than "forward" and "generate".
    """
    if mode not in ("forward", "generate"):
        raise StepError(f"there is no mode {mode!r}", hint='"forward" or "generate"')
    if input_shape is not None:
        first = next(model.parameters(), torch.empty(0))
        args = [torch.ones(tuple(input_shape), dtype=first.dtype, device=first.device)]
    if not args and not kwargs:
        raise StepError("get_model_profile needs an input", hint="input_shape=…, args=… or kwargs=…")
    call: Any = model if mode == "forward" else model.generate
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                call(*args, **(kwargs or {}))
            profiler = FlopsProfiler(model)
            profiler.start_profile(ignore_modules)
            call(*args, **(kwargs or {}))
            profiler.stop_profile()
    finally:
        model.train(was)
    if print_profile:
        profiler.print_model_profile(1, module_depth, top_modules, detailed, output_file)
    return profiler.get_total_flops(as_string), profiler.get_total_macs(as_string), profiler.get_total_params(as_string)


def _text(number: float, unit: str, as_string: bool) -> Any:
    if not as_string:
        return number
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if number >= factor:
            return f"{number / factor:.2f} {letter}{unit}"
    return f"{number} {unit}".strip()
