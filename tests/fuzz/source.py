"""A case as a Python program: the model, its batches, the loop around it."""

from __future__ import annotations

import pprint
import random
from pathlib import Path
from textwrap import indent

from .blocks import KINDS, Draw, Part
from .case import Case, Line
from .scenarios import ARGUMENTS, INPUTS, LOSSES, OPTIMIZERS, OPTIONS, OUTPUTS, STYLES

HEAD = """\
import collections, contextlib, copy, dataclasses, decimal, enum, fractions, functools, types, typing
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

STATIC, STATES = {}, ("momentum_buffer", "exp_avg", "exp_avg_sq", "sum", "square_avg")


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


def tie(a, b):
    for m, n in zip(a.modules(), b.modules()):
        n._parameters.update(m._parameters)
    return b


def halves(args):
    rows = args[0].shape[0]
    cut = lambda v, s: v[s] if isinstance(v, torch.Tensor) and v.dim() and v.shape[0] == rows else v
    return [tuple(cut(a, s) for a in args) for s in (slice(0, rows // 2), slice(rows // 2, rows))]


def frozen(p):
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
"""

CLASSES = 3


def render(case: Case) -> str:
    """The program of a case, without what runs it."""
    return "\n\n".join([HEAD, *_blocks(case), _net(case), _batch(case), _between(case), _train(case)]) + "\n"


def script(case: Case, fault: str) -> str:
    """The program of a failure, which runs by itself and says what differs."""
    harness = (Path(__file__).parent / "harness.py").read_text().replace("from __future__ import annotations\n", "")
    title = f'"""{fault}\n\nFound by the fuzzer, seed {case.seed}. Prints what differs from plain PyTorch; exits 1 if something does.\n"""\n'
    foot = (Path(__file__).parent / "alone.py").read_text().partition("# ----\n")[2]
    return (
        title
        + "from __future__ import annotations\n"
        + render(case)
        + harness
        + "\n\n"
        + foot.replace("RUN_KIND", repr(case.run))
    )


# -- blocks -----------------------------------------------------------------------------------------------------------
def parts(case: Case, line: Line) -> list[Part]:
    """What the blocks of a line are, by the choices of its own seed."""
    rng = random.Random(line.seed)
    return [KINDS[kind].make(Draw(case.layout, case.width, case.time, rng)) for kind in line.kinds]


def _named(case: Case) -> list[tuple[str, Part]]:
    """All blocks with their attributes' names."""
    return [
        (f"b{at}" + ("" if which == 0 else "x"), part)
        for at, line in enumerate(case.lines)
        for which, part in enumerate(parts(case, line))
    ]


def _blocks(case: Case) -> list[str]:
    found = []
    for name, part in _named(case):
        body = "class {N}(nn.Module):\n    def __init__(self):\n        super().__init__()\n{init}\n\n    def forward(self, x):\n{forward}"
        text = (part.top and part.top + "\n\n") + body.replace("{N}", name.upper()).replace(
            "{init}", indent(part.init, " " * 8)
        ).replace("{forward}", indent(part.forward, " " * 8))
        found.append(text.replace("{n}", name))
    return found


def _net(case: Case) -> str:
    argument = ARGUMENTS[case.argument] if case.argument else None
    init, forward = [], []
    if case.tokens:
        init.append(f"self.embed = nn.Embedding(11, {case.width})")
        forward.append("h = self.embed(x)")
    else:
        forward.append("h = x")
    if argument:
        forward += argument.use.splitlines()
    for at, line in enumerate(case.lines):
        b = f"b{at}"
        init.append(f"self.{b} = {b.upper()}()")
        if line.way == "parallel":
            init.append(f"self.{b}x = {b.upper()}X()")
        if line.way == "tied":
            init.append(f"self.{b}t = tie(self.{b}, {b.upper()}())")
        forward.append(
            {
                "plain": f"h = self.{b}(h)",
                "residual": f"h = h + self.{b}(h)",
                "parallel": f"h = self.{b}(h) + self.{b}x(h)",
                "repeated": f"for _ in range(2):\n    h = self.{b}(h)",
                "tied": f"h = self.{b}t(self.{b}(h))",
                "checkpoint": f"h = checkpoint(self.{b}, h, use_reentrant=False)",
                "scaled": f"h = 0.5 * self.{b}(h) + 0.5",
            }[line.way]
        )
    init.append(f"self.head = nn.Linear({case.width}, {CLASSES})")
    forward.append("out = self.head(h.mean((2, 3)))" if case.layout == "image" else "out = self.head(h)")
    if case.output not in ("out", "nested"):
        forward.append(f"loss = {LOSSES[case.loss].text}")
    forward.append(OUTPUTS[case.output])
    loss = LOSSES[case.loss].text
    extra = ", k=None" if argument else ""
    lines = [argument.top + "\n\n" if argument and argument.top else ""]
    lines += [
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()",
        indent("\n".join(init), " " * 8),
    ]
    lines += [f"\n    def forward(self, x, y{extra}):", indent("\n".join(forward), " " * 8)]
    inside = case.output not in ("out", "nested")
    pick = {"loss": "out", "tuple": "out[0]", "dict": "out['loss']", "dataclass": "out.loss"}
    if not inside:
        pick_out = "" if case.output == "out" else "    out = out[0]\n"
        body = f"{pick_out}    return {loss}"
    else:
        body = f"    return {pick[case.output]}"
    lines += [f"\n\nLOSS_INSIDE = {inside}\n\n\ndef loss_of(out, x, y, k=None):\n{body}"]
    return "\n".join(lines).lstrip("\n")


