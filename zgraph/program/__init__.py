"""The program: the data that passes take and change, and everything that only describes it.

Nothing here transforms a graph. `node.py` owns what is known of a node, `program.py` the graph with the roles of
its inputs and outputs, `collectives.py` what a collective means, `ops.py` zgraph's own operators, `printer.py`
how a program is read, and `digest.py` how ranks compare one.
"""

import torch._inductor.lowering  # noqa: F401  (registers Inductor's operators: a program may have them)

from zgraph.program import block_quantization, ops, regions, transfers_to_host  # (register zgraph's own)

__all__ = ["block_quantization", "ops", "regions", "transfers_to_host"]
