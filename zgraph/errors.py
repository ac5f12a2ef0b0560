"""Every error that zgraph raises on purpose, one type per kind of fault.

Each says what is wrong, where (the user's file and line, a plan key, a graph node), why, and what to do.
The four parts are attributes, so that tools need not parse the text. Nothing here imports torch: a plan can
be checked, and its errors caught, on a machine without it.
"""

from __future__ import annotations

import builtins
from textwrap import indent

__all__ = [
    "AssertionError",
    "BundleError",
    "CaptureError",
    "CheckpointError",
    "CollectiveError",
    "ContractError",
    "FilterError",
    "LayoutError",
    "LoweringError",
    "MeshError",
    "ModelError",
    "NonFiniteError",
    "OffloadError",
    "OutOfMemoryError",
    "OverflowError",
    "PassError",
    "PeerError",
    "PlanError",
    "RankMismatchError",
    "RolledBackError",
    "SignatureError",
    "SizeError",
    "StepError",
    "SymbolicError",
    "TargetError",
    "UnsupportedError",
    "VerifyError",
    "WrongValueError",
    "ZgraphError",
]


class ZgraphError(Exception):
    """The base of all of zgraph's errors: `except zgraph.errors.ZgraphError` catches every one of them."""

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, hint: str | None = None) -> None:
        # `what` alone is in `args`: pickle calls the type with `args` and restores the rest from `__dict__`.
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.what]
        for label, text in (("where", self.where), ("why", self.why), ("to do", self.hint)):
            if text:
                lines.append(f"  {label}:" + (f"\n{indent(text, '    ')}" if "\n" in text else f" {text}"))
        return "\n".join(lines)


class PlanError(ZgraphError, ValueError):
    """A plan that can't be read, or holds a key or value that means nothing.

    `where` is the plan key (`"mesh.dp"`), after file and line when the plan came from a file. `problems`
    holds one error per fault when there are several, and is empty when this error is the only one.
    """

    problems: tuple[PlanError, ...] = ()


class MeshError(PlanError):
    """A mesh that does not fit the number of ranks."""


class CaptureError(ZgraphError):
    """A model that can't be captured as one whole graph; `where` is the user's source line."""


class SizeError(CaptureError):
    """A size that is to differ from call to call can't: the model makes a number of it, or more than arithmetic.

    `sizes` are the names of those that it is about; none where it may be any.
    """

    sizes: tuple[str, ...] = ()


class ModelError(ZgraphError):
    """A model in a state that can't be compiled: compiled already, on several devices, and so on."""


class SignatureError(ZgraphError):
    """Inputs that a compiled model can't take, or that differ between ranks."""


class StepError(ZgraphError, RuntimeError):
    """A step that can't be taken: no gradients, no optimizer, a batch that does not divide."""


class AssertionError(ZgraphError, builtins.AssertionError, RuntimeError):
    """An assertion of the user's model that does not hold (`assert` on a tensor, `torch._assert`, `torch._check`), with its message; `where` is the
    user's source line. Caught by `except AssertionError` and `except RuntimeError`, of which PyTorch raises one or the other."""


class OverflowError(StepError):
    """Gradients that overflow although the loss scale is at its minimum."""


class NonFiniteError(StepError):
    """A step with an infinite loss or gradient, or one that is no number; it has changed neither weights nor states.

    `where` is the user's source line. `step` counts from 1; `micro_batch` and `rank` from 0. `module` is the path of the module in which the
    first such value came into being, `node` that value's name in its program, `phase` "forward" or "backward". All but `step` are None
    where running the step again did not show it.
    """

    step: int = 0
    micro_batch: int | None = None
    rank: int | None = None
    module: str | None = None
    node: str | None = None
    phase: str | None = None


class RolledBackError(NonFiniteError):
    """The same, after the last checkpoint was loaded: the run can go on from there.

    `tag` is that checkpoint's name, `client_state` what was saved with it, `lost` how many steps are to be made again.
    """

    tag: str = ""
    client_state: dict[str, object] | None = None
    lost: int = 0


class PassError(ZgraphError):
    """A pass that failed; `where` names the pass. `failure` is what it, or the verifier after it, raised, and `history` the program's
    way as far as it came (a `zgraph.passes.History`)."""

    failure: Exception | None = None
    history: object = None


class ContractError(PassError):
    """A pipeline whose passes' contracts contradict each other: found before anything runs."""


class VerifyError(PassError):
    """A program that breaks an invariant of its level; `node` names the offending node, if there is one, and `others` are further faults."""

    def __init__(
        self,
        what: str,
        *,
        node: str | None = None,
        where: str | None = None,
        why: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what, where=where, why=why, hint=hint)
        self.node = node
        self.others: tuple[VerifyError, ...] = ()


class FilterError(ZgraphError, ValueError):
    """A glob over a program's nodes that matches none of them; `hint` has the names nearest to it."""


class BundleError(ZgraphError):
    """A bundle that can't be written, or read: of another version, damaged, or no bundle."""


class CheckpointError(ZgraphError):
    """A checkpoint that can't be saved, or is damaged, of another model, or none; `where` is its file or folder."""


class LayoutError(ZgraphError):
    """A value with other strides, dtype or size than its program was made for; `where` is the user's source line."""


class WrongValueError(ZgraphError):
    """A value of compiled code that differs from what plain operators give for the same inputs; `where` is the user's source line."""


class LoweringError(ZgraphError):
    """Inductor failed on an operator, or does not support it; `where` is the user's source line."""


class RankMismatchError(ZgraphError):
    """Ranks that were about to run different programs: found by comparing hashes before the first step."""


class CollectiveError(ZgraphError):
    """A collective that failed or timed out, mostly because another rank died; names it and its module. `absent` are the ranks that had not
    arrived, as far as their heartbeats tell."""

    absent: tuple[int, ...] = ()


class PeerError(CollectiveError):
    """A step of a pipeline that another rank has left, for an error of its own; `where` and `why` are what that rank has said.

    `rank` is its number, `stage` and `micro_batch` where it was in the schedule, None where it was behind it.
    """

    rank: int = 0
    stage: int | None = None
    micro_batch: int | None = None


class UnsupportedError(ZgraphError, NotImplementedError):
    """Something that zgraph does not do, refused rather than done in part."""


class SymbolicError(ZgraphError):
    """A step that is no formula of its sizes; `where` names the node that differs, and the sizes at which it does."""


class OffloadError(ZgraphError):
    """A tensor that can't be moved to or from where it is offloaded; `where` is the folder of its file."""


class OutOfMemoryError(ZgraphError, RuntimeError):
    """A device without room for a step, and what would have fitted; `where` is the user's source line."""


class TargetError(ZgraphError):
    """A command-line target (`package.module:factory`, or an example) that can't be imported or called."""
