"""The end of a failure's script; `source.script` takes what is below the line."""

# ruff: noqa: F821
# ----
KIND = RUN_KIND


def load(name):
    import importlib.util
    import sys

    spec = importlib.util.spec_from_file_location(f"{name}_program", __file__)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_rank(rank, world, port):
    import logging
    import os

    logging.getLogger("zgraph").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    verdict = run_pair(load, True, data_rank(PLAN["mesh"], rank))
    print(f"rank {rank}: {verdict.word} {verdict.reason} {verdict.detail}", flush=True)
    dist.barrier()
    os._exit(verdict.word in ("wrong", "unclear"))


if __name__ == "__main__":
    import logging
    import sys
    import warnings

    warnings.simplefilter("ignore")
    logging.getLogger("zgraph").setLevel(logging.ERROR)
    if KIND == "ranks":
        import torch.multiprocessing as mp

        mp.spawn(on_rank, (WORLD, int(sys.argv[1]) if len(sys.argv) > 1 else 29871), WORLD)
    else:
        verdict = run_virtual(load) if KIND == "virtual" else run_pair(load)
        print(verdict.word, verdict.reason, verdict.detail)
        sys.exit(verdict.word in ("wrong", "unclear"))
