"""The translation of a DeepSpeed configuration into a plan, with a report on each of its keys.

    plan, report = zgraph.deepspeed.plan("ds_config.json", world=8)
    print(report)

The meanings and defaults are those of DeepSpeed 0.19.8, pitfalls included: the report names them. Sizes that DeepSpeed counts in elements become
the bytes of what is communicated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from zgraph.deepspeed.config_sections import SIZES, UPDATED, elastic
from zgraph.deepspeed.keys import KEYS, LOG_LEVELS
from zgraph.deepspeed.optimizers import optimizer, scheduler
from zgraph.deepspeed.plan_draft import Draft
from zgraph.deepspeed.read_config import Config, check, fill, read
from zgraph.deepspeed.report import Report
from zgraph.deepspeed.sparse_attention import sparse_attention
from zgraph.errors import PlanError
from zgraph.plan.plan import Plan
from zgraph.plan.precision import Precision, preset
from zgraph.record import short

DTYPES = {
    **dict.fromkeys(("fp32", "float32", "torch.float32", "float"), "float32"),
    **dict.fromkeys(("fp16", "float16", "torch.float16", "half"), "float16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bfloat16"),
}


BATCH, ROWS, PARTS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


class Translation(NamedTuple):
    """A plan, with the report on the configuration that it is made from."""

    plan: Plan  # the plan
    report: Report  # the verdict on each key


def plan(config: Config, *, world: int, model: Any = None, arguments: Any = None) -> Translation:
    """Translate a DeepSpeed configuration into a plan for `world` ranks, with a report on each of its keys.

    `config` is a dict or the path of a JSON file, or that file's text in base64. "auto" is filled as transformers fills it: by the hidden
    size of the `model` (`model.config.hidden_size`) and by training `arguments` (a `TrainingArguments`, or a dict). Raises `PlanError` if the file
    can't be read, and if keys are unknown or unsupported, with one problem for each (`error.problems`); `report` reports the
    same keys without raising.
    """
    key_report = report(config, world=world, model=model, arguments=arguments)
    return Translation(key_report.require_plan(), key_report)


def report(config: Config, *, world: int, model: Any = None, arguments: Any = None) -> Report:
    """Return a report on each key of a DeepSpeed configuration: see `plan`. Raises `PlanError` if the file can't be
    read."""
    if type(world) is not int or world < 1:
        raise PlanError(
            f"there are no {short(world)} ranks", where="world", hint="how many ranks train: a whole number from 1"
        )
    given = read(config)
    whole = isinstance(given.get("zero_optimization"), bool)
    if whole:
        given["zero_optimization"] = {"stage": int(given["zero_optimization"])}
    missing = fill(given, model, arguments)
    draft = Draft(given, world)
    check(draft)
    for key, why in missing.items():
        draft.refuse(key, why, "give a number, or the model and the training arguments")
    _mesh(draft)
    _batch(draft)
    _precision(draft)
    _clipping(draft)
    optimizer(draft)
    scheduler(draft)
    _steps_in_fp32(draft)
    _zero(draft)
    if whole and not draft.is_refused("zero_optimization.stage"):
        stage = draft.get("zero_optimization.stage")
        draft.apply("zero_optimization.stage", "zero", stage, "true is stage 1" if stage else "false is stage 0")
    _wire(draft)
    _offload(draft)
    _elasticity(draft)
    sparse_attention(draft)
    _rest(draft)
    return draft.finish()


def usual_world(config: Config) -> int:
    """Return the number of ranks that a configuration's three batch sizes imply, if nothing else divides the ranks;
    1 if they imply none."""
    given = read(config)
    total, rows, parts = (given.get(key) for key in (BATCH, ROWS, PARTS))
    whole = all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in (total, rows, parts))
    return total // (rows * parts) if whole and total % (rows * parts) == 0 else 1  # type: ignore[operator,no-any-return]


# -- ranks ------------------------------------------------------------------------------------------------------------------
def _mesh(draft: Draft) -> None:
    """Set the mesh: the ranks divide layers, sequences and weights by their keys, and the remaining dimension is
    data-parallel."""
    sizes = {"pp": _stages(draft), "cp": _divided(draft, "sequence_parallel_size"), "tp": _tensor_parallel(draft)}
    divided = sizes["pp"] * sizes["cp"] * sizes["tp"]
    if draft.world % divided:
        key = next(k for k in _DIVIDING if draft.get(k) not in (None, 0, 1, "auto"))
        draft.refuse(key, f"{draft.world} ranks can't be divided by {divided}", "another size, or number of ranks")
        return
    data = draft.world // divided
    mesh: dict[str, int] = {"pp": sizes["pp"]} if sizes["pp"] > 1 else {}
    shard = draft.get("zero_optimization.mics_shard_size", -1)
    if shard > 0 and data % shard:
        draft.refuse(
            "zero_optimization.mics_shard_size",
            f"{data} data-parallel ranks can't be divided by {shard}",
            "a size that divides them",
        )
        return
    if 0 < shard < data:
        mesh |= {"replicate": data // shard, "dp": shard}
    else:
        mesh["dp"] = data
    mesh |= {dim: sizes[dim] for dim in ("cp", "tp") if sizes[dim] > 1}
    draft.fields["mesh"] = mesh
    draft.origins |= {f"mesh.{dim}": key for dim, key in _MESH_KEYS.items() if draft.get(key) is not None}
    if shard > 0:
        draft.say(
            "zero_optimization.mics_shard_size",
            "applied",
            f"mesh = {mesh}: weights are sharded over {min(shard, data)} ranks",
        )
    elif shard != -1 or draft.get("zero_optimization.mics_shard_size") is not None:
        draft.say("zero_optimization.mics_shard_size", "equivalent", "it asks for nothing")


_DIVIDING = (
    "pipeline.stages",
    "pipeline_parallel.pp_size",
    "tensor_parallel.autotp_size",
    "tensor_parallel.tp.tp_size",
    "sequence_parallel_size",
)
_MESH_KEYS = {
    "replicate": "zero_optimization.mics_shard_size",
    "cp": "sequence_parallel_size",
    "tp": "tensor_parallel.autotp_size",
}


def _divided(draft: Draft, key: str, dim: str = "cp", *, least: int = 0) -> int:
    """Return the number of ranks that a key divides over; 1 if it does not divide."""
    value = draft.get(key)
    if value is None:
        return 1
    if value < least or value > draft.world:
        draft.refuse(key, f"there are {draft.world} ranks", "a number from 1 to that of the ranks")
        return 1
    if value <= 1:
        draft.say(key, "equivalent", "nothing is divided")
        return 1
    note = 'with context_attention = "heads", as Ulysses does it' if dim == "cp" else ""
    draft.say(key, "applied", f"mesh.{dim} = {int(value)}{f', {note}' if note else ''}")
    if dim == "cp":
        draft.fields["context_attention"] = "heads"
        draft.origins["context_attention"] = key
    draft.origins[f"mesh.{dim}"] = key
    return int(value)


def _tensor_parallel(draft: Draft) -> int:
    keys = ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size")
    sizes = [_divided(draft, key, "tp") for key in keys]
    if min(sizes) > 1 and sizes[0] != sizes[1]:
        draft.refuse(keys[1], f"{keys[0]} is {sizes[0]}", "give one of them")
    return max(sizes)


def _stages(draft: Draft) -> int:
    stages = 1
    if draft.get("pipeline.stages") == "auto":
        draft.say(
            "pipeline.stages", "no effect here", "the number of stages is the model's, or pipeline_parallel.pp_size"
        )
    elif draft.get("pipeline.stages") is not None:
        if type(draft.get("pipeline.stages")) is not int:
            draft.refuse("pipeline.stages", "it is not a whole number", 'a number of ranks, or "auto"')
        else:
            stages = _divided(draft, "pipeline.stages", "pp", least=1)
    asked = draft.get("pipeline_parallel.enabled", draft.get("pipeline_parallel") is not None)
    if draft.get("pipeline_parallel.enabled"):
        draft.say("pipeline_parallel.enabled", "applied", "see pp_size")
    if not asked:
        for name in ("enabled", "pp_size", "micro_batches"):
            if draft.get(f"pipeline_parallel.{name}") is not None:
                draft.say(f"pipeline_parallel.{name}", "equivalent", "no pipeline is asked for")
        return stages
    if draft.get("pipeline_parallel.pp_size") is None:
        if not draft.is_refused("pipeline_parallel.pp_size"):
            draft.refuse(
                "pipeline_parallel.enabled", "pp_size is missing", 'say how many stages there are: "pp_size": 2'
            )
        return stages
    size = _divided(draft, "pipeline_parallel.pp_size", "pp", least=1)
    if min(size, stages) > 1 and size != stages:
        draft.refuse("pipeline_parallel.pp_size", f"pipeline.stages is {stages}", "give one of them")
    return max(size, stages)


# -- the batch --------------------------------------------------------------------------------------------------------------
def _batch(draft: Draft) -> None:
    """Set the micro-batches of a step, from any two of: rows of a step, rows of a micro-batch, micro-batches.

    Rows of a step = rows of a micro-batch * micro-batches * data-parallel ranks.
    """
    mesh = draft.fields.get("mesh")
    if mesh is None or draft.get("elasticity.enabled"):
        return
    ranks = mesh.get("replicate", 1) * mesh["dp"]
    asked = draft.get("pipeline_parallel.enabled", True)
    staged = "pipeline_parallel.micro_batches" if asked else None
    staged = staged if staged and draft.get(staged) is not None else None
    for key in (BATCH, ROWS, PARTS, *([staged] if staged else [])):
        value = draft.get(key)
        if value not in (None, "auto") and value < 1:
            draft.refuse(key, f"{value} is no number of them", "a whole number from 1")
    if any(draft.is_refused(key) for key in (BATCH, ROWS, PARTS, *([staged] if staged else []))):
        return
    total = draft.get(BATCH) if draft.get(BATCH) != "auto" else None
    rows, parts = draft.get(ROWS), draft.get(PARTS)
    if staged:
        if parts is not None and parts != draft.get(staged):
            draft.refuse(staged, f"{PARTS} is {parts}, and both are the micro-batches of a step", "give one of them")
            return
        parts = draft.get(staged)
    if total is not None and rows is not None and parts is not None and total != rows * parts * ranks:
        draft.refuse(
            BATCH,
            f"{ROWS} * {PARTS} * {ranks} data-parallel ranks is {rows * parts * ranks}",
            "give two of the three, and leave the other out",
        )
        return
    if total is not None:
        parts = parts or (total // (rows * ranks) if rows else 1)
        each = ranks * parts * (rows or 1)
        if not parts or total % each:
            why = f"{total} rows can't be divided over {ranks} ranks and their micro-batches"
            draft.refuse(BATCH, why, f"a multiple of {each or ranks * (rows or 1)}")
            return
        rows = rows or total // (ranks * parts)
    elif rows is None and parts is not None and draft.get(PARTS) is not None:
        draft.refuse(PARTS, "how many rows a micro-batch has can't be told", f"give {ROWS} as well")
        return
    parts = parts or 1
    note = (
        f"a step is {rows * parts} rows on each of {ranks} data-parallel ranks"
        if rows
        else f"on {ranks} data-parallel ranks"
    )
    for key in (BATCH, ROWS):
        if draft.get(key) is not None:
            draft.say(key, "applied", note)
    name = PARTS if draft.get(PARTS) is not None else staged
    if name or parts > 1:
        draft.apply(name or BATCH, "micro_batches", int(parts), note)
    if staged:
        draft.say(staged, "applied", f"micro_batches = {int(parts)}: {note}")


def _elasticity(draft: Draft) -> None:
    section = draft.get("elasticity")
    if section is None or any(draft.is_refused(f"elasticity.{k}") for k in section):
        return
    if not section.get("enabled"):
        for key in section:
            draft.say(f"elasticity.{key}", "equivalent", "no elastic run is asked for")
        return
    batch = [key for key in (BATCH, ROWS, PARTS) if draft.get(key) is not None]
    if batch and not section.get("ignore_non_elastic_batch_info"):
        draft.refuse(batch[0], "the section elasticity says how large a batch is", "leave it out")
        return
    for key in batch:
        draft.say(key, "no effect here", "elasticity.ignore_non_elastic_batch_info leaves it out")
    draft.say("elasticity.enabled", "applied", "the section says how large a batch is")
    try:
        fields = elastic(section)["elastic"]
    except PlanError as error:
        draft.refuse(error.where or "elasticity.enabled", error.what, error.hint or error.why or "another value")
        return
    for key in section:
        draft.apply(f"elasticity.{key}", "elastic", fields)
    if "mesh" in draft.fields:
        draft.fields["mesh"]["dp"] = -1  # (as many as there are)


# -- precision --------------------------------------------------------------------------------------------------------------
def _precision(draft: Draft) -> None:
    """Set the precision: DeepSpeed casts the model itself to bf16 or fp16, and keeps fp32 master weights."""
    low = [name for name in ("bf16", "fp16") if draft.get(f"{name}.enabled")]
    for name in ("bf16", "fp16"):
        if name not in low:
            for key in draft.get(name, {}):
                if (known := KEYS.get(f"{name}.{key}")) is not None and known.verdict == "applied":
                    draft.say(f"{name}.{key}", "equivalent", f"{name} is not enabled")
    if len(low) > 1:
        draft.refuse("fp16.enabled", "bf16 is enabled as well", "enable one of them")
        return
    name = low[0] if low else "fp32"
    changes: dict[str, Any] = {}
    if name == "fp16":
        _loss_scale(draft, changes)
        if (cast := draft.get("fp16.auto_cast")) is not None:
            changes["cast_inputs"] = cast
            draft.say("fp16.auto_cast", "applied", f"precision.cast_inputs = {str(cast).lower()}")
    if name == "bf16":
        _bf16(draft, changes)
    _dtypes(draft, changes, name)
    if changes and draft.get("optimizer") is None:
        changes["accumulate"] = None  # (a record may name a dtype of sums only for the plan's optimizer)
    try:
        record = (preset(name, "deepspeed") if low else Precision()).model_copy(update=changes)
    except PlanError as error:
        key = _SCALING.get((error.where or "").split(".")[-1], f"{name}.enabled")
        draft.refuse(key, error.what, error.hint or error.why or "another value")
        return
    if low:
        how = f'{name} with numerics "deepspeed": weights, gradients and their reduction in {name}, fp32 master weights'
        if record == preset(name, "deepspeed"):
            draft.fields |= {"precision": name, "numerics": "deepspeed"}
            draft.origins |= {"precision": f"{name}.enabled", "numerics": f"{name}.enabled"}
            draft.say(f"{name}.enabled", "applied", f'precision = "{name}", numerics = "deepspeed": {how}')
        else:
            draft.apply(f"{name}.enabled", "precision", record, how)
            draft.say(f"{name}.enabled", "applied", f"precision = a record: {how}")
    elif changes:
        draft.fields["precision"] = record
        named = {"accumulate": "data_types.grad_accum_dtype", "buffer": "data_types.buffer_dtype"}
        draft.origins["precision"] = named.get(next(iter(changes)), "communication_data_type")


_SCALING = {
    "static": "fp16.loss_scale",
    "initial_scale_power": "fp16.initial_scale_power",
    "loss_scale_window": "fp16.loss_scale_window",
    "hysteresis": "fp16.hysteresis",
    "consecutive_hysteresis": "fp16.consecutive_hysteresis",
    "min_loss_scale": "fp16.min_loss_scale",
}


def _loss_scale(draft: Draft, changes: dict[str, Any]) -> None:
    scale: dict[str, Any] = {}
    plain = draft.get("zero_optimization.stage", 0) == 0
    if plain:  # (DeepSpeed's loss scaling without ZeRO has other rules)
        scale |= {"hysteresis": 1, "ends_at_minimum": False}
        draft.origins |= {f"precision.loss_scale.{name}": "fp16.enabled" for name in scale}
    for name, key in _SCALING.items():
        value = draft.get(key)
        if value is None:
            continue
        if name == "static" and value == 0:
            draft.say(key, "applied", "the loss scale follows overflows")
            continue
        if plain and "hysteresis" in name:
            draft.say(key, "no effect here", "at stage 0 DeepSpeed's loss scale is halved by each overflow")
            continue
        whole = name not in ("static", "min_loss_scale", "consecutive_hysteresis")
        scale[name] = int(value) if whole else value if isinstance(value, bool) else float(value)
        draft.say(key, "applied", f"precision.loss_scale.{name} = {scale[name]}")
        draft.origins[f"precision.loss_scale.{name}"] = key
    if scale:
        changes["loss_scale"] = scale


def _bf16(draft: Draft, changes: dict[str, Any]) -> None:
    key = "bf16.check_grad_overflow"
    checks = draft.get(key, True)
    if draft.get("optimizer") is None:
        draft.say(key, "no effect here", "there is no optimizer, so nothing is updated")
    elif draft.fields.get("mesh", {}).get("pp", 1) > 1 and draft.get(key) is None:
        draft.say(key, "no effect here", "a pipeline's steps are not looked at: one that is not finite updates as well")
    elif checks:
        draft.apply(
            key, "on_nonfinite", "skip", "a step whose gradients are not finite updates nothing, as DeepSpeed has it"
        )
    else:
        draft.say(key, "applied", 'on_nonfinite = "ignore"')
    if draft.get("bf16.bf16_optimizer_states") is not None:
        stored = "bfloat16" if draft.get("bf16.bf16_optimizer_states") else "float32"
        changes["optimizer_state"] = stored
        draft.say("bf16.bf16_optimizer_states", "applied", f'precision.optimizer_state = "{stored}"')


def _steps_in_fp32(draft: Draft) -> None:
    """Set what ZeRO's optimizers do in fp32 with gradients that are not finite. (Without ZeRO they update.)"""
    key = "zero_optimization.compute_grad_norm"
    low = draft.get("bf16.enabled") or draft.get("fp16.enabled")
    whole = "local_steps" not in draft.fields and draft.fields.get("mesh", {}).get("pp", 1) == 1
    if low or not whole or not draft.get("zero_optimization.stage", 0) or draft.get("optimizer") is None:
        return
    if draft.get(key, True):
        said = "with ZeRO, a step whose gradients are not finite updates nothing in fp32 either, as DeepSpeed has it"
        draft.apply(key, "on_nonfinite", "skip", said)
    else:
        draft.say(key, "applied", 'on_nonfinite = "ignore"')


