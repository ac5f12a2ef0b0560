"""What a plan's `wire.auto` has chosen for a model: one pair of formats for all its programs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from zgraph.program.remark import Remark
from zgraph.units import shown_bytes

logger = logging.getLogger(__name__)

EXACT = "same"  # the format of what is sent as it is


@dataclass(frozen=True)
class WireStep:
    """A training step with one pair of formats."""

    gather: str  # the format that weights are gathered in, as `wire.gather` is written
    reduce: str  # the format that gradients are reduced in, as `wire.reduce` is written
    error: float  # the most that an element may be wrong by, as a part of the largest of its block
    sent: int  # bytes of weights and gradients that a rank sends
    seconds: float  # the forecast time, the update included
    doubted: float  # the same if operators take longer than costs say, by which steps are compared

    def __str__(self) -> str:
        return f"weights gathered {_in_words(self.gather)}, gradients reduced {_in_words(self.reduce)}"


def _in_words(format: str) -> str:
    return "as they are" if format == EXACT else f"in {format}"


@dataclass(frozen=True)
class WireFormats:
    """The formats that were chosen."""

    chosen: WireStep  # the step that is run
    exact: WireStep  # the step with everything as it is
    missed: WireStep | None  # the fastest step that `max_error` rules out; None if none is faster
    max_error: float  # the plan's

    def __str__(self) -> str:
        chosen, exact, allowed = self.chosen, self.exact, f"wire.max_error {self.max_error:g}"
        if chosen == exact:
            return f"wire.auto: {exact}: nothing that {allowed} allows is sure to make the step faster, forecast {_ms(exact)}"
        return (
            f"wire.auto: {chosen} (error at most {chosen.error:.3g}, {allowed}): a rank sends {shown_bytes(chosen.sent)} "
            f"of them in a step, {chosen.sent / exact.sent:.3f} of {shown_bytes(exact.sent)}; forecast step {_ms(chosen)}, "
            f"as they are {_ms(exact)}"
        )

    def remark(self) -> Remark:
        """Return the choice as a remark, which says what a larger error would give."""
        if self.missed is None:
            return Remark("wire.auto", "", str(self), "no smaller format is faster", 0.0, "a faster link")
        return Remark(
            "wire.auto",
            "",
            str(self),
            f"{self.missed} may be wrong by {self.missed.error:.3g}",
            self.chosen.seconds - self.missed.seconds,
            f"wire.max_error={self.missed.error * 1.01:.3g} allows it",
        )

    @staticmethod
    def of(said: Mapping[str, Any]) -> WireFormats:
        """Return the formats that `dataclasses.asdict` gave."""
        steps = {name: said[name] and WireStep(**said[name]) for name in ("chosen", "exact", "missed")}
        return WireFormats(**{**said, **steps})


def _ms(step: WireStep) -> str:
    return f"{step.seconds * 1e3:.4g} ms"


class WireChoice:
    """The formats of a model's programs, once its first training program has chosen them."""

    def __init__(self) -> None:
        self.formats: WireFormats | None = None

    def take(self, formats: WireFormats) -> None:
        """Let all further programs follow a choice, and log it in one line."""
        if self.formats != formats:
            logger.info("%s", formats)
        self.formats = formats

    def said(self) -> dict[str, Any] | None:
        """Return the choice as JSON; None before it."""
        return None if self.formats is None else asdict(self.formats)

    def __str__(self) -> str:
        return "wire.auto: the first training program chooses" if self.formats is None else str(self.formats)
