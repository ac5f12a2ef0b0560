"""What torch's tracing and compiling depend on besides the program: configuration, modes of this thread, tables that a user can change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

# Settings that add a user's own code to Inductor.
_OWN_CODE = (
    "cudagraph_policy",
    "custom_partitioner_fn",
    "inductor_choices_class",
    "joint_custom_post_pass",
    "joint_custom_pre_pass",
    "post_grad_custom_post_pass",
    "post_grad_custom_pre_pass",
    "pre_grad_custom_pass",
    "_post_fusion_custom_pass",
    "_pre_fusion_custom_pass",
)


class Unknown(Exception):
    """Raised where a setting that compiling depends on can't be written as text."""


def settings() -> dict[str, Any]:
    """Return all settings that compiling depends on, as JSON values: equal settings make equal programs of equal
    graphs.

    Raises `Unknown`, naming the setting, where one is code of the user's own.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    entries: dict[str, Any] = {"modes": _modes()}
    for name, config in (("inductor", inductor_config), ("functorch", functorch_config)):
        values = config.save_config_portable(ignore_private_configs=False)  # type: ignore[attr-defined]
        entries[name] = {key: _text(value, f"{name}.{key}") for key, value in sorted(values.items())}
        for key in _OWN_CODE:  # (torch leaves them out of the configuration that it saves)
            if getattr(config, key, None) is not None:
                raise Unknown(f"{name}.{key} is set")
    entries["tag"] = str(torch.compiler.config.cache_key_tag)  # type: ignore[attr-defined]
    refuse_own_tables()
    return entries


def refuse_own_tables() -> None:
    """Raise `Unknown` if an operator's decomposition or lowering is neither torch's nor zgraph's (whose source is in
    keys)."""
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import lowerings

    for what, table in (("decomposition", decompositions), ("lowering", lowerings)):
        for target, function in table.items():
            if not _is_known(function):
                raise Unknown(f"the {what} of {target} is not torch's own")


def _is_known(function: Any) -> bool:
    """Return whether a function is torch's, or zgraph's (whose source is in each key)."""
    while (inner := getattr(function, "func", None) or getattr(function, "__wrapped__", None)) is not None:
        function = inner
    return str(getattr(function, "__module__", None)).partition(".")[0] in ("torch", "functools", "zgraph")


def _modes() -> dict[str, Any]:
    """Return the process's and this thread's modes that change how operators and their gradients are traced."""
    backends: Any = torch.backends
    devices = ("cpu", "cuda")
    return {
        "autocast": [
            [d, torch.is_autocast_enabled(d), str(torch.get_autocast_dtype(d)), torch.is_autocast_cache_enabled()]
            for d in devices
        ],
        "default": [str(torch.get_default_dtype()), str(torch.get_default_device())],
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        ],
        "products": [
            torch.get_float32_matmul_precision(),
            backends.cuda.matmul.allow_tf32,
            backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            backends.cudnn.allow_tf32,
            backends.cudnn.enabled,
            backends.cudnn.benchmark,
            backends.cudnn.deterministic,
            backends.mkldnn.enabled,
            backends.mkldnn.is_available(),
        ],
        "attention": [
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.cuda.cudnn_sdp_enabled(),
        ],
        "anomaly": torch.is_anomaly_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "threads": torch.get_num_threads(),
    }


def _text(value: Any, where: str) -> Any:
    """Return a setting as JSON, with sets and dicts sorted."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_text(v, where) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(_text(v, where)) for v in value)
    if isinstance(value, dict):
        return _pairs(value.items(), where)
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    raise Unknown(f"{where} is a {type(value).__name__}")


def _pairs(items: Iterable[tuple[Any, Any]], where: str) -> list[list[Any]]:
    return sorted(([str(_text(k, where)), _text(v, where)] for k, v in items), key=lambda pair: str(pair[0]))
