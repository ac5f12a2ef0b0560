"""Where offloaded tensors are stored: the host's memory, files on NVMe."""
