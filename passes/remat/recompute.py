"""Recomputes parts of the forward in the backward instead of saving them.

Which values are saved is torch's min-cut (Zheng et al.'s and functorch's "min-cut rematerialization"): with kernels
that fuse, writing and reading a cheap value costs more than computing it again. Recomputed nodes are copies in the
backward phase just before their first use; random operators and collectives are never copied.

Min-cut assumes a graph in which equal nodes are one, and in which the forward may compute, and save, all that does not
depend on a tangent. This pass first brings the graph into this form: where min-cut saves a value that autograd made in
the backward (a layer norm's 1 / n of the saved statistics), its own operands would otherwise be missing and be
recomputed from far up, through matrix products.

Exponentials of a softmax on CPU are computed twice in the same phase, see `repeat_exponentials`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from zgraph.passes.contract import graph_pass
from zgraph.program.aliases import is_view, made_once, mutates
from zgraph.program.node import Phase, info, set_info, tensor
from zgraph.program.program import Fact, InputRole, Program, of_backward
from zgraph.torch_compat import aot


@graph_pass(
    "recompute",
    "cheap values are computed again in the backward, as torch's min-cut chooses",
    requires=(Fact.CLEAN, Fact.INDUCTOR_READY),
    provides=(Fact.RECOMPUTED,),
    conflicts=(Fact.SHARDED,),
)
def recompute(program: Program) -> dict[str, int]:
    forward_outputs = sum(not of_backward(*item) for item in program.output_items())
    if forward_outputs == len(program.outputs):
        return {"recomputed": 0}
    merged = merge_equal(program)
    program.recompile()
    late = [n.name for p, n in program.input_items() if p.role in (InputRole.TANGENT, InputRole.RETURNED)]
    saved = aot.min_cut_saved(program.module, forward_outputs, late)
    hoisted = hoist_saved(program, saved)
    recomputed = recompute_all_but(program, saved) + repeat_exponentials(program)
    return {"merged": merged, "hoisted": hoisted, "recomputed": recomputed}


def merge_equal(program: Program) -> int:
    """Replace equal nodes (same operator, same arguments) by the first of them; return how many were removed.

    Safe for operators that neither draw numbers nor write: they give the same value bit for bit.
    """
    first: dict[Any, fx.Node] = {}
    merged = 0
    for node in program.nodes:
        if node.op != "call_function" or (
            not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem
        ):
            continue
        if made_once(node) or mutates(node) or node.is_impure():
            continue
        key = (node.target, _key(node.args), _key(node.kwargs))
        known = first.setdefault(key, node)
        if known is node or (info(known).phase is Phase.BACKWARD and info(node).phase is Phase.FORWARD):
            continue
        node.replace_all_uses_with(known)
        program.graph.erase_node(node)
        merged += 1
    return merged


def _key(arg: Any) -> Any:
    if isinstance(arg, (tuple, list)):
        return tuple(_key(a) for a in arg)
    if isinstance(arg, dict):
        return tuple(sorted((k, _key(v)) for k, v in arg.items()))
    return arg if isinstance(arg, fx.Node) else (type(arg).__name__, str(arg))


def hoist_saved(program: Program, saved: set[str]) -> int:
    """Let the forward compute the `saved` values that the backward computes; return how many nodes moved.

    Each is computed right after the last of its operands. Views of inputs stay where they are: they cost nothing there.
    """
    moved = 0

    def hoist(node: fx.Node) -> None:
        nonlocal moved
        if node.op != "call_function" or info(node).phase is not Phase.BACKWARD:
            return
        for used in node.all_input_nodes:
            hoist(used)
        set_info(node, info(node).replace(phase=Phase.FORWARD))
        max([last_input, *node.all_input_nodes]).append(node)
        moved += 1

    last_input = program.placeholders()[-1]
    results = set(program.output_values())
    for node in program.nodes:
        if (
            node.name in saved
            and node not in results
            and info(node).phase is Phase.BACKWARD
            and not _view_of_input(node)
        ):
            hoist(node)
    return moved


def _view_of_input(node: fx.Node) -> bool:
    while is_view(node):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def recompute_all_but(program: Program, saved: set[str], by: str = "recompute") -> int:
    """Copy into the backward every forward node that it reads and that is not named in `saved`; return how many were
    copied.

    `by` is the pass that makes the copies.
    """
    copies: dict[fx.Node, fx.Node] = {}

    def again(node: fx.Node, before: fx.Node) -> fx.Node:
        if node in copies or node.op != "call_function" or node.name in saved or info(node).phase is Phase.BACKWARD:
            return copies.get(node, node)
        if made_once(node):
            return node
        for used in node.all_input_nodes:
            again(used, before)
        if node.target is operator.getitem and node.args[0] not in copies:
            return node  # (the outputs of a saved operator with several are saved, since it is no tensor itself)
        with program.graph.inserting_before(before):
            copies[node] = program.repeat(node, copies, by)
        return copies[node]

    for node in program.nodes:  # (a list from before: copies are not among them)
        if node.op == "output" or info(node).phase is not Phase.BACKWARD:
            continue
        for used in node.all_input_nodes:
            if info(used).phase is Phase.FORWARD and (fresh := again(used, node)) is not used:
                node.replace_input_with(used, fresh)
    return len(copies)


def repeat_exponentials(program: Program) -> int:
    """Give sums of exponentials that something else reads as well (a softmax that is written out) exponentials of their
    own, on CPU; return how many.

    Inductor's C++ backend stores an exponential with two readers: as much as the scores, written and read once more.
    Computing it twice takes no longer (`benchmarks/results/kernels.md` has what is moved). On CUDA it does so by itself.
    """
    count = 0
    for node in program.nodes:
        if node.target is not torch.ops.aten.exp.default or tensor(node).device.type != "cpu":
            continue
        sums = [
            u for u in node.users if u.target is torch.ops.aten.sum.dim_IntList and info(u).phase is info(node).phase
        ]
        if len(sums) == len(node.users):
            continue
        record = info(node).replace(made_by="recompute")
        for total in sums:
            with program.graph.inserting_before(total):
                own = program.call(node.target, node.args, record, name=f"{node.name}_summed")
            total.replace_input_with(node, own)
        count += len(sums)
    return count
