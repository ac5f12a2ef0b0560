"""Run a program on N virtual ranks in one process: no process group, no launch, any world size.

All ranks run node by node in step; a collective takes its operands from all ranks of its group at once. Sums are
computed in rank order, so results do not depend on a transport, and each rank has a random state of its own.
(`torch.distributed._local_tensor` does this by dispatch; walking our own graph is 100 lines, needs no fake process
group, and fixes the order of additions, which bit-for-bit comparison needs.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from zgraph.errors import MeshError, UnsupportedError
from zgraph.program import collectives, ops, transfers_to_host
from zgraph.program.aliases import is_random, mutates
from zgraph.program.groups import dim_of, lines_of
from zgraph.program.layout import laid_out, promised
from zgraph.program.program import Program


def coordinates(mesh: dict[str, int], rank: int) -> dict[str, int]:
    """Return a rank's position in each mesh dimension (the last dimension varies fastest)."""
    where: dict[str, int] = {}
    for name, size in reversed(mesh.items()):
        where[name] = rank % size
        rank //= size
    return {name: where[name] for name in mesh}


def group_ranks(mesh: dict[str, int], group: str, rank: int) -> list[int]:
    """Return the ranks that share a group with `rank`, in group order. For a group of some positions of a mesh
    dimension that `rank` is not in, return the ranks at those positions of its dimension. Raises `MeshError` if the
    mesh has no such group."""
    lines, dim = lines_of(group, mesh), dim_of(group)
    place = coordinates(mesh, rank)[dim]
    positions = next((line for line in lines if place in line), lines[0])
    world = 1
    for size in mesh.values():
        world *= size
    mine = {k: v for k, v in coordinates(mesh, rank).items() if k != dim}
    line = [r for r in range(world) if {k: v for k, v in coordinates(mesh, r).items() if k != dim} == mine]
    return [line[p] for p in positions]


Watch = Callable[[Program, fx.Node, Sequence[dict[fx.Node, Any]], Sequence[Any]], None]
"""A function that is called with the program, an operator, each rank's values by node, and the operator's result on
each rank."""


def run_virtual(
    program: Program,
    inputs: Sequence[Sequence[Any]],
    random_states: list[torch.Tensor] | None = None,
    watch: Watch | None = None,
) -> list[tuple[Any, ...]]:
    """Run `program` on every rank of its mesh.

    `inputs[r]` are rank r's values for the placeholders, in order. `random_states[r]`, if given, is rank r's CPU
    generator state, changed in place as the rank draws. `watch` is called after each operator. Returns each rank's
    outputs, in order.
    """
    return _Runner(program, random_states, watch).run(inputs)


class _Runner:
    def __init__(self, program: Program, random_states: list[torch.Tensor] | None, watch: Watch | None) -> None:
        self.program = program
        self.watch = watch
        self.world = program.world
        self.random_states = random_states
        used = {collectives.group_of(n): None for n in program.graph.nodes if collectives.is_start(n)}
        self.groups = {g: [group_ranks(program.mesh, g, r) for r in range(self.world)] for g in used}

    def run(self, inputs: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        if len(inputs) != self.world:
            raise ValueError(f"{len(inputs)} ranks' inputs for a mesh of {self.world} ranks")
        environments: list[dict[fx.Node, Any]] = [{} for _ in range(self.world)]
        left = {node: len(node.users) for node in self.program.graph.nodes}
        given = 0
        with torch.no_grad():
            for node in self.program.graph.nodes:
                if node.op == "output":
                    return [tuple(env[a] for a in node.args[0]) for env in environments]
                if node.op == "placeholder":
                    results = [values[given] for values in inputs]
                    given += 1
                else:
                    results = self._node(node, environments)
                    if self.watch is not None:
                        self.watch(self.program, node, environments, results)
                strides = None if any(map(mutates, (node, *node.users))) else promised(node)
                for env, result in zip(environments, results, strict=True):
                    env[node] = result if strides is None else laid_out(result, strides)
                for used in node.all_input_nodes:
                    left[used] -= 1
                    if not left[used]:
                        for env in environments:
                            del env[used]
        raise ValueError("the program has no output node")

    def _node(self, node: fx.Node, environments: list[dict[fx.Node, Any]]) -> list[Any]:
        if node.op == "get_attr":
            return [getattr(self.program.module, str(node.target))] * self.world
        if collectives.is_start(node):
            operands = [env[node.all_input_nodes[0]] for env in environments]
            return self._collective(node, operands)
        if collectives.is_wait(node):
            return [env[node.args[0]] for env in environments]  # type: ignore[index]
        if node.target is ops.RELEASE:
            return [None] * self.world
        if transfers_to_host.is_host_transfer(node):
            return [_move(node, [env[a] for a in node.all_input_nodes]) for env in environments]
        return [self._call(node, env, rank) for rank, env in enumerate(environments)]

    def _call(self, node: fx.Node, env: dict[fx.Node, Any], rank: int) -> Any:
        args = fx.node.map_arg(node.args, lambda n: env[n])
        kwargs = fx.node.map_arg(node.kwargs, lambda n: env[n])
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        if self.random_states is None or not is_random(node):
            return target(*args, **kwargs)
        torch.set_rng_state(self.random_states[rank])
        result = target(*args, **kwargs)
        self.random_states[rank] = torch.get_rng_state()
        return result

    def _collective(self, node: fx.Node, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        groups = self.groups[collectives.group_of(node)]
        done: dict[tuple[int, ...], Any] = {}
        results = []
        for rank in range(self.world):
            group = groups[rank]
            if rank not in group:
                raise MeshError(
                    f"rank {rank} is not in the group {collectives.group_of(node)!r}",
                    where=node.name,
                    why="virtual ranks all run the same program; it is one of some ranks alone",
                )
            key = tuple(group)
            if key not in done:
                done[key] = self._combine(node, [operands[r] for r in group])
            combined = done[key]
            results.append(combined[group.index(rank)] if isinstance(combined, list) else combined)
        return results

    def _combine(self, node: fx.Node, parts: list[torch.Tensor]) -> Any:
        """Return a collective's result: one tensor for all ranks of the group, or a list with one for each."""
        if node.target in (collectives.ALL_GATHER, collectives.GATHER_APART):
            return torch.cat(parts)
        if node.target is collectives.ALL_TO_ALL:
            sent = [part.split(list(node.args[2])) for part in parts]  # type: ignore[arg-type]
            return [torch.cat([pieces[r] for pieces in sent]) for r in range(len(parts))]
        if node.target is collectives.SHIFT:
            return [parts[r - collectives.distance_of(node)].clone() for r in range(len(parts))]
        op = collectives.reduce_op_of(node)
        total = parts[0].clone()
        for part in parts[1:]:
            total = torch.maximum(total, part) if op == "max" else total + part
        if op == "avg":
            total /= len(parts)
        elif op not in ("sum", "max"):
            raise UnsupportedError(f"reduction {op!r} on virtual ranks is not there yet", where=node.name)
        return list(total.chunk(len(parts))) if node.target is collectives.REDUCE_SCATTER else total


def _move(node: fx.Node, values: list[torch.Tensor]) -> torch.Tensor:
    """Run a transfer to or from the host: in one process it is a copy, made where the transfer starts."""
    if transfers_to_host.is_wait(node):
        return values[0]
    return values[0].copy_(values[1]) if node.target is transfers_to_host.STORE else values[0].clone()