def _dtypes(draft: Draft, changes: dict[str, Any], name: str) -> None:
    """Set the dtype in which gradients are reduced, and the other dtypes that have keys of their own."""
    for key in ("compress_communication", "zero_optimization.compress_communication"):
        if draft.get(key):
            changes["reduce"] = {"fp16": "float16"}.get(name, "bfloat16")
            draft.say(
                key, "applied", f'precision.reduce = "{changes["reduce"]}": gradients are reduced in half as many bytes'
            )
        elif draft.get(key) is not None:
            draft.say(key, "equivalent", "it asks for nothing")
    names = {
        "communication_data_type": "reduce",
        "data_types.buffer_dtype": "buffer",
        "data_types.grad_accum_dtype": "accumulate",
    }
    for key, field in names.items():
        value = draft.get(key)
        if value is None:
            continue
        dtype = DTYPES.get(value.lower())
        if dtype is None:
            draft.refuse(key, f"{value!r} is no dtype", '"fp32", "fp16" or "bf16"')
        elif field == "accumulate":
            _accumulation(draft, changes, dtype)
        else:
            changes[field] = dtype
            draft.say(key, "applied", f'precision.{field} = "{dtype}"')
    fp32_modules = draft.get("data_types.keep_in_fp32_modules")
    if fp32_modules is not None and not all(isinstance(name, str) for name in fp32_modules):
        draft.refuse(
            "data_types.keep_in_fp32_modules", f"{short(fp32_modules)} has more than texts", "names of modules"
        )
    elif fp32_modules is not None:
        changes["keep_fp32"] = tuple(f"*{name}*" for name in fp32_modules)
        draft.say("data_types.keep_in_fp32_modules", "applied", f"precision.keep_fp32 = {list(changes['keep_fp32'])}")


