"""Passes that send fewer bits."""
