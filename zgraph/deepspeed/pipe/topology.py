"""The positions of ranks on the axes of a pipeline, as numbers, without process groups.

Ranks are counted along the last axis first: with axes ("pipe", "data") and sizes (2, 3), rank 4 is at pipe 1, data 1.
"""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

from zgraph.deepspeed import comm
from zgraph.errors import MeshError
from zgraph.names import did_you_mean


class ProcessTopology:
    """A mapping of positions on named axes to ranks, the outermost axis first."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes):
            raise MeshError(
                f"axes {list(axes)} do not match sizes {list(dims)}", hint="one size for each axis, each name once"
            )
        self.axes = list(axes)
        self.dims = list(dims)
        kind: Any = namedtuple("ProcessCoord", axes)  # type: ignore[misc]
        self.ProcessCoord = kind
        places = itertools.product(*map(range, dims))
        self.mapping: dict[Any, int] = {kind(*place): rank for rank, place in enumerate(places)}

    def get_rank(self, **place: int) -> int:
        """Return the rank at a position, given by its index on every axis. Raises `MeshError` if there is none."""
        if set(place) != set(self.axes):
            raise MeshError(f"the coordinates {place} do not name the axes {self.axes}", hint="name each axis")
        rank = self.mapping.get(self.ProcessCoord(**place))
        if rank is None:
            raise MeshError(
                f"there is no place {place}", why=f"the sizes are {dict(zip(self.axes, self.dims, strict=True))}"
            )
        return rank

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the position of a rank as a named tuple. Raises `MeshError` if there is no such rank."""
        coordinates = next((place for place, at in self.mapping.items() if at == rank), None)
        if coordinates is None:
            raise MeshError(f"there is no rank {rank}", why=f"the sizes make {self.world_size()}")
        return coordinates

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return a rank's position as text, without some axes: "model_00"."""
        place = self.get_coord(rank)
        return outer_sep.join(f"{a}{inner_sep}{getattr(place, a):02d}" for a in self.axes if a not in omit_axes)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks whose positions differ on one axis only; [] if there is no such axis."""
        if axis not in self.axes:
            return []
        others = [a for a in self.axes if a != axis]
        groups: dict[tuple[int, ...], list[int]] = {}
        for place, rank in self.mapping.items():
            groups.setdefault(tuple(getattr(place, a) for a in others), []).append(rank)
        return list(groups.values())

    def filter_match(self, **wanted: int) -> list[int]:
        """Return the ranks whose positions have these indices. Raises `MeshError` for an unknown axis."""
        unknown = next((axis for axis in wanted if axis not in self.axes), None)
        if unknown is not None:
            raise MeshError(f"there is no axis {unknown!r}", hint=did_you_mean(unknown, self.axes))
        return [rank for place, rank in self.mapping.items() if all(getattr(place, a) == v for a, v in wanted.items())]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at one index of an axis."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        return math.prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """A topology of stages and of data-parallel copies of the pipeline."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(("pipe", "data"), (num_pp, num_dp))


class PipeModelDataParallelTopology(ProcessTopology):
    """A topology of stages, of data-parallel copies of the pipeline, and of ranks that divide weights."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(("pipe", "data", "model"), (num_pp, num_dp, num_mp))


class PipelineParallelGrid:
    """A rank's position in a topology, with the methods of `engine.grid`.

    A process group is made when it is first asked for: all of its ranks must do so. (The compiled model has groups of its
    own.) `process_group` is not looked at, as in DeepSpeed. Without a `rank` it is this process's: raises `MeshError` if there are
    other ranks than the topology's.
    """

    def __init__(self, topology: ProcessTopology, process_group: Any = None, *, rank: int | None = None) -> None:
        self._topo = topology
        self.global_rank = comm.get_rank() if rank is None else rank
        self.world_size = topology.world_size()
        if rank is None and not self._is_grid_valid():
            raise MeshError(
                f"the topology has {self.world_size} ranks, and there are {comm.get_world_size()}",
                where="topology",
                why=f"its sizes are {dict(zip(topology.axes, topology.dims, strict=True))}",
                hint="sizes whose product is the number of ranks",
            )
        self.pipe_parallel_size = max(topology.get_dim("pipe"), 1)
        self.data_parallel_size = max(topology.get_dim("data"), 1)
        self.model_parallel_size = self.slice_parallel_size = max(topology.get_dim("model"), 1)
        self.stage_id = self._at("pipe")
        self.data_parallel_id = self._at("data")
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.dp_group, self.pp_group, self.slice_group = (self._along(a) for a in ("data", "pipe", "model"))
        self._groups: dict[tuple[int, ...], Any] = {}

    def _is_grid_valid(self) -> bool:
        return self.world_size == comm.get_world_size()

    def _along(self, axis: str) -> list[int]:
        """Return the ranks whose positions differ from this rank's on one axis only."""
        lists = self._topo.get_axis_comm_lists(axis)
        return next((ranks for ranks in lists if self.global_rank in ranks), [self.global_rank])

    def _of_one_copy(self) -> list[int]:
        """Return the ranks that have one copy of the model between them."""
        if "data" not in self._topo.axes:
            return list(self._topo.mapping.values())
        return sorted(self._topo.get_axis_list("data", self.data_parallel_id))

    def _group(self, ranks: Sequence[int]) -> Any:
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = comm.new_group(list(ranks), use_local_synchronization=True)
        return self._groups[key]

    def _at(self, axis: str) -> int:
        return int(getattr(self._topo.get_coord(self.global_rank), axis, 0))

    def topology(self) -> ProcessTopology:
        return self._topo

    def get_stage_id(self) -> int:
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        return self.data_parallel_id

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_pipe_parallel_rank(self) -> int:
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_data_parallel_rank(self) -> int:
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        return self.data_parallel_size

    def get_model_parallel_rank(self) -> int:
        """Return this rank's index among those that have one copy of the model between them: stages and ranks that
        divide weights."""
        return self._of_one_copy().index(self.global_rank)

    def get_model_parallel_world_size(self) -> int:
        return len(self._of_one_copy())

    def get_slice_parallel_rank(self) -> int:
        """Return this rank's index among those that divide weights."""
        return self._at("model")

    def get_slice_parallel_world_size(self) -> int:
        return self.slice_parallel_size

    # (Megatron's names of these)
    get_pipeline_model_parallel_rank: Callable[..., int] = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size: Callable[..., int] = get_pipe_parallel_world_size
    get_tensor_model_parallel_rank: Callable[..., int] = get_slice_parallel_rank
    get_tensor_model_parallel_world_size: Callable[..., int] = get_slice_parallel_world_size

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_group

    def get_data_parallel_group(self) -> Any:
        return self._group(self.dp_group)

    def get_pipe_parallel_group(self) -> Any:
        return self._group(self.pp_group)

    def get_model_parallel_group(self) -> Any:
        return self._group(self._of_one_copy())

    def get_slice_parallel_group(self) -> Any:
        return self._group(self.slice_group)

    def stage_to_global(self, stage_id: int, **others: int) -> int:
        """Return the rank of another stage at this rank's position on all other axes."""
        place = self._topo.get_coord(self.global_rank)._asdict() | {"pipe": stage_id} | others
        return self._topo.get_rank(**place)
