"""Parts of a program whose sizes depend on values (what a mask selects), each as one operator.

Passes need sizes that are numbers. So the operators between a mask and the next value of a fixed size (a mean, a
matrix of gradients) are one node, `zgraph::region`: it takes and gives tensors of fixed sizes. Its second argument
says in JSON what it computes, operator by operator, as plain PyTorch would; it is part of the program's text and
digest, and needs nothing else to run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from zgraph.errors import StepError
from zgraph.program import serialize
from zgraph.program.ops import library


def written(inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> str:
    """Return the text of a region. Raises `UnsupportedError` for a node that is no call of an operator."""
    kinds = [serialize.type_to_json(node.meta["val"]) for node in outputs]
    for kind in kinds:
        kind["device"] = torch.device(kind["device"]).type  # (of which rank it is does not matter)
    data = {
        "inputs": [node.name for node in inputs],
        "nodes": serialize.nodes_to_json(nodes),
        "outputs": [node.name for node in outputs],
        "kinds": kinds,
    }
    return json.dumps(data, separators=(",", ":"))


def run(inputs: Sequence[torch.Tensor], program: str) -> list[torch.Tensor]:
    """Run a region; its results have storage of their own, and the strides that they had when it was captured.

    Raises `StepError` if a result has another shape than when it was captured.
    """
    function, kinds = _loaded(program)
    taken = {x.untyped_storage()._cdata for x in inputs}
    given = []
    for value, kind in zip(function(*inputs), kinds, strict=True):
        if list(value.shape) != kind["shape"]:
            raise StepError(
                f"the model computes a tensor of {list(value.shape)} where it had {kind['shape']} when it was captured",
                why="programs have values of fixed sizes; torch.linalg.lstsq, say, gives no residuals for matrices without the full rank",
                hint="leave out what has no fixed size (of lstsq, use .solution alone)",
            )
        storage = value.untyped_storage()._cdata
        if list(value.stride()) != kind["stride"] or storage in taken:  # (an operator's results are its own)
            value = _empty(kind, value.device).copy_(value)
            storage = value.untyped_storage()._cdata
        taken.add(storage)
        given.append(value)
    return given


def fresh_outputs(inputs: Sequence[torch.Tensor], program: str) -> list[torch.Tensor]:
    """Return tensors like a region's results, without values."""
    devices = {x.device.type: x.device for x in reversed(inputs)}
    return [_empty(kind, devices.get(kind["device"], kind["device"])) for kind in _loaded(program)[1]]


@functools.lru_cache(maxsize=1024)
def _loaded(program: str) -> tuple[Callable[..., Sequence[torch.Tensor]], list[dict[str, Any]]]:
    data = json.loads(program)
    graph = fx.Graph()
    given = {name: graph.placeholder(name) for name in data["inputs"]}
    nodes = serialize.nodes_from_json(graph, data["nodes"], given)
    graph.output(tuple(nodes[name] for name in data["outputs"]))
    return fx.GraphModule(nn.Module(), graph), data["kinds"]


def _empty(kind: dict[str, Any], device: torch.device | str) -> torch.Tensor:
    return torch.empty_strided(kind["shape"], kind["stride"], dtype=getattr(torch, kind["dtype"]), device=device)


library.impl("region", run, "CompositeExplicitAutograd")
torch.library.register_fake("zgraph::region", fresh_outputs, lib=library)
