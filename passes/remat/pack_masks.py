"""Masks that the forward saves for the backward are saved as bits.

    mask = native_dropout(x)[1]  ->  bits = to_bits(mask), which is saved          mask = from_bits(bits), before its first reader in the backward

*Contract.* On entry the saved values are decided. On exit each boolean value that the forward computes and the backward reads is saved as an
eighth of its bytes, and is whole only inside of the forward, and from its first reader in the backward on. Numbers stay the same, bit for
bit: of dropout the mask is the one that was drawn, so what is drawn behind it is, too. (A generator of plain PyTorch's on a CPU can't be asked
for the same numbers twice without its state of 5 kB; Inductor would store numbers that it draws again, of 4 bytes each.) Masks of a few bytes,
views of inputs and what the model returns stay as they are; so do masks on an accelerator, and in Inductor's programs for several sizes, of
which a remark tells.
"""

from __future__ import annotations

import torch

from zgraph.passes.analysis.saved_values import Crossing, crossings, made_by_forward
from zgraph.passes.contract import graph_pass
from zgraph.program.node import Phase, info, tensor
from zgraph.program.packed_masks import FROM_BITS, TO_BITS
from zgraph.program.program import Fact, Program
from zgraph.program.remark import Remark
from zgraph.program.sizes import typical, with_nodes

LEAST = 512
"""The least elements of a mask that is packed: allocators round up to 64 bytes."""


@graph_pass("pack_masks", "masks that the backward reads are saved as bits", requires=(Fact.CLEAN,))
def pack_masks(program: Program) -> dict[str, int]:
    masks = [c for c in crossings(program) if _is_mask(c)]
    symbolic = bool(program.sizes) and Fact.INDUCTOR_READY in program.facts
    packed = [c for c in masks if tensor(c.root).device.type == "cpu" and not symbolic]
    for crossing in packed:
        _pack(program, crossing)
    if len(packed) < len(masks):
        elsewhere = next(c.root for c in masks if c not in packed)
        program.remarks.append(
            Remark(
                "pack_masks",
                elsewhere.name,
                f"{len(masks) - len(packed)} masks are saved as bytes",
                f"they are on {tensor(elsewhere).device.type}: masks are packed on CPUs, with Inductor in programs of one size",
                0.0,
                "leave pack_masks out of the plan",
            )
        )
    sizes = [typical(tensor(c.root).numel()) for c in packed]
    return {"masks": len(packed), "bytes": sum(sizes), "packed_bytes": sum(-(-size // 8) for size in sizes)}


def _is_mask(crossing: Crossing) -> bool:
    root = crossing.root
    if not made_by_forward(root) or tensor(root).dtype is not torch.bool:
        return False
    return typical(tensor(root).numel()) >= LEAST


def _pack(program: Program, crossing: Crossing) -> None:
    """Save the bits of a mask in place of it."""
    root, mask = crossing.root, tensor(crossing.root)
    record = info(root).replace(made_by="pack_masks")
    with program.graph.inserting_before(root.next):
        told = with_nodes(program.graph, (list(mask.stride()),))
        bits = program.call(TO_BITS, (root, *told), record, name=f"{root.name}_bits")
    with program.graph.inserting_before(crossing.first):
        told = with_nodes(program.graph, (list(mask.shape), list(mask.stride())))
        back = program.call(FROM_BITS, (bits, *told), record.replace(phase=Phase.BACKWARD), name=f"{root.name}_back")
    crossing.read_instead(program, back, "pack_masks")