# -- batches ----------------------------------------------------------------------------------------------------------
def _batch(case: Case) -> str:
    rows = case.rows * (case.data_ranks if case.run == "virtual" else 1)
    shape = {
        "flat": (rows, case.width),
        "seq": (rows, case.time, case.width),
        "image": (rows, case.width, 4, 4),
    }[case.layout]
    targets = (rows,) if case.layout != "seq" else (rows, case.time)
    make = f"torch.randint(0, 11, {shape[:2]}, generator=g)" if case.tokens else f"torch.randn({shape}, generator=g)"
    body = [
        f"g = torch.Generator().manual_seed({case.seed % 1000} + 100 * step + 10007 * rank)",
        f"x, y = {make}, torch.randint(0, {CLASSES}, {targets}, generator=g)",
    ]
    left_out = {"requires gradients", "transposed"} if case.tokens else set()
    if "requires gradients" not in case.inputs and any("GroupNorm" in part.init for _, part in _named(case)):
        left_out.add("channels last")  # (torch's own backward of GroupNorm crashes: there is nothing to compare with)
    body += [INPUTS[name] for name in case.inputs if name not in left_out]
    if case.argument:
        body += [f"k = {ARGUMENTS[case.argument].value}", "return x, y, k"]
    else:
        body += ["return x, y"]
    low = dict(case.plan)
    plan = pprint.pformat(low, width=110, sort_dicts=False)
    constants = f"DTYPE = torch.{'float64' if case.double else 'float32'}\nWORLD, DATA_RANKS = {case.world}, {case.data_ranks}\nPLAN = {plan}\n"
    build = f"\n\ndef build():\n    torch.manual_seed({case.seed % 9973})\n    return Net()\n"
    return constants + build + "\n\ndef batch(step, rank):\n" + indent("\n".join(body), " " * 4)


def _between(case: Case) -> str:
    """What the caller does to blocks before each step but the first, and what Python remembers in them."""
    changes, states = [], []
    for name, part in _named(case):
        if part.between:
            changes += [f"b = model.{name}", *part.between.replace("{n}", name).splitlines()]
        if part.state:
            states.append(f"(lambda b: {part.state})(model.{name})".replace("{n}", name))
    between = "def between(model, step):\n" + indent("\n".join(changes) or "pass", " " * 4)
    return between + "\n\n\ndef remembered(model):\n    return [" + ", ".join(states) + "]"


# -- the loop ---------------------------------------------------------------------------------------------------------
def _train(case: Case) -> str:
    if case.run == "virtual":
        return ""
    plan = dict(case.plan)
    own = OPTIMIZERS[case.optimizer] if case.optimizer else ""
    make = f"optimizer = {own}" if own else "optimizer = t.optimizer(model)"
    early = "optimizer before compile" in case.options
    at = lambda where: [OPTIONS[n].text for n in case.options if OPTIONS[n].where == where]  # noqa: E731
    # A loss outside of the model is given to `compile` for `train_step`, with forward's own arguments.
    loss_fn = ", loss_of" if case.style == "train_step" and case.output == "out" else ""
    lines = [
        "torch.manual_seed(7)",
        "model, called, optimizer_hooks = build(), [], []",
        "parameters = list(model.parameters())",
    ]
    lines += [make] if early else []
    lines += at("before compile")
    lines += [
        f"model = t.compile(model, batch(0, t.rank){loss_fn})",
        *at("after compile"),
        "parameters = list(model.parameters())",
    ]
    lines += [] if early else [make]
    if "hook on the optimizer" in case.options:
        lines.append("for hook in optimizer_hooks:\n    optimizer.register_step_pre_hook(hook)")
    if "ema" in case.options:
        lines.append("ema = [torch.zeros(p.shape, dtype=p.dtype) for p in parameters]")
    step = [
        "t.step = step",
        "torch.manual_seed(100 + step + 1000 * t.rank)",
        "if step:\n    between(model, step)",
        "args = batch(step, t.rank)",
        *at("before step"),
        STYLES[case.style].strip("\n").replace("{between}", "\n".join(at("between"))),
    ]
    user = "optimizer" not in plan
    if not (case.style == "train_step" and not user):
        step += ["t.gradients(model)", *at("after backward")]
        step += (
            ["optimizer.step()\noptimizer.zero_grad()"]
            if user
            else ["t.keep('norm', 'norm', t.update(model, optimizer))"]
        )
    if "requires gradients" in case.inputs and not case.tokens:
        step.append("t.keep('input', 'gradient', args[0].grad)")
    step += [
        "t.keep('input', 'args', [a for a in args if isinstance(a, torch.Tensor)])",
        "t.state(model, optimizer)",
        *at("after step"),
    ]
    step += ["t.keep('python', 'remembered', remembered(model))", "t.keep('python', 'called', len(called))"]
    lines += [f"for step in range({case.steps}):", indent("\n".join(step), " " * 4)]
    return "def train(t):\n" + indent("\n".join(lines), " " * 4)
