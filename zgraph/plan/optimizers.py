"""The optimizers of a plan, as records; `zgraph.update` has their rules. Nothing here imports torch.

Where torch.optim has the optimizer, names, defaults and meaning are torch's (2.13). Each record may say `groups`, for
parameters that are updated with other numbers, and `decay="matrices"`, which leaves norms and biases without decay.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any, Literal, Self, Union

from pydantic import AfterValidator, BeforeValidator, Field, FiniteFloat, StrictBool, StrictInt, model_validator

from zgraph.errors import PlanError
from zgraph.names import did_you_mean
from zgraph.record import Record, joined, short

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdamW8bit",
    "AnyOptimizer",
    "Lion",
    "Muon",
    "OneBitAdam",
    "OneBitLAMB",
    "OneBitOptimizer",
    "Optimizer",
    "ParamGroup",
    "UpdateKind",
    "ZeroOneAdam",
]

Rate = Annotated[FiniteFloat, Field(ge=0)]
Beta = Annotated[FiniteFloat, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], Field(description="decay rates of the gradient's average and of its square's")]
Eps = Annotated[Rate, Field(description="added to the denominator, so that it is not zero")]
Amsgrad = Annotated[StrictBool, Field(description="divide by the largest second moment so far, not the latest")]
Maximize = Annotated[StrictBool, Field(description="step up the gradient instead of down")]
Nesterov = Annotated[StrictBool, Field(description="use Nesterov's momentum")]
MaxCoeff = Annotated[Rate, Field(description="the largest ratio of a weight's norm to its update's")]
MinCoeff = Annotated[Rate, Field(description="the smallest")]
Count = Annotated[StrictInt, Field(ge=1)]
FreezeSteps = Annotated[
    StrictInt, Field(ge=1, description="steps before the squares' average is frozen, and momenta are sent in signs")
]


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Value = Annotated[Any, AfterValidator(_hashable)]  # checked by the optimizer's field that it overrides


class ParamGroup(Record, frozen=True):
    """Parameters by name, and the numbers that differ for them: `ParamGroup(match="*.bias", weight_decay=0.0)`.

    `match` has patterns of `fnmatch`, case-sensitive, over whole names ("layers.0.bias"); with several, any may match.
    """

    match: str | tuple[str, ...] = Field(description="shell patterns of parameter names")
    overrides: dict[str, Value] = Field(
        default_factory=dict, description="fields of the optimizer and their values here"
    )

    @model_validator(mode="before")
    @classmethod
    def _take_overrides(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("overrides", {}), dict):
            return data
        other = {k: v for k, v in data.items() if k not in cls.model_fields}
        known = {k: v for k, v in data.items() if k in cls.model_fields}
        return {**known, "overrides": {**known.get("overrides", {}), **other}} if other else data

    def __hash__(self) -> int:
        return hash((self.match, frozenset(self.overrides.items())))


class UpdateKind(Enum):
    """What ranks share for one update."""

    GRADIENTS = "gradients"  # as they are: the backward reduces them
    GRADIENT_SIGNS = "signs of gradients"  # in the update, as all that follow
    MOMENTUM_SIGNS = "signs of momenta"
    NOTHING = "nothing"  # each rank goes on by itself
    ROUND_SIGNS = "signs of a round's steps"  # what each rank has moved by since they shared last
    IN_GROUPS = "gradients within groups"  # as the backward reduces them: groups of ranks go on by themselves
    ROUNDS = "a round's steps"  # what each group has moved by since they shared last, besides gradients within it

    @property
    def reduced(self) -> bool:
        """Whether the backward reduces gradients, over the ranks that share them."""
        return self in (UpdateKind.GRADIENTS, UpdateKind.IN_GROUPS, UpdateKind.ROUNDS)

    @property
    def local(self) -> bool:
        """Whether ranks have weights of their own after the update."""
        return self in (UpdateKind.NOTHING, UpdateKind.IN_GROUPS)


class Optimizer(Record, frozen=True):
    """The fields that all optimizers have."""

    name: str
    lr: Rate = Field(default=1e-3, description="the learning rate")
    weight_decay: Rate = Field(default=0.0, description="how strongly weights decay")
    groups: tuple[ParamGroup, ...] = Field(default=(), description="parameters with other numbers; each in at most one")
    decay: Literal["all", "matrices"] = Field(
        default="all", description='"matrices": parameters of fewer than two dimensions have no weight decay'
    )

    def _records(self) -> tuple[Optimizer, ...]:
        """Return the records whose fields a group may override."""
        return (self,)

    def kind(self, step: int) -> UpdateKind:
        """Return what ranks share for an update; `step` counts from 1, skipped steps included."""
        return UpdateKind.GRADIENTS

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        problems = [problem for at, group in enumerate(self.groups) for problem in self._problems(at, group)]
        if problems:
            raise joined(problems)
        return self

    def _problems(self, at: int, group: ParamGroup) -> Iterator[PlanError]:
        left = dict(group.overrides)
        known: dict[str, None] = {}
        for record in self._records():
            fields = [k for k in type(record).model_fields if k not in _FOR_ALL]
            known.update(dict.fromkeys(fields))
            values = {k: left.pop(k) for k in fields if k in left}
            try:
                record.model_copy(update={**values, "groups": ()})
            except PlanError as error:
                for problem in error.problems or (error,):
                    where = f"groups[{at}].{problem.where}" if problem.where else f"groups[{at}]"
                    yield PlanError(problem.what, where=where, why=problem.why, hint=problem.hint)
        for key in left:
            yield PlanError(f"unknown key {key!r}", where=f"groups[{at}].{key}", hint=did_you_mean(key, known))


# What is the same for all parameters.
_FOR_ALL = (
    *("name", "groups", "decay", "companion", "companion_modules", "freeze_steps"),
    *("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"),
)


def _refuse_above(record: Optimizer, least: str, most: str) -> None:
    bound = getattr(record, most)
    if getattr(record, least) > bound:
        raise PlanError(f"{least} is above {most}, {bound}", where=least)


class Adam(Optimizer, frozen=True):
    """Kingma and Ba, 2014, with torch's L2 penalty as weight decay (decoupled if asked for)."""

    name: Literal["Adam"] = "Adam"
    betas: Betas = (0.9, 0.999)
    eps: Eps = 1e-8
    amsgrad: Amsgrad = False
    maximize: Maximize = False
    decoupled_weight_decay: StrictBool = Field(default=False, description="decay weights as AdamW does")


