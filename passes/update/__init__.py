"""Passes over the program of an update."""
