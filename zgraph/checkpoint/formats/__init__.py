"""Checkpoints of other systems, as sources."""
