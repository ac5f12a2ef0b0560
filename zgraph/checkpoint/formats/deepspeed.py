"""DeepSpeed's checkpoints as a source: weights in float32, the optimizer's states by parameter, buffers, counts and the
loss scale.

Read are checkpoints of ZeRO stages 0 to 3, universal ones, those of pipelines with ZeRO, and those of tensor
parallelism that describe how parameters are divided, also in pipelines. Besides tensors, each file holds a pickle of
DeepSpeed's objects, none of which is constructed (`zgraph.checkpoint.formats.torchfile`). Experts are refused: these
files do not say how they are divided. [Note: pipelines] Each stage has its own model file (mp_rank_01 is the second
stage's) and the partitions of its parameters; tensors that are no parameters are in a file of their layer. With tensor
parallelism in a pipeline, the second stage's files follow the first stage's, one for each tensor-parallel rank (of two,
mp_rank_02 and mp_rank_03), and a layer has a file for each tensor-parallel rank.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zgraph.checkpoint.formats.deepspeed_client import client_state
from zgraph.checkpoint.formats.deepspeed_partitions import Read, StoredTensor, first_stages, in_equal_parts, third_stage
from zgraph.checkpoint.formats.deepspeed_stage0 import unsharded
from zgraph.checkpoint.formats.deepspeed_tensor_parallel import INFO, Layout, check_buffers, check_same, merge
from zgraph.checkpoint.formats.deepspeed_universal import FOLDER, universal
from zgraph.checkpoint.formats.key_names import unwrapped_all
from zgraph.checkpoint.formats.torchfile import MALFORMED, Inert, Stored, TorchFile
from zgraph.checkpoint.source import MODEL, OPTIMIZER, Block, Source, TensorInfo
from zgraph.checkpoint.tensorfile import damaged
from zgraph.errors import CheckpointError, UnsupportedError
from zgraph.update.resume import Known

logger = logging.getLogger(__name__)

MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})(_\d+)?_model_states\.pt")
WHOLE = "mp_rank_00_model_states.pt"
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})(_\d+)?_optim_states\.pt")
LAYER_FILE = re.compile(r"layer_(\d{1,6})(?:-model_(\d{1,6}))?-model_states\.pt")
ELSEWHERE = re.compile(r"layer_\d.*\.pt|expp_rank_\d.*\.pt|.*_expert_\d.*\.pt")


def is_deepspeed(folder: Path) -> bool:
    """Return whether this folder holds one of DeepSpeed's checkpoints."""
    return (folder / FOLDER).is_dir() or any(MODEL_FILE.fullmatch(p.name) for p in folder.iterdir())


