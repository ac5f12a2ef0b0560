"""DeepSpeed's `sparse_attention` section as a plan's `attention`, for all attention of the model."""

from __future__ import annotations

from typing import Any

from zgraph.deepspeed.plan_draft import Draft
from zgraph.errors import PlanError
from zgraph.names import did_you_mean
from zgraph.plan.attention import BigBird, Dense, Fixed, Longformer, Sparsity, Variable

SECTION = "sparse_attention"
MODES: dict[str, type[Sparsity]] = {
    "dense": Dense,
    "fixed": Fixed,
    "variable": Variable,
    "bigbird": BigBird,
    "bslongformer": Longformer,
}
# The keys by the names of DeepSpeed's parser, one of which is misspelt there.
NAMES = {
    **{
        name: name
        for record in MODES.values()
        for name in record.model_fields
        if name not in ("kind", "seed", "num_different_global_patterns")
    },
    "num_differnt_global_patterns": "num_different_global_patterns",
}
_DEFAULTS = {"bigbird": {"num_random_blocks": 0}}  # of the section, where they are not those of DeepSpeed's classes


def sparse_attention(draft: Draft) -> None:
    """Set the plan's `attention` from the section, if there is one."""
    given = draft.get(SECTION)
    if not given:
        return
    mode = draft.get(f"{SECTION}.mode", "fixed")
    if mode not in MODES:
        draft.refuse(f"{SECTION}.mode", f"there is no mode {mode!r}", did_you_mean(str(mode), MODES))
        return
    record = MODES[mode]
    fields: dict[str, Any] = {}
    for key in given:
        if key == "mode" or given[key] is None:
            continue
        name = NAMES.get(key)
        if name is None or name not in record.model_fields:
            draft.say(f"{SECTION}.{key}", "no effect here", f"mode {mode!r} does not read it")
        else:
            fields[name] = given[key]
    try:
        sparsity = record(**{**_DEFAULTS.get(mode, {}), **fields})
    except PlanError as error:
        for problem in error.problems or (error,):
            named = {name: key for key, name in NAMES.items()}.get(problem.where or "", "")
            key = f"{SECTION}.{named}" if named in given else SECTION
            draft.refuse(key, problem.what, problem.hint or "leave it out")
        return
    draft.apply(
        f"{SECTION}.mode", "attention", {"*": sparsity}, "for all attention of the model, whatever modules it has"
    )
    for name in fields:
        key = next(key for key, field in NAMES.items() if field == name)
        draft.say(f"{SECTION}.{key}", "applied", f"attention: {name} = {getattr(sparsity, name)!r}")
