"""A release of a library without a name that zgraph needs, and that is not public there, is refused in one sentence, where its door is opened."""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from typing import Any

import pytest
from torch import nn
from trainers import as_launched, model_of

import zgraph
from zgraph.errors import ModelError
from zgraph.torch_compat.private_names import NAMES, _code, _words, refuse_release


def taken(monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    """Take a name of the table away, or all that are enough; gives what the error calls it."""
    name, *others = name.split(" or ")
    for other in others:
        taken(monkeypatch, other)
    place, _, rest = name.partition(" ")
    module, _, path = place.partition(":")
    inner, _, last = path.rpartition(".")
    owner: Any = importlib.import_module(module)
    owner = functools.reduce(getattr, inner.split("."), owner) if inner else owner
    if inspect.isclass(owner):
        owner = next(c for c in owner.__mro__ if last in vars(c))
    if not rest:
        monkeypatch.delattr(owner, last)
        return path
    asked, word, *_ = rest.split()
    fake, held = (lambda other: None), getattr(owner, last)
    if asked == "has":  # (what its code has besides stays)
        others = {w for w in _words(_code(held)) if w != word}
        fake = types.FunctionType(fake.__code__.replace(co_names=tuple(others)), {}) if others else fake
    fake.__module__ = getattr(held, "fget", held).__module__
    monkeypatch.setattr(owner, last, fake)
    return f"{word} in {path}" if asked == "has" else f"{path}({word}"


@pytest.mark.parametrize("part", list(NAMES))
def test_each_name_is_missed(part, monkeypatch):
    pytest.importorskip(NAMES[part].library)
    refuse_release(part)
    for name in NAMES[part].names:
        with monkeypatch.context() as patch:
            said = taken(patch, name)
            with pytest.raises(ModelError) as caught:
                refuse_release(part)
        assert f"has no {said}" in str(caught.value) and f"{NAMES[part].known} is known to work" in str(caught.value)


def test_a_method_that_another_library_has_replaced_says_nothing_of_the_release(monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.Trainer, "__init__", lambda self, *args, **kwargs: None)
    refuse_release("trainers")


def test_an_accelerator_that_keeps_its_models_otherwise_is_refused(monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    with as_launched():
        accelerator = accelerate.Accelerator(cpu=True)
        taken(monkeypatch, "accelerate:Accelerator.__init__ has _models")
        with pytest.raises(ModelError, match="has no _models in Accelerator"):
            accelerator.prepare(zgraph.compile(nn.Linear(2, 2), zgraph.Plan(backend="eager")))


def test_a_head_of_trls_that_is_another_one_is_refused(monkeypatch):
    utils = pytest.importorskip("trl.trainer.utils")
    models = model_of("llama"), model_of("llama")
    for model in models:
        utils.add_fused_lm_head(model)
    zgraph.compile(models[0], zgraph.Plan(backend="eager"))
    taken(monkeypatch, "trl.trainer.utils:_use_triton")
    with pytest.raises(ModelError, match="has no _use_triton"):
        zgraph.compile(models[1], zgraph.Plan(backend="eager"))


def test_a_release_of_lightning_is_refused_when_its_door_is_opened(monkeypatch):
    pytest.importorskip("lightning")
    import zgraph.lightning as door

    taken(monkeypatch, "lightning.pytorch.plugins:Precision._wrap_closure")
    with pytest.raises(ModelError, match=r"has no Precision\._wrap_closure"):
        importlib.reload(door)


def test_a_folder_is_not_loaded_by_a_release_that_ties_weights_otherwise(monkeypatch, tmp_path):
    transformers = pytest.importorskip("transformers")
    taken(monkeypatch, "transformers:PreTrainedModel.post_init has all_tied_weights_keys")
    with pytest.raises(ModelError, match="all_tied_weights_keys"):
        zgraph.load_pretrained(transformers.LlamaForCausalLM, tmp_path, zgraph.Plan())
