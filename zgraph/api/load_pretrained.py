"""Loading a transformers model from its folder into shards: a rank holds only its shards and one tensor at a time."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch

from zgraph.api.compiler import compile
from zgraph.checkpoint.loading import load
from zgraph.errors import ModelError
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
    weights, by default the config's. `options`: those of `zgraph.compile`. Weights that the files lack are initialised by
    the model's own rules, weights that the model lacks are ignored, and a warning names both. The model is in eval mode, as
    `from_pretrained` leaves it.

    All ranks must call it. A rank reads its rows of each tensor, and holds these and one module's whole weights at a time.
    Raises `CheckpointError` for a folder of another model, `ModelError` if `model` is not one of transformers'.
    """
    import transformers

    refuse_release("published models")
    place = Path(folder).absolute()
    factory, config = _class_and_config(transformers, model, place)
    kind = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype or "", None) or config.dtype
    with torch.device("meta"):
        built = factory(config, dtype=kind or torch.float32)
    if built.can_generate() and (place / "generation_config.json").is_file():
        built.generation_config = transformers.GenerationConfig.from_pretrained(place)
    built.eval()
    compiled: Any = compile(built, plan, **options)
    runtime = compiled.zgraph.runtime
    load(runtime, place, None, fallback=False, optimizer=False, client_state=None, partial=True)
    return compiled


def _class_and_config(transformers: Any, model: Any, folder: Path) -> tuple[Any, Any]:
    """Return the function that makes the model from a config and a dtype, and the config. Raises `ModelError`."""
    if isinstance(model, transformers.PreTrainedConfig):
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
    model_class: Any = model
    if hasattr(model_class, "_from_config"):
        return model_class._from_config, model_class.config_class.from_pretrained(folder)
    return model_class.from_config, transformers.AutoConfig.from_pretrained(folder)
