"""Passes that simplify a captured program."""
