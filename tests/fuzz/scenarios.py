"""What the caller does: how it calls the model, what it gives it, what it changes on the way. All of it is source, put together by `source`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .plans import OPTIMIZERS as PLAN_OPTIMIZERS

if TYPE_CHECKING:
    from .case import Case


@dataclass(frozen=True)
class Loss:
    """An expression of `out` and the targets `y` (integers, one for each row of `out`)."""

    text: str
    smooth: bool = True


LOSSES: dict[str, Loss] = {
    "square": Loss("out.square().mean()"),
    "mse to one": Loss("F.mse_loss(out, torch.ones_like(out))"),
    "mse to zeros": Loss("F.mse_loss(out, torch.zeros_like(out))"),
    "cross entropy": Loss("F.cross_entropy(out.flatten(0, -2), y.flatten())"),
    "cross entropy, some ignored": Loss(
        "F.cross_entropy(out.flatten(0, -2), y.flatten().masked_fill(y.flatten() == 1, -100))", False
    ),
    "cross entropy, smoothed": Loss("F.cross_entropy(out.flatten(0, -2), y.flatten(), label_smoothing=0.1)"),
    "masked": Loss("(out.square() * (y > 0)[..., None]).sum() / (y > 0).sum().clamp(min=1)", False),
    "boolean mask": Loss("out[y >= 0].square().mean()", False),
    "huber": Loss("F.smooth_l1_loss(out, torch.ones_like(out))"),
    "binary": Loss("F.binary_cross_entropy_with_logits(out, (y > 0).to(out.dtype)[..., None].expand_as(out))"),
    "log-sum-exp": Loss("torch.logsumexp(out, -1).square().mean()"),
    "rmse": Loss("(F.mse_loss(out, torch.ones_like(out)) + 0.1).sqrt()"),
    "absolute": Loss("out.abs().mean() + out.square().mean()"),
    # (Near a similarity of 1 all that is left in bfloat16, of its gradient too, is rounding.)
    "cosine": Loss("1 - F.cosine_similarity(out + 0.1, torch.ones_like(out), dim=-1).mean()", False),
    "nll": Loss("F.nll_loss(out.flatten(0, -2).log_softmax(-1), y.flatten())"),
    "gaussian": Loss("F.gaussian_nll_loss(out, torch.ones_like(out), out.square() + 0.5)", False),
    "kl": Loss("F.kl_div(out.log_softmax(-1), torch.full_like(out, 1 / out.shape[-1]), reduction='batchmean')"),
}

OUTPUTS = {
    "loss": "return loss",
    "tuple": "return loss, out",
    "dict": "return {'loss': loss, 'logits': out}",
    "dataclass": "return Output(loss, out)",
    "out": "return out",
    "nested": "return [out, {'h': h.mean()}]",
}
"""What forward returns. Of the last two the caller computes the loss."""


@dataclass(frozen=True)
class Argument:
    """A further argument `k` of forward: what it is at a step, and what forward does with it before its first block."""

    value: str
    use: str
    top: str = ""


_SLOTS = "class Slots:\n    __slots__ = ('k',)\n    def __init__(self, k):\n        self.k = k\n"
_OBJECT = "class Box:\n    def __init__(self, k):\n        self.k = k\n"
_DATA = "@dataclasses.dataclass\nclass Config:\n    k: float\n"
_ENUM = "class Mode(enum.Enum):\n    a = 1.0\n    b = 2.0\n"
_STR = "class Name(str):\n    pass\n"
_LIST = "class Items(list):\n    pass\ndef items(v):\n    found = Items([1])\n    found.k = v\n    return found\n"
_MODULE = (
    "class Times(nn.Module):\n    def __init__(self, k):\n        super().__init__()\n"
    "        self.k = k\n    def forward(self, x):\n        return x * self.k\n"
)
_FUNCTION = "def times(k):\n    def f(x):\n        return x * k\n    return f\n"
_NAMED = "class Pair(typing.NamedTuple):\n    k: float\n    x: torch.Tensor\n"
ARGUMENTS: dict[str, Argument] = {
    "float": Argument("1.0 + step", "h = h * k"),
    "int": Argument("1 + step", "h = h * k"),
    "bool": Argument("step % 2 == 0", "h = h * (2 if k else 1)"),
    "None or float": Argument("None if step == 1 else 1.5", "h = h * (1.0 if k is None else k)"),
    "str": Argument("'abc'[step % 3]", "h = h * {'a': 1.0, 'b': 2.0, 'c': 3.0}[k]"),
    "str subclass": Argument("Name('ab'[step % 2])", "h = h * (1.5 if k == 'a' else 2.0)", _STR),
    "range": Argument("range(1 + step)", "h = h * float(len(k))"),
    "slice": Argument("slice(0, 1 + step)", "h = h * torch.arange(4.0)[k].sum().to(h.dtype)"),
    "fraction": Argument("fractions.Fraction(step + 1, 2)", "h = h * float(k)"),
    "decimal": Argument("decimal.Decimal(step + 1)", "h = h * float(k)"),
    "numpy float": Argument("np.float32(1.0 + step)", "h = h * float(k)"),
    "numpy int": Argument("np.int64(1 + step)", "h = h * int(k)"),
    "numpy array": Argument("np.array([1.0 + step])", "h = h * torch.from_numpy(k).to(h.dtype)"),
    "slots": Argument("Slots(1.0 + step)", "h = h * k.k", _SLOTS),
    "object": Argument("Box(1.0 + step)", "h = h * k.k", _OBJECT),
    "object of a tensor": Argument("Box(torch.tensor(1.0 + step))", "h = h * k.k", _OBJECT),
    "dataclass": Argument("Config(1.0 + step)", "h = h * k.k", _DATA),
    "enum": Argument("[Mode.a, Mode.b][step % 2]", "h = h * k.value", _ENUM),
    "list": Argument("[1.0] * (1 + step)", "h = h * sum(k)"),
    "list subclass": Argument("items(1.0 + step)", "h = h * k.k", _LIST),
    "tuple": Argument("(1.0 + step, 2)", "h = h * k[0]"),
    "dict": Argument("{'abc'[step % 3]: 1.0 + step}", "h = h * sum(k.values()) * (2 if 'a' in k else 1)"),
    "ordered dict": Argument("collections.OrderedDict(a=1.0 + step)", "h = h * k['a']"),
    "set": Argument("{1, 1 + step}", "h = h * float(len(k))"),
    "deque": Argument("collections.deque([1.0 + step])", "h = h * k[0]"),
    "bytes": Argument("b'ab'[step % 2 : step % 2 + 1]", "h = h * (1.5 if k == b'a' else 2.0)"),
    "module": Argument("Times(1.0 + step)", "h = k(h)", _MODULE),
    "function": Argument("times(1.0 + step)", "h = k(h)", _FUNCTION),
    "partial": Argument("functools.partial(torch.mul, torch.tensor(1.0 + step))", "h = k(h)"),
    "dtype": Argument(
        "[torch.float32, torch.float64][step % 2]", "h = h.to(k).to(x.dtype) if h.is_floating_point() else h"
    ),
    "size": Argument("torch.Size([1 + step])", "h = h * k[0]"),
    "named tuple": Argument("Pair(1.0 + step, torch.tensor(2.0))", "h = h * k.k * k.x", _NAMED),
    "number in a tensor": Argument("torch.tensor(1.0 + step)", "h = h * k"),
    "tensor that changes its dtype": Argument(
        "torch.tensor([1 + step]).to([torch.float32, torch.int64][step % 2])", "h = h * k"
    ),
    "tensor that requires gradients": Argument(
        "torch.full((1,), 1.0 + step, requires_grad=step % 2 == 0)", "h = h * k"
    ),
    "the input again": Argument("x", "h = h + k * 0.1"),
    "the input again, changed": Argument("x", "h = h * 1.0\nk.mul_(0.5)\nh = h + x"),
    "a view of the input": Argument("x[:]", "h = h * 1.0\nx.mul_(0.5)\nh = h + k"),
    "list that is appended to": Argument("[]", "k.append(h.shape[0])\nh = h * len(k)"),
    "dict that is written to": Argument("{}", "k['mean'] = h.detach().mean()\nh = h + k['mean']"),
}

INPUTS = {
    "transposed": "x = x.transpose(-1, -2).contiguous().transpose(-1, -2)",
    "every other": "x = torch.stack([x, x], -1).flatten(-2)[..., ::2]",
    "expanded": "x = x[:1].expand(x.shape)",
    "channels last": "x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x",
    "static buffer": "x = STATIC.setdefault('x', torch.empty_like(x)).copy_(x)",
    "requires gradients": "x = x.clone().requires_grad_()",
}
"""How the input `x` lies in memory."""

OPTIMIZERS = {
    "SGD": "torch.optim.SGD(parameters, lr=0.1)",
    "SGD momentum": "torch.optim.SGD(parameters, lr=0.05, momentum=0.9)",
    "SGD nesterov": "torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "Adam": "torch.optim.Adam(parameters, lr=0.01, eps=1e-3)",
    "AdamW": "torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)",
    "AdamW foreach": "torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, foreach=True)",
    "Adagrad": "torch.optim.Adagrad(parameters, lr=0.05, eps=1e-3)",
    "RMSprop": "torch.optim.RMSprop(parameters, lr=0.01, eps=1e-2)",
    "NAdam": "torch.optim.NAdam(parameters, lr=0.01, eps=1e-3)",
    "two groups": "torch.optim.SGD([{'params': parameters[:1], 'lr': 0.02}, {'params': parameters[1:]}], lr=0.1, momentum=0.5)",
}

STYLES = {
    "usual": "out = model(*args)\nloss = loss_of(out, *args)\n{between}\nt.keep('output', 'out', out)\nloss.backward()",
    "no_sync": """
