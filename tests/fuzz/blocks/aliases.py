"""Borders of storage: parameters whose gradients are one tensor, aliases of weights and buffers, buffers that change, attribute tensors."""

from __future__ import annotations

from . import Draw, Part, block


@block("one gradient for several parameters", "flat seq", border=True, smooth=True)
def one_gradient(c: Draw) -> Part:
    init, forward = c.rng.choice(
        [
            (
                f"self.p, self.q = nn.Parameter(torch.ones({c.d})), nn.Parameter(torch.ones({c.d}))",
                "return torch.tanh(x + self.p + self.q)",
            ),
            (
                f"self.w, self.delta = nn.Parameter(torch.randn({c.d}, {c.d}) * 0.4), nn.Parameter(torch.zeros({c.d}, {c.d}))",
                "return F.linear(x, self.w + self.delta).tanh()",
            ),
            (
                f"self.a, self.b = nn.Linear({c.d}, {c.d}), nn.Linear({c.d}, {c.d})",
                "return self.a(x) + self.b(x.sin())",
            ),
            (
                f"self.w, self.pos = nn.Parameter(torch.randn({c.d}, {c.d}) * 0.4), nn.Parameter(torch.zeros({c.d * c.d}))",
                f"return F.linear(x, self.w + self.pos.view({c.d}, {c.d})).tanh()",
            ),
            (
                f"self.p, self.q = nn.Parameter(torch.ones({c.d})), nn.Parameter(torch.ones(1, {c.d}))",
                "return torch.tanh(x + self.p - self.q)",
            ),
            (f"self.p = nn.Parameter(torch.ones({c.d}))", "return torch.tanh(x + self.p + self.p)"),
        ]
    )
    return Part(init, forward)


@block("expanded gradient", "flat seq", border=True, smooth=True)
def expanded_gradient(c: Draw) -> Part:
    return Part(
        f"self.p = nn.Parameter(torch.randn({c.d}, {c.d}))",
        f"return x + {c.pick('self.p.sum()', 'self.p.mean()', 'self.p.sum(0)')} * 0.1",
    )


@block("weight in a list", "flat seq", border=True, smooth=True)
def weight_in_list(c: Draw) -> Part:
    alias, read = c.rng.choice(
        [
            ("self.w = [self.a.weight]", "self.w[0]"),
            ("self.w = {'w': self.a.weight}", "self.w['w']"),
            ("self.w = (self.a.weight, 1)", "self.w[0]"),
            ("self.w = [self.a]", "self.w[0].weight"),
            ("self.w = [self.a.weight.data]", "self.w[0]"),
            ("self.w = [lambda: self.a.weight]", "self.w[0]()"),
        ]
    )
    return Part(f"self.a = nn.Linear({c.d}, {c.d}, bias=False)\n{alias}", f"return torch.tanh(self.a(x)) @ {read}")


@block("slice of a weight", "flat seq", border=True, smooth=True)
def slice_of_weight(c: Draw) -> Part:
    alias = c.pick("self.a.weight[:2]", "self.a.weight.detach()[:2]", "self.a.weight.data[:2]", "self.a.weight.t()[:2]")
    return Part(
        f"self.a = nn.Linear({c.d}, {c.d}, bias=False)\nself.w = {alias}",
        "return torch.tanh(self.a(x)) * torch.tanh(self.a(x)[..., :2] @ self.w).sin()",
    )


@block("buffer on a weight", "flat seq", border=True, smooth=True)
def buffer_on_weight(c: Draw) -> Part:
    alias = c.pick("self.a.weight.detach()", "self.a.weight.data", "self.a.weight.data[0]")
    return Part(
        f"self.a = nn.Linear({c.d}, {c.d}, bias=False)\nself.register_buffer('w', {alias})",
        "return torch.tanh(self.a(x)) + (x @ self.w if self.w.dim() == 2 else x * self.w)",
    )


