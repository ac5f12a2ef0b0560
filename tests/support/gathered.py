"""What is alive of gathered parameters, read off a program by storage: nothing here asks what zgraph reckons itself."""

from __future__ import annotations

import torch
from torch import fx

from zgraph.program import collectives
from zgraph.program.aliases import aliases_of
from zgraph.program.node import Phase, Role, info, tensor
from zgraph.program.program import Program


def gathers(program: Program, phase: Phase | None = None) -> list[fx.Node]:
    """The starts of gathers, in order."""
    return [
        n
        for n in program.nodes
        if collectives.is_start(n) and info(n).role is Role.GATHER and phase in (None, info(n).phase)
    ]


def aliases_of_gather(start: fx.Node) -> list[fx.Node]:
    """What lies in the buffer of a gather: it, its wait, and every view of both."""
    waits = [u for u in start.users if collectives.is_wait(u)]
    return [*aliases_of(start), *(a for w in waits for a in aliases_of(w))]


def alive(program: Program) -> list[int]:
    """Gathered bytes after each node of a program that is not split: a buffer lives from the start of its gather to its
    last reader. What the program returns is left out: it outlives any schedule."""
    nodes = program.nodes
    at = {node: i for i, node in enumerate(nodes)}
    found = [0] * len(nodes)
    for start in gathers(program):
        readers = {u for alias in aliases_of_gather(start) for u in alias.users}
        if program.output_node() in readers:
            continue
        for i in range(at[start], max(at[r] for r in readers) + 1):
            found[i] += bytes_of(start)
    return found


def bytes_of(start: fx.Node) -> int:
    whole = tensor(start)
    return whole.numel() * whole.element_size()


class GatheredBytes(torch.utils._python_dispatch.TorchDispatchMode):
    """The bytes of gathered buffers that are alive in a run, and the most that ever were, by their storages' true lives."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list = []
        self.peak = self.gathers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in (collectives.ALL_GATHER, collectives.COALESCED[collectives.ALL_GATHER]):
            for whole in made if isinstance(made, list) else [made]:
                storage = whole.untyped_storage()
                self.gathers += 1
                self.alive.append((torch.multiprocessing.reductions.StorageWeakRef(storage), storage.nbytes()))
        self.alive = [(ref, size) for ref, size in self.alive if not ref.expired()]
        self.peak = max(self.peak, sum(size for _, size in self.alive))
        return made
