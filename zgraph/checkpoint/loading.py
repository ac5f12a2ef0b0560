"""Load a checkpoint into a compiled model, whatever plan it was saved by.

First the ranks together check all of it and compare it with the model; then each rank reads its own part into the
weights and states in place. What was saved in another precision is read from the widest tensor there is: a float32
weight from the master copy of a bfloat16 one, for example, and the other way round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from zgraph.checkpoint import state
from zgraph.checkpoint.detect_format import candidates, open_checkpoint
from zgraph.checkpoint.formats.huggingface import Safetensors
from zgraph.checkpoint.formats.transformers_forms import TransformersForms
from zgraph.checkpoint.pretrained import is_pretrained
from zgraph.checkpoint.read_native import Checkpoint
from zgraph.checkpoint.source import MODEL, OPTIMIZER, Source
from zgraph.checkpoint.user_values import PerRank, decode
from zgraph.errors import CheckpointError, PlanError
from zgraph.names import did_you_mean
from zgraph.program.tolerance import bits
from zgraph.ranks.agreement import Agreement
from zgraph.record import short
from zgraph.runtime.local_rounds import is_weight
from zgraph.torch_compat.dtensors import local_of
from zgraph.update.build_update import AHEAD, DERIVED, EMA, MASTER
from zgraph.update.optimizer_rules import RULES
from zgraph.update.owned_parameters import mesh_of
from zgraph.update.resume import Last
from zgraph.update.states import States

if TYPE_CHECKING:
    from zgraph.runtime.runtime import Runtime

logger = logging.getLogger(__name__)

STEP = "step"

# Which weights are loaded: all of them, and the checkpoint has no others; those that both have; none, as they are set already.
Weights = Literal["all", "some", "none"]


@dataclass
class Loading:
    """The reads and writes of a load into the model and its optimizer: first `tensors`, then `copies`, then `fresh`."""

    # targets to read into, by the tensor's name in the checkpoint
    tensors: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    # (target, source) pairs of the model's own tensors
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)  # parameters whose optimizer states begin anew
    counts: dict[str, float] = field(default_factory=dict)  # the updates that a parameter has had, by its name
    # the same where the checkpoint has no count: what the optimizer's rule takes instead
    begun: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # warnings to log
    missing: frozenset[str] = frozenset()  # weights that the checkpoint lacks: they stay as they are
    weights: Weights = "all"  # which weights are loaded
    keeps: bool = False  # whether the optimizer's states stay as they are

    def read(self, name: str, into: torch.Tensor) -> None:
        self.tensors.setdefault(name, []).append(into)


def load(
    runtime: Runtime,
    path: Path,
    tag: str | None,
    *,
    fallback: bool,
    optimizer: bool | Literal["keep"],
    client_state: dict[str, Any] | None,
    partial: bool = False,
    weights: Weights = "all",
) -> dict[str, Any]:
    """Load a checkpoint and return what the user added to it; see `zgraph.api.handle.Handle.load_checkpoint`.
    `partial`: tensors of a transformers model that the files lack stay as they are."""
    if not isinstance(optimizer, bool | str) or optimizer not in (True, False, "keep"):
        raise PlanError(f"load_checkpoint knows no optimizer={short(optimizer)}", hint='True, False or "keep"')
    agreement = runtime.everyone
    agreement.vote("a checkpoint to load", f"{path} {tag} {fallback} {optimizer} {weights}")
    agreement.relax()  # (disks differ)

    def refused(rank: int, said: str) -> CheckpointError:
        return CheckpointError(f"rank {rank} can't load the checkpoint", where=str(path), why=said)

    def prepared(wanted: str | None) -> tuple[Source, _Parts]:
        source = agreement.together("the checkpoint", lambda: _opened(runtime, path, wanted, partial), refused)
        checksum = source.manifest.checksum if isinstance(source, Checkpoint) else ""
        agreement.vote("the checkpoint's manifest", f"{source.kind} {source.folder} {checksum}")
        agreement.relax()
        parts = agreement.together(
            "the checkpoint", lambda: _prepared(runtime, source, optimizer, client_state, weights), refused
        )
        return source, parts

    tries = [tag]
    if fallback:
        tags = agreement.together("the checkpoints to try", lambda: candidates(path, tag), refused)
        tries = agreement.gather("the checkpoints to try", tags)[0]
    failure: CheckpointError | None = None
    for wanted in tries:
        try:
            source, parts = prepared(wanted)
        except CheckpointError as error:
            failure = failure or error
            if fallback:
                logger.warning("checkpoint %s can't be loaded: %s", wanted or "(latest)", error)
            continue
        if failure is not None:
            logger.warning("loading %s, saved before what can't be loaded", source.folder)
        return _apply(runtime, source, parts, client_state or {})
    assert failure is not None
    raise failure


def peek(everyone: Agreement, path: Path, tag: str | None) -> tuple[Source, dict[str, Any]]:
    """Open a checkpoint and return it with its client state, before a run time exists to load it into. All ranks must
    call it. Raises `CheckpointError`."""

    def open_with_state() -> tuple[Source, dict[str, Any]]:
        source = open_checkpoint(path, tag)
        return source, _client_state(everyone, source) if isinstance(source, Checkpoint) else dict(source.client)

    def refused(rank: int, said: str) -> CheckpointError:
        return CheckpointError(f"rank {rank} can't load the checkpoint", where=str(path), why=said)

    return everyone.together("the checkpoint", open_with_state, refused)


@dataclass
class _Parts:
    """All that was read and checked of a checkpoint, ready to be applied."""

    loading: Loading  # what is to be written
    optimizer: bool  # whether optimizer states are loaded too
    random: state.RandomStates | None  # this rank's random states; None without any
    client: dict[str, Any]  # what the user had added, by key
    extra: dict[str, Any]  # values for modules' `set_extra_state`, by the modules' paths
    programs: dict[str, str]  # hashes of the programs that this rank ran
    residuals: dict[str, Any] | None  # see `zgraph.update.error_feedback`; None: to begin anew
    local: dict[str, torch.Tensor]  # what this rank has of its own in rounds of local steps


def _opened(runtime: Runtime, path: Path, tag: str | None, partial: bool) -> Source:
    source = open_checkpoint(path, tag)
    if isinstance(source, Safetensors) and is_pretrained(runtime.module):
        own = {MODEL + n for n in runtime.module.state_dict()}
        if partial or not own >= source.tensors.keys():  # (files of torch's writer have the model's own names)
            source = TransformersForms(source, runtime.module, partial=partial)
    ranks = max(1, len(runtime.everyone.ranks))
    source.verify(runtime.everyone.rank(), ranks)
    return source


def _prepared(
    runtime: Runtime,
    source: Source,
    states: bool | Literal["keep"],
    objects: dict[str, Any] | None,
    weights: Weights = "all",
) -> _Parts:
    runtime.updater.averages.refuse_checkpoint()
    runtime.shards.refresh()
    optimizer = states is True
    loading = planned(runtime, source, optimizer, keeps=states == "keep", weights=weights)
    random, client, extra, programs, residuals = None, dict(source.client), {}, source.known.programs, None
    local: dict[str, torch.Tensor] = {}
    if isinstance(source, Checkpoint):
        own = source.own(runtime.everyone.rank())
        if own is not None and not loading.keeps:
            random = state.RandomStates(own.get("random", {}), runtime.device)
            programs = saved if isinstance(saved := own.get("programs"), dict) else programs
        client = _client_state(runtime.everyone, source)
        first = source.own(0) or {}
        if optimizer:
            residuals = _residuals(runtime, source, own if own is not None else first, loading)
            local = _local(runtime, source, own if own is not None else first, loading)
        extra = decode(first.get("extra", {}), _copier(source))
        mine = state.extra_states(runtime.module).keys()
        if weights != "all":
            extra = {path: value for path, value in extra.items() if weights == "some" and path in mine}
        elif mine != extra.keys():
            paths = ", ".join(sorted(mine ^ extra.keys()))
            raise CheckpointError(
                f"what get_extra_state() gives for {paths} is in the checkpoint or in the model, not in both",
                where=str(source.folder),
                hint="build the model that it was saved of",
            )
    for key, target in (objects or {}).items():
        if key not in client:
            raise CheckpointError(f"the checkpoint has no client state {key!r}", hint=did_you_mean(key, client))
        if not callable(getattr(target, "load_state_dict", None)):
            raise CheckpointError(
                f"client_state[{key!r}] is a {type(target).__name__}, which has no load_state_dict()",
                hint="leave it out, and take its value from what load_checkpoint returns",
            )
    return _Parts(loading, optimizer, random, client, extra, programs, residuals, local)


def _residuals(runtime: Runtime, source: Checkpoint, own: dict[str, Any], loading: Loading) -> dict[str, Any] | None:
    """Return the saved residuals: what this rank had not sent of its gradients or momenta. If the mesh is another than
    at the save, they begin at zero, with a note; the count of draws goes on."""
    if "residuals" not in own:
        return None
    saved: dict[str, Any] = decode(own["residuals"], _copier(source))
    before, now = source.known.mesh, mesh_of(runtime.sizes, runtime.updater.held)
    if saved["residuals"] and before != now:
        loading.notes.append(
            f"what was not sent of gradients or momenta is of the ranks of mesh {before}, and it is {now} now: residuals begin at zero, "
            "and what those ranks had not sent is lost"
        )
        saved["residuals"] = {}
    return saved


def _local(runtime: Runtime, source: Checkpoint, own: dict[str, Any], loading: Loading) -> dict[str, torch.Tensor]:
    """Return what this rank has of its own of local steps. If the mesh is another than at the save it is lost, with a
    note: weights are those of the last synchronization."""
    if "local" not in own:
        return {}
    saved: dict[str, torch.Tensor] = decode(own["local"], _copier(source))
    before, now = source.known.mesh, mesh_of(runtime.sizes, runtime.updater.held)
    if before == now:
        return saved
    of = f"of the ranks of mesh {before}, and it is {now} now"
    if any(is_weight(name) for name in saved):
        loading.notes.append(
            f"local steps since the last synchronization are {of}: they are lost, and each momentum is one of those ranks'"
        )
    else:
        loading.notes.append(f"what the optimizer keeps is each {of}: that of the first is taken for all")
    return {}


def _copier(source: Source) -> Callable[[str], torch.Tensor]:
    def copy(name: str) -> torch.Tensor:
        if name not in source.tensors:
            raise ValueError(f"there is no tensor {name!r}")
        return source.whole(name).clone()

    return copy


def _client_state(everyone: Agreement, source: Checkpoint) -> dict[str, Any]:
    """Return what the user had added: values equal on all ranks, and each rank's own (as a `PerRank` if there are other
    ranks now)."""
    ranks = max(1, len(everyone.ranks))
    saved = len(source.manifest.own)
    load = _copier(source)

    def values(given: Any) -> dict[str, Any]:
        if not isinstance(given, dict) or not all(isinstance(v, dict) and "value" in v for v in given.values()):
            raise CheckpointError("the user's part of the checkpoint can't be read", where=str(source.folder))
        return {k: decode(v["value"], load) for k, v in given.items()}

    client_state = values(source.manifest.client)
    if saved == ranks:
        own_state = source.own(everyone.rank()) or {}
        return client_state | values(own_state.get("client", {}))
    all_own = [values((source.own(rank) or {}).get("client", {})) for rank in range(saved)]
    for key in dict.fromkeys(k for own in all_own for k in own):
        client_state[key] = PerRank(own.get(key) for own in all_own)
        logger.warning(
            "client_state[%r] was another on each of %d ranks, and there are %d now: it is given as a PerRank, the list of them",
            key,
            saved,
            ranks,
        )
    return client_state


def planned(
    runtime: Runtime, source: Source, optimizer: bool, *, keeps: bool = False, weights: Weights = "all"
) -> Loading:
    """Match the tensors of a checkpoint with those of the model and, of the `optimizer`, its states, which begin anew
    where they are not loaded, unless the model `keeps` them. Raises `CheckpointError` for a weight of another shape, and unless the checkpoint
    has every weight of the model and no others, if all `weights` are to be loaded."""
    loading = Loading(keeps=keeps, weights=weights)
    module, shards = runtime.module, runtime.shards
    names: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    every = {n for same in names.values() for n in same}
    buffers = state.persistent_buffers(module)
    known = {n.removeprefix(MODEL) for n in source.tensors if n.startswith(MODEL)}
    optional = set(source.known.left_out)
    missing = [ns[0] for ns in names.values() if not known & set(ns)] + [n for n in buffers if n not in known]
    if isinstance(source, TransformersForms) and source.partial:
        loading.missing, missing = frozenset(missing), []
    elif not optional.isdisjoint(missing):
        loading.missing = frozenset(optional.intersection(missing))
        missing = [name for name in missing if name not in optional]
    beyond = known - every - {n for n, _ in module.named_buffers(remove_duplicate=False)}
    if weights == "all":
        _refuse_others(source, missing, sorted(beyond))
    loading.missing |= frozenset(missing)
    loading.notes += _left(missing, sorted(beyond)) if weights == "some" else []
    for name, buffer in buffers.items():
        if name not in loading.missing and weights != "none":
            _plan_buffer(source, loading, name, buffer)
    saved: dict[str, dict[str, str]] = {}
    for name in source.tensors:
        if name.startswith(OPTIMIZER):
            owner, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
            saved.setdefault(owner, {})[key] = name
    if runtime.updater.optimizer is not None:
        runtime.updater.make_states()
    elif saved and optimizer:
        loading.notes.append("the checkpoint has an optimizer's states, and the plan no optimizer: they are left out")
        optimizer = False
    for name, param in shards.params().items():
        if name in loading.missing:
            loading.fresh.extend([name] if weights != "all" and not keeps and runtime.holds(name) else [])
            continue
        saved_name, *others = (n for n in names[id(param)] if n in known)
        if weights != "none":
            _check_tied(runtime, source, MODEL + saved_name, [MODEL + n for n in others])
        of_param: dict[str, str] = next((saved.pop(n) for n in names[id(param)] if n in saved), {})
        for other in names[id(param)]:
            saved.pop(other, None)
        if runtime.holds(name):
            _plan_parameter(runtime, source, loading, name, MODEL + saved_name, of_param, optimizer)
    if saved and optimizer and runtime.updater.optimizer is not None:
        loading.notes.append(f"states of parameters that the model lacks are left out: {', '.join(sorted(saved)[:5])}")
    return loading


def _refuse_others(source: Source, missing: Sequence[str], beyond: Sequence[str]) -> None:
    """Raise `CheckpointError` if only the model, or only the checkpoint, has some weights."""
    parts = [
        f"{what}: {', '.join(sorted(absent)[:5])}{' …' if len(absent) > 5 else ''}"
        for what, absent in (("the checkpoint lacks", missing), ("the model lacks", beyond))
        if absent
    ]
    if parts:
        raise CheckpointError(
            "the checkpoint is of another model",
            where=str(source.folder),
            why="; ".join(parts),
            hint="build the model that it was saved of; strict=False (load_module_strict=False of an engine) loads what both have",
        )


def _left(missing: Sequence[str], beyond: Sequence[str]) -> list[str]:
    """Return what to tell of weights that only the model or only the checkpoint has."""
    return [
        f"{what}: {', '.join(names)}"
        for what, names in (
            ("the checkpoint lacks weights of the model, which stay as they are", missing),
            ("the model lacks weights of the checkpoint, which are left out", beyond),
        )
        if names
    ]


def _plan_buffer(source: Source, loading: Loading, name: str, buffer: torch.Tensor) -> None:
    _check(source, MODEL + name, buffer)
    if buffer.numel() > 1 and 0 in buffer.stride() and not buffer.is_sparse:
        raise CheckpointError(
            f"buffer {name!r} has elements that share memory",
            why="it was made by expand()",
            hint="clone it in the model",
        )
    loading.read(MODEL + name, buffer)


def _plan_parameter(
    runtime: Runtime, source: Source, loading: Loading, name: str, weight: str, saved: dict[str, str], optimizer: bool
) -> None:
    """Add to `loading` where this rank's part of one parameter, and of its states, is read from."""
    param = runtime.shards.params()[name].detach()
    plan_optimizer = runtime.updater.optimizer
    mine: dict[str, torch.Tensor] = {}
    if plan_optimizer is not None:
        mine = {k: v for k, v in plan_optimizer.state.get(runtime.shards.params()[name], {}).items() if k != STEP}
    if loading.weights == "none":
        loading.copies.extend((mine[key], param) for key in (MASTER, AHEAD) if key in mine)
        optimizer = optimizer and _fit(source, loading, name, saved, mine)
    else:
        _plan_weight(source, loading, param, weight, saved, mine)
    if EMA in mine and not loading.keeps:
        if EMA in saved and optimizer:
            loading.read(saved[EMA], mine[EMA])
        else:
            loading.copies.append((mine[EMA], mine.get(MASTER, param)))
    _plan_states(runtime, source, loading, name, saved, mine, optimizer)


