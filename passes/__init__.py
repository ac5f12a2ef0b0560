"""The graph passes, a file for each, and the code that runs and checks them.

A pass is a function over a `Program` with a declared contract (`contract.py`); `manager.py` runs a pipeline of them,
`verifier/` checks the program after each.
"""

from zgraph.passes.contract import Contract, Pass, PassType, graph_pass
from zgraph.passes.manager import History, PassManager, PassRecord
from zgraph.passes.verifier import verify_program, verify_ranks

__all__ = [
    "Contract",
    "History",
    "Pass",
    "PassManager",
    "PassRecord",
    "PassType",
    "graph_pass",
    "verify_program",
    "verify_ranks",
]
