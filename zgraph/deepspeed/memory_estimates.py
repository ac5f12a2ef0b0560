"""DeepSpeed's estimates of the memory that a model's states take, adapted to what zgraph stores.

    estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=8, num_nodes=1)
    estimate_zero3_model_states_mem_needs_all_live(model, 8, inputs=(batch,))   # and the peak of a step, activations too

States are those of bf16 with Adam: weights and gradients of 2 bytes, fp32 master weights and two moments. With
`inputs`, the batch of one rank, the peak is forecast from the compiled step, with activations, gathered weights and
buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zgraph.build.planned_step import Inputs
from zgraph.deepspeed.absent_names import Absent
from zgraph.deepspeed.translate import plan
from zgraph.units import shown_bytes

_OPTIONS: dict[int, tuple[tuple[str, ...], ...]] = {  # what may be offloaded, by ZeRO stage
    2: (("optimizer",), ()),
    3: (("parameters", "optimizer"), ("optimizer",), ()),
}


_BY_NUMBER = (
    "what is stored depends on the model's parameters, not on their number alone",
    "the estimates of these names that end in _all_live(model) or _all_cold(…); zgraph.forecast",
)
estimate_zero2_model_states_mem_needs = Absent(
    "runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs", *_BY_NUMBER
)
estimate_zero3_model_states_mem_needs = Absent("runtime.zero.stage3.estimate_zero3_model_states_mem_needs", *_BY_NUMBER)


@dataclass(frozen=True)
class Need:
    """The memory that a model's states need on one GPU and its host, in bytes."""

    offloaded: tuple[str, ...]  # what is in the host's memory: "parameters", "optimizer"
    gpu: int  # bytes of a GPU
    host: int  # bytes of the host for each of its GPUs
    peak: int | None = None  # bytes at the peak of a step, if inputs were given


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    inputs: Inputs | None = None,
) -> list[Need]:
    """Print and return the memory of a model's states at ZeRO stage 2, for each choice of what is offloaded."""
    return _all(model, 2, num_gpus_per_node * num_nodes, additional_buffer_factor, inputs)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    inputs: Inputs | None = None,
) -> list[Need]:
    """Print and return the memory of a model's states at ZeRO stage 3, for each choice of what is offloaded."""
    return _all(model, 3, num_gpus_per_node * num_nodes, additional_buffer_factor, inputs)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[Need]:
    """Print and return the memory of the states at ZeRO stage 2, from the number of parameters alone."""
    return _shown(total_params, 0, 2, num_gpus_per_node * num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> list[Need]:
    """Print and return the memory of the states at ZeRO stage 3, from the numbers of parameters of the model and its
    largest layer."""
    return _shown(total_params, largest_layer_params, 3, num_gpus_per_node * num_nodes, additional_buffer_factor)


def _all(model: nn.Module, stage: int, ranks: int, factor: float, inputs: Inputs | None) -> list[Need]:
    total = sum(p.numel() for p in model.parameters())
    largest = max((sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()), default=0)
    peaks: dict[tuple[str, ...], int] = {}
    if inputs is not None:
        peaks = {kept: _peak(model, stage, ranks, kept, inputs) for kept in _OPTIONS[stage]}
    return _shown(total, largest, stage, ranks, factor, peaks)


def _shown(
    total: int, largest: int, stage: int, ranks: int, factor: float, peaks: dict[tuple[str, ...], int] | None = None
) -> list[Need]:
    needs = [_need(total, largest, stage, ranks, kept, factor, (peaks or {}).get(kept)) for kept in _OPTIONS[stage]]
    print(
        f"{total / 1e6:.0f} M parameters at stage {stage} on {ranks} GPU(s): weights, gradients, Adam's states in bf16"
    )
    print(f"{'a GPU':>12}{'its host':>12}{'  peak of a step' if peaks else ''}  in the host's memory")
    for need in needs:
        peak = f"{shown_bytes(need.peak):>16}" if need.peak is not None else ""
        print(
            f"{shown_bytes(need.gpu):>12}{shown_bytes(need.host):>12}{peak}  {', '.join(need.offloaded) or 'nothing'}"
        )
    return needs


def _need(
    total: int, largest: int, stage: int, ranks: int, kept: tuple[str, ...], factor: float, peak: int | None
) -> Need:
    share = -(-total // ranks)
    # below stage 3 the whole weights; at stage 3 the largest layer's whole weights and their gradient
    gpu = 2 * total if stage < 3 else 4 * largest
    gpu += 2 * share  # gradients
    gpu += 0 if "parameters" in kept else 2 * share
    states = 12 * share
    host = states * ("optimizer" in kept) + 2 * share * ("parameters" in kept)
    gpu += 0 if "optimizer" in kept else states
    return Need(kept, gpu, int(host * factor), peak)


def _peak(model: nn.Module, stage: int, ranks: int, kept: tuple[str, ...], inputs: Inputs) -> int:
    """Return the bytes at the peak of a step of one micro-batch, by the forecast."""
    from zgraph.inspection.make_inspection import of_model
    from zgraph.inspection.memory import peak_of
    from zgraph.plan.plan import Plan

    section: dict[str, Any] = {"stage": stage}
    section |= {f"offload_{'param' if name == 'parameters' else name}": {"device": "cpu"} for name in kept}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": section,
    }
    zero_plan: Plan = plan(config, world=ranks).plan
    inputs = pytree.tree_map_only(torch.Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, inputs)
    return peak_of(of_model(model, zero_plan, inputs, ranks)).bytes
