"""What runs a case's program plainly and compiled, and compares what the two gave.

The text of this file is put into the scripts of failures, so it imports nothing of the fuzzer. `train(t)` of the program is called
with a `Plain` and with a `Compiled`: all that it wants compared it gives to `t.keep`.

Equal within t, norm-wise, as the design says: ‖a - b‖ ≤ t·‖b‖ + t·FLOOR·‖all values of the same group at the same step‖.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Norm-wise, after three optimizer steps of a small model. What is wrong is mostly off by more than a hundredth."""
FLOOR = 0.03
"""A gradient that is zero in exact arithmetic is nothing but rounding: its share of its group's norm is allowed (3e-6 in float32)."""
STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq", "sum", "square_avg")


@dataclass(frozen=True)
class Kept:
    """Something that is compared: `group` is "output", "gradient", "parameter" and so on; values of a group at a step share a floor."""

    step: int
    group: str
    name: str
    value: Any

    @property
    def key(self) -> tuple[int, str, str]:
        return self.step, self.group, self.name


@dataclass
class Run:
    """What one side gave: all that it kept, and the exception that ended it, if one did.

    `elsewhere`: keys of what another rank may hold, for this one does not seem to (see `Verdict.elsewhere`).
    """

    kept: list[Kept] = field(default_factory=list)
    error: BaseException | None = None
    elsewhere: set[tuple[int, str, str]] = field(default_factory=set)


@dataclass(frozen=True)
class Verdict:
    """What came of a case: "equal", "refused", "unclear" or "wrong", and why.

    `elsewhere`: what this rank does not have, of a pipeline: it is for whoever asks all ranks to say "wrong" if none has it.
    """

    word: str
    reason: str = ""
    detail: str = ""
    elsewhere: frozenset[tuple[int, str, str]] = frozenset()


def frozen(value: Any) -> Any:
    """A copy that nothing changes later: whole tensors, plain values."""
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [frozen(v) for v in value]
    if isinstance(value, dict):
        return {k: frozen(v) for k, v in value.items()}
    if dataclasses.is_dataclass(value):
        return [type(value).__name__, frozen(vars(value))]
    return copy.deepcopy(value)


