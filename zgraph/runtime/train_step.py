"""Runs one whole training step as one call: micro-batches, their losses' weights, reduction, update, and the joined
output.

Each micro-batch's loss has a weight: equal ones, or its number of targets. The weight is the tangent that its backward
starts from, so nothing is compiled for it and the loss that is returned is the model's own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from zgraph.build.step_program import Entry
from zgraph.capture.batch import Call, LossOperators, MicroBatch, parts_of
from zgraph.capture.call_signature import batch_size
from zgraph.capture.capture import find_loss
from zgraph.capture.ignored_targets import IGNORED, TARGETS, Ignores, LossesSeen, ignored_of
from zgraph.capture.replaced_forward import signature_of
from zgraph.errors import StepError
from zgraph.plan.elasticity import Elastic
from zgraph.plan.plan import Plan
from zgraph.runtime.beside_batch import BesideBatch
from zgraph.runtime.join_outputs import detached, join_outputs, rows_by_place
from zgraph.runtime.out_of_memory import explained
from zgraph.runtime.runtime import Runtime


class HasForward(Protocol):
    """A compiled module with its class's own forward."""

    @property
    def module(self) -> Any: ...

    @property
    def forward_function(self) -> Callable[..., Any]: ...


class TakesBatches(HasForward, Protocol):
    """A compiled module, and what is known of its batches."""

    @property
    def beside_batch(self) -> BesideBatch: ...


