"""Regions that run in chunks, over slices of their rows."""
