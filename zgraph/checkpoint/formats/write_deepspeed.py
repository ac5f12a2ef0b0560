"""Write a checkpoint of any system as DeepSpeed's: partitions of ZeRO stages 1 to 3 for a number of ranks, or a
universal one for any number.

The files are those of DeepSpeed 0.19. Its loaders need objects of its own classes in them (a loss scaler, addresses of
fragments): these are written by name, so that DeepSpeed need not be installed here.
`zgraph.checkpoint.formats.deepspeed_partitions` describes how partitions are cut.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from zgraph.checkpoint.formats.deepspeed_partitions import PADDED_TO
from zgraph.checkpoint.master_precision import is_current_in
from zgraph.checkpoint.source import MODEL, OPTIMIZER, Source
from zgraph.errors import CheckpointError

VERSION = "0.19.8"  # of the DeepSpeed whose files these are
SUB_GROUP = 10**9  # elements of a rank's part of a sub-group at stage 3: DeepSpeed's default
MASTER = "master"
Layout = Literal["universal", 1, 2, 3]

# Options that DeepSpeed's and torch's optimizers look up in a group, where the plan's optimizer has none of the name.
_DEFAULTS = {
    "bias_correction": True,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}


@dataclass(frozen=True)
class Object:
    """One of DeepSpeed's own objects, written by the name of its class."""

    module: str  # the module of its class
    name: str  # its class's name
    state: dict[str, Any]  # its attributes


class _Pickler(pickle._Pickler):
    """A pickler that writes each `Object` as an object of its class."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if not isinstance(obj, Object):
            super().save(obj, save_persistent_id)  # type: ignore[misc]
            return
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())  # type: ignore[attr-defined]
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)  # type: ignore[attr-defined]
        super().save(obj.state)  # type: ignore[misc]
        self.write(pickle.BUILD)  # type: ignore[attr-defined]


_BY_NAME: Any = ModuleType("pickle")  # (torch takes a module with a `Pickler`)
_BY_NAME.Pickler = _Pickler


def _save(value: Any, path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_BY_NAME)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getbuffer())


class Content:
    """The part of a source that a DeepSpeed checkpoint can hold: `groups` of the names of trained parameters, the
    `frozen` ones, and `buffers`.

    Raises `CheckpointError` for a source without an optimizer, or with states that are not shaped as their weights.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        known = source.known
        named = [list(group["names"]) for group in known.groups]
        if not any(named):
            raise CheckpointError(
                "there is no optimizer in the checkpoint",
                where=str(source.folder),
                hint="zgraph ckpt export writes weights alone",
            )
        states = [n.removeprefix(OPTIMIZER).rpartition(".") for n in source.tensors if n.startswith(OPTIMIZER)]
        self.keys: dict[str, list[str]] = {}
        for name, _, key in states:
            self.keys.setdefault(name, []).append(key)
        self.groups = [[n for n in names if n in self.keys] for names in named]
        self.numbers = [self._numbers(group) for group, names in zip(known.groups, self.groups, strict=True) if names]
        self.groups = [names for names in self.groups if names]
        if not self.groups:
            raise CheckpointError(
                "the optimizer has no states yet", where=str(source.folder), hint="save after the first step"
            )
        trained = {n for names in self.groups for n in names}
        weights = [n.removeprefix(MODEL) for n in source.tensors if n.startswith(MODEL)]
        self.frozen = [n for names in named for n in names if n not in trained]
        self.buffers = [n for n in weights if n not in trained and n not in self.frozen]
        self._refuse_others()

    def _refuse_others(self) -> None:
        for names in self.groups:
            for name in names:
                for key in self.state_keys(name):
                    if self.source.tensors[f"{OPTIMIZER}{name}.{key}"].shape != self.shape(name):
                        raise CheckpointError(
                            f"the state {key} of {name} has another shape than its weight",
                            where=str(self.source.folder),
                            why="DeepSpeed's partitions cut states as they cut weights",
                            hint="AdamW, SGD and others whose states are shaped as their weights",
                        )

    def _numbers(self, group: Mapping[str, Any]) -> dict[str, Any]:
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in group.items() if k not in ("names", "params")}
        plan = (self.source.known.plan or {}).get("optimizer") or {}
        return {**_DEFAULTS, "decoupled_weight_decay": plan.get("name") != "Adam", **values}

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.tensors[MODEL + name].shape

    def elements(self, name: str) -> int:
        return math.prod(self.shape(name))

    def state_keys(self, name: str) -> list[str]:
        """Return the names of a parameter's states that are shaped as it, without the master and the moving average."""
        return [k for k in self.keys[name] if k not in ("step", MASTER, "ema")]

    def step(self, name: str) -> float:
        """Return how many updates a parameter has had."""
        at = f"{OPTIMIZER}{name}.step"
        known = self.source.known
        return float(self.source.whole(at)) if at in self.source.tensors else float((known.steps or 0) - known.skipped)

    def wide(self, name: str) -> torch.Tensor:
        """Read a weight in float32: from its master if that is current."""
        master = f"{OPTIMIZER}{name}.{MASTER}"
        current = master in self.source.tensors and is_current_in(self.source, master, MODEL + name)
        return self.source.whole(master if current else MODEL + name).float()

    def value(self, name: str, key: str) -> torch.Tensor:
        """Read a weight ("fp32") or one of its states, in float32."""
        return self.wide(name) if key == "fp32" else self.source.whole(f"{OPTIMIZER}{name}.{key}").float()

    @property
    def low(self) -> torch.dtype:
        """The dtype of the model's weights."""
        return self.source.tensors[MODEL + self.groups[0][0]].dtype