def _accumulation(draft: Draft, changes: dict[str, Any], dtype: str) -> None:
    """Set the dtype in which micro-batches' gradients are added up: the model's, unless the configuration asks for
    another."""
    key = "data_types.grad_accum_dtype"
    if draft.get("optimizer") is None:
        draft.say(key, "no effect here", "there is no optimizer, so nothing is updated")
    elif dtype == "float32" and not draft.get("bf16.enabled"):
        draft.say(key, "equivalent", "the plan's optimizer accumulates gradients in fp32")
    elif dtype == "float16" or draft.get("fp16.enabled"):
        said = "fp16's gradients are accumulated in fp32, which holds small ones without the loss scale"
        draft.say(key, "no effect here", said)
    else:
        changes["accumulate"] = dtype
        draft.say(key, "applied", f'precision.accumulate = "{dtype}"')


def _clipping(draft: Draft) -> None:
    key = "gradient_clipping"
    given = draft.get(key)
    if draft.is_refused(key):
        return
    norm = 1.0 if given is None else given
    if norm < 0:
        draft.refuse(key, f"{norm} is no norm", "a number above 0, or 0 for none")
    elif norm == 0:
        draft.say(key, "applied", "nothing is clipped")
    else:
        draft.apply(key, "grad_clip", float(norm), "DeepSpeed's default" if given is None else "")


