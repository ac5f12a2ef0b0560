"""The precision of a plan from `mixed_precision` of a file of `accelerate config`, without DeepSpeed."""

from __future__ import annotations

from zgraph.deepspeed.plan_draft import Draft
from zgraph.names import did_you_mean
from zgraph.plan.precision import preset

NAMES = ("no", "fp16", "bf16", "fp8")


def asked_precision(draft: Draft) -> tuple[str, str]:
    """Return the key that says a precision, and "no", "fp16" or "bf16"; "no" if it is refused."""
    key, value = "mixed_precision", draft.get("mixed_precision")
    if value is None and draft.get("fp16") is not None:  # (files from before accelerate 0.11)
        return "fp16", "fp16" if draft.get("fp16") else "no"
    if draft.get("fp16") is not None:
        draft.say("fp16", "no effect here", "mixed_precision says it")
    if value is None:
        return key, "no"
    if value.lower() not in NAMES:
        draft.refuse(key, f"there is no precision {value}", did_you_mean(value, NAMES))
    elif value.lower() == "fp8":
        hint = 'bf16; wire = {gather = "fp8"} in a plan sends weights in 8 bits'
        draft.refuse(key, "products are not computed in 8 bits here", hint)
    else:
        return key, value.lower()
    return key, "no"


def set_precision(draft: Draft, kind: str | None) -> None:
    """Set the precision: FSDP's, or in place of the autocast that accelerate puts around a model."""
    key, name = asked_precision(draft)
    if draft.get(key) is None:
        return
    if name == "no":
        draft.say(key, "equivalent", "a plan computes in the model's own dtypes")
        return
    numerics = "fsdp2" if kind == "FSDP" else None
    how = "float32 shards, gathered and reduced in it" if numerics else "in place of autocast"
    if name == "bf16":
        draft.apply(key, "precision", "bf16", how)
    else:
        from zgraph.hf.loss_scaling import loss_scale_of

        draft.apply(key, "precision", preset("fp16", numerics).model_copy(update={"loss_scale": loss_scale_of(None)}))
        said = f"precision = a record: fp16, {how}, with the loss scaling of torch's GradScaler"
        draft.say(key, "applied", f'{said}; an Accelerator says mixed_precision="no", or it would scale as well')
    if numerics and name == "bf16":
        draft.fields["numerics"] = numerics
        draft.origins["numerics"] = key