for at, part in enumerate(halves(args)):
    with t.no_sync(model) if at == 0 else contextlib.nullcontext():
        out = model(*part)
        t.keep('output', f'out{at}', out)
        (loss_of(out, *part) / 2).backward()""",
    "own accumulation": """
for at, part in enumerate(halves(args)):
    out = model(*part)
    t.keep('output', f'out{at}', out)
    (loss_of(out, *part) / 2).backward()""",
    "two forwards": """
one, two = halves(args)
first, second = model(*one), model(*two)
t.keep('output', 'first', first)
t.keep('output', 'second', second)
loss_of(second, *two).backward()
loss_of(first, *one).backward()""",
    "two forwards, one loss": """
one, two = halves(args)
loss = loss_of(model(*one), *one) * 0.3 + loss_of(model(*two), *two) * 0.7
t.keep('output', 'loss', loss)
loss.backward()""",
    "two backwards": """
out = model(*args)
loss = loss_of(out, *args)
loss.backward(retain_graph=True)
t.keep('output', 'out', out)
loss.backward()""",
    "autograd.grad": """
out = model(*args)
trained = [p for p in model.parameters() if p.requires_grad]
grads = t.averaged(torch.autograd.grad(loss_of(out, *args), trained, allow_unused=True))
t.keep('output', 'out', out)
for at, (p, g) in enumerate(zip(trained, grads)):
    t.keep('gradient', f'of autograd.grad {at}', g)
    p.grad = g""",
    "autograd.grad after no_sync": """