# -- ZeRO -------------------------------------------------------------------------------------------------------------------
# The plan's fields for the section's counts of elements; and the ZeRO stages in which a count has an effect (else stage 3).
_FIELDS = {**SIZES, "stage3_param_persistence_threshold": "param_persistence_threshold"}
_STAGES = {"allgather_bucket_size": (1, 2, 3), "reduce_bucket_size": (0, 1, 2, 3)}


def _zero(draft: Draft) -> None:
    section = "zero_optimization"
    stage = draft.get(f"{section}.stage", 0)
    if stage not in (0, 1, 2, 3):
        draft.refuse(f"{section}.stage", f"there is no stage {stage}", "0, 1, 2 or 3")
        return
    draft.apply(
        f"{section}.stage",
        "zero",
        int(stage),
        "" if draft.get(f"{section}.stage") is not None else "DeepSpeed's default",
    )
    low = draft.get("bf16.enabled") or draft.get("fp16.enabled")
    for name, field in _FIELDS.items():
        key = f"{section}.{name}"
        value = draft.get(key)
        if value is None:
            continue
        if value < 0 or value % 1:
            draft.refuse(key, f"{value} is no number of elements", "a whole number, such as 5e8")
        elif stage not in _STAGES.get(name, (3,)):
            draft.say(key, "no effect here", f"the stage is {int(stage)}")
        elif field == "param_persistence_threshold":
            draft.apply(key, field, int(value))
        else:
            draft.apply(key, field, int(value) * (2 if low else 4), "in bytes")
    if (overlap := draft.get(f"{section}.overlap_comm")) is not None:
        draft.apply(f"{section}.overlap_comm", "prefetch.enabled", overlap)


