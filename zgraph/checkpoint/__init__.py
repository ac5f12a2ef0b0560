"""Checkpoints: saving and loading under any plan, formats of other systems, and checks for damage."""