one, two = halves(args)
with t.no_sync(model):
    loss_of(model(*one), *one).backward()
trained = [p for p in model.parameters() if p.requires_grad]
grads = t.averaged(torch.autograd.grad(loss_of(model(*two), *two), trained, allow_unused=True))
for at, g in enumerate(grads):
    t.keep('gradient', f'of autograd.grad {at}', g)
loss_of(model(*two), *two).backward()""",
    "own tangent": """
out = model(*args)
g = torch.linspace(0.5, 1.0, out.numel(), dtype=out.dtype).view(out.shape)
out.backward(g)
t.keep('output', 'out', out)
t.keep('input', 'tangent', g)""",
    "own tangents, accumulated": """
g = None
for at in range(2):
    out = model(*args)
    g = torch.linspace(0.5, 1.0, out.numel(), dtype=out.dtype).view(out.shape) if g is None else g
    with t.no_sync(model) if at == 0 else contextlib.nullcontext():
        out.backward(g)
t.keep('input', 'tangent', g)""",
    "outer graph": """
x = args[0].detach().clone().requires_grad_()
out = model(x * 1.5, *args[1:])
t.keep('output', 'out', out)
(loss_of(out, *args) * 2 + x.sum() * 0.1).backward()
t.keep('input', 'gradient of x', x.grad)""",
    "evaluation beside": """
model.eval()
with torch.no_grad():
    t.keep('output', 'evaluated', model(*args))
model.train()
out = model(*args)
t.keep('output', 'out', out)
loss_of(out, *args).backward()""",
    "train_step": "t.keep('output', 'loss', t.train_step(model, optimizer, args))",
}
"""How a step calls the model and its backward. `args` are the step's, `halves` cuts them in two."""


@dataclass(frozen=True)
class Option:
    """Something that a caller may do as well: `where` it stands in the loop, and its text."""

    where: str
    text: str
    own_optimizer: bool = False