def _fit(source: Source, loading: Loading, name: str, saved: dict[str, str], mine: dict[str, torch.Tensor]) -> bool:
    """Return whether the saved states have the shapes of those that the model has now; note it if they have not."""
    fit = all(source.tensors[saved[k]].shape == tuple(v.shape) for k, v in mine.items() if k in saved)
    if not fit:
        loading.notes.append(f"states of {name} have another shape in the checkpoint: they begin anew")
    return fit


def _plan_weight(
    source: Source,
    loading: Loading,
    param: torch.Tensor,
    weight: str,
    saved: dict[str, str],
    mine: dict[str, torch.Tensor],
) -> None:
    """Add to `loading` where this rank's part of a weight, and of what follows from it, is read from."""
    _check(source, weight, param)
    for key in DERIVED:
        if key in saved:
            _check(source, saved[key], param)
    low = param.dtype.itemsize < 4
    newest = saved.get(AHEAD, weight) if AHEAD not in mine else weight
    widest = saved.get(MASTER, newest)
    if MASTER in mine:
        loading.read(widest, mine[MASTER])
    if low and source.tensors[newest].dtype is param.dtype:
        loading.read(newest, param)
    elif MASTER in mine:
        loading.copies.append((param, mine[MASTER]))
    else:
        loading.read(widest, param)
    if AHEAD in mine:
        if AHEAD in saved:
            loading.read(saved[AHEAD], mine[AHEAD])
        else:
            loading.copies.append((mine[AHEAD], param))