class DeepSpeed(Source):
    """A folder of DeepSpeed's, as a source. Raises `CheckpointError` for one that is damaged or incomplete,
    `UnsupportedError` for other parallelism."""

    kind = "DeepSpeed"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = sorted(p.name for p in folder.iterdir())
        self._refuse_others(names)
        self._files: list[TorchFile] = []
        if (folder / FOLDER).is_dir() and WHOLE in names:  # (a universal one has stage 3's model files beside it)
            names = [n for n in names if n == WHOLE or not MODEL_FILE.fullmatch(n)]
        self._held: dict[str, StoredTensor | torch.Tensor] = {}
        try:
            if any(LAYER_FILE.fullmatch(n) for n in names):
                state, ranks, read = self._of_stages(names)
            elif any(int(m[2]) for n in names if (m := MODEL_FILE.fullmatch(n))):
                state, ranks, read = self._of_parts(names, self._model_ranks(names))
            else:
                state, ranks, read = self._of_one(self._ranked(names, MODEL_FILE), self._ranked(names, OPTIMIZER_FILE))
            self._hold(state, read)
            self.known = self._known(state, ranks, read)
            self.client = client_state(state, folder)
        except UnsupportedError:  # (a RuntimeError, and so among `MALFORMED`)
            raise
        except MALFORMED as error:
            damaged(folder, f"{type(error).__name__}: {error}"[:300])
        self.tensors = {n: TensorInfo.whole(t.dtype, tuple(t.shape)) for n, t in self._held.items()}

    def _of_one(self, models: list[str], optimizers: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]], Read]:
        """Read the files of a whole model, or of one stage and tensor-parallel rank: return the first rank's model
        state, each rank's optimizer state, and all tensors."""
        states = [self._table(models[0])] if models else [{}]
        if states[0].get("frozen_param_fragments") and len(models) > 1:
            states += [self._table(name) for name in models[1:]]
        ranks = [self._table(name)["optimizer_state_dict"] for name in optimizers]
        return states[0], ranks, self._read(states, ranks)

    def _of_stages(self, names: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]], Read]:
        """Read the files of a pipeline (see the module's note), and return the same."""
        parts = 1 + max(int(m[2] or 0) for n in names if (m := LAYER_FILE.fullmatch(n)))
        ranks_of = self._model_ranks(names)
        if len(ranks_of) % parts:
            raise CheckpointError(
                f"there are files of {len(ranks_of)} mp_rank, and each stage of the pipeline has {parts}",
                where=str(self.folder),
                hint="copy all of them here",
            )
        whole, every = Read(), list[dict[str, Any]]()
        first: dict[str, Any] = {}
        for begin in range(0, len(ranks_of), parts):
            state, ranks, read = self._of_parts(names, ranks_of[begin : begin + parts])
            first, every = first or state, every or ranks
            whole.weights |= {
                n: w for n, w in read.weights.items() if n not in whole.weights
            }  # (several stages may have a tied one)
            whole.states |= {k: v for k, v in read.states.items() if k not in whole.states}
            for at, group in enumerate(read.groups):
                if at == len(whole.groups):
                    whole.groups.append(group | {"names": []})
                seen = whole.groups[at]["names"]
                seen += [n for n in group["names"] if n not in seen]
        return {**first, "module": self._of_layers(names, whole)}, every, whole

    def _model_ranks(self, names: list[str]) -> list[int]:
        """Return the numbers of `mp_rank` among the files. Raises `CheckpointError` unless they are 0, 1, …"""
        ranks = sorted({int(m[2]) for n in names for p in (MODEL_FILE, OPTIMIZER_FILE) if (m := p.fullmatch(n))})
        if ranks != list(range(len(ranks))):
            lost = next(r for r in range(len(ranks) + 1) if r not in ranks)
            raise CheckpointError(f"the files of mp_rank {lost} are missing", where=str(self.folder))
        return ranks

    def _of_parts(self, names: list[str], parts: list[int]) -> tuple[dict[str, Any], list[dict[str, Any]], Read]:
        """Read the files of tensor parallelism, or of one pipeline stage with it, and return the same. Each
        tensor-parallel rank (mp_rank) has files like those of a whole model."""
        states, every, reads = list[dict[str, Any]](), list[list[dict[str, Any]]](), list[Read]()
        layout: Layout | None = None
        for part in parts:
            mine = [n for n in names if f"mp_rank_{part:02d}_" in n]
            models = self._ranked(mine, MODEL_FILE)
            if len(parts) == 1:
                return self._of_one(models, self._ranked(mine, OPTIMIZER_FILE))
            if layout is None:
                layout = Layout(TorchFile(self.folder / models[0]).value.get(INFO), len(parts), self.folder)
            state, ranks, read = self._of_one(models, self._ranked(mine, OPTIMIZER_FILE))
            states.append(state)
            every.append(ranks)
            reads.append(read)
        assert layout is not None
        check_buffers(states, self.folder)
        return states[0], every[0], merge(layout, reads, states, self.folder)

    def _of_layers(self, names: list[str], read: Read) -> dict[str, Any]:
        """Return the tensors of a pipeline's layer files by name, the first tensor-parallel rank's. The second file of
        a tied layer, none of whose names are in `read`, is skipped."""
        tensors: dict[str, Any] = {}
        for name in names:
            if (match := LAYER_FILE.fullmatch(name)) is None:
                continue
            layer_tensors = {f"{int(match[1])}.{key}": value for key, value in self._table(name).items()}
            if layer_tensors.keys().isdisjoint(read.weights):
                continue
            if int(match[2] or 0):
                rest = {n: v for n, v in layer_tensors.items() if n not in read.weights}
                check_same({n: tensors.get(n) for n in rest}, rest, self.folder)
            else:
                tensors |= layer_tensors
        return tensors

    def _refuse_others(self, names: list[str]) -> None:
        layers = any(LAYER_FILE.fullmatch(n) for n in names)
        names = [n for n in names if not LAYER_FILE.fullmatch(n)]
        if layers and not any(OPTIMIZER_FILE.fullmatch(n) for n in names) and not (self.folder / FOLDER).is_dir():
            raise UnsupportedError(
                "a DeepSpeed checkpoint of a pipeline without ZeRO can't be read",
                where=str(self.folder),
                why="which state belongs to which parameter is not in its files",
                hint="save it with ZeRO stage 1, which changes no numbers; or convert it with DeepSpeed's ds_to_universal",
            )
        matches = [m for n in names for p in (MODEL_FILE, OPTIMIZER_FILE) if (m := p.fullmatch(n))]
        if any(m[3] for m in matches) or any(ELSEWHERE.fullmatch(n) for n in names):
            raise UnsupportedError(
                "a DeepSpeed checkpoint of experts can't be read",
                where=str(self.folder),
                why="its parameters are cut in ways that these files do not say",
                hint="convert it with DeepSpeed's ds_to_universal, and load that",
            )

    def _ranked(self, names: list[str], pattern: re.Pattern[str]) -> list[str]:
        """Return the files of all data-parallel ranks that match the pattern, in rank order. Raises `CheckpointError`
        if one is missing."""
        file_of = {int(m[1] or 0): n for n in names if (m := pattern.fullmatch(n))}
        if len(file_of) < sum(bool(pattern.fullmatch(n)) for n in names):
            raise CheckpointError("one rank has two files", where=str(self.folder), why="of two checkpoints, it seems")
        if sorted(file_of) != list(range(len(file_of))):
            lost = next(r for r in range(len(file_of) + 1) if r not in file_of)
            raise CheckpointError(
                f"the file of rank {lost} is missing", where=str(self.folder), hint="copy it here too"
            )
        return [file_of[rank] for rank in sorted(file_of)]

    def _table(self, name: str) -> dict[str, Any]:
        file = TorchFile(self.folder / name)
        if not isinstance(file.value, dict):
            damaged(file.path, "it holds no table")
        self._files.append(file)
        return file.value

    def _read(self, states: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> Read:
        state = states[0]
        shapes = state.get("param_shapes") or []
        if (self.folder / FOLDER).is_dir():
            if INFO in state:  # (shapes of a tensor-parallel rank's parts, where the folder has the whole)
                shapes = []
            read, files = universal(self.folder / FOLDER, shapes, set(state.get("buffer_names") or ()))
            self._files += files
        elif ranks:
            self._check_ranks(ranks)
            whole = third_stage if "fp32_flat_groups" in ranks[0] else first_stages
            read = whole(shapes, ranks, self.folder)
        else:
            read = unsharded(self._parameters(state), state.get("optimizer"), self.folder)
        for name, shape in (state.get("frozen_param_shapes") or {}).items():
            fragments = [s["frozen_param_fragments"][name] for s in states]
            if len(fragments) == 1 and fragments[0].shape == tuple(shape):
                read.weights[name] = fragments[0]
            else:
                read.weights[name] = in_equal_parts(name, shape, fragments, self.folder)
        return read

    def _check_ranks(self, ranks: list[dict[str, Any]]) -> None:
        if any(r.get("ds_zero_partition_groups") for r in ranks):
            raise UnsupportedError("a DeepSpeed checkpoint of experts can't be read", where=str(self.folder))
        counts = ranks[0].get("partition_count")
        for count in counts if isinstance(counts, list) else [counts]:
            if count != len(ranks):
                raise CheckpointError(
                    f"the checkpoint is of {count} ranks, but has the optimizer's files of {len(ranks)}",
                    where=str(self.folder),
                    hint="copy all of them here",
                )

    @staticmethod
    def _parameters(state: Mapping[str, Any]) -> dict[str, Stored]:
        """Return the module's own parameters in their order, a tied one under its first name."""
        buffers, parameters, places = set(state.get("buffer_names") or ()), {}, set()
        for name, value in state["module"].items():
            if isinstance(value, Stored) and name not in buffers and (value.start, value.shape) not in places:
                places.add((value.start, value.shape))
                parameters[name] = value
        return parameters

    def _hold(self, state: Mapping[str, Any], read: Read) -> None:
        """Store every tensor by its name in a source: the optimizer's weights and states, then what only the module
        has, tied ones under each name."""
        weights: dict[str, StoredTensor] = dict(read.weights)
        module = state.get("module") or {}
        at = {(w.start, w.shape): n for n, w in module.items() if isinstance(w, Stored) and w.elements and n in weights}
        tied = state.get("shared_params") or {}
        weights |= {name: weights[of] for name, of in tied.items() if of in weights}
        left = []
        for name, value in module.items():
            if name in weights:
                continue
            if not isinstance(value, Stored):
                left.append(name)
            elif (value.start, value.shape) in at:
                weights[name] = weights[at[value.start, value.shape]]
            else:
                weights[name] = value
        if left:
            logger.warning("%s: left out, since they are no tensors: %s", self.folder, ", ".join(map(str, left[:5])))
        short = unwrapped_all({name: name for name in weights})
        self._held |= {MODEL + short[n]: w for n, w in weights.items()}
        self._held |= {f"{OPTIMIZER}{short[n]}.{key}": t for (n, key), t in read.states.items()}
        for group in read.groups:
            group["names"] = [short[n] for n in group["names"]]

    def _known(self, state: Mapping[str, Any], ranks: list[dict[str, Any]], read: Read) -> Known:
        steps, samples = _count(state.get("global_steps")), _count(state.get("global_samples"))
        known = Known(steps, _count(state.get("skipped_steps")) or 0, samples, read.groups)
        known.world = _count(state.get("dp_world_size")) or 1
        known.loss_scale = _loss_scale(state, ranks, known.skipped)
        schedule = state.get("lr_scheduler")
        if isinstance(schedule, dict) and steps is not None:
            last, epoch = _count(schedule.get("last_batch_iteration")), _count(schedule.get("last_epoch"))
            position = last + 1 if last is not None else epoch
            if position is not None and position != steps - known.skipped:
                logger.warning(
                    "%s: its learning rate was scheduled %d times in %d updates; a plan's schedule goes on from the updates",
                    self.folder,
                    position,
                    steps - known.skipped,
                )
        return known

    def block(self, name: str, block: Block) -> torch.Tensor:
        tensor = self._held[name]
        return tensor.clone() if isinstance(tensor, torch.Tensor) else tensor.read()

    def rows(self, name: str, block: Block, first: int, count: int) -> torch.Tensor:
        tensor = self._held[name]
        return tensor[first : first + count] if isinstance(tensor, torch.Tensor) else tensor.rows(first, count)

    def verify(self, share: int = 0, of: int = 1) -> None:
        for file in self._files[share::of]:
            file.verify()


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _loss_scale(state: Mapping[str, Any], ranks: list[dict[str, Any]], skipped: int) -> dict[str, float] | None:
    """Return the state of fp16's loss scale, by the names of `zgraph.update.scaler`; None without one."""
    config = state.get("ds_config")
    half = config.get("fp16") if isinstance(config, dict) else None
    if not isinstance(half, dict) or half.get("enabled") is not True:
        return None
    scaler = ranks[0].get("loss_scaler") if ranks else state.get("optimizer")
    saved = scaler.state if isinstance(scaler, Inert) else scaler
    if not isinstance(saved, dict):
        return None
    names = {
        "scale": "cur_scale",
        "iteration": "cur_iter",
        "last_overflow": "last_overflow_iter",
        "hysteresis": "cur_hysteresis",
    }
    values = {k: saved.get(name) for k, name in names.items()}
    return {k: v for k, v in values.items() if isinstance(v, (int, float))} | {"skipped": skipped}