class AdamW(Optimizer, frozen=True):
    """Loshchilov and Hutter, 2017: Adam with decoupled weight decay."""

    name: Literal["AdamW"] = "AdamW"
    betas: Betas = (0.9, 0.999)
    eps: Eps = 1e-8
    weight_decay: Rate = Field(default=1e-2, description="how strongly weights decay")
    amsgrad: Amsgrad = False
    maximize: Maximize = False


class AdamW8bit(Optimizer, frozen=True):
    """AdamW with 8-bit states in blocks: Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization".

    Whether a parameter's states have 8 bits depends on the length of its rows (along dimension 0), not on its size:
    the numbers must not depend on how many of its rows a rank has.
    """

    name: Literal["AdamW8bit"] = "AdamW8bit"
    betas: Betas = (0.9, 0.999)
    eps: Eps = 1e-8
    weight_decay: Rate = Field(default=1e-2, description="how strongly weights decay")
    amsgrad: Amsgrad = False
    maximize: Maximize = False
    block_size: Annotated[StrictInt, Field(ge=1)] = Field(
        default=256, description="elements that share a scale, within a row"
    )
    min_row_size: Annotated[StrictInt, Field(ge=1)] = Field(
        default=16, description="parameters with shorter rows, and vectors, keep float32 states"
    )


class SGD(Optimizer, frozen=True):
    """Stochastic gradient descent, with momentum, and with Nesterov's momentum if asked for."""

    name: Literal["SGD"] = "SGD"
    momentum: Rate = Field(default=0.0, description="the share of the last step that is added to the next")
    dampening: FiniteFloat = Field(default=0.0, description="by how much the gradient counts less in the momentum")
    nesterov: Nesterov = False
    maximize: Maximize = False

    @model_validator(mode="after")
    def _check_nesterov(self) -> Self:
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise PlanError("Nesterov's momentum needs a momentum and no dampening", where="nesterov")
        return self


