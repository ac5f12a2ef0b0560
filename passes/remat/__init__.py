"""Passes that recompute values in place of saving them."""
