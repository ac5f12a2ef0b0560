"""`Plan`: everything that a user decides about a training step, as one frozen, checked, comparable value.

A plan holds no callable and no tensor: it can be hashed, compared between ranks, saved and loaded. A key that zgraph
does not know is an error with the nearest known key, never ignored. Nothing here imports torch.

A new field is one line in `Plan`; the type of a field that is a record of its own is a subclass of `Record`, which
gives the same errors, at any depth.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    StrictBool,
    StrictInt,
    WithJsonSchema,
    model_validator,
)

from zgraph.errors import MeshError, PlanError
from zgraph.names import did_you_mean
from zgraph.plan import planfile
from zgraph.plan.attention import Attention, AttentionTable
from zgraph.plan.clipping_and_ema import Average, Clip
from zgraph.plan.communication import Bucket, Bytes, Prefetch
from zgraph.plan.conflicts import first_conflict
from zgraph.plan.elasticity import Elastic, divisors, shown_worlds
from zgraph.plan.local_steps import LocalSteps
from zgraph.plan.loss_scaling import LossScale
from zgraph.plan.lr_schedules import AnySchedule
from zgraph.plan.offloading import Offload
from zgraph.plan.optimizers import AnyOptimizer, UpdateKind, ZeroOneAdam
from zgraph.plan.pipeline_schedules.make_schedule import check_name
from zgraph.plan.precision import Precision, precision_of, preset
from zgraph.plan.shapes import Buckets, Dynamic, Hot, declared, shapes_of
from zgraph.plan.watchdog import Watch
from zgraph.plan.wire import Wire
from zgraph.record import Record, Table, joined, short

__all__ = ["DATA_DIMENSIONS", "MESH_DIMENSIONS", "Mesh", "Plan", "Record", "UserPass"]

MESH_DIMENSIONS = ("pp", "replicate", "dp", "cp", "tp")
"""Every mesh dimension's name, outermost first."""

DATA_DIMENSIONS = ("replicate", "dp")
"""The mesh dimensions over which ranks see different rows: the same as `DATA_DIMS` of `zgraph.program.program`, which loads torch."""


GROUPS = DATA_DIMENSIONS[0]
"""The mesh dimension whose ranks are groups that hold the same shards, and train by themselves in local steps."""


class Mesh(Table[int]):
    """Mesh sizes by dimension name, outermost first."""

    _field = "mesh"


class Styles(Table[str]):
    """How modules' weights are divided, by pattern of module paths."""

    _field = "tensor_parallel"


class Tiles(Table[int]):
    """The number of chunks in which regions run, by pattern of module paths."""

    _field = "tiles"


def _check_tiles(chunks: Mapping[str, int]) -> Tiles:
    for pattern, count in chunks.items():
        if count < 2:
            raise PlanError(
                f"{pattern!r} can't run in {count} chunk(s)", where=pattern, hint="2 or more; or leave it out"
            )
    return Tiles(chunks)


def _check_dynamic(dynamic: Dynamic) -> Dynamic:
    declared(dynamic)  # (places that say different things of one size are refused)
    return Table((argument, told if isinstance(told, str) else Table(told)) for argument, told in dynamic.items())


