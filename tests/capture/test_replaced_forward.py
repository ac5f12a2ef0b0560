"""A forward that is replaced after (or before) compile is captured as it is now, or wraps the compiled one; none runs without the plan."""

import copy
import functools
import types

import pytest
import torch
from torch import nn

import zgraph
from zgraph.errors import ModelError, StepError
from zgraph.program.node import has_info, info

X = torch.arange(12.0).view(4, 3) / 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x, scale=1.0):
        return self.b(torch.tanh(self.a(x))).square().mean() * scale


def other(self, x, scale=2.0):
    return self.b(torch.relu(self.a(x))).abs().mean() * scale


def by_method(model):
    model.forward = types.MethodType(other, model)


def by_closure(model):
    model.forward = lambda x: other(model, x)


def by_partial(model):
    model.forward = functools.partial(other, model)


def around(model):
    old = model.forward

    @functools.wraps(old)
    def forward(*args, **kwargs):
        return old(*args, **kwargs) * 3

    model.forward = forward


def around_beside_much_else(model):
    old, others = model.forward, types.SimpleNamespace(held=[types.SimpleNamespace(at=at) for at in range(3000)])
    model.forward = lambda *args, **kwargs: others and old(*args, **kwargs) * 3


def around_as_accelerate_does(model):
    def forward(self, *args, **kwargs):
        return self._old_forward(*args, **kwargs) * 3

    model._old_forward = model.forward
    model.forward = functools.update_wrapper(functools.partial(forward, model), model._old_forward)


def around_by_an_object(model):
    class Around:
        def __init__(self, function):
            self.function = function

        def __call__(self, *args):
            return self.function(*args) * 3

    model.forward = Around(model.forward)


def deleted(model):
    model.__dict__.pop("forward", None)


def gradients(model, run=lambda model: model(X)):
    model.zero_grad()
    loss = run(model)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


REPLACED = [
    by_method,
    by_closure,
    by_partial,
    around,
    around_beside_much_else,
    around_as_accelerate_does,
    around_by_an_object,
    deleted,
]


def compiled(model=None, backend="eager", **options):
    return zgraph.compile(model or Net(), zgraph.Plan(backend=backend, **options))


@pytest.mark.parametrize("replace", REPLACED)
def test_a_forward_that_is_replaced_after_compile_is_what_runs(replace):
    plain, model = Net(), compiled()
    if replace is not by_closure:
        model(X)
    for module in (plain, model):
        replace(module)
    for _ in range(2):
        for one, two in zip(gradients(plain), gradients(model), strict=True):
            torch.testing.assert_close(one, two)
    assert model.zgraph.programs


@pytest.mark.parametrize("replace", [by_method, by_closure])
def test_a_forward_that_was_replaced_before_compile_is_captured(replace):
    plain, model = Net(), Net()
    for module in (plain, model):
        replace(module)
    for one, two in zip(gradients(plain), gradients(compiled(model)), strict=True):
        torch.testing.assert_close(one, two)


def test_a_step_and_an_evaluation_run_the_new_forward_too():
    plain, model = Net(), compiled(optimizer=zgraph.SGD(lr=0.1), micro_batches=2)
    model.train_step(X)
    plain.load_state_dict(model.state_dict())
    for module in (plain, model):
        by_method(module)
    torch.testing.assert_close(model.train_step(X), plain(X).detach())
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.eval_step(X), plain(X).detach())


def test_a_forward_that_is_replaced_in_the_class_is_what_runs():
    class Own(Net):
        def forward(self, x):
            return super().forward(x)

    model = compiled(Own())
    before = model(X)
    old = Own.forward
    Own.forward = lambda self, x: old(self, x) * 5
    torch.testing.assert_close(model(X), before * 5)
    torch.testing.assert_close(model.forward(X), before * 5)
    Own.forward = old
    torch.testing.assert_close(model(X), before)


def test_a_forward_that_is_put_back_needs_no_new_program():
    model = compiled()
    model(X)
    model.forward = types.MethodType(Net.forward, model)  # (as accelerate unwraps a model)
    model(X)
    assert set(model.zgraph.programs) == {"train0"}


def test_the_forward_from_before_is_refused_once_another_was_captured():
    model = compiled()
    before = model.forward
    by_method(model)
    model(X)
    with pytest.raises(ModelError, match="was replaced"):
        before(X)


def test_a_wrapper_that_leaves_out_the_compiled_forward_is_refused():
    model = compiled()
    old = model.forward
    model.forward = lambda x: old(x) if x.sum() > 1e6 else other(model, x)
    with pytest.raises(ModelError, match="without its plan"):
        model(X)


def test_a_copy_has_the_new_forward_or_is_refused():
    model = compiled()
    by_method(model)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(X), model(X))
    around(model)
    with pytest.raises(ModelError, match="copy"):
        copy.deepcopy(model)


def test_another_plan_runs_the_new_forward():
    model = compiled()
    by_method(model)
    before = model(X)
    model.zgraph.recompile(zgraph.Plan(backend="eager", micro_batches=2))
    torch.testing.assert_close(model(X), before)


def test_the_forward_of_a_child_that_is_replaced_is_what_runs():
    plain, model = Net(), compiled()
    model(X)
    for module in (plain, model):
        module.a.forward = types.MethodType(lambda self, x: nn.functional.linear(x, self.weight), module.a)
    torch.testing.assert_close(model(X), plain(X))


def replace_in_stages(before):
    """What a rank of two stages says of a forward that is replaced before or after its first step, and of a wrapper."""
    model = zgraph.compile(
        Net(), zgraph.Plan(backend="eager", mesh={"pp": 2}, partition=["b"], optimizer=zgraph.SGD(lr=0.0))
    )
    plain = Net()
    by_method(plain)
    if not before:
        model.train_step(X)
    said = []
    for replace in (around, by_method):
        kept = model.__dict__["forward"]
        replace(model)
        try:
            said.append(model.train_step(X) is not None)
        except (ModelError, StepError) as error:
            said.append(str(error).splitlines()[0])
        model.__dict__["forward"] = kept
    return said


@pytest.mark.gloo
def test_stages_take_another_forward_until_they_are_cut(two):
    wrapped = "a function is wrapped around the forward of a model in stages"
    for found in two.run(replace_in_stages, False):
        assert found == [wrapped, "the forward of a model in stages was replaced"]
    for found in two.run(replace_in_stages, True):
        assert found == [wrapped, True]


def test_torch_compile_around_a_compiled_model_calls_it_as_a_whole():
    plain, model = Net(), compiled()
    outer = torch.compile(lambda x: model(x * 2) + 1, backend="eager")
    torch.testing.assert_close(outer(X), plain(X * 2) + 1)
    whole = torch.compile(model, backend="eager")
    for one, two in zip(gradients(plain), gradients(model, lambda _: whole(X)), strict=True):
        torch.testing.assert_close(one, two)


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])

    @decorated
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_modules_of_a_decorated_forward_have_their_names():
    model = zgraph.compile(Decorated(), zgraph.Plan(backend="eager", recompute=["layers.0"]))
    model(torch.ones(2, 4)).backward()
    [step] = model.zgraph.programs.values()
    modules = {info(n).module for n in step.captured.graph.nodes if has_info(n)}
    assert {"layers.0.0", "layers.0.1", "layers.1.0"} <= modules
