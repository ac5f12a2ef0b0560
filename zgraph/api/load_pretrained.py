"""Loading a transformers model from its folder into shards: a rank holds only its shards and one tensor at a time."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zgraph.api.compiler import compile
from zgraph.checkpoint.detect_format import open_checkpoint
from zgraph.checkpoint.loading import load
from zgraph.checkpoint.write_pretrained import dtype_of
from zgraph.errors import CheckpointError, ModelError
from zgraph.plan.plan import Plan
from zgraph.torch_compat.private_names import refuse_release


def load_pretrained(
    model: Any,
    folder: str | PathLike[str],
    plan: Plan | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    **options: Any,
) -> Any:
    """Build a transformers model without memory, compile it by a plan, and load each rank's shards from a folder.

    `model`: its class (`LlamaForCausalLM`, `AutoModelForCausalLM`), which then takes the folder's config, or a config.
    `folder`: what `save_pretrained` writes or the Hub has: safetensors in one file or several. `dtype`: the dtype of the
    weights ("bf16", "bfloat16", torch.bfloat16), by default the config's, else that of the files; parts that the model
    keeps in float32 stay so. `options`: those of `zgraph.compile`; with a class also fields of its config (`num_labels=3`).
    Weights that the files lack are initialised by the model's own rules, weights that the model lacks are ignored, and a
    warning names both. The model is in eval mode, as `from_pretrained` leaves it.

    All ranks must call it. A rank reads its rows of each tensor, and holds these and one module's whole weights at a time.
    Raises `CheckpointError` for a folder of another model, or without safetensors, `ModelError` if `model` is not one of
    transformers', and for quantized weights.
    """
    import transformers

    refuse_release("published models")
    refuse_release("loaded models")
    place = Path(folder).absolute()
    own = inspect.signature(compile).parameters.keys() - {"model", "plan"}
    fields = {name: value for name, value in options.items() if name not in own}
    factory, config = _class_and_config(transformers, model, place, fields)
    _refuse_folder(place, config)
    wanted = _dtype(dtype, config, place)
    with torch.device("meta"):
        built = factory(config, dtype=wanted)
    _keep_wide(built, wanted)
    if built.can_generate() and (place / "generation_config.json").is_file():
        built.generation_config = transformers.GenerationConfig.from_pretrained(place)
    built.eval()
    compiled: Any = compile(built, plan, **{name: value for name, value in options.items() if name in own})
    runtime = compiled.zgraph.runtime
    load(runtime, place, None, fallback=False, optimizer=False, client_state=None, partial=True)
    return compiled


def _class_and_config(transformers: Any, model: Any, folder: Path, fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the function that makes the model from a config and a dtype, and the config with these fields. Raises `ModelError`,
    and `CheckpointError` for a folder without a config."""
    if isinstance(model, transformers.PreTrainedConfig):
        _refuse_fields(fields)
        names = model.architectures or []
        known = [getattr(transformers, n) for n in names if hasattr(transformers, n)]
        if not known:
            raise ModelError(
                f"the config names no class of transformers' ({', '.join(names) or 'architectures is empty'})",
                hint="load_pretrained(LlamaForCausalLM, folder, plan), say",
            )
        return known[0]._from_config, model
    if not isinstance(model, type) or not (hasattr(model, "_from_config") or hasattr(model, "from_config")):
        raise ModelError(
            f"{model!r} is no class of transformers', nor a config",
            where="load_pretrained",
            hint="load_pretrained(AutoModelForCausalLM, folder, plan); other models: torch.device('meta'), zgraph.compile, load_checkpoint",
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"the folder {'has no config.json' if folder.is_dir() else 'is not there'}",
            where=str(folder),
            hint="huggingface_hub.snapshot_download(name) gives the folder of a model of the Hub"
            + ("; of an adapter's, load its base model, and compile it with the adapter" if _adapters(folder) else ""),
        )
    model_class: Any = model
    kind = model_class.config_class if hasattr(model_class, "_from_config") else transformers.AutoConfig
    config, rest = kind.from_pretrained(folder, return_unused_kwargs=True, **fields)
    _refuse_fields(rest)
    config.name_or_path = str(folder)
    return getattr(model_class, "_from_config", None) or model_class.from_config, config


def _adapters(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def _refuse_fields(fields: Mapping[str, Any]) -> None:
    """Raise `ModelError` for arguments that neither the config nor `zgraph.compile` has."""
    if fields:
        raise ModelError(
            f"load_pretrained has no argument {next(iter(fields))!r}",
            why="it takes dtype, the arguments of zgraph.compile and, with a class, fields of the folder's config",
            hint="a subfolder is a part of the folder's path; load what from_pretrained alone can with it, and compile that",
        )


def _refuse_folder(folder: Path, config: Any) -> None:
    """Raise `ModelError` for weights that are quantized or belong to an adapter as well, `CheckpointError` for pickled ones."""
    if getattr(config, "quantization_config", None) is not None:
        method = dict(config.quantization_config).get("quant_method", "its config")
        raise ModelError(
            f"the weights are quantized ({method})",
            where=str(folder),
            why="from_pretrained makes layers of them that only their own classes can compute with",
            hint="a folder without quantization; precision and zero=3 of the plan divide what its weights take",
        )
    if _adapters(folder):
        raise ModelError(
            "the folder has an adapter of PEFT's beside the model's weights",
            where=str(folder),
            why="from_pretrained would put it into the model, and load_pretrained reads the weights alone",
            hint="keep the adapter in a folder of its own; or from_pretrained, and compile that model",
        )
    if not any(folder.glob("*.safetensors")) and any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            "the folder's weights are pickled, in pytorch_model.bin",
            where=str(folder),
            why="rows of them can't be read one by one, and a rank reads its own alone",
            hint="once, in one process: AutoModel.from_pretrained(folder).save_pretrained(another), of the model's own class",
        )


def _dtype(given: str | torch.dtype | None, config: Any, folder: Path) -> torch.dtype:
    """Return the dtype of the weights, which `from_pretrained` would choose. Raises `CheckpointError` for a name that is none."""
    named = getattr(torch, given, None) if isinstance(given, str) else None
    wanted = dtype_of(named if isinstance(named, torch.dtype) else None if given == "auto" else given)
    if wanted is not None:
        return wanted
    if config.dtype is not None:
        return config.dtype  # type: ignore[no-any-return]
    floating = (t.dtype for t in open_checkpoint(folder, None).tensors.values() if t.dtype.is_floating_point)
    return next(floating, torch.float32)


def _keep_wide(model: nn.Module, dtype: torch.dtype) -> None:
    """Give what a model keeps in a wider dtype than `dtype` that dtype, as `from_pretrained` does."""
    for pattern, wide in model._get_dtype_plan(dtype).items():  # type: ignore[operator, union-attr]
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and re.search(pattern.replace("*", ".*"), name):
                tensor.data = tensor.data.to(wide)
