"""Find out which names of a checkpoint are the model's, and which the optimizer's, whatever keys it was saved under.

torch.distributed.checkpoint joins the keys of nested dicts with dots. The optimizer's part is recognised by the form
that `torch.distributed.checkpoint.state_dict` gives it: `PREFIX.state.NAME.KEY` beside `PREFIX.param_groups`; the
model's part by the names that the optimizer has states of, or else by the keys that it was saved under. What is
ambiguous is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from zgraph.checkpoint.source import MODEL, OPTIMIZER
from zgraph.errors import CheckpointError

logger = logging.getLogger(__name__)

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
WRAPPER = "module."  # what DistributedDataParallel puts before every name
KEYS_OF_MODELS = ("model", "state_dict", "module")
STATE, GROUPS = "state", "param_groups"


@dataclass
class Parts:
    """The tensors of the model and its optimizer among those of a checkpoint."""

    # the name in the checkpoint's files of each tensor, by its name in a `Source`
    names: dict[str, str] = field(default_factory=dict)
    optimizer: str | None = None  # the prefix of the optimizer's `state.` and `param_groups`; None without one


def unwrapped(name: str) -> str:
    """Return a parameter's name without what compilers and wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrapped_all(names: Mapping[str, str]) -> dict[str, str]:
    """Return the parameter's name without wrappers for each name in a checkpoint, where `names` gives it with them;
    DistributedDataParallel's prefix is removed if all have it. Raises `CheckpointError` if two names become the
    same."""
    short_names = {name: unwrapped(of) for name, of in names.items()}
    if short_names and all(n.startswith(WRAPPER) for n in short_names.values()):
        short_names = {name: n.removeprefix(WRAPPER) for name, n in short_names.items()}
    seen: dict[str, str] = {}
    for name, short in short_names.items():
        if short in seen:
            raise CheckpointError(
                f"{seen[short]} and {name} are both {short}", why="without what wrappers add to names"
            )
        seen[short] = name
    return short_names


def parted(
    tensors: Collection[str], values: Collection[str], paths: Mapping[str, tuple[str | int, ...]], where: str
) -> Parts:
    """Tell apart the model's tensors and the optimizer's. `tensors` and `values`: the names of tensors and of other
    values; `paths`: the keys that a name was saved under, where they are known. Raises `CheckpointError` for what is
    ambiguous."""
    prefix = _optimizer([*tensors, *values], tensors, where)
    states: dict[str, tuple[str, str]] = {}  # (parameter, key of the state) by name in the checkpoint
    if prefix is not None:
        for name in tensors:
            if name.startswith(f"{prefix}{STATE}."):
                owner, _, key = name.removeprefix(f"{prefix}{STATE}.").rpartition(".")
                states[name] = (unwrapped(owner), key)
    owners = {owner for owner, _ in states.values()}
    if any(owner.isdigit() for owner in owners):
        raise CheckpointError(
            "the optimizer's states have numbers for parameters, not names",
            where=where,
            hint="save torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer), which has names",
        )
    rest = [n for n in tensors if prefix is None or not n.startswith((f"{prefix}{STATE}.", f"{prefix}{GROUPS}."))]
    shown = {n: unwrapped(n) for n in rest}
    before = _model(shown, owners, paths, where)
    chosen = [n for n in rest if shown[n].startswith(before)]
    if not before and any(len(paths.get(n, ())) == 1 for n in chosen):
        chosen = [n for n in chosen if len(paths.get(n, ())) == 1]
    short = unwrapped_all({n: shown[n].removeprefix(before) for n in chosen})
    parts = Parts({MODEL + s: n for n, s in short.items()}, prefix)
    wrapped = {shown[n].removeprefix(before): s for n, s in short.items()}
    for name, (owner, key) in states.items():
        parts.names[f"{OPTIMIZER}{wrapped.get(owner, owner)}.{key}"] = name
    if len(parts.names) < len(chosen) + len(states):
        raise CheckpointError("states of one parameter are there twice, by two of its names", where=where)
    left = sorted(set(rest) - set(chosen))
    if left:
        more = " …" if len(left) > 5 else ""
        logger.warning("%s: %d tensors are no model's and left out: %s%s", where, len(left), ", ".join(left[:5]), more)
    return parts


def _optimizer(every: Collection[str], tensors: Collection[str], where: str) -> str | None:
    """Return the prefix of an optimizer's `state.` and `param_groups`; None without an optimizer. Raises
    `CheckpointError` for several."""
    prefixes = {_before(name, GROUPS) for name in every} - {None}
    if not prefixes:  # (a file of tensors alone has no groups)
        prefixes = {p for p in {_before(n, STATE) for n in tensors} if p and _is_optimizer(p, tensors)}
    if len(prefixes) > 1:
        raise CheckpointError(
            f"the checkpoint has {len(prefixes)} optimizers",
            where=where,
            why=f"they are {', '.join(sorted(repr(str(p)) for p in prefixes))}, and it can't be known which is meant",
            hint="save the one that the plan's optimizer goes on from",
        )
    return next(iter(prefixes), None)


def _before(name: str, part: str) -> str | None:
    parts = name.split(".")
    if part not in parts[:-1]:
        return None
    return "".join(f"{p}." for p in parts[: parts.index(part)])


def _is_optimizer(prefix: str, tensors: Collection[str]) -> bool:
    """Return whether all tensors under this prefix are states of parameters that the checkpoint has too."""
    begin = f"{prefix}{STATE}."
    under = [n for n in tensors if n.startswith(prefix)]
    owners = {n.removeprefix(begin).rpartition(".")[0] for n in under}
    others = {unwrapped(n) for n in tensors if not n.startswith(prefix)}
    ends = {n[i + 1 :] for n in others for i, c in enumerate(n) if c == "."} | others
    return all(n.startswith(begin) for n in under) and all(unwrapped(o) in ends for o in owners)


def _model(
    names: Mapping[str, str], owners: Collection[str], paths: Mapping[str, tuple[str | int, ...]], where: str
) -> str:
    """Return the prefix of the model's tensors. `names`: those of tensors without wrappers, by name in the checkpoint;
    `owners`: the parameters that the optimizer has states of. Raises `CheckpointError` if several prefixes are
    possible."""
    if owners:
        some, known = min(owners), set(names.values())
        prefixes = {n[: -len(some)] for n in known if n == some or n.endswith("." + some)}
        prefixes = {p for p in prefixes if all(p + o in known for o in owners)}
        if not prefixes:
            lost = next((o for o in sorted(owners) if not any(n == o or n.endswith("." + o) for n in known)), some)
            raise CheckpointError(
                "the optimizer's states are of parameters that are not in the checkpoint",
                where=where,
                why=f"there is no {lost}",
                hint="save the model beside its optimizer",
            )
    elif not any(paths.values()):
        return ""
    else:
        groups = list(dict.fromkeys(paths.get(n, (n,))[:-1] for n in names))
        named = [g for g in groups if g and str(g[-1]) in KEYS_OF_MODELS]
        chosen = groups if len(groups) == 1 else named or [g for g in groups if not g] or groups
        prefixes = {unwrapped("".join(f"{p}." for p in g)) for g in chosen}
    if len(prefixes) > 1:
        raise CheckpointError(
            f"the checkpoint has {len(prefixes)} parts that could be the model",
            where=where,
            why=", ".join(sorted(repr(p) for p in prefixes)[:8]),
            hint="save the model's state dict under the key 'model', once",
        )
    return next(iter(prefixes), "")
