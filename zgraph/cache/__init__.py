"""What was compiled, kept for later processes: the store, and what its entries depend on."""
