"""The DeepSpeed section of a file of `accelerate config`: made into a DeepSpeed configuration, which is translated as any other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zgraph import deepspeed
from zgraph.deepspeed.plan_draft import Draft
from zgraph.deepspeed.read_config import read
from zgraph.deepspeed.report import Report, Row
from zgraph.errors import PlanError
from zgraph.hf.accelerate_config.mesh import parallel_key, sizes_of
from zgraph.hf.accelerate_config.precision import asked_precision

_SECTION = "deepspeed_config"
_PARTS = "gradient_accumulation_steps"
# DeepSpeed's keys for those of the section.
_NAMES = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "gradient_clipping": "gradient_clipping",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
_START = (
    "start ranks with torchrun, zgraph launch, or accelerate launch --multi_gpu: by this file it would run DeepSpeed"
)
_OF_TRAIN_STEP = "of train_step; in a loop of one's own accelerator.accumulate(model) does it"
_NO_OPTIMIZER = (
    'a plan offloads the states of its own optimizer, and the file has none: with optimizer = {name = "AdamW"} in the plan '
    'say offload = {optimizer = "cpu"}'
)


def read_deepspeed(draft: Draft, folder: Path, model: Any) -> None:
    """Set the plan's fields for the section `deepspeed_config`. `folder`: that of accelerate's file."""
    draft.say("distributed_type", "applied", f"the plan divides the weights, by deepspeed_config; {_START}")
    file = draft.get(f"{_SECTION}.deepspeed_config_file", "none")
    if file == "none":
        _of_keys(draft)
    else:
        _of_file(draft, folder, file, model)


# -- keys of the section ----------------------------------------------------------------------------------------------------
def _of_keys(draft: Draft) -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 2}}  # (accelerate's default)
    for own, name in _NAMES.items():
        value = draft.get(f"{_SECTION}.{own}")
        if value is None:
            continue
        if own.endswith("nvme_path") and str(value).lower() == "none":
            draft.say(f"{_SECTION}.{own}", "equivalent", "it asks for nothing")
            continue
        *outer, last = name.split(".")
        table = config
        for part in outer:
            table = table.setdefault(part, {})
        table[last] = value
    key, precision = asked_precision(draft)
    if precision != "no":
        config[precision] = {"enabled": True, **({"auto_cast": True} if precision == "fp16" else {})}
    elif draft.get(key) is not None:
        draft.say(key, "equivalent", "a plan computes in the model's own dtypes")
    _divide(draft, config)
    report = deepspeed.report(config, world=draft.world)
    keys = {name: f"{_SECTION}.{own}" for own, name in _NAMES.items()}
    keys |= {f"{precision}.enabled": key, "sequence_parallel_size": parallel_key("sp")}
    _take(draft, report, keys)
    offload = f"{_SECTION}.offload_optimizer_device"
    if str(draft.get(offload, "none")).lower() != "none" and not draft.is_refused(offload):
        draft.say(offload, "no effect here", _NO_OPTIMIZER)
    _accumulate(draft, f"{_SECTION}.{_PARTS}")
    if draft.get(f"{_SECTION}.deepspeed_config_file") is not None:
        draft.say(f"{_SECTION}.deepspeed_config_file", "equivalent", "there is no file")


def _divide(draft: Draft, config: dict[str, Any]) -> None:
    """Add what parallelism_config says to a configuration: accelerate has sequence parallelism with DeepSpeed."""
    if not draft.get("parallelism_config"):
        return
    sizes = sizes_of(draft)
    if sizes is None:
        return
    for name, size in sizes.items():
        if name in ("tp", "cp") and size > 1:
            draft.refuse(
                parallel_key(name), "accelerate has it with FSDP 2 alone", "distributed_type: FSDP; or a plan's mesh"
            )
        elif draft.get(parallel_key(name)) is not None:
            draft.say(parallel_key(name), "equivalent" if size == 1 else "applied", "these ranks are of mesh.dp")
    if sizes["sp"] > 1:
        config["sequence_parallel_size"] = sizes["sp"]


def _take(draft: Draft, report: Report, keys: Mapping[str, str]) -> None:
    """Take over the verdicts on keys of a DeepSpeed configuration by their names in accelerate's file, and the plan's fields."""
    for row in report.rows:
        key = keys.get(row.key)
        if key is not None:
            if not draft.is_refused(key):
                draft.say(key, row.verdict, row.said, row.hint)
        elif row.verdict == "refused":
            draft.refuse(_SECTION, f"{row.key}: {row.said}", row.hint)
    if report.plan is not None:
        draft.fields |= {name: getattr(report.plan, name) for name in report.plan.model_fields_set}


def _accumulate(draft: Draft, key: str) -> None:
    parts = draft.get(key)
    if parts is None:
        return
    if parts < 1:
        draft.refuse(key, f"{parts} is no number of micro-batches", "1 or more")
    elif parts == 1:
        draft.say(key, "equivalent", "a step is one micro-batch")
    else:
        draft.apply(key, "micro_batches", int(parts), _OF_TRAIN_STEP)


# -- a DeepSpeed file -------------------------------------------------------------------------------------------------------
_ROWS, _BATCH, _SAVE = "train_micro_batch_size_per_gpu", "train_batch_size", "stage3_gather_16bit_weights_on_model_save"


def _of_file(draft: Draft, folder: Path, name: str, model: Any) -> None:
    """Translate the DeepSpeed file that the section names, as accelerate fills it."""
    key = f"{_SECTION}.deepspeed_config_file"
    path = Path(name) if Path(name).is_file() else folder / name
    try:
        config = read(path)
    except PlanError as error:
        draft.refuse(key, "; ".join(filter(None, (error.what, error.why))), error.hint or "the path of a JSON file")
        return
    draft.say(key, "applied", f"read from {path}: its keys follow")
    _refuse_twice(draft)
    if "zero_optimization" not in config:
        draft.refuse(key, "accelerate takes no file without zero_optimization", '"zero_optimization": {"stage": 0}')
        return
    section = config["zero_optimization"]
    if isinstance(section, dict) and section.get(_SAVE) == "auto":
        section[_SAVE] = False
    rows = _taken_out(draft, config)
    _divide(draft, config)
    report = deepspeed.report(config, world=draft.world, model=model, arguments={"max_grad_norm": 1.0})
    if report.plan is not None:
        draft.fields = {field: getattr(report.plan, field) for field in report.plan.model_fields_set} | draft.fields
    for row in (*report.rows, *rows):
        own = parallel_key("sp") if row.key == "sequence_parallel_size" else f"{path.name}: {row.key}"
        draft.rows[own] = replace(row, key=own)


def _taken_out(draft: Draft, config: dict[str, Any]) -> list[Row]:
    """Take keys out of a configuration whose "auto" accelerate fills from a loader, and the micro-batches of a step where it
    does not say their rows; return the verdicts on them."""
    rows = []
    for key in (_ROWS, _BATCH):
        if config.get(key) == "auto":
            rows.append(Row(key, config.pop(key), "no effect here", "accelerate takes it from the loader"))
    parts = config.get(_PARTS)
    if _ROWS in config or _BATCH in config or not (parts == "auto" or (type(parts) is int and parts > 0)):
        return rows
    if parts == "auto":
        said = "the Accelerator's argument, or TrainingArguments', says it"
        rows.append(Row(_PARTS, config.pop(_PARTS), "no effect here", said))
    else:
        draft.fields["micro_batches"] = parts
        rows.append(Row(_PARTS, config.pop(_PARTS), "applied", f"micro_batches = {parts}: {_OF_TRAIN_STEP}"))
    return rows


def _refuse_twice(draft: Draft) -> None:
    """Refuse keys that belong into the DeepSpeed file, as accelerate does."""
    owned = [f"{_SECTION}.{own}" for own in (*_NAMES, _PARTS) if draft.get(f"{_SECTION}.{own}") is not None]
    key, precision = asked_precision(draft)
    if precision != "no":
        owned.append(key)
    elif draft.get(key) is not None:
        draft.say(key, "no effect here", "the DeepSpeed file says it")
    for name in owned:
        draft.refuse(name, "accelerate does not take it beside a DeepSpeed file, which says it", "leave it out here")
