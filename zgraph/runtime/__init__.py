"""Runs compiled programs: the calls of a model, its backward, its updates."""
