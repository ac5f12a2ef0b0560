"""Start a script on the ranks of several machines, by DeepSpeed's options: torchrun on each, started by ssh, pdsh, srun or mpirun.

This package works out machines, variables and command lines; ssh, pdsh, srun or mpirun then start them. Loads without torch.
"""