def _secondary(draft: Draft, stage: int) -> None:
    key = "zero_optimization.zero_hpz_partition_size"
    ranks = draft.get(key)
    if ranks is None:
        return
    if ranks < 1:
        draft.refuse(
            key, f"{ranks} is no number of ranks", "the devices of a node; 1 for no second copy of the weights"
        )
    elif ranks == 1:
        draft.say(key, "equivalent", "it asks for nothing")
    elif stage != 3:
        draft.say(key, "no effect here", "the backward gathers weights again at stage 3 alone")
    else:
        draft.apply(key, "wire.secondary", ranks, "the backward gathers weights within a node")


def _wire(draft: Draft) -> None:
    """Set the fields for ZeRO++: quantized weights and gradients on the wire, and a second copy of the weights in
    each node."""
    stage = draft.get("zero_optimization.stage", 0)
    _secondary(draft, stage)
    for name, field, format, what in (
        ("zero_quantized_weights", "gather", "int8", "weights are gathered in 8 bits"),
        ("zero_quantized_gradients", "reduce", "int4", "gradients are sent in 4 bits, and added up in float32"),
    ):
        key = f"zero_optimization.{name}"
        asked = draft.get(key)
        if asked is None:
            continue
        if not asked:
            draft.say(key, "equivalent", "it asks for nothing")
        elif stage != 3:
            draft.say(key, "no effect here", f"DeepSpeed has it at stage 3; a plan has wire.{field} at any")
        else:
            draft.apply(key, f"wire.{field}", format, what)