OPTIONS: dict[str, Option] = {
    "optimizer before compile": Option("", "", own_optimizer=True),
    "hook on a parameter before compile": Option("before compile", "parameters[0].register_hook(lambda g: g * 2)"),
    "accumulation hook before compile": Option(
        "before compile", "parameters[0].register_post_accumulate_grad_hook(lambda p: called.append(1))"
    ),
    "hook on a parameter": Option("after compile", "list(model.parameters())[0].register_hook(lambda g: g * 2)"),
    "hook on the model": Option("before compile", "model.register_forward_hook(lambda m, i, o: called.append(1))"),
    "hook on a module after compile": Option(
        "after compile", "model.head.register_forward_hook(lambda m, i, o: (called.append(1), o * 1.5)[1])"
    ),
    "deep copy": Option("after compile", "model = copy.deepcopy(model)"),
    "forward replaced": Option(
        "after compile",
        "inner = model.forward\nmodel.forward = lambda *a: (called.append(1), inner(*a))[1]",
    ),
    "state dict": Option(
        "before step", "model.load_state_dict({k: v.detach().clone() for k, v in model.state_dict().items()})"
    ),
    "another state dict": Option(
        "before step",
        "if step == 1:\n    model.load_state_dict({k: v * 0.9 if v.is_floating_point() else v for k, v in model.state_dict().items()})",
    ),
    "weights changed": Option(
        "before step",
        "with torch.no_grad():\n    for p in model.parameters():\n        if not p.is_meta:\n            p.mul_(0.9)",
    ),
    "weights changed by data": Option(
        "before step", "for p in model.parameters():\n    if not p.is_meta:\n        p.data.mul_(0.9)"
    ),
    "frozen for a step": Option("before step", "list(model.parameters())[0].requires_grad_(step != 1)"),
    "input overwritten": Option(
        "between", "if args[0].is_floating_point():\n    with torch.no_grad():\n        args[0].mul_(0.5)"
    ),
    "output changed": Option(
        "between",
        "with torch.no_grad():\n    for o in pytree.tree_leaves(out):\n        if isinstance(o, torch.Tensor) and o.dim():\n            o.mul_(0.5)",
    ),
    "loss divided in place": Option("between", "loss /= 2"),
    "buffers overwritten": Option(
        "between", "for b in model.buffers():\n    if b.is_floating_point():\n        b.mul_(1.5)"
    ),
    "scalar read": Option("between", "t.keep('python', 'item', loss.item())"),
    "gradients scaled": Option(
        "after backward", "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.mul_(0.5)"
    ),
    "clipped": Option(
        "after backward", "t.keep('norm', 'clipped', torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))"
    ),
    "clipped by value": Option("after backward", "torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)"),
    "learning rate": Option("after step", "optimizer.param_groups[0]['lr'] *= 0.5"),
    "optimizer state saved and loaded": Option(
        "after step", "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))"
    ),
    "optimizer state cleared": Option("after step", "if step == 1:\n    optimizer.state.clear()"),
    "optimizer state scaled": Option(
        "after step",
        "for s in optimizer.state.values():\n    for k, v in s.items():\n"
        "        if k in STATES and isinstance(v, torch.Tensor):\n            v.mul_(0.5)",
    ),
    "optimizer state replaced": Option(
        "after step",
        "if step == 0:\n    for s in optimizer.state.values():\n        for k, v in s.items():\n"
        "            if k in STATES and isinstance(v, torch.Tensor):\n                s[k] = v * 0.5",
    ),
    "hook on the optimizer": Option("after compile", "optimizer_hooks.append(lambda o, *a: called.append(1))"),
    "gradients kept at zero": Option("after step", "optimizer.zero_grad(set_to_none=False)", own_optimizer=True),
    "ema": Option(
        "after step",
        "for p, m in zip(model.parameters(), ema):\n    m.lerp_(frozen(p), 0.5)\nt.keep('python', 'ema', [float(m.norm()) for m in ema])",
    ),
}


def fits(name: str, case: Case) -> bool:
    """Does this style or option go with the rest of a case?"""
    plan, form = dict(case.plan), case.output
    has_out = form == "out"
    own = plan.get("optimizer") is None
    if name in STYLES:
        if case.run == "virtual":
            return name == "usual"
        if "pp" in case.mesh:
            return name == "train_step"
        if name == "train_step":
            return form != "nested" and not (
                form == "out" and case.loss not in ("square", "mse to one", "mse to zeros")
            )
        if name.startswith("own tangent"):
            return has_out
        if name == "outer graph":
            return not case.tokens
        return True
    if case.run == "virtual":
        return False
    option = OPTIONS[name]
    if plan.get("precision") == "bf16" and name in ("deep copy", "forward replaced", "hook on the model"):
        return False  # (plain PyTorch computes in bfloat16 here by a forward that holds the model)
    if "pp" in case.mesh and name in (
        "ema",
        "optimizer before compile",
        "deep copy",
        "clipped",
        "another state dict",
        "state dict",
    ):
        return False
    if option.where == "between" and case.style != "usual":
        return False
    if option.where == "after backward" and case.style == "train_step" and not own:
        return False
    if option.where == "after backward" and case.style == "train_step" and plan.get("precision") == "bf16":
        return False
    return own or not option.own_optimizer


assert PLAN_OPTIMIZERS