def _plan_states(
    runtime: Runtime,
    source: Source,
    loading: Loading,
    name: str,
    saved: dict[str, str],
    mine: dict[str, torch.Tensor],
    optimizer: bool,
) -> None:
    """Add to `loading` where this rank's part of a parameter's states is read from; without `optimizer` they begin anew."""
    rest = {k: v for k, v in mine.items() if k not in DERIVED}
    theirs = {k: v for k, v in saved.items() if k not in (*DERIVED, STEP)}
    if not optimizer or not theirs or not mine:
        loading.fresh.extend([] if loading.keeps else [name])
        if optimizer and theirs.keys() != rest.keys() and (theirs or rest):
            which = "the checkpoint has none" if rest else "the plan has no optimizer for them"
            loading.notes.append(f"states of {name}: {which}")
    else:
        if rest.keys() != theirs.keys():
            raise CheckpointError(
                f"the checkpoint's optimizer keeps {', '.join(sorted(theirs))} of {name}, and the plan's {', '.join(sorted(rest))}",
                where=str(source.folder),
                why="it was saved by another optimizer",
                hint="load it by a plan with that optimizer; or optimizer=False for the weights alone",
            )
        for key, tensor in rest.items():
            _check(source, theirs[key], tensor)
            loading.read(theirs[key], tensor)
        if STEP not in saved:
            loading.begun[name] = _begun(runtime, source, name, theirs)
    if optimizer and STEP in saved:
        info = source.tensors[saved[STEP]]
        if info.shape not in ((), (1,)):
            raise CheckpointError(f"the count of updates of {name} is no number but {list(info.shape)}")
        loading.counts[name] = float(source.whole(saved[STEP]).reshape(()))


