"""Pipeline parallelism: a model's stages on several ranks, and the schedule by which micro-batches go through them.

`zgraph.passes` cuts the captured program into one program per stage. This package has what comes after: which rank does
what in which order (a schedule), the time and memory of that (its simulation), and the run time.
"""