def _offload(draft: Draft) -> None:
    zero = "zero_optimization"
    stage = draft.get(f"{zero}.stage", 0)
    for old, name in (("cpu_offload", "optimizer"), ("cpu_offload_param", "parameters")):
        if draft.get(f"{zero}.{old}") is not None:
            present = "offload_optimizer" if name == "optimizer" else "offload_param"
            if draft.get(f"{zero}.{present}") is not None:
                draft.refuse(f"{zero}.{old}", f"{present} says it as well", "leave it out")
                continue
            place = "cpu" if draft.get(f"{zero}.{old}") else "none"
            draft.apply(f"{zero}.{old}", f"offload.{name}", place)
    for section, name in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        _place(draft, f"{zero}.{section}", f"offload.{name}", stage)
    size = draft.get(f"{zero}.sub_group_size")
    if size is not None:
        if size < 1 or size % 1:
            draft.refuse(f"{zero}.sub_group_size", f"{size} is no number of elements", "a whole number, such as 1e9")
        elif draft.fields.get("offload", {}).get("optimizer", "none") != "none":
            draft.apply(
                f"{zero}.sub_group_size",
                "offload.sub_group_bytes",
                int(size) * UPDATED,
                f"in bytes, {UPDATED} an element",
            )
        else:
            draft.say(f"{zero}.sub_group_size", "no effect here", "the optimizer is not offloaded")
    for name, field in (("activation", "activations"), ("opt_states", "optimizer"), ("parameters", "parameters")):
        if draft.get(f"compile.offload_{name}"):
            draft.apply(f"compile.offload_{name}", f"offload.{field}", "cpu")
        elif draft.get(f"compile.offload_{name}") is not None:
            draft.say(f"compile.offload_{name}", "equivalent", "it asks for nothing")