def _check_mesh(sizes: Mapping[str, int]) -> Mesh:
    for name, size in sizes.items():
        if name not in MESH_DIMENSIONS:
            raise PlanError(f"a mesh has no dimension {name!r}", where=name, hint=did_you_mean(name, MESH_DIMENSIONS))
        if size != -1 and size < 1:
            raise PlanError(
                f"mesh dimension {name!r} can't have size {size}",
                where=name,
                hint="a positive size, or -1 for the rest",
            )
    rest = [name for name, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise PlanError(
            f"only one mesh dimension can be -1, not {_listed(rest)}", hint="give all but one of them a size"
        )
    return Mesh((name, sizes[name]) for name in MESH_DIMENSIONS if name in sizes)


_RECOMPUTE = ("auto", "none", "full")
_NAME = r"[^\W\d]\w*"
_REF = rf"{_NAME}(?:\.{_NAME})*:{_NAME}(?:\.{_NAME})*"  # package.module:name
_PASS = re.compile(
    rf"(?P<ref>{_REF})"
    rf"(?:\s+(?P<position>before|after)\s+(?P<anchor>{_NAME}(?:[.-]\w+)*))?"
)


@dataclass(frozen=True)
class UserPass:
    """A pass of the user's own and its place in the pipeline: without a position, after all others."""

    ref: str  # "package.module:function"
    position: Literal["before", "after"] | None = None  # on which side of `anchor` it runs
    anchor: str | None = None  # the name of the pass that `position` refers to; None exactly if `position` is

    @classmethod
    def parse(cls, text: str) -> UserPass:
        """Return the pass of `"package.module:function"`, alone or followed by `before NAME` or `after NAME`."""
        match = _PASS.fullmatch(text.strip())
        if match is None:
            raise PlanError(
                f"{text!r} does not name a pass",
                hint='write "package.module:function", then "before NAME" or "after NAME" if needed',
            )
        position: Any = match["position"]
        return cls(match["ref"], position, match["anchor"])

    def __str__(self) -> str:
        return self.ref if self.position is None else f"{self.ref} {self.position} {self.anchor}"


def _refuse_callable(value: Any) -> Any:
    if callable(value):
        module, name = (
            getattr(value, "__module__", "package.module"),
            getattr(value, "__qualname__", "function"),
        )
        raise PlanError(
            f"a plan can't hold the callable {name}",
            why="plans are hashed, compared between ranks and saved",
            hint=f'write its name: "{module}:{name}"',
        )
    return value


def _integer(value: Any) -> Any:
    # pydantic's Literal of integers accepts True as 1.
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(f"{short(value)} is not an integer", hint="0, 1, 2 or 3")
    return value


def _recompute_type(value: Any) -> Any:
    # (pydantic's own error would name every type of the union)
    value = _refuse_callable(value)
    for part in value if isinstance(value, (list, tuple)) else (value,):
        if not isinstance(part, str):
            raise PlanError(
                f"{short(part)} is no {'pattern' if part is not value else 'way of recomputing'}",
                hint='"auto", "none", "full", a list of patterns of modules, or a policy "package.module:function"',
            )
    return value


def _check_recompute(given: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if isinstance(given, tuple):
        if not given or not all(given):
            raise PlanError(
                "recompute is an empty list, or has an empty pattern",
                hint='patterns such as "blocks.*"; "none" for nothing',
            )
        return given
    if given not in _RECOMPUTE and not re.fullmatch(_REF, given):
        raise PlanError(
            f"{short(given)} is no way of recomputing",
            hint=f'{did_you_mean(given, _RECOMPUTE)}; a policy is "package.module:function", and patterns of modules are a list',
        )
    return given


def _check_schedule(given: str) -> str:
    try:
        check_name(given)
    except PlanError as error:
        raise PlanError(error.what, why=error.why, hint=error.hint) from None  # (the field's name is put before it)
    return given


_PARTITIONS = ("uniform", "parameters", "time")


def _check_partition(given: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if isinstance(given, tuple):
        if not given or not all(given) or len(set(given)) < len(given):
            raise PlanError(
                "partition names no module, or one twice",
                hint='paths of the modules that stages begin with, such as ["layers.4", "layers.8"]',
            )
        return given
    if given.startswith("type:"):
        try:
            re.compile(given.removeprefix("type:"))
        except re.error as error:
            raise PlanError(f"{short(given)} is no pattern of class names", why=str(error)) from None
        return given
    if given not in _PARTITIONS:
        raise PlanError(
            f"{short(given)} is no way of cutting a model",
            hint=f'{did_you_mean(given, _PARTITIONS)}; "type:REGEX" counts modules by their class; paths of modules are a list',
        )
    return given


class Plan(Record, frozen=True):
    """A description of a compiled training step. Every fault in it is a `PlanError`, raised when it is created.

    The fields' meanings, allowed values and defaults are in `Plan.json_schema()`. A mesh that does not fit the number
    of ranks is refused when that number is known, in `resolve_mesh`. The ZeRO stages are those of Rajbhandari et al.,
    2020, "ZeRO".

    Equality and hash are those of the values; where a value came from (`origins`) does not count.
    """

    mesh: Annotated[
        dict[str, StrictInt],
        AfterValidator(_check_mesh),
        WithJsonSchema(
            {
                "type": "object",
                "properties": {name: {"type": "integer", "minimum": -1} for name in MESH_DIMENSIONS},
                "additionalProperties": False,
            }
        ),
    ] = Field(
        examples=[{"replicate": 2, "dp": -1}],
        default_factory=lambda: _check_mesh({"dp": -1}),
        description="sizes by name, outermost first: pp (pipeline ranks), replicate (copies of the shards: HSDP), "
        "dp (ranks that share one set of shards), cp (ranks that divide sequences), tp (ranks that divide weights); -1 once for the rest",
    )
    zero: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_integer)] = Field(
        examples=[2],
        default=3,
        description="the ZeRO stage: 0 replicates, 1 shards the optimizer state, 2 gradients too, 3 parameters too",
    )
    backend: Literal["inductor", "eager"] = Field(
        examples=["eager"],
        default="inductor",
        description="inductor compiles; eager runs the same program operator by operator",
    )
    param_persistence_threshold: Annotated[StrictInt, Field(ge=0)] = Field(
        examples=[10000], default=0, description="parameters of fewer elements than this stay whole on every rank"
    )
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | Precision, Field(union_mode="left_to_right"), BeforeValidator(precision_of)
    ] = Field(examples=["bf16"], default="fp32", description='"fp32", "bf16", "fp16" or a record of dtypes')
    numerics: Literal["deepspeed", "fsdp2"] | None = Field(
        examples=["fsdp2"],
        default=None,
        description="the system whose mixed precision to follow; none: zgraph's own (see zgraph.plan.precision)",
    )
    optimizer: AnyOptimizer | None = Field(
        examples=[{"name": "AdamW", "lr": 0.0003, "decay": "matrices"}],
        default=None,
        description="the optimizer that the update program runs; none: use one of your own",
    )
    lr_schedule: AnySchedule | None = Field(
        examples=[{"name": "Cosine", "total_steps": 10000, "warmup_steps": 500}],
        default=None,
        description="the learning rate from step to step",
    )
    ema: Average | None = Field(
        examples=[0.999], default=None, description="a moving average of the weights, or its decay"
    )
    grad_clip: Clip | None = Field(
        examples=[1.0], default=None, description="the largest norm of all gradients together, or a record"
    )
    micro_batches: Annotated[StrictInt, Field(ge=1)] = Field(
        examples=[4], default=1, description="into how many parts train_step splits its batch"
    )
    schedule: Annotated[str, BeforeValidator(_refuse_callable), AfterValidator(_check_schedule)] = Field(
        examples=["zb"],
        default="1f1b",
        description="the order in which pipeline stages run micro-batches (mesh.pp): gpipe, 1f1b, interleaved1f1b, loopedbfs, interleavedzerobubble, "
        'zb, zbvzerobubble, zbv, dualpipev, a .csv file of actions, or "package.module:function"',
    )
    partition: Annotated[str | tuple[str, ...], BeforeValidator(_refuse_callable), AfterValidator(_check_partition)] = (
        Field(
            examples=[["layers.4", "layers.8", "layers.12"]],
            default="time",
            description="where the model is cut into pipeline stages: uniform, parameters, time, type:REGEX, or the paths of the modules that stages "
            "begin with, but for the first stage",
        )
    )
    virtual_stages: Annotated[StrictInt, Field(ge=1)] | None = Field(
        examples=[2],
        default=None,
        description="pipeline stages on each rank of mesh.pp; none: as many as the schedule needs",
    )
    tensor_parallel: (
        Literal["auto", "model"]
        | Annotated[dict[str, Literal["colwise", "rowwise", "vocab", "replicate"]], AfterValidator(Styles)]
    ) = Field(
        examples=[{"*.q_proj": "colwise", "*.o_proj": "rowwise"}],
        default="auto",
        description="which weights the ranks of mesh.tp divide: auto (found from the graph), model (its own table, in transformers), or a table "
        "from patterns of module paths to colwise, rowwise, vocab or replicate",
    )
    sequence_parallel: StrictBool = Field(
        examples=[True],
        default=False,
        description="whether ranks of mesh.tp hold parts of the tokens between divided layers, so that norms and dropouts are divided as well",
    )
    async_tensor_parallel: Literal["auto", "off"] | Annotated[StrictInt, Field(ge=2)] = Field(
        examples=[4],
        default="auto",
        description="whether collectives of mesh.tp and the matrix products beside them run in pieces, each on the link while the next is computed: "
        "auto (where the simulated step is faster), off, or the number of pieces",
    )
    partition_activations: StrictBool = Field(
        examples=[True],
        default=False,
        description="whether ranks of mesh.tp store saved activations in parts that all of them would store whole, and gather them for the backward",
    )
    sequence_dim: Literal["auto"] | StrictInt = Field(
        examples=[1],
        default="auto",
        description="the dimension of inputs that is the sequence, which ranks of mesh.cp divide: auto (found from the graph), or its number",
    )
    context_attention: Literal["auto", "heads", "ring"] = Field(
        examples=["ring"],
        default="auto",
        description="how ranks of mesh.cp compute attention: heads (each rank the whole sequence for some heads), ring (keys and "
        "values are passed around), "
        "or auto: heads, unless the ranks don't divide them",
    )
    elastic: Elastic | None = Field(
        examples=[{"batch": 24, "micro_batch": 8}],
        default=None,
        description="the rows of a step, the same on any number of ranks, as a record; micro_batches then follows from the number of ranks",
    )
    loss_average: Literal["batch", "token"] = Field(
        examples=["token"],
        default="batch",
        description="whether micro-batches and ranks count equally (batch) or by their numbers of targets (token)",
    )
    bucket: Bucket = Field(
        examples=[{"gather": "16MiB"}],
        default=Bucket(),
        description="how much one gather or reduction carries, as a record",
    )
    wire: Wire = Field(
        examples=[{"gather": "int8", "reduce": "bf16"}],
        default=Wire(),
        description="in how many bits weights are gathered and gradients scattered over data-parallel ranks, as a record",
    )
    local_steps: LocalSteps | None = Field(
        examples=[{"every": 8, "wire": "int8"}],
        default=None,
        description="how many steps groups of ranks (mesh.replicate) train by themselves, and how they come together (DiLoCo), as a record; "
        "none: gradients are averaged over all of them at each step",
    )
    prefetch: Prefetch = Field(
        examples=[{"max_bytes": "256MiB", "reduce_bytes": "64MiB"}],
        default=Prefetch(),
        description="how early gathers start, as a record",
    )
    recompute: Annotated[
        Literal["auto", "none", "full"] | str | tuple[str, ...],
        BeforeValidator(_recompute_type),
        AfterValidator(_check_recompute),
    ] = Field(
        examples=[["blocks.*"]],
        default="auto",
        description="what the backward recomputes: none; full (all but each layer's inputs); auto (cheap values on "
        'inductor, and what memory_budget needs); patterns of module paths; or a policy over nodes, "package.module:function"',
    )
    pack_masks: StrictBool = Field(
        examples=[True],
        default=False,
        description="whether masks that the forward saves for the backward (of dropout, say) are saved as bits, in place of bytes",
    )
    tiles: Annotated[dict[str, StrictInt], AfterValidator(_check_tiles)] = Field(
        examples=[{"loss": 8, "model.layers.*.mlp": 4}],
        default_factory=Tiles,
        description="what runs in chunks over slices of its rows, so that nothing inside of it is stored whole: a table from "
        "patterns of module paths, "
        'or "loss" (the classification loss, or log-probabilities and entropies, with the matrix product that gives '
        "their logits), to numbers of chunks",
    )
    attention: AttentionTable = Field(
        examples=[{"layers.*": {"kind": "bigbird", "block": 64}}],
        default_factory=Attention,
        description="attention that computes only some blocks of queries with some blocks of keys: a table from patterns of module paths to "
        "sparsities (zgraph.Fixed, Variable, BigBird, Longformer, LocalWindow, SlidingWindow, BlockLayout, Dense), or mask functions "
        '"package.module:name"',
    )
    shapes: Annotated[
        Literal["auto", "static", "dynamic"] | Buckets | Hot,
        Field(union_mode="left_to_right"),
        BeforeValidator(shapes_of),
    ] = Field(
        examples=[
            "static",
            {"buckets": [256, 512], "pad": {"input_ids": 0, "attention_mask": 0, "labels": -100}},
            {"hot": 2},
        ],
        default="auto",
        description="calls that differ only in sizes: auto (the first is a program as it stands; at the second the sizes that differ become "
        "symbols, and one program serves all), dynamic (symbols from the first call on), static (each is a program of its own), or a record: "
        "sizes that inputs are padded to, and with what (buckets, pad); or which sizes have static programs besides (hot)",
    )
    dynamic: Annotated[Dynamic, AfterValidator(_check_dynamic)] = Field(
        examples=[{"input_ids": {"0": "batch", "1": {"name": "seq", "max": 2048}}, "image_grid_thw": "value"}],
        default_factory=Table,
        description="sizes that are symbols from the first call on: a table from arguments of forward to tables from dimensions to sizes "
        '(a name, or a record with name, max and typical); equal names are one size. "value": each value of it has a program of its own',
    )
    max_programs: Annotated[StrictInt, Field(ge=1)] = Field(
        examples=[16],
        default=128,
        description="how many compiled programs are kept, each for the calls of one signature; of more the one that was called for longest ago goes",
    )
    offload: Offload = Field(
        examples=[{"optimizer": "cpu", "activations": "nvme:/mnt/disk"}],
        default=Offload(),
        description="what is stored in the host's memory or on disk while nothing reads it, as a record",
    )
    memory_budget: Bytes | None = Field(
        examples=["20GiB"],
        default=None,
        description='bytes of device memory that a step may take on each rank, or "20GiB"; none: no bound. In a pipeline it is for all stages '
        "of a rank, with its in-flight micro-batches",
    )
    on_nonfinite: Literal["ignore", "stop", "skip", "rollback"] = Field(
        examples=["rollback"],
        default="ignore",
        description="what happens at a step with an infinite or NaN loss or gradient: ignore (it updates the weights); skip (no "
        "update); stop (an error that names the module); rollback (the same error, after the last checkpoint was loaded)",
    )
    watch: Watch = Field(
        examples=[{"timeout": 300}], default=Watch(), description="how ranks watch each other, as a record"
    )
    hardware: str | None = Field(
        examples=["h100-80g"],
        default=None,
        description="the hardware that schedules are made for: h100-80g, h200-141g, a100-80g, cpu, or a file that "
        "zgraph calibrate has written; default: what data sheets say of such devices; none: that in commands, "
        "and measured where a model is compiled",
    )
    adapt: Literal["once", "off"] = Field(
        examples=["once"],
        default="off",
        description="whether the operators of a step are timed while it trains, and transfers scheduled once more by these times where "
        "that is forecast to be faster: once, or off. Where hardware is not named",
    )
    passes: tuple[
        Annotated[str, AfterValidator(lambda text: str(UserPass.parse(text))), BeforeValidator(_refuse_callable)],
        ...,
    ] = Field(
        examples=[["flight:count_flight after overlap"]],
        default=(),
        description='passes of your own: "package.module:function", then "before NAME" or "after NAME" if needed',
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (conflict := first_conflict(self)) is not None:
            raise conflict
        if self.elastic is not None:
            self._check_worlds(self.elastic)
        return self

    def _check_worlds(self, elastic: Elastic) -> None:
        for world in elastic.worlds or ():
            try:
                self.resolve_mesh(world)
            except MeshError as error:
                raise PlanError(
                    f"elastic.worlds names {world}, and it can't be",
                    where="elastic.worlds",
                    why="; ".join(text for text in (error.what, error.why) if text),
                    hint="leave it out",
                ) from None
        if elastic.worlds is None and not self.worlds():
            raise PlanError(
                f"no number of ranks can have an elastic batch of {elastic.batch}",
                where="elastic.batch",
                why=f"the mesh is {_shown(self.mesh)}",
                hint="another batch or micro_batch, or -1 for a size of the mesh",
            )

    @property
    def named_hardware(self) -> str | None:
        """The hardware that the plan names; None where it is the device's own, by data sheets or measured."""
        return None if self.hardware == "default" else self.hardware

    def resolved_precision(self) -> Precision:
        """Return the dtypes that `precision` and `numerics` stand for."""
        return preset(self.precision, self.numerics) if isinstance(self.precision, str) else self.precision

    def loss_scale(self) -> LossScale | None:
        """Return the loss scaling of this plan, or None for none."""
        return self.resolved_precision().scaling()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    # Values are compared, not origins: two plans that say the same are the same plan.

    def __eq__(self, other: object) -> bool:
        return self.model_dump() == other.model_dump() if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return int(self.hash()[:15], 16)

    def hash(self) -> str:
        """Return the SHA-256, in hex, of the values in canonical JSON: the same in every process, on every machine."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    # Files.

    @classmethod
    def load(cls, path: str | PathLike[str], beside: Mapping[str, Any] | None = None) -> Self:
        """Return the plan in a TOML, YAML or JSON file, as its suffix says, with the fields of `beside` that it lacks.

        Raises `PlanError` with the file and, where it is known, the line: for a file that is missing, can't be parsed
        or holds a key twice, and for every fault in the plan itself.
        """
        file = Path(path)
        text = planfile.read(file)
        data = planfile.parse(text, file)
        try:
            plan = cls.model_validate({**(beside or {}), **data})
        except PlanError as error:
            raise located(error, file, text) from None
        unsaid = (beside or {}).keys() - data.keys()
        plan._origins.update(dict.fromkeys(plan.model_fields_set - unsaid, f"file {file}"))
        return plan

    def save(self, path: str | PathLike[str]) -> None:
        """Write every value, defaults too: the file then means the same to a zgraph with other defaults.

        The suffix of `path` gives the format. Raises `PlanError` if it is none of .toml, .yaml, .yml and .json, if the
        file can't be written, or if the format can't hold the plan unchanged.
        """
        file = Path(path)
        text = planfile.render(self.model_dump(mode="json"), file)
        if type(self).model_validate(planfile.parse(text, file)) != self:
            raise PlanError(
                "this plan can't be written in this format without a change",
                where=str(file),
                hint="save it as .json",
            )
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise PlanError("the plan can't be written", where=str(file), why=error.strerror) from error

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON Schema of a plan file, for editors and other tools."""
        return cls.model_json_schema()

    # Reading a plan.

    def origins(self) -> dict[str, str]:
        """Return where each field's value came from: `"default"`, `"given"`, `"file plan.toml"`, or `"elastic"` if
        that has chosen it."""
        return {
            name: self._origins.get(name, "given") if name in self.model_fields_set else "default"
            for name in type(self).model_fields
        }

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copy = super().model_copy(update=update, deep=deep)
        if update:  # the copy is validated as a new plan, whose fields all count as given
            origins = {name: origin for name, origin in self._origins.items() if name not in update}
            copy._origins.update(origins)
        return copy

    def __str__(self) -> str:
        rows = [("field", "value", "origin")]
        rows += [(name, _shown(getattr(self, name)), origin) for name, origin in self.origins().items()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}" for name, value, origin in rows)

    @property
    def own_policy(self) -> str | None:
        """The policy over nodes of the user's own that says what is recomputed, "package.module:function"; None without one."""
        return self.recompute if isinstance(self.recompute, str) and ":" in self.recompute else None

    def user_passes(self) -> tuple[UserPass, ...]:
        """Return `passes`, parsed."""
        return tuple(UserPass.parse(text) for text in self.passes)

    def usual_world(self) -> int:
        """Return the number of ranks to show a plan with where none is given.

        It is that of the mesh, with 2 for its -1, or the next that `elastic` allows.
        """
        usual = math.prod(2 if size == -1 else size for size in self.mesh.values())
        if self.elastic is None:
            return usual
        worlds = self.worlds()
        return next((world for world in worlds if world >= usual), worlds[-1])

    def worlds(self) -> tuple[int, ...]:
        """Return the numbers of ranks that an elastic plan can have, the smallest first.

        Raises `PlanError` for a plan that is not elastic: most of these can have any number.
        """
        if self.elastic is None:
            raise PlanError("the plan is not elastic", where="elastic", hint="elastic=zgraph.Elastic(batch=…)")
        known = math.prod(size for size in self.mesh.values() if size != -1)
        rests = divisors(self.elastic.batch) if -1 in self.mesh.values() else [1]
        candidates = (known * rest for rest in rests)
        return tuple(world for world in candidates if self.elastic.refusal(world, self.data_ranks(world)) is None)

    def pipeline_ranks(self, world: int) -> int:
        """Return the number of `world` ranks that a pipeline's stages are divided over: 1 without a pipeline.

        Raises `MeshError` for a world that does not fit the mesh.
        """
        return self.resolve_mesh(world).get("pp", 1)

    def refuse_pipeline(self, world: int, what: str) -> None:
        """Raise `PlanError`, saying that there is no `what` of it, if the plan has a pipeline on `world` ranks."""
        ranks = self.pipeline_ranks(world)
        if ranks > 1:
            raise PlanError(
                f"there is no {what} of a plan with a pipeline",
                where="mesh.pp",
                why=f"the stages on its {ranks} ranks have programs of their own",
                hint="zgraph forecast shows all of it, and zgraph dump --stage K the programs of a stage; or leave pp out of the mesh",
            )

    @property
    def gradient_dims(self) -> tuple[str, ...]:
        """The mesh dimensions over which gradients are averaged."""
        return tuple(d for d in DATA_DIMENSIONS if self.local_steps is None or d != GROUPS)

    @property
    def takes_local_steps(self) -> bool:
        """Whether ranks may have weights of their own between some steps."""
        return self.local_steps is not None or isinstance(self.optimizer, ZeroOneAdam)

    def update_kind(self, step: int) -> UpdateKind:
        """Return what ranks share for an update; `step` counts from 1, skipped steps included."""
        if self.local_steps is not None:
            return UpdateKind.ROUNDS if self.local_steps.ends_at(step) else UpdateKind.IN_GROUPS
        return UpdateKind.GRADIENTS if self.optimizer is None else self.optimizer.kind(step)

    def data_ranks(self, world: int) -> int:
        """Return how many of `world` ranks see different rows."""
        known = math.prod(size for size in self.mesh.values() if size != -1)
        return math.prod(world // known if self.mesh.get(d, 1) == -1 else self.mesh.get(d, 1) for d in DATA_DIMENSIONS)

    def for_world(self, world: int) -> Self:
        """Return this plan on `world` ranks.

        An elastic plan gets the rows of a rank and the number of micro-batches that follow from it; another one is
        returned as it is. Raises `MeshError` for a world that does not fit the mesh.
        """
        sizes = self.resolve_mesh(world)
        if self.elastic is None:
            return self
        rows = self.elastic.batch // math.prod(sizes.get(dim, 1) for dim in DATA_DIMENSIONS)
        elastic = self.elastic.model_copy(update={"rows": rows})
        plan = self.model_copy(update={"elastic": elastic, "micro_batches": elastic.parts(rows)})
        plan._origins.update({"elastic": self.origins()["elastic"], "micro_batches": "elastic"})
        return plan

    def resolve_mesh(self, world: int) -> dict[str, int]:
        """Return the mesh's sizes by name, in ranks, with -1 filled in.

        Raises `MeshError` if their product can't be `world` ranks, or if the elastic batch or `wire.secondary` does
        not fit them.
        """
        if isinstance(world, bool) or not isinstance(world, Integral):
            raise MeshError(
                f"a world is a number of ranks, not a {type(world).__name__}",
                hint="a whole number, such as 4; zgraph.verify takes (model, plan, world, inputs)",
            )
        known = math.prod(size for size in self.mesh.values() if size != -1)
        rest = next((name for name, size in self.mesh.items() if size == -1), None)
        mesh = _shown(self.mesh)
        if rest is None and known != world:
            raise MeshError(
                f"the mesh {mesh} is for a world of {known}, and this one is of {world}",
                where="mesh",
                hint=f"start {known} rank(s), or change the sizes to make {world} (-1 takes the rest)",
            )
        if world < 1 or world % known:
            raise MeshError(
                f"the mesh {mesh} does not divide a world of {world}",
                where="mesh",
                why=f"the sizes without {rest} make {known}, and {world} is no multiple of that",
                hint=f"start a multiple of {known} ranks, or change the sizes",
            )
        why = self.elastic.refusal(world, self.data_ranks(world)) if self.elastic is not None else None
        if self.elastic is not None and why is not None:
            raise MeshError(
                f"an elastic batch of {self.elastic.batch} rows can't be on {world} rank(s)",
                where="elastic",
                why=why,
                hint=f"worlds that can: {shown_worlds(self.worlds(), world)}",
            )
        sizes = {name: world // known if size == -1 else size for name, size in self.mesh.items()}
        ranks, block = sizes.get("dp", 1), self.wire.secondary
        if block is not None and ranks % block:
            raise MeshError(
                f"wire.secondary is {block}, and mesh.dp is {ranks}",
                where="wire.secondary",
                why="the ranks of dp are to be nodes of that many",
                hint=f"a number that divides {ranks}, as the devices of a node do; or leave it out",
            )
        return sizes


def plan_of(given: Any) -> Plan:
    """Return the plan that a caller gave; `Plan()` for None. Raises `PlanError` for what is no plan."""
    if given is None:
        return Plan()
    if isinstance(given, Plan):
        return given
    hint = "zgraph.Plan(zero=3), say"
    if isinstance(given, Mapping):
        hint = "zgraph.Plan(**fields); zgraph.deepspeed.plan(config, world=…) for a configuration of DeepSpeed"
    elif isinstance(given, str | PathLike):
        hint = f'zgraph.Plan.load("plan.toml") reads a file; {hint}'
    raise PlanError(f"a plan is a zgraph.Plan, not {_shown(given)} ({type(given).__name__})", hint=hint)


def located(error: PlanError, file: Path, text: str) -> PlanError:
    """Return the same error, with file and line in `where`."""
    if error.problems:
        return joined([located(problem, file, text) for problem in error.problems])
    place = str(file)
    if error.where:
        lines = planfile.lines_of_key(text, re.sub(r"\[\d+\]", "", error.where).rpartition(".")[2])
        place += f":{lines[0]}: {error.where}" if len(lines) == 1 else f": {error.where}"
    return type(error)(error.what, where=place, why=error.why, hint=error.hint)


def _listed(names: list[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1]))


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={size}" for name, size in value.items()) or "(none)"
    if isinstance(value, Record):
        return repr(value)
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value)) or "(none)"
    return str(value) if isinstance(value, str) else repr(value)
