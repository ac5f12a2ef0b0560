"""Passes that divide a program among the ranks of a mesh dimension: tensor and context parallelism."""