def _place(draft: Draft, section: str, field: str, stage: int) -> None:
    """Set where values are stored, from a section with "device" and "nvme_path"."""
    given = draft.get(section)
    if given is None or any(draft.is_refused(f"{section}.{k}") for k in given):
        return
    device, path = given.get("device", "none"), given.get("nvme_path")
    least = 3 if field == "offload.parameters" else 1
    if device not in ("none", "cpu", "nvme"):
        draft.refuse(f"{section}.device", f"{device!r} is no place", '"none", "cpu" or "nvme"')
    elif device == "nvme" and not path:
        draft.refuse(f"{section}.device", "nvme_path is missing", 'say where the disk is: "nvme_path": "/local_nvme"')
    elif device != "none" and stage < least:
        draft.refuse(f"{section}.device", f"the stage is {int(stage)}", f"stage {least}{'' if least == 3 else ' to 3'}")
    elif device == "none":
        draft.say(f"{section}.device", "equivalent", "nothing is offloaded")
    elif field == "offload.optimizer" and draft.get("optimizer") is None:
        draft.say(
            f"{section}.device", "no effect here", "there is no optimizer: one that initialize is given is offloaded"
        )
    else:
        draft.apply(f"{section}.device", field, f"nvme:{path}" if device == "nvme" else device)
    if path is not None:
        used = device == "nvme"
        draft.say(
            f"{section}.nvme_path",
            "applied" if used else "no effect here",
            f"{field}: see device" if used else f"the device is {device}",
        )
    if (ratio := given.get("ratio")) is not None:
        if device == "none":
            draft.say(f"{section}.ratio", "no effect here", "nothing is offloaded")
        elif not 0 <= ratio <= 1:
            draft.refuse(f"{section}.ratio", f"{ratio} is no share", "a number from 0 to 1")
        else:
            draft.apply(f"{section}.ratio", "offload.ratio", float(ratio))


