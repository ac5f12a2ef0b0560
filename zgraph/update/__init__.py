"""The optimizer step: optimizers' rules, and the program that applies them to the shards."""