@block("two parameters on one storage", "flat seq", border=True, smooth=True)
def one_storage(c: Draw) -> Part:
    init = c.pick(
        "self.b = nn.Parameter(self.a.data)",
        "self.b = nn.Parameter(self.a.data.t())",
        "self.b = nn.Parameter(self.a.data[:])",
    )
    return Part(
        f"self.a = nn.Parameter(torch.randn({c.d}, {c.d}) * 0.4)\n{init}", "return torch.tanh(x @ self.a) @ self.b"
    )


@block("parameters cut from one tensor", "flat seq", border=True, smooth=True)
def cut_from_one(c: Draw) -> Part:
    n = c.d * c.d
    return Part(
        f"f = torch.randn({2 * n}) * 0.4\nself.a, self.b = nn.Parameter(f[:{n}].view({c.d}, {c.d})), nn.Parameter(f[{n}:].view({c.d}, {c.d}))",
        "return torch.tanh(x @ self.a) @ self.b",
    )


@block("parameter stored transposed", "flat seq", border=True, smooth=True)
def stored_transposed(c: Draw) -> Part:
    return Part(
        f"self.a = nn.Parameter((torch.randn({c.d}, {c.d}) * 0.4).t())",
        f"return torch.tanh(x @ self.a{c.pick('', '.t()')})",
    )


@block("tied weights", "flat seq", border=True, smooth=True)
def tied(c: Draw) -> Part:
    return Part(
        f"self.a, self.b = nn.Linear({c.d}, {c.d}), nn.Linear({c.d}, {c.d})\nself.b.weight = self.a.weight",
        "return self.b(torch.tanh(self.a(x)))",
    )


@block("parameter list and dict", "flat seq", border=True, smooth=True)
def parameter_list(c: Draw) -> Part:
    return Part(
        f"self.l = nn.ParameterList([nn.Parameter(torch.randn({c.d}) * 0.4) for _ in range(2)])\n"
        f"self.m = nn.ParameterDict({{'g': nn.Parameter(torch.ones({c.d}))}})",
        "for p in self.l:\n    x = x + p\nreturn torch.tanh(x * self.m['g'])",
    )


@block("hidden module", "flat seq", border=True, smooth=True)
def hidden_module(c: Draw) -> Part:
    return Part(
        f"self.h = [nn.Linear({c.d}, {c.d})]\nself.a = nn.Linear({c.d}, {c.d})",
        "return self.h[0](torch.tanh(self.a(x)))",
    )


@block("unused and frozen parameters", "flat seq", border=True, smooth=True)
def unused(c: Draw) -> Part:
    return Part(
        f"self.a, self.b, self.c = nn.Linear({c.d}, {c.d}), nn.Linear({c.d}, {c.d}), nn.Linear(2, 2)\nself.b.requires_grad_(False)",
        "return self.b(torch.tanh(self.a(x)))",
    )


@block("buffer that changes", border=True)
def buffer_changes(c: Draw) -> Part:
    how = c.pick(
        "self.k.mul_(0.9).add_(x.detach().mean() * 0.1)",
        "self.k.copy_(self.k * 0.9 + x.detach().mean() * 0.1)",
        "self.k = self.k * 0.9 + x.detach().mean() * 0.1",
        "self.k += 0.1",
        "self.k[0] = x.detach().mean()",
        "self.k.data.add_(0.1)",
        "self.k.lerp_(x.detach().mean().expand_as(self.k), 0.1)",
    )
    guard = c.pick("", "if self.training:\n    ")
    order = c.pick("before", "after")
    body = [f"{guard}{how}", "y = x * self.k.mean()"]
    return Part(
        "self.register_buffer('k', torch.ones(3))",
        "\n".join(body if order == "before" else body[::-1]) + "\nreturn y",
    )


@block("buffer set by the caller", border=True)
def buffer_set(c: Draw) -> Part:
    how = c.pick(
        "b.k.fill_(1.0 + step)", "b.k.mul_(1.5)", "b.k = torch.full((3,), 0.5 + step)", "b.k.data = b.k.data + 1"
    )
    return Part("self.register_buffer('k', torch.ones(3))", "return x * self.k.mean()", between=how)


