"""Passes that compute values again in place of keeping them."""
