"""The methods of DeepSpeed's engine that this one refuses by name, and errors that are `AssertionError`s as in
DeepSpeed."""

from __future__ import annotations

from typing import Any, NoReturn

from zgraph.errors import ModelError, StepError, UnsupportedError


class EngineMisuse(StepError, AssertionError):
    """The error for a call that DeepSpeed rejects by an assertion: `except AssertionError` catches it too."""


class InitializeMisuse(ModelError, AssertionError):
    """The error for arguments of `initialize` that DeepSpeed rejects by an assertion: no model, or a scheduler of
    another optimizer."""


class Unsupported:
    """The methods of an engine that raise `UnsupportedError`."""

    def offload_states(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `UnsupportedError`: a plan sets what is stored on the host, for the whole run."""
        raise _stays("offload_states")

    def reload_states(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `UnsupportedError`; see `offload_states`."""
        raise _stays("reload_states")


def _stays(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"engine.{name}()",
        why="compiled programs know where weights and states are stored, and that does not change between steps",
        hint='"offload_optimizer" and "offload_param" in the configuration; or save a checkpoint, and load it later',
    )
