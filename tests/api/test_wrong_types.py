"""An argument of a wrong type, in any place of a public function, is refused by a sentence that says what it takes."""

import torch
from sweeps import sweep
from torch import nn

import zgraph
from zgraph.errors import ZgraphError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).square().mean()


PLAN = zgraph.Plan(backend="eager", optimizer=zgraph.SGD(lr=0.1))
X, Q = torch.randn(4, 4), torch.randn(1, 2, 64, 8)
VALUES = {"tensor": X, "int": 3, "str": "abc", "none": None, "list": [X], "dict": {"a": 1}, "function": lambda x: x}


def compiled():
    return zgraph.compile(Net(), PLAN)


# What is called with a wrong value, and the kinds of values that are right there.
CALLS = {
    "verify(model)": (lambda v: zgraph.verify(v, PLAN, 2, (X,)), ()),
    "verify(plan)": (lambda v: zgraph.verify(Net(), v, 2, (X,)), ("none",)),
    "verify(world)": (lambda v: zgraph.verify(Net(), PLAN, v, (X,)), ("int",)),
    "verify(inputs)": (lambda v: zgraph.verify(Net(), PLAN, 2, v), ("dict",)),
    "verify(loss_fn)": (lambda v: zgraph.verify(Net(), PLAN, 2, (X,), v), ("none", "function")),
    "verify(compiled)": (lambda v: zgraph.verify(Net(), PLAN, 1, (X,), compiled=v), ()),
    "programs(model)": (lambda v: zgraph.programs(v, PLAN, (X,), 2), ()),
    "programs(plan)": (lambda v: zgraph.programs(Net(), v, (X,), 2), ("none",)),
    "programs(inputs)": (lambda v: zgraph.programs(Net(), PLAN, v, 2), ("dict",)),
    "programs(world)": (lambda v: zgraph.programs(Net(), PLAN, (X,), v), ("int",)),
    "programs(costs)": (lambda v: zgraph.programs(Net(), PLAN, (X,), 2, v), ("none",)),
    "compile(model)": (lambda v: zgraph.compile(v, PLAN), ()),
    "compile(plan)": (lambda v: zgraph.compile(Net(), v), ("none",)),
    "compile(inputs)": (lambda v: zgraph.compile(Net(), PLAN, inputs=v), ("none", "dict")),
    "compile(loss_fn)": (lambda v: zgraph.compile(Net(), PLAN, loss_fn=v), ("none", "function")),
    "compile(mesh)": (lambda v: zgraph.compile(Net(), PLAN, mesh=v), ("none",)),
    "compile(dynamic)": (lambda v: zgraph.compile(Net(), PLAN, dynamic=v), ("none",)),
    "calibrate(model)": (lambda v: zgraph.calibrate(v, PLAN, (X,), steps=1), ()),
    "calibrate(steps)": (lambda v: zgraph.calibrate(Net(), PLAN, (X,), steps=v), ("int",)),
    "calibrate(path)": (lambda v: zgraph.calibrate(Net(), PLAN, (X,), path=v), ("none", "str", "int")),
    "full_state_dict(model)": (zgraph.full_state_dict, ()),
    "full_state_dict(optimizer)": (lambda v: zgraph.full_state_dict(compiled(), v), ("none",)),
    "full_state_dict(ranks)": (lambda v: zgraph.full_state_dict(compiled(), ranks=v), ("none",)),
    "full_state_dict(device)": (lambda v: zgraph.full_state_dict(compiled(), device=v), ("str",)),
    "full_state_dict(max_bytes)": (lambda v: zgraph.full_state_dict(compiled(), max_bytes=v), ("int",)),
    "full_weights(model)": (lambda v: zgraph.full_weights(v).__enter__(), ()),
    "full_weights(write)": (lambda v: zgraph.full_weights(compiled(), write=v).__enter__(), ()),
    "full_weights(by_block)": (lambda v: zgraph.full_weights(compiled(), by_block=v).__enter__(), ()),
    "stream_weights(model)": (lambda v: list(zgraph.stream_weights(v)), ()),
    "stream_weights(dtype)": (lambda v: list(zgraph.stream_weights(compiled(), dtype=v)), ("none",)),
    "load_pretrained(model)": (lambda v: zgraph.load_pretrained(v, "nowhere", PLAN), ()),
    "sparse_attention(sparsity)": (lambda v: zgraph.sparse_attention(Q, Q, Q, v), ()),
    "save_checkpoint(dir)": (lambda v: compiled().save_checkpoint(v), ("str",)),
    "load_checkpoint(dir)": (lambda v: compiled().load_checkpoint(v), ("str",)),
    "load_checkpoint(client_state)": (lambda v: compiled().load_checkpoint("nowhere", None, v), ("none", "dict")),
    "load_checkpoint(optimizer)": (lambda v: compiled().load_checkpoint("nowhere", optimizer=v), ()),
    "recompile(plan)": (lambda v: compiled().zgraph.recompile(v), ("none",)),
    **{
        f"{name}(…)": (getattr(zgraph, name), ())
        for name in ("Plan", "AdamW", "SGD", "GradClip", "EMA", "Elastic", "Precision", "LocalSteps", "Cosine", "Watch")
    },
}


@sweep("call", sorted(CALLS), quick=range(0, len(CALLS), 2))
def test_a_value_of_a_wrong_type_is_refused_by_a_sentence(call):
    function, right = CALLS[call]
    for kind, value in VALUES.items():
        if kind in right:
            continue
        try:
            function(value)
        except ZgraphError as error:
            assert len(error.what.split()) > 2, (kind, error)
        else:
            raise AssertionError(f"{call} takes a {kind}")


def test_a_record_says_which_field_it_may_have_meant():
    try:
        zgraph.AdamW(3e-4)
    except TypeError as error:
        assert "AdamW takes its fields by name" in str(error) and "AdamW(lr=…)" in str(error)
