"""Pipeline parallelism: a model's stages on several ranks, and the schedule by which micro-batches go through them.

`zgraph.passes` cuts the captured program into one program per stage. Here is what comes after: which rank does what in which order
(a schedule), what that takes (its simulation), and what runs it.
"""
