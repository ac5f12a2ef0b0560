"""One case by zgraph against the same by plain PyTorch."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import dataclass, field

import torch
from torch import nn

import zgraph
from databases.cases import Case, Made, seed, tensors_of
from zgraph.errors import VerifyError, ZgraphError
from zgraph.torch_compat.inductor_code import eager_random_numbers

# Of the largest value of a tensor. Eager runs plain PyTorch's own operators, Inductor others.
TOLERANCE = {"eager": 1e-5, "inductor": 2e-4}


@dataclass
class Result:
    """What came of a case. "equal"; "refused" (by zgraph, which says why); "unclear" (by somebody else's error, where plain PyTorch
    works); "wrong"; "void" (plain PyTorch does not run it either)."""

    verdict: str
    why: str = ""


@dataclass
class Observed:
    """All that a user can see of a run: tensors by name, None where there is none."""

    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)
    trained: list[bool] = field(default_factory=list)  # can a gradient go through each output?
    others: list[str] = field(default_factory=list)  # outputs that are no tensors


def observe(made: Made, model: nn.Module, calls: int) -> Observed:
    """Forward and backward, as often as `calls` says, and what came of them."""
    found = Observed()
    for call in range(calls):
        seed(f"call {call}")
        output = made.finish(model(*made.args, **made.kwargs))
        outputs = tensors_of(output)
        found.trained += [x.requires_grad for x in outputs]
        found.others += [repr(x) for x in torch.utils._pytree.tree_leaves(output) if not isinstance(x, torch.Tensor)]
        trained = [x for x in outputs if x.requires_grad]
        for i, x in enumerate(outputs):
            found.tensors[f"output {i} of call {call}"] = x.detach().clone()
        if trained:
            generator = torch.Generator().manual_seed(call)
            torch.autograd.backward(
                trained, [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in trained]
            )
    for name, parameter in model.named_parameters():
        found.tensors[f"the gradient of {name}"] = parameter.grad
    for name, buffer in model.named_buffers():
        found.tensors[f"buffer {name}"] = buffer
    for i, x in enumerate(tensors_of((made.args, made.kwargs))):
        found.tensors[f"input {i}"] = x.detach()
        found.tensors[f"the gradient of input {i}"] = x.grad if x.is_leaf else None
    return found


def difference(got: Observed, expected: Observed, tolerance: float, *, values: bool = True) -> str | None:
    """What differs first, None if nothing does."""
    if got.others != expected.others:
        return f"outputs {got.others} for {expected.others}"
    if got.trained != expected.trained:
        return f"outputs that can be differentiated: {got.trained} for {expected.trained}"
    for name, wanted in expected.tensors.items():
        have = got.tensors.get(name)
        if (have is None) != (wanted is None):
            return f"{name} is {'missing' if have is None else 'there'}, and in plain PyTorch it is not"
        if have is None or wanted is None:
            continue
        if have.shape != wanted.shape or have.dtype != wanted.dtype:
            return f"{name} is {have.dtype}{list(have.shape)} for {wanted.dtype}{list(wanted.shape)}"
        if values and (off := distance(have, wanted)) > tolerance:
            return f"{name} is off by {off:.2g} of its largest value"
    return None


def distance(have: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest finite value; infinity where one is not finite and the other is something else."""
    if have.is_sparse or wanted.layout is not torch.strided:
        have, wanted = have.to_dense(), wanted.to_dense()
    if not wanted.numel():
        return 0.0
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    have, wanted = have.to(wide), wanted.to(wide)
    finite = torch.isfinite(wanted)
    if not torch.equal(torch.isfinite(have), finite):
        return float("inf")
    same = torch.where(finite, torch.zeros_like(wanted), wanted), torch.where(finite, torch.zeros_like(have), have)
    if not torch.allclose(*same, equal_nan=True):
        return float("inf")
    zero = torch.zeros_like(wanted)
    off = torch.where(finite, have - wanted, zero).abs().max()
    largest = torch.where(finite, wanted, zero).abs().max()
    return float(off / largest.clamp(min=1e-3))


def compare(case: Case, backend: str) -> Result:
    """Run a case by both."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = 2 if case.database == "module" else 1
        try:
            plain, again = (observe(made, made.model, calls) for made in (case.make(), case.make()))
        except Exception as error:
            return Result("void", brief(error))
        steady = difference(again, plain, 1e-6) is None  # (memory that nobody has written to, say)
        made = case.make()
        try:
            model = zgraph.compile(made.model, zgraph.Plan(backend=backend))  # type: ignore[arg-type]
            with eager_random_numbers():
                got = observe(made, model, calls)
        except VerifyError as error:  # (that is for us to read)
            return Result("unclear", brief(error))
        except ZgraphError as error:
            return Result("refused", brief(error))
        except Exception as error:
            return Result("unclear", brief(error))
        off = difference(got, plain, TOLERANCE[backend], values=steady)
        return Result("equal") if off is None else Result("wrong", off)


def brief(error: BaseException) -> str:
    """An error in one line, with where it was raised unless that was on purpose."""
    text = f"{type(error).__name__}: " + " | ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if isinstance(error, ZgraphError) and not isinstance(error, VerifyError):
        return text[:600]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "databases" not in f.filename]
    return f"{text[:500]} ({'; '.join(f'{f.filename}:{f.lineno}' for f in frames[-2:])})"
