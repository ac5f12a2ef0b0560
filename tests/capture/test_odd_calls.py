"""Inputs, states and surroundings that no program is made for are refused by name before harm; unusual ones that can be right are."""

import copy
import io
import re

import numpy as np
import pytest
import torch
from sweeps import product
from torch import nn

import zgraph
from zgraph.errors import CaptureError, ModelError, PlanError, UnsupportedError

X = torch.arange(8.0).view(2, 4) / 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, other=None):
        return self.b(torch.tanh(self.a(x))).square().mean()


def compiled(model=None, backend="eager"):
    return zgraph.compile(model or Net(), zgraph.Plan(backend=backend))


class Doubling(torch.Tensor):
    """Every function of it gives twice what it should."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result * 2 if function is torch.nn.functional.linear else result


def dual(x):
    return torch.autograd.forward_ad.make_dual(x, x)


INPUTS = {
    "sparse_coo": lambda: torch.eye(2).to_sparse(),
    "sparse_csr": lambda: torch.eye(2).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged),
    "class with operators": lambda: X.as_subclass(Doubling),
    "FakeTensor": lambda: torch._subclasses.FakeTensorMode().from_tensor(X),
    "Generator": lambda: torch.Generator(),
}


@pytest.mark.parametrize(("kind", "made"), INPUTS.items())
def test_an_input_that_is_no_plain_tensor_is_refused_by_its_name(kind, made):
    model = compiled()
    for call in (lambda: model(X, made()), lambda: model(X, other={"deep": [made()]})):
        with pytest.raises(UnsupportedError, match=kind) as raised:
            call()
        assert "other" in raised.value.where
        assert raised.value.why
        assert raised.value.hint


def test_forward_mode_differentiation_is_refused():
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UnsupportedError, match="'x' is a dual tensor"):
        compiled()(dual(X))


@pytest.mark.parametrize(
    "transform",
    [
        lambda model: torch.vmap(model)(X.view(2, 1, 4)),
        lambda model: torch.func.grad(model)(X),
        lambda model: torch.func.jvp(model, (X,), (X,)),
        lambda model: torch.jit.trace(model, X),
    ],
)
@pytest.mark.parametrize("called", [False, True])
def test_a_transform_around_a_compiled_model_is_refused(transform, called):
    model = compiled()
    if called:
        model(X)
    with pytest.raises(UnsupportedError, match="inside of a transform"):
        transform(model)


def test_functional_call_gives_gradients_to_what_it_puts_in():
    def gradients(model):
        put = {n: (p.detach() * 2).requires_grad_() for n, p in model.named_parameters()}
        torch.func.functional_call(model, put, (X,)).backward()
        return [p.grad for p in put.values()]

    for one, two in zip(gradients(Net()), gradients(compiled()), strict=True):
        torch.testing.assert_close(one, two)


class OfComplex(Net):
    def forward(self, z):
        return (z * self.a.weight[0]).imag.sum() + z.real.sum() * self.a.bias.sum()


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_inputs_that_are_marked_as_conjugate_or_negative_are_read_as_such(backend):
    z = torch.complex(X, X + 1)
    plain, model = OfComplex(), compiled(OfComplex(), backend)
    for given in (z, z.conj(), torch.complex(X, z.conj().imag), z):
        torch.testing.assert_close(model(given), plain(given))
    plain, model = Net(), compiled(backend=backend)
    for given in (z.imag, z.conj().imag, z.imag):
        torch.testing.assert_close(model(given), plain(given))


@pytest.mark.parametrize(
    "layer", [lambda: nn.Embedding(5, 4, max_norm=1.0), lambda: nn.EmbeddingBag(5, 4, max_norm=1.0)]
)
def test_an_embedding_that_changes_its_weights_in_forward_is_refused(layer):
    model = nn.Sequential(layer(), nn.Linear(4, 2))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(UnsupportedError, match=r"its parameter '0\.weight' in place") as raised:
        compiled(model)(torch.tensor([[1, 2]]))
    assert "max_norm" in raised.value.hint
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_a_model_with_sparse_state_is_refused():
    model = Net()
    model.register_buffer("adjacency", torch.eye(2).to_sparse_csr())
    with pytest.raises(UnsupportedError, match="buffer 'adjacency' is a sparse tensor"):
        compiled(model)


def test_a_backward_hook_inside_of_the_model_is_refused_by_name_and_one_on_it_is_called():
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"):
        model = Net()
        getattr(model.a, register)(lambda *_: None)
        with pytest.raises(UnsupportedError, match="module 'a' has a backward hook"):
            compiled(model)
    model = compiled()
    model(X)
    model.a.register_full_backward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="module 'a' has a backward hook"):
        model(X)
    model, calls = compiled(), []
    model.register_full_backward_hook(lambda *_: calls.append(1))
    model(X.clone().requires_grad_()).backward()
    assert calls == [1]


def test_a_model_that_was_moved_away_is_refused():
    model = compiled()
    model(X)
    with pytest.raises(ModelError, match=r"can't be moved or cast: .* would be .* on meta"):
        model.to("meta")


def test_a_model_that_is_moved_to_the_first_cpu_stays_where_it_is():
    model = compiled()
    before = dict(model.named_parameters())
    model.to(torch.device("cpu", 0))  # (accelerate's device on a CPU; torch copies each tensor)
    model(X)
    assert all(p is before[n] for n, p in model.named_parameters())


def test_a_distribution_that_checks_its_arguments_is_refused_with_the_way_out():
    class Drawn(Net):
        def forward(self, x):
            return self.a(x).mean() * torch.distributions.Normal(0, 1).icdf(torch.tensor(0.7))

    before = torch.distributions.Distribution._validate_args  # (torch.compile turns it off for the process)
    try:
        torch.distributions.Distribution.set_default_validate_args(True)
        with pytest.raises(CaptureError, match=r"Distribution\.set_default_validate_args\(False\)"):
            compiled(Drawn())(X)
        torch.distributions.Distribution.set_default_validate_args(False)
        torch.testing.assert_close(compiled(Drawn())(X), Drawn()(X))
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)


def test_shallow_copies_and_pickles_are_refused():
    model = compiled()
    for refused in (copy.copy, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(ModelError, match=r"pickled, nor copied by copy\.copy"):
            refused(model)


def test_ordinary_arguments_that_are_no_tensors_are_right():
    class Sliced(Net):
        def forward(self, x, rows):
            return self.b(self.a(x)[:rows]).square().mean()

    plain, model = Sliced(), compiled(Sliced())
    for rows in (np.int64(1), np.int32(2), np.int64(2)):
        torch.testing.assert_close(model(X, rows), plain(X, rows))

    class Shaped(Net):
        def forward(self, x, size, dtype):
            return self.a(x).view(size).to(dtype).square().mean()

    plain, model = Shaped(), compiled(Shaped())
    for size, dtype in ((torch.Size([4, 2]), torch.float64), (torch.Size([8]), torch.float32)):
        torch.testing.assert_close(model(X, size, dtype), plain(X, size, dtype))


def test_inputs_that_overlap_themselves_get_their_gradients():
    def gradient(model, spread):
        v = torch.arange(5.0).div(10).requires_grad_()
        model(spread(v)).backward()
        return v.grad

    for spread in (lambda v: v.as_strided((2, 4), (1, 1)), lambda v: v[:4].expand(2, 4), lambda v: v[1:].flip(0)[None]):
        torch.testing.assert_close(gradient(compiled(), spread), gradient(Net(), spread))


def wrap_in_ddp():
    model = zgraph.compile(Net(), zgraph.Plan(backend="eager", mesh={"dp": 2}))
    try:
        torch.nn.parallel.DistributedDataParallel(model)
    except ModelError as error:
        return str(error)
    return None


@pytest.mark.gloo
def test_data_parallel_wrappers_are_refused_with_what_to_do(two):
    for said in two.run(wrap_in_ddp):
        assert said is not None
        assert "leave it out" in said


def test_clipping_of_complex_gradients_is_refused():
    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.z = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x):
            return (x * self.z).abs().square().mean()

    with pytest.raises(PlanError, match="'z' can't be clipped"):
        zgraph.compile(Wave(), zgraph.Plan(backend="eager", grad_clip=0.1))


MARKS = {
    "mark_dynamic": lambda x: torch._dynamo.mark_dynamic(x, 0, min=1, max=10),
    "maybe_mark_dynamic": lambda x: torch._dynamo.maybe_mark_dynamic(x, 0),
    "mark_unbacked": lambda x: torch._dynamo.decorators.mark_unbacked(x, 0),
    "dynamic_sources": lambda x: None,
}


@product("mark, held", MARKS, [False, True], together=1)
def test_what_torch_compile_is_told_of_sizes_changes_nothing(mark, held):
    """A program is for one size, where the plan says so; what is marked as dynamic for torch.compile is so there."""

    class Sized(Net):
        def forward(self, x):
            x = self.held if held else x
            return (self.a(x).view(-1, len(x)).softmax(0) * len(x)).square().mean()

    sources = "L['x'],L['self'].held" if mark == "dynamic_sources" else ""
    plain, model = Sized(), zgraph.compile(Sized(), zgraph.Plan(backend="eager", shapes="static"))
    with torch.compiler.config.patch(dynamic_sources=sources):
        for rows in (2, 3, 2):
            x = torch.arange(4.0 * rows).view(rows, 4) / 10
            plain.held = model.held = x
            if rows == 3:
                MARKS[mark](x)
            assert torch.equal(model(x), plain(x))
    assert len(model.zgraph.runtime.entries) == 2


def test_what_meets_on_two_devices_is_refused_with_both():
    """(An input that is not on the model's device, say.)"""

    class Two(Net):
        def forward(self, x):
            return super().forward(x + torch.ones(4, device="meta"))

    with pytest.raises(CaptureError, match=r"is on \w+ and on \w+; move one: .*x\.to\(device\)") as found:
        compiled(Two())(X)
    assert {"cpu", "meta"} <= set(re.findall(r"\w+", str(found.value)))