def write_deepspeed(source: Source, folder: Path, layout: Layout, ranks: int) -> None:
    """Write all files of a checkpoint into its folder, for `ranks` data-parallel ranks. Raises `CheckpointError`: see
    `Content`."""
    if ranks < 1:
        raise CheckpointError(f"a checkpoint can't be written for {ranks} ranks", hint="a number from 1")
    content = Content(source)
    _write_models(content, folder, layout, ranks)
    if layout == "universal":
        _write_universal(content, folder)
        return
    prefix = "bf16_" if content.low is torch.bfloat16 else ""
    flats = list(_sub_groups(content, ranks)) if layout == 3 else [(i, names) for i, names in enumerate(content.groups)]
    for rank in range(ranks):
        part = _third_stage(content, flats, rank, ranks) if layout == 3 else _first_stages(content, layout, rank, ranks)
        state = {"optimizer_state_dict": part, "ds_config": {}, "ds_version": VERSION}
        _save(state, folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


# -- the model ------------------------------------------------------------------------------------------------------------------
def _write_models(content: Content, folder: Path, layout: Layout, ranks: int) -> None:
    """Write the files of model states: for ZeRO stage 3 one for each rank, with the buffers and the rank's part of
    frozen parameters; for stages 1 and 2 one with all weights; for a universal one both."""
    if layout != 3:
        whole = {n: content.source.whole(MODEL + n) for n in _weights(content)}
        frozen = {n: whole[n] for n in content.frozen}
        _save(_model_state(content, content.groups, whole, frozen, ranks), folder / "mp_rank_00_model_states.pt")
    if layout in (3, "universal"):
        groups = [names for _, names in _sub_groups(content, ranks)]
        empty = torch.empty(0, dtype=content.low)
        for rank in range(ranks):
            tensors = {n: content.source.whole(MODEL + n) if n in content.buffers else empty for n in _weights(content)}
            parts = {n: _equal_part(content.source.whole(MODEL + n), rank, ranks) for n in content.frozen}
            state = _model_state(content, groups, tensors, parts, ranks)
            _save(state, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")


def _weights(content: Content) -> list[str]:
    return [n.removeprefix(MODEL) for n in content.source.tensors if n.startswith(MODEL)]


def _model_state(
    content: Content,
    groups: Sequence[Sequence[str]],
    module: Mapping[str, torch.Tensor],
    frozen: Mapping[str, torch.Tensor],
    ranks: int,
) -> dict[str, Any]:
    known = content.source.known
    steps = known.steps or 0
    return {
        "module": OrderedDict(module),
        "buffer_names": list(content.buffers),
        "optimizer": None,
        "param_shapes": [OrderedDict((n, torch.Size(content.shape(n))) for n in names) for names in groups],
        "frozen_param_shapes": OrderedDict((n, torch.Size(content.shape(n))) for n in content.frozen),
        "frozen_param_fragments": OrderedDict(frozen),
        "shared_params": {},
        "lr_scheduler": {"last_batch_iteration": steps - known.skipped - 1},
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": known.skipped,
        "global_steps": steps,
        "global_samples": known.samples or 0,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": VERSION,
    }


# -- the optimizer ----------------------------------------------------------------------------------------------------------------
def _common(content: Content, stage: int) -> dict[str, Any]:
    scaler, moves = _loss_scaler(content)
    return {
        "loss_scaler": scaler,
        "dynamic_loss_scale": moves,
        "overflow": False,
        "zero_stage": stage,
        "ds_version": VERSION,
    }


def _loss_scaler(content: Content) -> tuple[Object, bool]:
    """Return DeepSpeed's object for the loss scale, and whether the scale is dynamic."""
    module, saved = "deepspeed.runtime.fp16.loss_scaler", content.source.known.loss_scale
    if saved is None:
        return Object(module, "LossScaler", {"cur_scale": 1.0, "dynamic": False}), False
    plan: Any = content.source.known.plan or {}
    precision = plan.get("precision")
    record = (precision.get("loss_scale") if isinstance(precision, dict) else None) or {}
    if record.get("static") is not None:
        return Object(module, "LossScaler", {"cur_scale": float(saved["scale"]), "dynamic": False}), False
    state = {
        "cur_scale": float(saved["scale"]),
        "cur_iter": int(saved.get("iteration", 0)),
        "last_overflow_iter": int(saved.get("last_overflow", -1)),
        "scale_factor": 2.0,
        "scale_window": int(record.get("loss_scale_window", 1000)),
        "min_scale": float(record.get("min_loss_scale", 1.0)),
        "delayed_shift": int(record.get("hysteresis", 2)),
        "cur_hysteresis": int(saved.get("hysteresis", record.get("hysteresis", 2))),
        "consecutive_hysteresis": bool(record.get("consecutive_hysteresis", False)),
        "raise_error_at_min_scale": True,
        "dtype": torch.float16,
        "dynamic": True,
    }
    return Object(module, "DynamicLossScaler", state), True


def _first_stages(content: Content, stage: int, rank: int, ranks: int) -> dict[str, Any]:
    """Return a rank's optimizer state at stage 1 or 2: its equal part of each group, whose parameters are stored end to
    end and padded."""
    weights, states, mappings, paddings = [], {}, [], []
    for index, names in enumerate(content.groups):
        total = sum(content.elements(n) for n in names)
        each = -(-total // (PADDED_TO * ranks)) * PADDED_TO
        spans = list(_spans(content, names, rank * each, each))
        weights.append(_laid(content, spans, "fp32", each))
        group_state: dict[str, Any] = {k: _laid(content, spans, k, each) for k in content.state_keys(names[0])}
        states[index] = {"step": torch.tensor(content.step(names[0])), **group_state}
        mappings.append(OrderedDict((n, _address(high - low, at)) for n, low, high, at in spans))
        paddings.append(max(0, min(each, (rank + 1) * each - total)))
    groups = [{**numbers, "params": [i]} for i, numbers in enumerate(content.numbers)]
    return {
        **_common(content, stage),
        "base_optimizer_state": {"state": states, "param_groups": groups},
        "single_partition_of_fp32_groups": weights,
        "group_paddings": paddings,
        "param_alignment_paddings": [[0] * len(names) for names in content.groups],
        "partition_count": [ranks] * len(content.groups),
        "param_slice_mappings": mappings,
    }


def _address(count: int, start: int) -> Object:
    return Object("deepspeed.utils.tensor_fragment", "fragment_address", {"numel": count, "start": start})


def _spans(content: Content, names: Sequence[str], begin: int, count: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, first element, end element, position in the part) of each parameter that `count` elements of the
    group from `begin` on hold some of."""
    at = 0
    for name in names:
        size = content.elements(name)
        low, high = max(begin, at), min(begin + count, at + size)
        if low < high:
            yield name, low - at, high - at, low - begin
        at += size


def _laid(content: Content, spans: Sequence[tuple[str, int, int, int]], key: str, count: int) -> torch.Tensor:
    flat = torch.zeros(count)
    for name, low, high, at in spans:
        flat[at : at + high - low] = content.value(name, key).reshape(-1)[low:high]
    return flat


def _sub_groups(content: Content, ranks: int) -> Iterator[tuple[int, list[str]]]:
    """Yield stage 3's sub-groups: (the group's number, the names of its parameters that are updated together)."""
    for index, names in enumerate(content.groups):
        now: list[str] = []
        size = 0
        for name in names:
            now.append(name)
            size += -(-content.elements(name) // ranks)
            if size >= SUB_GROUP:
                yield index, now
                now, size = [], 0
        if now:
            yield index, now


def _third_stage(content: Content, flats: Sequence[tuple[int, list[str]]], rank: int, ranks: int) -> dict[str, Any]:
    """Return a rank's optimizer state at stage 3: its equal part of each parameter, end to end in each sub-group."""

    def laid(names: Sequence[str], key: str) -> torch.Tensor:
        return torch.cat([_equal_part(content.value(n, key), rank, ranks) for n in names])

    states = {
        at: {
            "step": torch.tensor(content.step(names[0])),
            **{k: laid(names, k) for k in content.state_keys(names[0])},
        }
        for at, (_, names) in enumerate(flats)
    }
    groups = [
        {**numbers, "params": [at for at, (group, _) in enumerate(flats) if group == index]}
        for index, numbers in enumerate(content.numbers)
    ]
    return {
        **_common(content, 3),
        "partition_count": ranks,
        "optimizer_state_dict": {"state": states, "param_groups": groups},
        "fp32_flat_groups": [laid(names, "fp32") for _, names in flats],
    }


def _equal_part(value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    flat = value.reshape(-1)
    each = -(-len(flat) // ranks)
    part = flat[rank * each : (rank + 1) * each]
    return torch.cat([part, part.new_zeros(each - len(part))]) if len(part) < each else part.clone()


def _write_universal(content: Content, folder: Path) -> None:
    zero = folder / "zero"
    for names in content.groups:
        for name in names:
            for key in ("fp32", *content.state_keys(name)):
                _save({"param": content.value(name, key)}, zero / name / f"{key}.pt")
            _save(torch.tensor(content.step(name)), zero / name / "step.pt")
    groups = [{**numbers, "params": [i]} for i, numbers in enumerate(content.numbers)]
    states = {i: {"step": torch.tensor(content.step(names[0]))} for i, names in enumerate(content.groups)}
    optimizer = {"state": states, "param_groups": groups}
    common = _common(content, 3) | {"optimizer_state_dict": optimizer, "base_optimizer_state": optimizer}
    _save(common | {"param_groups": groups}, zero / "optimizer_state.pt")
