"""DeepSpeed's `profiling`."""
