"""What `benchmarks/overlap.py` stands on: a modelled link, a count of memory, a model, and those that train it."""
