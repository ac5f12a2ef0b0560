"""The attributes of a DeepSpeed engine that say what it trains and which ranks train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from zgraph.api.conversions import change_by
from zgraph.deepspeed import comm
from zgraph.deepspeed.absent_names import refuse_of_engine
from zgraph.deepspeed.pipe.module import PipelineModule
from zgraph.errors import StepError, UnsupportedError

if TYPE_CHECKING:
    from zgraph.api.handle import Handle

_SET = {
    "enable_backward_allreduce": "engine.no_sync() for backward passes that do not reduce",
    "gradient_average": '"gradient_allreduce_op": "sum" in the configuration',
    "optimizer": "initialize(optimizer=…), also of a model that is initialized already",
    "training_dataloader": "initialize(training_data=…); or give train_batch an iterator",
}


class Attributes(nn.Module):
    """The attributes of an engine that do not change while it trains."""

    module: nn.Module
    config: dict[str, Any]
    num_experts: tuple[int, ...] = ()
    has_moe_layers = False
    use_ds_comm = False  # (collectives are torch's)
    _training: Any
    _batch: Any
    _outer: bool

    @property
    def handle(self) -> Handle:
        """The handle of the compiled model."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model. Raises `AbsentName`, an `AttributeError`, for what DeepSpeed has and zgraph
        has not."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            refuse_of_engine(name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        known = getattr(type(self), name, None)
        if isinstance(known, property) and known.fset is None:
            raise StepError(
                f"engine.{name} can't be set",
                why="it follows from what initialize was given, and nothing would come of another value",
                hint=_SET.get(name, "initialize(…) again, which goes on with the model's weights"),
            )
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Attributes:
        """Return the engine where `to`, `half`, `cuda` and others ask for what there is already.

        Raises `UnsupportedError` where they would change weights or buffers, before anything is changed.
        """
        said = change_by(self.module, fn)
        if said is not None:
            raise UnsupportedError(
                f"an engine's weights and buffers can't be moved or cast: {said}",
                why="its programs are compiled for where and what they are",
                hint="bf16 or fp16 in the configuration; or move and cast the model before initialize. Whole weights to take elsewhere: "
                "engine.save_16bit_model, engine.module.save_pretrained",
            )
        return self

    # -- what is trained ------------------------------------------------------------------------------------------------
    @property
    def pipeline_parallelism(self) -> bool:
        """Whether the model is a `PipelineModule`."""
        return isinstance(self.module, PipelineModule)

    @property
    def param_names(self) -> dict[nn.Parameter, str]:
        """The names of the model's present parameters."""
        return {param: name for name, param in self.module.named_parameters()}

    @property
    def training_data(self) -> Any:
        """What the script gave `initialize` as `training_data`."""
        return self._training.data

    @property
    def collate_fn(self) -> Callable[..., Any] | None:
        """What the script gave `initialize` as `collate_fn`."""
        return self._training.collate_fn  # type: ignore[no-any-return]

    @property
    def mpu(self) -> Any:
        """What the script gave `initialize` as `mpu`."""
        return self._training.mpu

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes that the model computes in, and that gradients are accumulated in: the model's in bf16, else
        float32, unless `data_types.grad_accum_dtype` says otherwise."""
        precision = self.handle.plan.resolved_precision()
        computed = precision.dtype("compute") or torch.float32
        return computed, precision.dtype("accumulate") or torch.float32

    def is_deepcompile_active(self) -> bool:
        """Return False: steps are compiled by zgraph."""
        return False

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        return isinstance(obj, torch.utils.data.IterableDataset)

    # -- how gradients are reduced --------------------------------------------------------------------------------------
    @property
    def gradient_average(self) -> bool:
        """Whether gradients are the ranks' mean, not their sum."""
        return bool(self.gradient_allreduce_op() != "sum")  # type: ignore[operator]

    @property
    def inside_no_sync_ctxt(self) -> bool:
        """Whether the script is inside of `no_sync`."""
        return self._outer

    @property
    def enable_backward_allreduce(self) -> bool:
        """True: the backward of a step's last micro-batch reduces."""
        return True

    # -- ranks ------------------------------------------------------------------------------------------------------------
    @property
    def dist_backend(self) -> str | None:
        """The name of the process group's backend ("nccl"); None without one."""
        return dist.get_backend() if dist.is_initialized() else None

    @property
    def global_rank(self) -> int:
        return comm.get_rank()

    @property
    def local_rank(self) -> int:
        return comm.get_local_rank()

    @property
    def world_size(self) -> int:
        return comm.get_world_size()

    @property
    def dp_world_size(self) -> int:
        """The number of ranks that read different rows."""
        return self._batch.ranks  # type: ignore[no-any-return]

    @property
    def sequence_parallel_size(self) -> int:
        """The number of ranks that divide a sequence."""
        return self._size("cp")

    @property
    def seq_dp_world_size(self) -> int:
        """The number of ranks over which gradients are averaged."""
        return self.dp_world_size * self.sequence_parallel_size

    @property
    def mp_world_size(self) -> int:
        """The number of ranks that divide a model's layers or weights."""
        return self._size("tp") * self._size("pp")

    def get_tensor_parallel_rank(self) -> int:
        """Return this rank's index among those that divide a layer's weights."""
        return self._place("tp")

    def get_model_parallel_rank(self) -> int:
        """Return this rank's index among those that divide the model."""
        return self._place("pp") * self._size("tp") + self._place("tp")

    def data_rank(self) -> int:
        """Return this rank's index among the ranks that read different rows."""
        return self._place("replicate") * self._size("dp") + self._place("dp")

    get_data_parallel_rank = data_rank

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The group of the ranks that read different rows; None in a process without a process group.

        Raises `UnsupportedError` where replicas and shards have a dimension of the mesh each, and so no group together.
        """
        mesh, names = self.handle.mesh, self._dims()
        if mesh is None:
            return dist.group.WORLD
        data = [dim for dim in ("replicate", "dp") if dim in names]
        if len(data) != 1:
            raise UnsupportedError(
                "engine.data_parallel_group",
                why=f"the mesh has the dimensions {', '.join(names)}, and no group for all ranks that read different rows",
                hint="engine.dp_world_size and engine.data_rank(); engine.handle.mesh has a group for each dimension",
            )
        return mesh.get_group(data[0])

    @property
    def seq_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The group of the ranks over which gradients are averaged.

        Raises `UnsupportedError` where they have several dimensions of the mesh.
        """
        if self.sequence_parallel_size > 1:
            raise UnsupportedError(
                "engine.seq_data_parallel_group",
                why=f"the mesh has the dimensions {', '.join(self._dims())}, and no group for two of them",
                hint="engine.data_parallel_group, engine.get_sequence_parallel_group()",
            )
        return self.data_parallel_group

    def get_sequence_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the group of the ranks that divide a sequence; None where none is divided."""
        mesh = self.handle.mesh
        return mesh.get_group("cp") if mesh is not None and self.sequence_parallel_size > 1 else None

    @property
    def seq_parallel_group(self) -> dist.ProcessGroup | None:
        """The group of the ranks that divide a sequence; None where none is divided."""
        return self.get_sequence_parallel_group()

    def _dims(self) -> tuple[str, ...]:
        mesh = self.handle.mesh
        return () if mesh is None else tuple(mesh.mesh_dim_names or ())

    def _size(self, dim: str) -> int:
        mesh = self.handle.mesh
        return mesh[dim].size() if mesh is not None and dim in self._dims() else 1

    def _place(self, dim: str) -> int:
        mesh = self.handle.mesh
        return mesh.get_local_rank(dim) if mesh is not None and dim in self._dims() else 0