@block("buffers that view each other", border=True)
def buffers_view(c: Draw) -> Part:
    alias = c.pick("self.k[:2]", "self.k", "self.k.view(2, 2)", "self.k.detach()")
    return Part(
        f"self.register_buffer('k', torch.ones(4))\nself.register_buffer('v', {alias})",
        f"self.k.add_(0.1)\nreturn x * self.k.mean() + self.v.sum() * 0.1{c.pick('', ' + self.k[0]')}",
    )


@block("counter buffer", border=True)
def counter_buffer(c: Draw) -> Part:
    return Part(
        "self.register_buffer('n', torch.zeros((), dtype=torch.long))",
        "self.n.add_(1)\nreturn x * (1.0 + 0.1 * self.n)",
    )


@block("memory as an attribute", border=True, remembers=True)
def memory_attribute(c: Draw) -> Part:
    where = c.pick("self.m", "self.s['m']", "self.l[0]")
    return Part(
        "self.m, self.s, self.l = torch.zeros(()), {'m': torch.zeros(())}, [torch.zeros(())]",
        f"{where} = {where} * 0.9 + x.detach().mean()\nreturn x + {where}",
        state=f"float({where.replace('self', 'b')})",
    )


@block("attribute tensor that changes form", border=True)
def attribute_changes_form(c: Draw) -> Part:
    change = c.pick(
        "b.k = b.k.double() if step % 2 else b.k.float()",
        "b.k = torch.full((2 + step,), 0.5)",
        "b.k = b.k.to(torch.float16)",
        "b.k = torch.tensor([1, 2, 3])",
        "b.k = b.k.clone().requires_grad_()",
        "b.k.requires_grad_(not b.k.requires_grad)",
        "b.k = b.k * 1.5",
        "b.k = b.k[None]",
        "b.k = nn.Parameter(b.k * 2, requires_grad=False).data",
    )
    where = c.pick("attribute", "dict", "list", "object")
    init, read = {
        "attribute": ("self.k = torch.ones(3)", "self.k"),
        "dict": ("self.s = {'k': torch.ones(3)}", "self.s['k']"),
        "list": ("self.s = [torch.ones(3)]", "self.s[0]"),
        "object": ("self.s = types.SimpleNamespace(k=torch.ones(3))", "self.s.k"),
    }[where]
    change = change.replace("b.k", read.replace("self", "b"))
    return Part(
        init,
        f"return x * {read}.mean().to(x.dtype)" if "3])" not in change else f"return x * {read}.sum()",
        between=change,
    )


@block("global tensor", border=True)
def global_tensor(c: Draw) -> Part:
    change = c.pick("K_{n}['k'] = torch.full((3 + step,), 0.5)", "K_{n}['k'].mul_(2)", "K_{n}['k'] = K_{n}['k'].half()")
    return Part("pass", "return x * K_{n}['k'].float().mean().to(x.dtype)", "K_{n} = {'k': torch.ones(3)}\n", change)


@block("buffer that comes to require gradients", "flat seq", border=True)
def buffer_requires(c: Draw) -> Part:
    where = c.pick("self.register_buffer('k', torch.ones({d}))", "self.k = torch.ones({d})").replace("{d}", str(c.d))
    return Part(
        where,
        "return x * self.k",
        between="b.k.requires_grad_(step % 2 == 0)",
        state="None if b.k.grad is None else b.k.grad.sum().item()",
    )


@block("parameter in a list only", "flat seq", border=True)
def parameter_in_list(c: Draw) -> Part:
    return Part(
        f"self.l = [nn.Parameter(torch.ones({c.d}))]",
        "return x * self.l[0]",
        between=c.pick("b.l[0].requires_grad_(step % 2 == 0)", "b.l[0].data.mul_(1.5)", "pass"),
        state="None if b.l[0].grad is None else b.l[0].grad.sum().item()",
    )
