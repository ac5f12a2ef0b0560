"""What happens between two backward passes: optimizers' rules, and the program that applies them to the shards."""