def train_step(
    runtime: Runtime,
    model: Callable[..., Any],
    loss_fn: Callable[..., Any] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run one whole training step (see `zgraph.api.handle.Handle.train_step`)."""
    plan = runtime.plan
    tokens = plan.loss_average == "token"
    kwargs = in_order(runtime, kwargs)
    if plan.elastic is not None:
        _refuse_other_rows(plan.elastic, args, kwargs)
    calls = cut_batch(runtime, args, kwargs, plan.micro_batches, uneven=tokens)
    weights = [1.0 / len(calls)] * len(calls)
    outputs = []
    with _step(runtime, len(calls)):
        parts = _agreed_parts(runtime, calls)
        for number, (call, (given, rest, others)) in enumerate(zip(calls, parts, strict=True)):
            last = number + 1 == len(calls)
            with contextlib.nullcontext() if last else runtime.no_sync(), explained(runtime):
                output, unknown = _checked_output(runtime, model, given, len(calls))
                operators = LossOperators() if unknown and loss_fn is not None else None
                with (
                    operators or contextlib.nullcontext(),
                    LossesSeen() if tokens and not number else contextlib.nullcontext() as seen,
                ):
                    loss = loss_of(output, loss_fn, named(runtime, given), rest, others)
                if operators is not None:
                    operators.refuse_other_dimensions(
                        output,
                        (named(runtime, given), rest, others),
                        batch_size(*call) or 0,
                        runtime.beside_batch.is_part,
                    )
                if not loss.requires_grad:
                    raise _untrained()
                if seen is not None:  # (only now is it known which targets count)
                    captured = runtime.entered.trace.ignored if runtime.entered is not None else set()
                    weights = target_weights(runtime, calls, captured | seen.found)
                weight = weights[number]
                if weight == 1.0:
                    loss.backward()
                else:
                    loss.backward(torch.as_tensor(weight, dtype=loss.dtype, device=loss.device))
                if runtime.nonfinite is not None and loss_fn is not None:
                    runtime.nonfinite.saw_loss(loss)
            outputs.append(detached(output))
        if plan.optimizer is not None:
            runtime.updater.step()
        else:
            runtime.updater.clip_only()
    sizes = [batch_size(*call) for call in calls]
    total = sum(weights)
    # (a rank without a single target returns the plain mean over its micro-batches)
    shares = [w / total for w in weights] if total else [1.0 / len(calls)] * len(calls)
    entered = runtime.entered
    return join_outputs(outputs, shares, sizes, entered.rows_by_place if entered is not None else {})


@contextlib.contextmanager
def _step(runtime: Runtime, parts: int) -> Iterator[None]:
    """Run a step of so many micro-batches; undo what it has done so far where it fails."""
    try:
        with runtime.beside_batch.step(parts):
            yield
    except BaseException:
        runtime.updater.give_up()
        raise


def _agreed_parts(runtime: Runtime, calls: Sequence[Call]) -> list[tuple[Call, tuple[Any, ...], dict[str, Any]]]:
    """Return what `for_forward` returns for each micro-batch; let the ranks vote on all of their forwards."""
    parts = [for_forward(runtime, *call) for call in calls]
    with runtime.calls.lock:
        runtime.calls.agree_on_step([given for given, _, _ in parts])
    return parts


@functools.lru_cache(maxsize=16)
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a forward. (It is needed with every micro-batch. Few are cached: a function may keep more
    alive than its code.)
    """
    return signature_of(forward)


def in_order(model: HasForward, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return named arguments in the order of forward's signature: which one is first must not depend on how the call is
    written.
    """
    known = list(_signature(model.forward_function).parameters)
    return {k: kwargs[k] for k in [n for n in known if n in kwargs] + [n for n in kwargs if n not in known]}


# -- in ---------------------------------------------------------------------------------------------------------------
def cut_batch(
    model: TakesBatches, args: tuple[Any, ...], kwargs: dict[str, Any], parts: int, *, uneven: bool | None
) -> list[Call]:
    """Return the calls of a step's micro-batches as `split_batch` does. A tensor that had another size than the batch in
    an earlier step is passed to each.
    """
    if parts == 1:
        return [(args, kwargs)]
    beside = model.beside_batch.of(model.forward_function, args, kwargs)
    return split_batch(args, kwargs, parts, uneven=uneven, beside=beside)


def split_batch(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parts: int,
    *,
    uneven: bool | None,
    beside: Collection[int] = (),
) -> list[Call]:
    """Return the calls of the micro-batches: tensors of the batch's size are cut along dimension 0, everything else is
    passed to each, and so are the flat inputs whose numbers are in `beside`.

    The batch's size is that of the first tensor with a dimension, in the order of forward's arguments. A tensor of that
    size that is not part of the batch is cut too, unless the program shows that it is none: then the first step raises
    `StepError`. Raises `StepError` if `parts` does not divide the size, unless `uneven`: then the last micro-batches
    have a row less (None: the plan can't allow that). There are always `parts` of them: ranks whose batches differ
    communicate in each.
    """
    if parts == 1:
        return [(args, kwargs)]
    size = batch_size(args, kwargs)
    if size is None:
        raise StepError("the batch has no tensor to cut into micro-batches", where="micro_batches")
    if (size % parts and not uneven) or size < parts:
        raise StepError(
            f"{parts} micro-batches do not divide a batch of {size}",
            where="micro_batches",
            why="each would count equally, though they have different sizes"
            if size >= parts
            else "some would be empty",
            hint=f"give a multiple of {parts} rows"
            + (
                '; or loss_average="token", which counts each by its targets'
                if size >= parts and uneven is not None
                else ""
            ),
        )
    leaves, spec = pytree.tree_flatten((args, kwargs))
    calls: list[Call] = []
    end = 0
    for at in range(parts):
        begin, end = end, end + size // parts + (at < size % parts)
        part = [x[begin:end] if _has_batch(x, size) and number not in beside else x for number, x in enumerate(leaves)]
        calls.append(pytree.tree_unflatten(part, spec))
    return calls


def _checked_output(runtime: Runtime, model: Callable[..., Any], call: Call, parts: int) -> tuple[Any, bool]:
    """Run the model on one of so many micro-batches; return its output, and whether the program is new in such a step: then
    what was cut is checked to be a batch.
    """
    runtime.handed = []
    output = model(*call[0], **call[1])
    handed, runtime.handed = runtime.handed, None
    entry = runtime.entered
    if parts == 1 or entry is None or entry.batch_known:
        return output, False
    _check_batch(runtime, entry, call, output, handed)
    return output, True


def _check_batch(runtime: Runtime, entry: Entry, call: Call, output: Any, handed: Sequence[Any]) -> None:
    """Raise `StepError` if the program shows that what was cut into micro-batches is not a batch; note which dimensions of
    the output, of which `handed` are the flat ones, have its rows.
    """
    flat = entry.trace.flat.flatten(runtime.module, *call)
    beside = runtime.beside_batch
    here = MicroBatch(entry.program().captured, call, flat, beside.is_part, runtime.captured_at)
    parts = tuple((name, x.dim()) for name, x, _ in parts_of(call, flat, beside.is_part)), len(handed)
    if batch_size(*call) != 1 or parts not in beside.checked:  # (for one row that takes a capture)
        shown = here.of_several_rows()
        if shown is not None:
            shown.refuse_no_batch()
        beside.checked[parts] = shown.rows_of_outputs() if shown is not None else {}
    entry.rows_by_place = rows_by_place(output, handed, beside.checked[parts], call, beside.is_part)
    entry.batch_known = True


def _refuse_other_rows(elastic: Elastic, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    size = batch_size(args, kwargs)
    if size != elastic.rows:
        raise StepError(
            f"the batch has {size} rows" if size is not None else "the batch has no tensor with rows",
            where="elastic",
            why=f"a step of {elastic.batch} rows is {elastic.rows} on each rank here",
            hint="give each rank model.zgraph.plan.elastic.rows of them",
        )


def first_part(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the first micro-batch's call of a rank's batch that is only inspected. If the plan is elastic and for a
    known number of ranks (see `Plan.for_world`), the call has as many rows as the plan says: rows of the batch are
    repeated. Raises what `split_batch` does.
    """
    size = batch_size(args, kwargs)
    if plan.elastic is None or plan.elastic.rows is None or not size:
        return split_batch(args, kwargs, plan.micro_batches, uneven=plan.loss_average == "token")[0]
    rows = torch.arange(plan.elastic.rows // plan.micro_batches) % size
    leaves, spec = pytree.tree_flatten((args, kwargs))
    part = [x[rows.to(x.device)] if _has_batch(x, size) else x for x in leaves]
    return pytree.tree_unflatten(part, spec)  # type: ignore[return-value]


def _has_batch(x: Any, size: int) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0 and x.shape[0] == size


def target_weights(runtime: Runtime, calls: Sequence[Call], losses: Collection[Ignores]) -> list[Any]:
    """Return each micro-batch's number of targets, divided by the mean of all micro-batches of all ranks: the mean
    gradient over ranks is then that of all targets together (with local steps, within a group). `losses` tell which targets do not count.
    """
    ignored = ignored_of(losses)
    counts = torch.tensor(
        [count_targets(runtime.module, *call, ignored=ignored) for call in calls], dtype=torch.float64
    )
    total = counts.sum()
    ranks = 1
    if runtime.mesh is not None:
        for dim in runtime.plan.gradient_dims:
            if runtime.sizes.get(dim, 1) > 1:
                summed = total.to(runtime.device)
                dist.all_reduce(summed, group=runtime.mesh.get_group(dim))
                total = summed.cpu()
                ranks *= runtime.sizes[dim]
    if not total:
        raise StepError("no rank has a single target", where="loss_average", hint=f"targets of {ignored} do not count")
    mean = float(total) / ranks / len(calls)
    runtime.updater.numbers.factor = 1.0 / len(calls)
    return [float(c) / mean for c in counts]


def count_targets(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, ignored: int = IGNORED) -> int:
    """Return the number of targets that a micro-batch's loss averages over.

    They are the elements of the argument called labels, label, targets or target that are not `ignored`; without such
    an argument, of the last tensor of integers, else each row counts once. `ignored` is what the model's losses leave
    out (`zgraph.capture.ignored_targets`), -100 if it calls none of torch's. A causal language model of transformers
    (`loss_type` "ForCausalLM") shifts its labels: the first of each sequence is no target.
    """
    names = inspect.signature(type(module).forward).parameters
    named = dict(zip(list(names)[1:], args, strict=False)) | kwargs
    targets = next((named[n] for n in TARGETS if isinstance(named.get(n), torch.Tensor)), None)
    if targets is None:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        whole = [x for x in tensors if not x.is_floating_point() and x.dtype is not torch.bool]
        targets = whole[-1] if len(tensors) > 1 and whole else None
    if targets is None or targets.is_floating_point():
        return batch_size(args, kwargs) or 1
    if getattr(module, "loss_type", None) == "ForCausalLM" and targets.dim() > 1:
        targets = targets[:, 1:]
    return int((targets != ignored).sum())


def for_forward(
    model: HasForward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Call, tuple[Any, ...], dict[str, Any]]:
    """Return (what forward takes, the positional arguments that it does not take, the named ones that it does not
    take).
    """
    parameters = list(_signature(model.forward_function).parameters.values())[1:]
    kinds = inspect.Parameter
    room = sum(p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD) for p in parameters)
    if any(p.kind is kinds.VAR_POSITIONAL for p in parameters):
        room = len(args)
    if any(p.kind is kinds.VAR_KEYWORD for p in parameters):
        others: dict[str, Any] = {}
    else:
        known = {p.name for p in parameters}
        others = {k: v for k, v in kwargs.items() if k not in known}
    return (args[:room], {k: v for k, v in kwargs.items() if k not in others}), args[room:], others


def named(model: HasForward, given: Call) -> dict[str, Any]:
    """Return forward's arguments by its parameters' names, in their order, with `*args` and `**kwargs` expanded."""
    known = _signature(model.forward_function)
    bound = known.bind(model.module, *given[0], **given[1])
    arguments: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        if known.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            arguments |= {f"{name}[{i}]": v for i, v in enumerate(value)}
        elif known.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        else:
            arguments[name] = value
    return arguments


def loss_of(
    output: Any,
    loss_fn: Callable[..., Any] | None,
    given: dict[str, Any],
    rest: tuple[Any, ...],
    others: dict[str, Any],
) -> torch.Tensor:
    """Return the loss in an output or, if there is one, `loss_fn`'s value. `loss_fn` gets what forward did not take; if
    that is nothing, forward's arguments by name.

    Raises `StepError` if there is no loss, or it has more than one element.
    """
    if loss_fn is None:
        refuse_rest(given, rest, others)
        loss = find_loss(output)
        if loss is None:
            raise no_loss()
    elif rest or others:
        loss = loss_fn(output, *rest, **others)
    else:
        positional, by_name = _room(loss_fn, given)
        loss = loss_fn(output, *positional, **by_name)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shown = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise StepError(f"the loss is no single number but {shown}", hint="take its mean")
    return loss.reshape(()) if loss.dim() else loss


def refuse_rest(given: dict[str, Any], rest: tuple[Any, ...], others: dict[str, Any]) -> None:
    """Raise `StepError` for arguments that forward does not take, if there is no `loss_fn` to take them."""
    if rest or others:
        names = [*(f"argument {len(given) + i + 1}" for i in range(len(rest))), *others]
        raise StepError(
            f"the model's forward does not take {', '.join(names)}",
            hint="what forward does not take is for loss_fn: zgraph.compile(model, plan, loss_fn=…)",
        )


def no_loss() -> StepError:
    """Return the error for an output without a loss."""
    return StepError(
        "the model's output has no loss",
        why="it is no scalar, has no .loss or ['loss'], and its first element is no scalar",
        hint="zgraph.compile(model, plan, loss_fn=lambda output, targets: …)",
    )


def _untrained() -> StepError:
    if not torch.is_grad_enabled():
        return StepError(
            "train_step was called while gradients are disabled", hint="call train_step outside of torch.no_grad()"
        )
    return StepError(
        "the loss depends on no parameter that trains",
        hint="requires_grad_() on those that are to; and no .detach() or .item() on the way to the loss",
    )


def _room(loss_fn: Callable[..., Any], given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return forward's arguments that loss_fn needs besides the output: by name, or in order if none of the names is
    forward's.
    """
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):
        return [], {}
    kinds = inspect.Parameter
    simple = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    needed = [p.name for p in parameters if p.kind in simple and p.default is p.empty][1:]
    only = [p.name for p in parameters if p.kind is kinds.KEYWORD_ONLY and p.default is p.empty]
    if any(name in given for name in needed) or not needed:
        missing = [name for name in [*needed, *only] if name not in given]
        if missing:
            raise StepError(
                f"loss_fn wants {missing[0]!r}, which forward is not given",
                hint=f"forward has {', '.join(given) or 'nothing'}; give train_step what only loss_fn takes besides",
            )
        return [given[name] for name in needed], {name: given[name] for name in only}
    return list(given.values())[: len(needed)], {name: given[name] for name in only if name in given}
