"""What a script has added to one of DeepSpeed's checkpoints (`client_state`): it stands in the model file, among DeepSpeed's own entries."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zgraph.checkpoint.formats.torchfile import Stored

logger = logging.getLogger(__name__)

_OWN = frozenset(
    (
        *(
            "module",
            "buffer_names",
            "optimizer",
            "param_shapes",
            "frozen_param_shapes",
            "frozen_param_fragments",
            "shared_params",
        ),
        *(
            "lr_scheduler",
            "data_sampler",
            "random_ltd",
            "sparse_tensor_module_names",
            "csr_tensor_module_names",
            "num_experts",
        ),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "loss_scaler"),
        *("checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info"),
    )
)


def client_state(state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the entries of a model file that are not DeepSpeed's own. Objects of classes are left out, with a warning: nothing is constructed."""
    added: dict[str, Any] = {}
    left = []
    for key, value in state.items():
        if key in _OWN:
            continue
        try:
            added[key] = _plain(value)
        except TypeError as error:
            left.append(f"{key} ({error})")
    if left:
        logger.warning(
            "%s: left out of the client state, since they are objects of classes: %s", folder, ", ".join(left)
        )
    return added


def _plain(value: Any) -> Any:
    """Return a value with its tensors read. Raises `TypeError` with the class of an object that is no plain value."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if isinstance(value, Stored):
        return value.read()
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_plain(item) for item in value)
    raise TypeError(getattr(value, "origin", "") or type(value).__name__)
