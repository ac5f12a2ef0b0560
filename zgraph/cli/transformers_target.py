"""A target from transformers: the model of a config.json, and a batch for it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from zgraph.errors import TargetError

DEFAULT_BATCH = "1x512"


def load(folder: str, batch: str | None, *, weights: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return the model of `folder`/config.json, and its inputs, with labels if it takes some.

    `batch` is "rows" or "rows x tokens". The model is on the meta device and inputs are zeros; with `weights` both have
    random numbers. Nothing is downloaded, and no code of the folder is run. Raises `TargetError`.
    """
    rows, length = _batch(batch or DEFAULT_BATCH)
    model = _made(Path(folder), f"target 'hf:{folder}'", "cpu" if weights else "meta", use_cache=False)
    inputs = _inputs(model, model.config, rows, length)
    return model.train(), _drawn(inputs, model.config) if weights else inputs


def empty(folder: Path) -> Any:
    """Return the model of a folder's config.json on the meta device, with its generation_config.json if there is
    one. Raises `TargetError`."""
    model = _made(folder, "--config", "meta")
    if (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(str(folder))
    return model


def _made(path: Path, where: str, device: str, **changes: Any) -> Any:
    if not (path / "config.json").is_file():
        raise TargetError("there is no config.json", where=where, hint="name the folder that has one")
    try:
        import transformers
    except ImportError as error:
        raise TargetError("transformers is not installed", where=where, hint="pip install transformers") from error
    import torch

    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        for key, value in changes.items():
            setattr(config, key, value)
        names = [n for n in getattr(config, "architectures", None) or () if hasattr(transformers, n)]
        with torch.device(device), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return (
                getattr(transformers, names[0])(config)
                if names
                else transformers.AutoModelForCausalLM.from_config(config)
            )
    except Exception as error:
        raise TargetError(
            "the config makes no model", where=f"{path / 'config.json'}", why=f"{type(error).__name__}: {error}"
        ) from error


def _inputs(model: Any, config: Any, rows: int, length: int) -> dict[str, Any]:
    import torch

    takes = inspect.signature(model.forward).parameters
    if "pixel_values" in takes and getattr(model, "main_input_name", "") == "pixel_values":
        side = getattr(config, "image_size", 224)
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        inputs = {"pixel_values": torch.zeros(rows, getattr(config, "num_channels", 3), height, width)}
        labels = torch.zeros(rows, dtype=torch.int64)
    else:
        inputs = {"input_ids": torch.zeros(rows, length, dtype=torch.int64)}
        labels = torch.zeros(rows, length, dtype=torch.int64)
        if "SequenceClassification" in type(model).__name__:
            labels = labels[:, 0]
    return {**inputs, "labels": labels} if "labels" in takes else inputs


def _drawn(inputs: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return random inputs of the same shapes, with values that the model can take, and different rows."""
    import torch

    generator = torch.Generator().manual_seed(0)
    words = getattr(config.get_text_config(), "vocab_size", None) or config.num_labels
    random_inputs = {}
    for name, like in inputs.items():
        if like.is_floating_point():
            random_inputs[name] = torch.randn(like.shape, generator=generator)
        else:
            most = words if like.dim() > 1 else config.num_labels
            random_inputs[name] = torch.randint(most, like.shape, generator=generator)
    return random_inputs


def _batch(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if match is None or int(match[1]) < 1 or (match[2] is not None and int(match[2]) < 1):
        raise TargetError(f"{text!r} is no batch", where="--batch", hint="rows, or rows x tokens: 4x512")
    return int(match[1]), int(match[2] or DEFAULT_BATCH.split("x")[1])
