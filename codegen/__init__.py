"""From a finished program to callables: the split into forward and backward, then eager or Inductor."""

from zgraph.codegen import kernels  # (registers them)

__all__ = ["kernels"]