def _begun(runtime: Runtime, source: Source, name: str, saved: Collection[str]) -> float:
    """Return the count of updates of a parameter whose states were saved without one. Raises `CheckpointError` if the
    optimizer needs the true count."""
    record = runtime.updater.states.members[name].record
    if RULES[record.name].counts:
        raise CheckpointError(
            f"the checkpoint has no count of updates of {name}",
            where=str(source.folder),
            why=f"{record.name} works with it",
            hint="save each parameter's 'step' as torch's optimizers keep it; or optimizer=False for the weights alone",
        )
    return RULES[record.name].first_count(saved)


def _check(source: Source, name: str, into: torch.Tensor) -> None:
    """Raise `CheckpointError` unless a tensor of the model can take one of the checkpoint: of the same shape, and both
    real floating-point, both complex, or of one dtype."""
    info = source.tensors[name]
    kinds = [(d.is_floating_point, d.is_complex, d) for d in (info.dtype, into.dtype)]
    alike = kinds[0][:2] == kinds[1][:2] and (kinds[0][0] or kinds[0][1] or info.dtype is into.dtype)
    if info.shape != tuple(into.shape) or not alike:
        one, other = list(info.shape), list(into.shape)
        if not alike:
            one, other = f"{info.dtype} {one}", f"{into.dtype} {other}"  # type: ignore[assignment]
        raise CheckpointError(
            f"{name} is {one} in the checkpoint and {other} in the model",
            where=str(source.folder),
            hint="build the model that it was saved of",
        )


