"""`wire_bytes.py RANK RANKS STORE OPTIONS`: bytes that a rank sends in a step, as the link's backend (`benchmarks/link`) counts them.

OPTIONS is a JSON list of plans' fields. Rank 0 prints one line of JSON: the bytes of the third step with each.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType

import torch
import torch.distributed as dist
from padded_rows import PaddedRows

import zgraph

PLAN = {
    "mesh": {"dp": -1},
    "zero": 3,
    "backend": "eager",
    "optimizer": zgraph.SGD(lr=0.1),
    "prefetch": {"across_steps": False},  # (a gather for the next step would be of both)
}


def model_of_rows() -> PaddedRows:
    return PaddedRows(256, 256, 251)


def sent(zlink: ModuleType, fields: dict) -> int:
    """What this rank sends in a step, votes of the first ones aside."""
    plan = zgraph.Plan(**PLAN, **fields)
    model = zgraph.compile(model_of_rows(), plan)
    for _ in range(3):
        dist.barrier()
        zlink.stats(reset=True)
        model.zgraph.train_step(torch.ones(4, 256))
    return int(zlink.stats()[1])


if __name__ == "__main__":
    rank, ranks, store, options = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    torch.set_num_threads(1)
    from link import zlink

    dist.init_process_group("zlink", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = [sent(zlink, fields) for fields in options]
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
