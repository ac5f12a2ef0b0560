"""Where what is offloaded lies: files on NVMe."""
