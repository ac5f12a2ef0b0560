"""Passes that decide when transfers start and end."""
