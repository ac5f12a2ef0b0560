"""Passes that keep values elsewhere than on the device."""
