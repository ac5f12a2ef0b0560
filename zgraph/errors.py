"""Every error that zgraph raises on purpose, one type per kind of fault.

Each says what is wrong, where (the user's file and line, a plan key, a graph node), why, and what to do.
The four parts are attributes, so that tools need not parse the text. Nothing here imports torch: a plan can
be checked, and its errors caught, on a machine without it.
"""

from __future__ import annotations

import builtins
from textwrap import indent
from typing import Any

__all__ = [
    "ArgumentError",
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


class ArgumentError(ZgraphError, TypeError):
    """An argument of another type than a function takes."""


class PlanError(ZgraphError, ValueError):
    """A plan that can't be read, or has an unknown key or an invalid value.

    `where` is the plan key (`"mesh.dp"`), after file and line when the plan came from a file. `problems`
    holds one error per fault when there are several, and is empty when this error is the only one.
    """

    problems: tuple[PlanError, ...] = ()


class MeshError(PlanError):
    """A mesh that does not fit the number of ranks."""


class CaptureError(ZgraphError):
    """A model that can't be captured as one whole graph; `where` is the user's source line."""


class SizeError(CaptureError):
    """A size that was declared dynamic but can't be: the model makes a Python number of it, or more than arithmetic.

    `sizes` are the names of the sizes that the error is about; () if it may be any. `of_values` is whether a size depends
    on values, and `inputs` are then the names of the user's inputs whose values alone decide it; () if others do.
    """

    sizes: tuple[str, ...] = ()
    of_values: bool = False
    inputs: tuple[str, ...] = ()


class ModelError(ZgraphError):
    """A model in a state that can't be compiled: compiled already, on several devices, and so on."""


class SignatureError(ZgraphError):
    """Inputs that a compiled model can't take, or that differ between ranks."""


class StepError(ZgraphError, RuntimeError):
    """A step that can't be run: no gradients, no optimizer, a batch that can't be divided."""


class AssertionError(ZgraphError, builtins.AssertionError, RuntimeError):
    """An assertion of the user's model that does not hold (`assert` on a tensor, `torch._assert`, `torch._check`), with
    its message.

    `where` is the user's source line. It is caught by `except AssertionError` and by `except RuntimeError`, since
    PyTorch raises one or the other.
    """


class OverflowError(StepError):
    """Gradients that overflow although the loss scale is at its minimum."""


class NonFiniteError(StepError):
    """A step with an infinite loss or gradient, or one that is no number; it has changed neither weights nor states.

    `where` is the user's source line. All fields but `step` are None if running the step again did not reproduce the error.
    """

    step: int = 0  # the number of the step, from 1
    micro_batch: int | None = None  # the number of the micro-batch, from 0
    rank: int | None = None  # the rank, from 0
    module: str | None = None  # the path of the module that computed the first value that is not finite
    node: str | None = None  # that value's name in its program
    phase: str | None = None  # "forward" or "backward"


class RolledBackError(NonFiniteError):
    """A `NonFiniteError` after which the last checkpoint was loaded: the run can continue from it."""

    tag: str = ""  # the name of the checkpoint
    client_state: dict[str, object] | None = None  # what the script saved with it
    lost: int = 0  # how many steps have to be run again


class PassError(ZgraphError):
    """A pass that failed; `where` names the pass."""

    failure: Exception | None = None  # the error of the pass, or of the verifier after it
    history: object = None  # the passes that ran before (a `zgraph.passes.History`)


class ContractError(PassError):
    """A pipeline whose passes' contracts contradict each other, found before any pass runs."""


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
    """A glob over a program's nodes that matches none of them; `hint` has the nearest names."""


class BundleError(ZgraphError):
    """A bundle that can't be written or read: it has another version, is damaged, or is not a bundle."""


class CheckpointError(ZgraphError):
    """A checkpoint that can't be saved, does not exist, is damaged, or is another model's; `where` is its file or
    folder."""


class LayoutError(ZgraphError):
    """A value with other strides, dtype or size than its program was compiled for; `where` is the user's source
    line."""


class WrongValueError(ZgraphError):
    """A value of compiled code that differs from the result of plain operators on the same inputs; `where` is the
    user's source line."""


class LoweringError(ZgraphError):
    """Inductor failed on an operator, or does not support it; `where` is the user's source line."""


class RankMismatchError(ZgraphError):
    """Ranks that were about to run different programs, found by comparing hashes before the first step."""


class CollectiveError(ZgraphError):
    """A collective that failed or timed out, mostly because another rank died; the message names it and its module."""

    absent: tuple[int, ...] = ()  # the ranks that had not arrived, by their heartbeats


class PeerError(CollectiveError):
    """A step of a pipeline that another rank has left because of its own error; `where` and `why` are that rank's."""

    rank: int = 0  # the rank that failed
    stage: int | None = None  # the stage that it was running; None if its schedule was done
    micro_batch: int | None = None  # the micro-batch that it was running; None if its schedule was done


class UnsupportedError(ZgraphError, NotImplementedError):
    """Something that zgraph does not support, and refuses rather than doing it in part."""


class SymbolicError(ZgraphError):
    """A step that can't be expressed as a formula of its sizes; `where` names the node that differs, and the sizes
    at which it does."""


class OffloadError(ZgraphError):
    """A tensor that can't be moved to or from where it is offloaded; `where` is the folder of its file."""


class OutOfMemoryError(ZgraphError, RuntimeError):
    """A device that does not have enough memory for a step, with what would fit; `where` is the user's source line."""


class TargetError(ZgraphError):
    """A command-line target (`package.module:factory`, or an example) that can't be imported or called."""


def divided_penalty(
    kind: type[ZgraphError], why: str | None = None, *, where: str | None = None, module: str = "model"
) -> ZgraphError:
    """Return an error for a loss with a term of divided parameters, which are those of `module` in the hint."""
    return kind(
        "the loss has a term of the parameters themselves, which are divided over the ranks",
        where=where,
        why=why,
        hint="make the term a plain number first, on all ranks, whose gradient is averaged over them: "
        f"sum(p.square().sum() for p in {module}.parameters()).full_tensor(); or weight_decay of the optimizer",
    )


def refuse_unless(right: bool, where: str, value: Any, takes: str, hint: str | None = None) -> None:
    """Raise `ArgumentError` unless an argument is `right`; `where` names it, `takes` says what it has to be."""
    if not right:
        given = "None" if value is None else f"a value of type {type(value).__name__}"
        raise ArgumentError(f"{where} takes {takes}, not {given}", hint=hint)


def refuse_no_function(where: str, function: Any) -> None:
    """Raise `ArgumentError` for a function, which may be None, that can't be called."""
    refuse_unless(function is None or callable(function), where, function, "a function or None")


def refuse_no_bool(where: str, value: Any) -> None:
    """Raise `ArgumentError` for a value that is neither True nor False."""
    refuse_unless(isinstance(value, bool), where, value, "True or False")
