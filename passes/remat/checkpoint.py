"""Activation checkpointing: values of the forward are dropped, and recomputed in the backward just before they are
read.

This pass recomputes where the user says so: in modules, by a policy, in the model's own torch.utils.checkpoint regions.
`rematerialize` chooses what to recompute within a memory budget. (Chen et al., 2016, "Training Deep Nets with Sublinear
Memory Cost".)

Recomputed nodes are copies in the backward phase, of the same operators on the same values: results are equal bit for
bit. Random operators and collectives are never copied; their results are saved.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from zgraph.errors import PlanError
from zgraph.names import matches
from zgraph.passes.contract import graph_pass
from zgraph.passes.remat.recompute import recompute_all_but
from zgraph.program.aliases import root_of
from zgraph.program.node import Phase, info
from zgraph.program.program import Fact, Program
from zgraph.torch_compat import aot


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of `checkpoint`. Without `modules` and `policy` the model's own torch.utils.checkpoint regions are
    recomputed.
    """

    # patterns of module paths ("blocks.*"): each such module is recomputed from its inputs
    modules: tuple[str, ...] = ()
    policy: Callable[[fx.Node], bool] | None = None  # returns whether a node of the forward is recomputed


@graph_pass(
    "checkpoint",
    "values of the forward are computed again in the backward where the user says so",
    options=CheckpointOptions,
    requires=(Fact.CLEAN,),
    provides=(Fact.CHECKPOINTED,),
    conflicts=(Fact.SHARDED,),
)
def checkpoint(program: Program, options: CheckpointOptions) -> dict[str, int]:
    forward = [n for n in program.graph.nodes if n.op == "call_function" and info(n).phase is Phase.FORWARD]
    if options.policy is not None:
        again = {n for n in forward if _chosen(options.policy, n)}
    else:
        region = {
            n: _module_region(program, n, options.modules) if options.modules else aot.users_region(n) for n in forward
        }
        again = {n for n in forward if region[n] is not None and not _leaves(n, region)}
    recomputed = recompute_all_but(program, {n.name for n in forward if n not in again}, by="checkpoint")
    return {"marked": len(again), "recomputed": recomputed}


def _chosen(policy: Callable[[fx.Node], bool], node: fx.Node) -> bool:
    """Return whether a user's policy chooses a node. Raises `PlanError` where the policy raises."""
    try:
        return bool(policy(node))
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise PlanError(
            f"the policy failed for {node.name}, an {node.target}",
            where=f"recompute ({at.filename}:{at.lineno}, in {at.name})",
            why=f"{type(error).__name__}: {error}",
            hint="it gets each torch.fx.Node of the forward, and says whether the backward computes it again",
        ) from error


def _module_region(program: Program, node: fx.Node, patterns: tuple[str, ...]) -> object:
    """Return the outermost module around a node that one of the patterns names, None for none."""
    return next((program.first_name(path) for path in program.modules_around(node) if matches([path], patterns)), None)


def _leaves(node: fx.Node, region: dict[fx.Node, object]) -> bool:
    """Return whether the forward reads a value of a region outside of it, through views or not.

    Such a value is saved: otherwise recomputing what runs outside would recompute the region again.
    """
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user in region and region[user] != region[node]:
                return True
            if user in region and root_of(user) is root_of(node):
                stack.append(user)
    return False
