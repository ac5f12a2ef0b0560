"""Measurements of this machine and its links."""
