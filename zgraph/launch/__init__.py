"""Start a script on the ranks of several machines, by DeepSpeed's options: torchrun on each, started by ssh, pdsh, srun or mpirun.

Nothing here is a transport of its own: which machines, with which variables and lines, is worked out; who starts them are others. Loads without
torch.
"""
