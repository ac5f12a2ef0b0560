"""Checkpoints: what a run can go on from, under any other plan, and what can be told of one that is damaged."""
