"""Where what is offloaded lies: the host's memory, files on NVMe."""
