"""A target from transformers: the model of a config.json on the meta device, and a batch that it can take."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from zgraph.errors import TargetError

DEFAULT_BATCH = "1x512"


def load(folder: str, batch: str | None) -> tuple[Any, dict[str, Any]]:
    """(the model of `folder`/config.json, without weights; its inputs, with labels where it takes some). `batch` is "rows" or
    "rows x tokens". Nothing is fetched, and no code of the folder is run. Raises `TargetError`."""
    rows, length = _batch(batch or DEFAULT_BATCH)
    where = f"target 'hf:{folder}'"
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise TargetError("there is no config.json", where=where, hint="name the folder that has one")
    try:
        import transformers
    except ImportError as error:
        raise TargetError("transformers is not installed", where=where, hint="pip install transformers") from error
    import torch

    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        config.use_cache = False
        names = [n for n in getattr(config, "architectures", None) or () if hasattr(transformers, n)]
        with torch.device("meta"):
            made = (
                getattr(transformers, names[0])(config)
                if names
                else transformers.AutoModelForCausalLM.from_config(config)
            )
    except Exception as error:
        raise TargetError(
            "the config makes no model", where=f"{path / 'config.json'}", why=f"{type(error).__name__}: {error}"
        ) from error
    return made.train(), _inputs(made, config, rows, length)


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


def _batch(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if found is None or int(found[1]) < 1 or (found[2] is not None and int(found[2]) < 1):
        raise TargetError(f"{text!r} is no batch", where="--batch", hint="rows, or rows x tokens: 4x512")
    return int(found[1]), int(found[2] or DEFAULT_BATCH.split("x")[1])