def _check_tied(runtime: Runtime, source: Source, name: str, others: Sequence[str]) -> None:
    """Raise `CheckpointError` unless weights that are tied in the model are equal in the checkpoint. Each rank compares
    its share of the blocks."""
    rank, ranks = runtime.everyone.rank(), max(1, len(runtime.everyone.ranks))
    for other in others:
        blocks = source.tensors[name].blocks
        alike = source.tensors[other] == source.tensors[name] and all(
            torch.equal(bits(source.block(name, b)), bits(source.block(other, b))) for b in blocks[rank::ranks]
        )
        if not alike:
            raise CheckpointError(
                f"{name} and {other} are one weight in the model, and two in the checkpoint",
                where=str(source.folder),
                hint="untie them in the model, or load a checkpoint of one where they are tied",
            )


def _read(source: Source, loading: Loading, states: States) -> None:
    """Read the tensors of a checkpoint into those of the model and its optimizer. Raises `CheckpointError`."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            for number in range(max(map(len, loading.tensors.values()), default=0)):
                wanted = {n: ts[number] for n, ts in loading.tensors.items() if len(ts) > number}
                load_distributed(
                    wanted,
                    storage_reader=source.reader(),
                    planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                    no_dist=True,
                )
            for to, of in loading.copies:
                local_of(to).copy_(local_of(of))
            states.clear(loading.fresh)
    except (Exception, CheckpointException) as error:  # (torch's is no Exception)
        raise CheckpointError(
            "the checkpoint could not be read to its end",
            where=str(source.folder),
            why=f"{type(error).__name__}: {error}",
            hint="weights are of two checkpoints now: load one again before going on",
        ) from error


def _apply(runtime: Runtime, source: Source, parts: _Parts, objects: dict[str, Any]) -> dict[str, Any]:
    """Write what was planned, and return what the user had added. Where the write fails, the model can't be used until
    a checkpoint is loaded, and errors say so."""
    loading, updater = parts.loading, runtime.updater
    runtime.first_gathers.drop()
    agreement = runtime.everyone

    def refused(rank: int, said: str) -> CheckpointError:
        return CheckpointError(f"rank {rank} could not load the checkpoint", where=str(source.folder), why=said)

    try:
        agreement.together("the checkpoint", lambda: _read(source, loading, updater.states), refused)
    except Exception:
        updater.spoil()
        raise
    for param in runtime.shards.params().values():
        param.grad = None
    with torch.inference_mode(False):
        updater.rounds.restore(parts.local)
    runtime.weights_changed(list(runtime.shards.params()))
    runtime.shards.pending &= loading.missing
    _go_on(runtime, source, parts)
    mesh = mesh_of(runtime.sizes, updater.held)
    alike = source.known.plan == runtime.plan.model_dump(mode="json") and source.known.mesh == mesh
    runtime.votes.expected = parts.programs if alike else {}
    runtime.saver.last = Last(source.folder, parts.optimizer)
    if parts.random is not None:
        parts.random.restore()
    for note in loading.notes[:5]:
        logger.warning("%s", note)
    if len(loading.notes) > 5:
        logger.warning("… and %d more", len(loading.notes) - 5)

    def of_the_user() -> None:
        for path, value in parts.extra.items():
            runtime.module.get_submodule(path).set_extra_state(value)
        for key, target in objects.items():
            target.load_state_dict(parts.client[key])

    agreement.together("the state of the user's own objects", of_the_user, refused)
    return parts.client


def _go_on(runtime: Runtime, source: Source, parts: _Parts) -> None:
    """Set the counts and numbers with which steps go on: those of the checkpoint, or of a new beginning; where states
    stay, so do they."""
    loading, updater = parts.loading, runtime.updater
    if loading.keeps:
        updater.weights_loaded()
        return
    steps = source.known.steps
    if steps is None:
        steps = runtime.everyone.most("the steps of a checkpoint", int(max(loading.counts.values(), default=0.0)))
    with torch.inference_mode(False):
        updater.restore(source.known, steps, loading.begun | loading.counts, parts.optimizer)
    updater.residuals.restore(parts.residuals)
    runtime.samples = source.known.samples or 0 if parts.optimizer else 0
    runtime.own_steps = source.known.steps or 0 if parts.optimizer else 0