class Adagrad(Optimizer, frozen=True):
    """Duchi et al., 2011."""

    name: Literal["Adagrad"] = "Adagrad"
    lr: Rate = Field(default=1e-2, description="the learning rate")
    lr_decay: Rate = Field(default=0.0, description="how fast the learning rate falls with the number of steps")
    initial_accumulator_value: Rate = Field(default=0.0, description="what the sum of squares begins with")
    eps: Eps = 1e-10
    maximize: Maximize = False


class Lion(Optimizer, frozen=True):
    """Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms"."""

    name: Literal["Lion"] = "Lion"
    lr: Rate = Field(default=1e-4, description="the learning rate")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.99), description="decay rates of the update's average and of the momentum"
    )


class LAMB(Optimizer, frozen=True):
    """You et al., 2020, "Large Batch Optimization for Deep Learning", as in DeepSpeed's FusedLamb.

    The bias corrections are part of the step size, so the ratio of norms is computed without them, as is the weight
    decay.
    """

    name: Literal["LAMB"] = "LAMB"
    betas: Betas = (0.9, 0.999)
    eps: Annotated[FiniteFloat, Field(gt=0, description="added to the denominator, so that it is not zero")] = (
        1e-6  # (a row of zeros would make the whole norm 0 / 0)
    )
    max_coeff: MaxCoeff = 10.0
    min_coeff: MinCoeff = 0.01
    bias_correction: StrictBool = Field(default=True, description="correct the averages for beginning with zero")

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        _refuse_above(self, "min_coeff", "max_coeff")
        return self


class Muon(Optimizer, frozen=True):
    """Jordan et al., 2024, as torch.optim.Muon; `companion` updates embeddings and parameters that are no matrices."""

    name: Literal["Muon"] = "Muon"
    weight_decay: Rate = Field(default=0.1, description="how strongly weights decay")
    momentum: Rate = Field(default=0.95, description="the share of the last momentum that is kept")
    nesterov: Nesterov = True
    ns_coefficients: tuple[FiniteFloat, FiniteFloat, FiniteFloat] = Field(
        default=(3.4445, -4.775, 2.0315), description="of the Newton-Schulz iteration"
    )
    eps: Eps = 1e-7
    ns_steps: Annotated[StrictInt, Field(ge=1, lt=100)] = Field(default=5, description="iterations of Newton-Schulz")
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = Field(
        default=None, description="how the learning rate depends on a matrix's shape; none: original"
    )
    companion: AdamW = Field(default_factory=AdamW, description="for embeddings and what is no matrix")
    companion_modules: tuple[str, ...] = Field(
        default=(), description="patterns of further parameters for the companion"
    )

    def _records(self) -> tuple[Optimizer, ...]:
        return (self, self.companion)

    @model_validator(mode="after")
    def _check_companion(self) -> Self:
        if self.companion.groups:
            raise PlanError(
                "a companion has no groups of its own",
                where="companion.groups",
                hint="put them into Muon's: one that matches the companion's parameters holds for those",
            )
        return self


class OneBitOptimizer(Optimizer, frozen=True):
    """An optimizer that takes gradients which are not reduced, and shares signs itself, at some of its steps."""

    def begins_anew(self, step: int) -> bool:
        """Return whether what ranks have not sent before this step is of another quantity, and is dropped."""
        return False


class OneBitAdam(OneBitOptimizer, frozen=True):
    """Tang et al., 2021, as in DeepSpeed 0.19.6: Adam without bias corrections that sends signs of its momentum once
    it has warmed up.

    Weight decay is decoupled, as in AdamW.
    """

    name: Literal["OneBitAdam"] = "OneBitAdam"
    betas: Betas = (0.9, 0.999)
    eps: Eps = 1e-8
    freeze_steps: FreezeSteps = 100_000

    def kind(self, step: int) -> UpdateKind:
        return UpdateKind.GRADIENTS if step <= self.freeze_steps else UpdateKind.MOMENTUM_SIGNS


