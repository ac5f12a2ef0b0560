"""Collectives by `deepspeed.comm`, with their times."""

import torch

import zgraph.deepspeed as deepspeed
from zgraph.deepspeed import comm as dist


def main(sizes=(1024, 65536), trials=3, dtype=torch.float32):
    deepspeed.init_distributed()
    dist.configure(enabled=True, prof_all=True)
    sums = []
    for size in sizes:
        for _ in range(trials):
            tensor = torch.ones(size, dtype=dtype) * (dist.get_rank() + 1)
            dist.all_reduce(tensor)
            sums.append(tensor[0].item())
        parts = [torch.empty(4, dtype=dtype) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, torch.full((4,), float(dist.get_rank()), dtype=dtype))
        sums += [part[0].item() for part in parts]
    dist.barrier()
    measured = dist.log_summary(return_dict=True)
    assert measured["summary"]["all_reduce"]
    dist.configure(enabled=False)
    return sums


if __name__ == "__main__":
    print(main())