class Plain:
    """Plain PyTorch. On several ranks each runs its own rows, and gradients are averaged before anyone reads them, as DDP does.

    `keeping`: what autograd saves for the backward is copied, so that nothing that is overwritten later is missed. `nudged`: its weights
    are others by a few roundings.
    """

    def __init__(
        self, plan: dict[str, Any], ranks: bool = False, rank: int = 0, keeping: bool = False, nudged: bool = False
    ) -> None:
        self.plan, self.ranks, self.rank, self.keeping, self.nudged = plan, ranks, rank, keeping, nudged
        self.low = plan.get("precision", "fp32") == "bf16"
        self.staged = "pp" in plan.get("mesh", {})
        self.weights: dict[str, torch.Tensor] = {}
        self.step = 0
        self.run = Run()
        self.keys: set[tuple[int, str, str]] = set()
        # Of a pipeline: a buffer stays as it was where another stage changes it.
        self.first: dict[str, torch.Tensor] = {}

    # -- what is compared
    def keep(self, group: str, name: str, value: Any) -> None:
        leaves = pytree.tree_leaves(value) if group == "output" else [value]
        for at, leaf in enumerate(leaves):
            kept = Kept(self.step, group, f"{name}.{at}" if len(leaves) > 1 else name, frozen(leaf))
            assert kept.key not in self.keys, kept.key
            if group == "python" and self.staged and None in pytree.tree_leaves(kept.value):
                self.run.elsewhere.add(kept.key)  # (of a tensor that another stage has made, the others keep None)
            self.keys.add(kept.key)
            self.run.kept.append(kept)

    def gradients(self, model: nn.Module) -> None:
        self.average(model)
        for name, param in model.named_parameters():
            if param.is_meta:
                self.run.elsewhere.add((self.step, "gradient", name))
            else:
                self.keep("gradient", name, param.grad)

    def state(self, model: nn.Module, optimizer: Any) -> None:
        for name, param in model.named_parameters():
            if param.is_meta:
                self.run.elsewhere |= {(self.step, g, name) for g in ("parameter", *(f"state {k}" for k in STATES))}
                continue
            self.keep("parameter", name, param)
            state = optimizer.state.get(param, {}) if optimizer is not None else {}
            # (torch's Adagrad makes a state before the first update)
            for key in STATES if state.get("step", 1) else ():
                if isinstance(state.get(key), torch.Tensor) and param.requires_grad:
                    self.keep(f"state {key}", name, state[key])
        for name, buffer in model.named_buffers():
            self.keep("buffer", name, buffer)
            if name in self.first and not differs(buffer, self.first[name]):
                self.run.elsewhere.add((self.step, "buffer", name))

    # -- what differs between the sides
    def compile(
        self, model: nn.Module, inputs: tuple[Any, ...], loss_fn: Callable[..., Any] | None = None
    ) -> nn.Module:
        """Make of a model what is trained. `inputs` are those of a first call."""
        self.loss_fn = loss_fn
        with torch.no_grad():
            for param in model.parameters() if self.nudged else ():
                if param.is_floating_point():
                    size = torch.finfo(torch.bfloat16).eps if self.low else 4 * torch.finfo(param.dtype).eps
                    signs = 1 - 2 * (torch.arange(param.numel()) % 2)  # (not all alike: that may cancel)
                    param.mul_(1 + size * signs.to(param.dtype).view(param.shape))
        if self.low:
            self._compute_in_bfloat16(model)
        return model

    def optimizer(self, model: nn.Module) -> Any:
        """The plan's optimizer."""
        given = dict(self.plan["optimizer"])
        return getattr(torch.optim, given.pop("name"))(model.parameters(), **given)

    def no_sync(self, model: nn.Module) -> Any:
        return contextlib.nullcontext()

    def average(self, model: nn.Module) -> None:
        for param in model.parameters():
            if self.ranks and param.grad is not None:
                param.grad = self.averaged([param.grad])[0]

    def averaged(self, grads: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
        if not self.ranks:
            # (Those of torch.autograd.grad may be expanded, and refuse to be written to; zgraph's have memory of their own.)
            return [g.contiguous() if g is not None and 0 in g.stride() else g for g in grads]
        found: list[torch.Tensor | None] = []
        for grad in grads:
            if grad is not None:
                grad = grad.detach().clone(memory_format=torch.contiguous_format)
                dist.all_reduce(torch.view_as_real(grad) if grad.is_complex() else grad)
                grad /= dist.get_world_size()
            found.append(grad)
        return found

    def update(self, model: nn.Module, optimizer: Any) -> Any:
        """What `model.step()` does."""
        self.average(model)
        norm = self._clip(model)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def _clip(self, model: nn.Module) -> Any:
        if "grad_clip" in self.plan:
            return torch.nn.utils.clip_grad_norm_(model.parameters(), self.plan["grad_clip"])
        return None

    def train_step(self, model: nn.Module, optimizer: Any, args: tuple[Any, ...]) -> Any:
        """What `model.train_step` does, and the mean of its losses."""
        count = self.plan.get("micro_batches", 1)
        losses = []
        for part in _split(args, count):
            output = model(*part)
            loss = _loss(output) if self.loss_fn is None else self.loss_fn(output, *part)
            (loss / count).backward()
            losses.append(_loss(output))
        self.average(model)
        if "optimizer" in self.plan:
            self._clip(model)
            optimizer.step()
            optimizer.zero_grad()
        else:
            self._clip(model)
        return None if losses[0] is None else sum(x.detach() for x in losses) / count

    def _compute_in_bfloat16(self, model: nn.Module) -> None:
        """As `precision="bf16"`: weights and inputs are cast, buffers are as they are."""
        low = lambda x: x.to(torch.bfloat16) if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731

        def cast(*args: Any) -> Any:
            del model.__dict__["forward"]
            try:
                self.model, self.weights = model, {n: low(p) for n, p in model.named_parameters()}
                return torch.func.functional_call(model, self.weights, pytree.tree_map(low, args), tie_weights=True)
            finally:
                model.__dict__["forward"] = cast

        model.__dict__["forward"] = cast

    def checkpoint(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """torch's `checkpoint`, for a forward whose weights are cast: what it computes again, when forward is over, reads the cast ones too."""
        again = lambda: (contextlib.nullcontext(), _Cast(self.model, self.weights))  # noqa: E731
        return torch.utils.checkpoint.checkpoint(function, *args, context_fn=again, **kwargs)

    def through(self, program: Any) -> Any:
        """A context in which a program (a module) runs."""
        if self.low:
            program.checkpoint = self.checkpoint
        if self.keeping:
            return torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
        return contextlib.nullcontext()


class _Cast:
    """Within it a model has other weights. It is entered as often as a backward runs."""

    def __init__(self, model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
        self.model, self.weights = model, weights

    def __enter__(self) -> None:
        self.within = _reparametrize_module(self.model, self.weights, tie_weights=True)
        self.within.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.within.__exit__(*raised)


class Compiled(Plain):
    """zgraph by a plan."""

    def compile(
        self, model: nn.Module, inputs: tuple[Any, ...], loss_fn: Callable[..., Any] | None = None
    ) -> nn.Module:
        import zgraph

        # Where ranks have other weights than the model, it is said at once which: what comes next is allowed only then.
        early = {"tp", "pp"} & set(self.plan.get("mesh", {}))
        if "pp" in early:
            self.first = {name: frozen(buffer) for name, buffer in model.named_buffers()}
        return zgraph.compile(model, zgraph.Plan(**self.plan), inputs=inputs if early else None, loss_fn=loss_fn)

    def optimizer(self, model: Any) -> Any:
        return model.zgraph.optimizer

    def no_sync(self, model: Any) -> Any:
        return model.no_sync()

    def average(self, model: nn.Module) -> None:
        pass

    def averaged(self, grads: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return list(grads)

    def update(self, model: Any, optimizer: Any) -> Any:
        return model.step()

    def through(self, program: Any) -> Any:
        return contextlib.nullcontext()

    def train_step(self, model: Any, optimizer: Any, args: tuple[Any, ...]) -> Any:
        return _loss(model.train_step(*args))


def _split(args: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    rows = args[0].shape[0]
    size = rows // count
    each = []
    for at in range(count):
        mine = slice(at * size, (at + 1) * size)
        each.append(tuple(pytree.tree_map(lambda x: _cut(x, rows, mine), a) for a in args) if count > 1 else args)  # noqa: B023
    return each


def _cut(value: Any, rows: int, mine: slice) -> Any:
    cut = isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows
    return value[mine] if cut else value


def _loss(output: Any) -> Any:
    """The loss in a model's output: the output itself, `.loss`, `["loss"]`, the first element; None if there is none."""
    if output is None:  # (of a pipeline: what is no loss is with the last stage)
        return None
    if isinstance(output, torch.Tensor):
        return output if output.dim() == 0 else None
    if isinstance(output, dict):
        return output.get("loss")
    return getattr(output, "loss", None) if hasattr(output, "loss") else _loss(output[0])


# -- running ----------------------------------------------------------------------------------------------------------
def run_side(program: Any, side: Plain) -> Run:
    """Run `train` of a program (a module) with one side; its exception is part of what it gave."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(program.DTYPE)
    try:
        with side.through(program):
            program.train(side)
    except Exception as error:
        side.run.error = error
    finally:
        torch.set_default_dtype(before)
    return side.run


def run_pair(load: Callable[[str], Any], ranks: bool = False, rank: int = 0) -> Verdict:
    """Run a program plainly and compiled. `load(name)` makes a module of it, each time another, so that no global is shared."""
    program = load("plain")
    plain = run_side(program, Plain(program.PLAN, ranks, rank))
    compiled = run_side(load("compiled"), Compiled(program.PLAN, ranks, rank))
    low = torch.bfloat16 if program.PLAN.get("precision") == "bf16" else None
    if plain.error is not None and compiled.error is None and "inplace operation" in str(plain.error):
        # What is read was overwritten: to keep it is right as well.
        plain = run_side(load("kept"), Plain(program.PLAN, ranks, rank, keeping=True))
    verdict = compare(plain, compiled, low)
    if _on_any(verdict.word == "wrong", ranks):
        nudged = run_side(load("nudged"), Plain(program.PLAN, ranks, rank, nudged=True))
        loose = sensitive(plain, nudged, low)
        exact = run_side(in_double(load("exact")), Plain({**program.PLAN, "precision": "fp32"}, ranks, rank))
        loose |= rounded_as_much(plain, compiled, exact)
        found = compare(plain, compiled, low, loose)
        if verdict.word == "wrong" and found.word == "equal":
            return dataclasses.replace(found, reason="but for what rounding changes as much in plain PyTorch")
    return verdict


def in_double(program: Any) -> Any:
    """The same program on the same numbers, in double precision."""
    before, build, batch = program.DTYPE, program.build, program.batch

    def made(make: Callable[..., Any], *args: Any) -> Any:
        torch.set_default_dtype(before)
        try:
            return make(*args)
        finally:
            torch.set_default_dtype(torch.float64)

    def double(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.detach().double().requires_grad_(value.requires_grad) if floats else value

    program.DTYPE = torch.float64
    program.build = lambda: made(build).double()
    program.batch = lambda *args: pytree.tree_map(double, made(batch, *args))
    return program


OWN_ROUNDING = 4.0
"""How many times as far from the exact numbers as plain PyTorch's are ours may be: they are rounded in another order, and as often."""


def rounded_as_much(plain: Run, compiled: Run, exact: Run) -> set[tuple[int, str, str]]:
    """Keys of the numbers that are about as near to those of double precision as plain PyTorch's are. Not those of which double precision gives
    others altogether (it draws other random numbers, or takes another branch)."""
    right, theirs = {k.key: k.value for k in exact.kept}, {k.key: k.value for k in compiled.kept}
    return {
        k.key for k in plain.kept if k.key in right and k.key in theirs and _near(k.value, right[k.key], theirs[k.key])
    }


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _near(plain: Any, exact: Any, given: Any) -> bool:
    """Whether each tensor in what is `given` is about as near to the exact one as the plain one is."""
    rows = [_tensors(x) for x in (plain, exact, given)]
    if not rows[0] or len({len(row) for row in rows}) > 1:
        return False
    for three in zip(*rows, strict=True):
        if not all(v.is_floating_point() and v.shape == three[0].shape for v in three):
            return False
        mine, best, ours = (v.detach().double() for v in three)
        own = float((mine - best).norm())
        if own > 0.25 * float(best.norm()) + 1e-6 or float((ours - best).norm()) > OWN_ROUNDING * own + 1e-12:
            return False
    return True


def _on_any(mine: bool, ranks: bool) -> bool:
    """Whether this is so on any rank."""
    flag = torch.tensor(float(mine))
    if ranks:
        dist.all_reduce(flag)
    return bool(flag)


def sensitive(plain: Run, nudged: Run, low: torch.dtype | None) -> set[tuple[int, str, str]]:
    """Keys of the numbers that plain PyTorch itself can't give within the tolerance, from weights that are others by a few roundings (a
    training that diverges, say). Shapes, dtypes and what is no number are no such."""
    theirs = {k.key: k.value for k in nudged.kept}
    return {
        k.key
        for k in plain.kept
        if isinstance(k.value, torch.Tensor)
        and isinstance(theirs.get(k.key), torch.Tensor)
        and (k.value.is_floating_point() or k.value.is_complex())
        and differs(theirs[k.key], k.value, 0.0, low)
    }


def run_virtual(load: Callable[[str], Any]) -> Verdict:
    """Compare a program's first step on virtual ranks."""
    import zgraph

    program = load("virtual")

    def worst(dtype: torch.dtype) -> Any:
        """What is furthest off in this dtype, of what is."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            torch.manual_seed(7)
            model, args = program.build(), program.batch(0, 0)
            loss_fn = None if program.LOSS_INSIDE else (lambda out: program.loss_of(out, *args))
            found = zgraph.verify(model, zgraph.Plan(**program.PLAN), program.WORLD, args, loss_fn)
        finally:
            torch.set_default_dtype(before)
        return next((d for d in found.worst() if not d.ok), None)

    try:
        off = worst(program.DTYPE)
        if off is not None and program.DTYPE is torch.float32:
            # What rounding alone puts off (directions between rows that are nearly alike) is right in double precision.
            with contextlib.suppress(zgraph.errors.ZgraphError):  # (a budget may be too small for it)
                double = worst(torch.float64)
                off = off if double is not None and double.error > TOLERANCE[torch.float64] else None
    except Exception as error:
        return judge(error, _plain_error(program))
    return Verdict("equal") if off is None else Verdict("wrong", f"virtual {off.what}", str(off))


def _plain_error(program: Any) -> Exception | None:
    """What plain PyTorch raises in a program's first step."""
    try:
        side, args = Plain(program.PLAN), program.batch(0, 0)
        with side.through(program):
            program.loss_of(side.compile(program.build(), args)(*args), *args).backward()
    except Exception as error:
        return error
    return None


# -- comparing --------------------------------------------------------------------------------------------------------
def compare(
    plain: Run, compiled: Run, low: torch.dtype | None = None, loose: Iterable[tuple[int, str, str]] = ()
) -> Verdict:
    """Hold what the two sides gave against each other: numbers first, then how they ended. Numbers whose keys are `loose` may be any."""
    norms: dict[tuple[int, str], float] = {}
    for kept in plain.kept:
        if isinstance(kept.value, torch.Tensor):
            norms[kept.step, kept.group] = math.hypot(norms.get((kept.step, kept.group), 0.0), _norm(kept.value))
    theirs = {k.key: k.value for k in compiled.kept}
    elsewhere = set()
    for kept in plain.kept:
        if kept.key not in theirs:
            if compiled.error is not None:
                break
            if kept.key in compiled.elsewhere:
                elsewhere.add(kept.key)
                continue
            return Verdict("wrong", f"{kept.group} missing", f"step {kept.step}: {kept.group} {kept.name} is missing")
        if kept.key in loose and len(_tensors(theirs[kept.key])) == len(_tensors(kept.value)):
            continue
        fault = differs(theirs[kept.key], kept.value, norms.get((kept.step, kept.group), 0.0), low)
        if fault and kept.key in compiled.elsewhere:
            elsewhere.add(kept.key)
        elif fault:
            return Verdict("wrong", kept.group, f"step {kept.step}: {kept.group} {kept.name}: {fault}")
    return dataclasses.replace(judge(compiled.error, plain.error), elsewhere=frozenset(elsewhere))


def differs(mine: Any, plain: Any, norm: float = 0.0, low: torch.dtype | None = None) -> str:
    """How two values differ, "" if they are equal. `norm`: that of all values of their group."""
    if isinstance(mine, dict) and isinstance(plain, dict):
        mine, plain = [list(mine), list(mine.values())], [list(plain), list(plain.values())]
    if not isinstance(mine, torch.Tensor) or not isinstance(plain, torch.Tensor):
        if type(mine) is type(plain) and isinstance(mine, (list, tuple)) and len(mine) == len(plain):
            return next((d for a, b in zip(mine, plain, strict=True) if (d := differs(a, b, norm, low))), "")
        if isinstance(mine, float) and isinstance(plain, float):
            return differs(torch.tensor(mine), torch.tensor(plain), norm, low)
        return "" if type(mine) is type(plain) and mine == plain else f"{_shown(mine)} for {_shown(plain)}"
    if mine.shape != plain.shape or mine.dtype != plain.dtype:
        return f"{mine.dtype} {tuple(mine.shape)} for {plain.dtype} {tuple(plain.shape)}"
    if not (plain.is_floating_point() or plain.is_complex()):
        return "" if torch.equal(mine, plain) else f"{_shown(mine)} for {_shown(plain)}"
    t = max(TOLERANCE.get(x, TOLERANCE[torch.float32]) for x in (plain.dtype, low or plain.dtype))
    t = TOLERANCE[torch.float64] if plain.dtype is torch.complex128 else t
    finite = torch.isfinite(plain)
    if not torch.equal(torch.nan_to_num(mine)[~finite], torch.nan_to_num(plain)[~finite]):
        return f"{_shown(mine)} for {_shown(plain)}"
    error, size = _norm(mine[finite] - plain[finite]), _norm(plain[finite])
    if error <= t * size + t * FLOOR * norm:
        return ""
    return f"off by {error / max(size, 1e-300):.2g} (allowed {t:.0e}): {_shown(mine)} for {_shown(plain)}"


def _norm(value: torch.Tensor) -> float:
    if not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return float(torch.nan_to_num(value).to(torch.complex128).abs().norm()) if value.numel() else 0.0


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        flat = value.flatten()[:4].tolist()
        return f"{[round(v, 5) if isinstance(v, float) else v for v in flat]}{'…' if value.numel() > 4 else ''}"
    return repr(value)[:80]


def judge(error: BaseException | None, plain: BaseException | None) -> Verdict:
    """What a case is that ended so: `error` of the compiled side, `plain` of the other."""
    from zgraph.errors import VerifyError, ZgraphError

    if error is None:
        if plain is None:
            return Verdict("equal")
        return Verdict(
            "wrong", "does not raise", f"plain raises {type(plain).__name__}: {_first(plain)}; compiled does not"
        )
    text = f"{type(error).__name__}: {error}"
    if plain is not None:
        like = isinstance(error, (ZgraphError, RuntimeError, type(plain)))
        return Verdict("equal" if like else "unclear", "both raise", text)
    # (a program that its verifier rejects is a fault of a pass, and no answer to a user)
    refused = isinstance(error, ZgraphError) and not isinstance(error, VerifyError)
    return Verdict("refused" if refused else "unclear", reason_of(error), text)


def reason_of(error: BaseException) -> str:
    """The kind of an error: its type and first line, without what differs from case to case."""
    line = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "…", _first(error))
    line = re.sub(r"\b[\w.]*_?\d[\w.]*\b", "#", line)
    return f"{type(error).__name__}: {line[:90]}"


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def data_rank(mesh: dict[str, int], rank: int) -> int:
    """Which rows a rank is given: the same for ranks that divide weights, sequences or stages."""
    found, left = 0, rank
    for dim in reversed([d for d in ("pp", "replicate", "dp", "cp", "tp") if d in mesh]):
        left, at = divmod(left, mesh[dim])
        if dim == "dp":
            found += at
        if dim == "replicate":
            found += at * mesh.get("dp", 1)
    return found
