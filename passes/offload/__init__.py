"""Passes that keep values in other memory than the device's, or on disk."""
