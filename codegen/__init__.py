"""From a finished program to callables: the split into forward and backward, then eager or Inductor."""
