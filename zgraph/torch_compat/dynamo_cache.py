"""State that dynamo keeps of the code it has traced, kept apart from a capture."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import pgo
from torch._dynamo.code_context import code_context
from torch._dynamo.mutation_guard import GenerationTracker
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.utils import ExactWeakKeyDictionary

# (owner, attribute, what makes its initial value). A capture calls dynamo's tracer directly: it neither looks up
# compiled code nor adds any, and counts towards no limit of recompilations. Besides that cache, this is the state that
# one trace leaves to the next.
_MEMORY: tuple[tuple[Any, str, Callable[[], Any]], ...] = (
    # By code object: which sizes and numbers have changed between calls; and the same, as it was read from a file.
    (pgo, "_CODE_STATE", lambda: defaultdict(pgo.CodeState)),
    (pgo, "_INIT_CODE_STATE", lambda: None),
    # By symbol ("zf0"), for every model: which floats have to be constants.
    (TensorifyState, "force_specializations", set),
    # By code object: the graph module whose forward it is.
    (code_context, "code_context", ExactWeakKeyDictionary),
    # Classes whose modules were changed while they were traced.
    (GenerationTracker, "dynamic_classes", ExactWeakKeyDictionary),
)


@contextlib.contextmanager
def fresh_dynamo_cache() -> Iterator[None]:
    """Trace as in a process that has traced nothing, and leave torch.compile's state as it was."""
    theirs = [(owner, name, getattr(owner, name)) for owner, name, _ in _MEMORY]
    hooks_traced = torch._C._autograd._saved_tensors_hooks_set_tracing(False)  # type: ignore[attr-defined]
    for owner, name, fresh in _MEMORY:
        setattr(owner, name, fresh())
    try:
        yield
    finally:
        for owner, name, value in theirs:
            setattr(owner, name, value)
        torch._C._autograd._saved_tensors_hooks_set_tracing(hooks_traced)  # type: ignore[attr-defined]
