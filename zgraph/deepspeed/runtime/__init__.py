"""DeepSpeed's places of what is called `deepspeed.runtime`."""