class OneBitLAMB(OneBitOptimizer, frozen=True):
    """Li et al., 2021, as in DeepSpeed 0.19.6: LAMB without bias corrections that sends signs of its momentum once it
    has warmed up.

    After the warm-up a weight's ratio of norms is its average so far, times a factor that follows the squares of
    gradients.
    """

    name: Literal["OneBitLAMB"] = "OneBitLAMB"
    betas: Betas = (0.9, 0.999)
    eps: Annotated[FiniteFloat, Field(gt=0, description="added to the denominator, so that it is not zero")] = 1e-8
    freeze_steps: FreezeSteps = 100_000
    max_coeff: MaxCoeff = 10.0
    min_coeff: MinCoeff = 0.01
    coeff_beta: Beta = Field(default=0.9, description="decay rate of the ratio's average while it warms up")
    factor_max: Rate = Field(default=4.0, description="the largest factor of the frozen ratio")
    factor_min: Rate = Field(default=0.5, description="the smallest")
    factor_threshold: Beta = Field(default=0.1, description="how much of itself the factor may change in a step")

    def kind(self, step: int) -> UpdateKind:
        return UpdateKind.GRADIENTS if step <= self.freeze_steps else UpdateKind.MOMENTUM_SIGNS

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        _refuse_above(self, "min_coeff", "max_coeff")
        _refuse_above(self, "factor_min", "factor_max")
        return self


class ZeroOneAdam(OneBitOptimizer, frozen=True):
    """Lu et al., 2022, as in DeepSpeed 0.19.6: Adam without bias corrections that shares gradients as they are at ever
    fewer steps, signs of them at the others, and in the end signs of what several local steps have moved.

    Weight decay is decoupled, as in AdamW.
    """

    name: Literal["ZeroOneAdam"] = "ZeroOneAdam"
    betas: Betas = (0.9, 0.999)
    eps: Eps = 1e-8
    var_freeze_step: Count = Field(
        default=100_000, description="the last step at which the squares' average may change"
    )
    var_update_scaler: Count = Field(
        default=16, description="changes of the squares' average after which the interval between them doubles"
    )
    local_step_scaler: Count = Field(
        default=32_678, description="steps after which the interval between synchronizations doubles"
    )
    local_step_clipper: Count = Field(default=16, description="the longest interval between synchronizations")

    def variance_interval(self, step: int) -> int:
        """Return at which multiples the squares' average changes, at this step up to `var_freeze_step`."""
        interval, last = 1, 0  # (the last step of the intervals before)
        while step > (last := (last // interval + self.var_update_scaler) * interval):
            interval *= 2
        return interval

    def local_interval(self, step: int) -> int:
        """Return at which multiples ranks synchronize, at this step after `var_freeze_step`."""
        doublings = (step - self.var_freeze_step - 1) // self.local_step_scaler
        return min(self.local_step_clipper, 2 ** min(doublings, self.local_step_clipper.bit_length()))

    def kind(self, step: int) -> UpdateKind:
        if step <= self.var_freeze_step:
            exact = step % self.variance_interval(step) == 0
            return UpdateKind.GRADIENTS if exact else UpdateKind.GRADIENT_SIGNS
        ends = step % self.local_interval(step) == 0
        return UpdateKind.ROUND_SIGNS if ends else UpdateKind.NOTHING

    def begins_anew(self, step: int) -> bool:
        return step == self.var_freeze_step + 1


_ALL = (Adam, AdamW, AdamW8bit, SGD, Adagrad, Lion, LAMB, Muon, OneBitAdam, OneBitLAMB, ZeroOneAdam)
_NAMES = {str(record.model_fields["name"].default): record for record in _ALL}


def _known(value: Any) -> Any:
    """Return a record as it is, and a table as the record that its name says. Raises `PlanError` for an unknown name."""
    if isinstance(value, str):
        known = f"zgraph.{value}(lr=…)" if value in _NAMES else did_you_mean(value, _NAMES)
        raise PlanError(f"an optimizer is a record or a table, not the name {short(value)}", hint=known)
    if not isinstance(value, dict):
        return value
    name = value.get("name")
    if name is None:
        raise PlanError("an optimizer needs a name", where="name", hint=f"one of {', '.join(_NAMES)}")
    if not isinstance(name, str) or name not in _NAMES:
        raise PlanError(f"there is no optimizer {short(name)}", where="name", hint=did_you_mean(str(name), _NAMES))
    return _NAMES[name].model_validate(value)


AnyOptimizer = Annotated[
    Union[Adam, AdamW, AdamW8bit, SGD, Adagrad, Lion, LAMB, Muon, OneBitAdam, OneBitLAMB, ZeroOneAdam],  # noqa: UP007 (pydantic needs a union at run time)
    Field(discriminator="name"),
    BeforeValidator(_known),
]
