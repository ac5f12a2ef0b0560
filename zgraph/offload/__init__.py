"""The places that offloaded tensors are stored in: the host's memory, files on NVMe."""
