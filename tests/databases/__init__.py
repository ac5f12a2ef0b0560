"""PyTorch's own databases of modules and operators, run by zgraph and held against plain PyTorch.

python -m tests.databases --backend eager                      every module and operator, some samples of each
python -m tests.databases --only softmax --samples 20          those whose name has "softmax"
python -m tests.databases --write docs/databases.md            the table, of what has been run so far
"""
