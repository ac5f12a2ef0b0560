"""DeepSpeed's pipelines: a sequence of layers that the plan cuts into stages."""

from zgraph.deepspeed.pipe.module import LayerSpec, PipelineError, PipelineModule, TiedLayerSpec
from zgraph.deepspeed.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineError",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "TiedLayerSpec",
]