# -- the rest ---------------------------------------------------------------------------------------------------------------
_PARTITIONS = {"best": "time", "parameters": "parameters", "uniform": "uniform", "time": "time"}


def _rest(draft: Draft) -> None:
    validation = draft.get("checkpoint.tag_validation")
    if validation is not None and validation.lower() not in ("ignore", "warn", "fail"):
        draft.refuse("checkpoint.tag_validation", f"{validation!r} is no way of it", '"Ignore", "Warn" or "Fail"')
    elif validation is not None:
        draft.say("checkpoint.tag_validation", "equivalent", "ranks that save by different tags are refused")
    for field, value in (draft.get("zgraph") or {}).items():
        other = draft.given_for(field)
        if other is not None and draft.fields.get(field) != value:
            draft.refuse(f"zgraph.{field}", f"{other} says what it is", "give one of them")
        else:
            draft.apply(f"zgraph.{field}", field, value)
    level = draft.get("log_level")
    if level is not None and level.lower() not in LOG_LEVELS:
        draft.refuse("log_level", f"{level!r} is no level", '"debug", "info", "warning", "error" or "critical"')
    pipelined = draft.fields.get("mesh", {}).get("pp", 1) > 1
    partition = draft.get("pipeline.partition")
    if partition is not None and not pipelined:
        draft.say("pipeline.partition", "no effect here", "there is one stage")
    elif partition is not None:
        if partition.lower().startswith("type:"):
            draft.apply("pipeline.partition", "partition", partition)
        elif partition.lower() in _PARTITIONS:
            draft.apply("pipeline.partition", "partition", _PARTITIONS[partition.lower()])
        else:
            draft.refuse(
                "pipeline.partition",
                f"{partition!r} is no way of cutting a model",
                '"parameters", "uniform" or "type:REGEX"',
            )
    interval = draft.get("pipeline.activation_checkpoint_interval")
    if interval is not None and interval < 0:
        draft.refuse(
            "pipeline.activation_checkpoint_interval", f"{interval} is no number of layers", "1 or more; 0 for none"
        )
    elif interval:
        draft.apply("pipeline.activation_checkpoint_interval", "recompute", "full", "all but each layer's inputs")
    elif interval is not None:
        draft.say("pipeline.activation_checkpoint_interval", "equivalent", "nothing is computed again")
    parts = draft.get("activation_checkpointing.partition_activations")
    if parts is not None:
        if parts and draft.fields.get("mesh", {}).get("tp", 1) == 1:
            draft.say(
                "activation_checkpointing.partition_activations",
                "no effect here",
                "no ranks divide the model's weights",
            )
        else:
            draft.apply("activation_checkpointing.partition_activations", "partition_activations", parts)
    away = draft.get("activation_checkpointing.cpu_checkpointing")
    if away is not None:
        draft.apply("activation_checkpointing.cpu_checkpointing", "offload.activations", "cpu" if away else "none")
