"""The cache of compiled programs for later processes: the store, and the conditions that its entries depend on."""
