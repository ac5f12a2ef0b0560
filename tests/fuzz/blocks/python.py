"""Borders of Python: hooks, closures, globals, defaults, flags, counters, lists, asserts."""

from __future__ import annotations

from . import Draw, Part, block


@block("attribute that changes", border=True)
def attribute(c: Draw) -> Part:
    init, read, change = c.rng.choice(
        [
            ("self.k = 1.5", "self.k", "b.k = 1.0 + step"),
            ("self.k = [1.5]", "self.k[0]", "b.k[0] += 1"),
            ("self.k = {'a': 1.5}", "self.k['a']", "b.k['a'] *= 1.1"),
            ("self.k = types.SimpleNamespace(a=1.5)", "self.k.a", "b.k.a = 0.5 + step"),
            ("self.k = (1.5, 2)", "self.k[0]", "b.k = (0.5 + step, 2)"),
            ("self.k = {1, 2}", "len(self.k)", "b.k.add(5 + step)"),
            ("self.k = collections.deque([1.5])", "len(self.k)", "b.k.append(1.0)"),
            ("self.k = np.float64(1.5)", "float(self.k)", "b.k = np.float64(1 + step)"),
            ("self.k = fractions.Fraction(3, 2)", "float(self.k)", "b.k = fractions.Fraction(step + 1, 2)"),
            ("self.k = 'a'", "{'a': 1.0, 'b': 2.0}[self.k]", "b.k = 'ab'[step % 2]"),
            ("self.k = None", "(1.0 if self.k is None else 2.0)", "b.k = step or None"),
            ("self.k = range(2)", "float(len(self.k))", "b.k = range(1 + step)"),
            ("self.k = slice(0, 2)", "len([1, 2, 3, 4][self.k])", "b.k = slice(0, 1 + step)"),
            ("self.k = 2", "self.k ** 0.5", "type(b).k2 = step; b.k = 3 + step"),
        ]
    )
    return Part(init, f"return x * {read}", between=change)


@block("class attribute", border=True)
def class_attribute(c: Draw) -> Part:
    return Part("type(self).k = 1.5", "return x * type(self).k", between="type(b).k = 1.0 + step")


@block("property", border=True)
def python_property(c: Draw) -> Part:
    top = "class Box_{n}:\n    def __init__(self):\n        self._k = 1.5\n    @property\n    def k(self):\n        return self._k * 0.5\n"
    return Part("self.s = Box_{n}()", "return x * self.s.k", top, "b.s._k = 1.0 + step")


@block("closure", border=True)
def closure(c: Draw) -> Part:
    top = (
        "def scale_{n}():\n    k = 1.5\n    def get(x):\n        return x * k\n    def set(v):\n"
        "        nonlocal k\n        k = v\n    return get, set\n"
    )
    return Part("self.get, self.set = scale_{n}()", "return self.get(x)", top, "b.set(1.0 + step)")


@block("closure of a container", border=True)
def closure_container(c: Draw) -> Part:
    top = (
        "def scale_{n}():\n    k = {'v': 1.5, 'm': nn.Dropout(0.5)}\n    def get(x):\n"
        "        return x * k['v'] * (2.0 if k['m'].training else 1.0)\n    return get, k\n"
    )
    return Part(
        "self.get, self.k = scale_{n}()",
        "return self.get(x)",
        top,
        c.pick("b.k['v'] = 1.0 + step", "b.k['m'].train(step % 2 == 0)"),
    )


@block("mutable default", border=True, remembers=True)
def mutable_default(c: Draw) -> Part:
    top = "def scale_{n}(x, seen=[]):\n    seen.append(1)\n    return x * (1.0 + 0.1 * len(seen))\n"
    return Part("pass", "return scale_{n}(x)", top, state="len(scale_{n}.__defaults__[0])")


@block("default that changes", border=True)
def default_changes(c: Draw) -> Part:
    how = c.pick("scale_{n}.__defaults__ = (1.0 + step,)", "scale_{n}.k = 1.0 + step")
    top = "def scale_{n}(x, k=1.5):\n    return x * k * getattr(scale_{n}, 'k', 1.0)\nscale_{n}.k = 1.0\n"
    return Part("pass", "return scale_{n}(x)", top, how)


@block("global", border=True)
def python_global(c: Draw) -> Part:
    change = c.pick("globals()['G_{n}'] = 1.0 + step", "S_{n}['k'] = 1.0 + step", "L_{n}.append(step)")
    top = "G_{n} = 1.5\nS_{n} = {'k': 1.5}\nL_{n} = [1]\n"
    return Part("pass", "return x * G_{n} * S_{n}['k'] * len(L_{n})", top, change)


@block("global that counts", border=True, remembers=True)
def global_counts(c: Draw) -> Part:
    how = c.pick(
        "global G_{n}\nG_{n} += 1",
        "S_{n}['n'] += 1",
        "L_{n}.append(1)",
    )
    top = "G_{n} = 0\nS_{n} = {'n': 0}\nL_{n} = []\n"
    used = c.pick("", " * (1.0 + 0.1 * (G_{n} + S_{n}['n'] + len(L_{n})))")
    return Part("pass", f"{how}\nreturn x{used}", top, state="(G_{n}, S_{n}['n'], len(L_{n}))")


@block("counter", border=True, remembers=True)
def counter(c: Draw) -> Part:
    init, how, state = c.rng.choice(
        [
            ("self.k = 0", "self.k += 1", "self.k"),
            ("self.k = [0]", "self.k[0] += 1", "self.k[0]"),
            ("self.k = []", "self.k.append(len(self.k))", "len(self.k)"),
            ("self.k = {}", "self.k[len(self.k)] = 1", "len(self.k)"),
            ("self.k = collections.Counter()", "self.k['calls'] += 1", "self.k['calls']"),
            ("self.k = 0", "if self.training:\n    self.k += 1", "self.k"),
        ]
    )
    used = c.pick("", f" * (1.0 + 0.1 * {state})")
    return Part(init, f"{how}\nreturn x{used}", state=state.replace("self", "b"))


@block("attribute beside a counter", border=True, remembers=True)
def unwatched(c: Draw) -> Part:
    return Part(
        "self.k = 1.5", "N_{n}['n'] += 1\nreturn x * self.k", "N_{n} = {'n': 0}\n", "b.k = 1.0 + step", "N_{n}['n']"
    )


@block("statistics kept in a list", border=True, remembers=True)
def kept_statistics(c: Draw) -> Part:
    return Part(
        "self.seen = []",
        f"self.seen.append({c.pick('x.detach().mean()', 'x.mean()', 'x.shape[0]')})\nself.seen = self.seen[-2:]\nreturn x * 1.0",
        state="[None if v is None else float(v) for v in b.seen]",
    )


@block("forward hook", "flat seq", border=True, remembers=True)
def forward_hook(c: Draw) -> Part:
    hook = c.pick(
        "lambda m, i, o: o * 1.5",
        "lambda m, i, o: self.seen.append(1)",
        "lambda m, i, o: self.seen.append(o.detach().sum())",
        "lambda m, i, o: torch.tanh(o)",
    )
    return Part(
        f"self.seen = []\nself.a = nn.Linear({c.d}, {c.d})\nself.a.register_forward_hook({hook})",
        "return self.a(x)",
        state="[None if v is None else round(float(v), 4) for v in b.seen]",
    )


@block("forward pre-hook", "flat seq", border=True, remembers=True)
def forward_pre_hook(c: Draw) -> Part:
    hook = c.pick("lambda m, i: (i[0] * 1.5,)", "lambda m, i: self.seen.append(len(i))")
    return Part(
        f"self.seen = []\nself.a = nn.Linear({c.d}, {c.d})\nself.a.register_forward_pre_hook({hook})",
        "return self.a(x)",
        state="len(b.seen)",
    )


@block("hook with a counter of its own", "flat seq", border=True, remembers=True)
def hook_counter(c: Draw) -> Part:
    top = (
        "def counting_{n}():\n    n = 0\n    def hook(m, i, o):\n        nonlocal n\n        n += 1\n"
        "        return o * (1.0 + 0.1 * n)\n    return hook, lambda: n\n"
    )
    return Part(
        f"hook, self.count = counting_{{n}}()\nself.a = nn.Linear({c.d}, {c.d})\nself.a.register_forward_hook(hook)",
        "return self.a(x)",
        top,
        state="b.count()",
    )


@block("hook added between steps", "flat seq", border=True)
def hook_added(c: Draw) -> Part:
    return Part(
        f"self.a = nn.Linear({c.d}, {c.d})",
        "return self.a(x)",
        between="if step == 1:\n    b.handle = b.a.register_forward_hook(lambda m, i, o: o * 2)\nif step == 2:\n    b.handle.remove()",
    )


@block("module hook on gradients", "flat seq", border=True, remembers=True)
def backward_hook(c: Draw) -> Part:
    return Part(
        f"self.seen = []\nself.a = nn.Linear({c.d}, {c.d})\nself.a.register_full_backward_hook(lambda m, gi, go: self.seen.append(1))",
        "return torch.tanh(self.a(x))",
        state="len(b.seen)",
    )


@block("tensor hook in forward", "flat seq", border=True)
def tensor_hook(c: Draw) -> Part:
    return Part(
        f"self.a = nn.Linear({c.d}, {c.d})",
        "h = self.a(x)\nif h.requires_grad:\n    h.register_hook(lambda g: g * 0.5)\nreturn torch.tanh(h)",
    )


@block("assert that holds", border=True)
def assert_holds(c: Draw) -> Part:
    how = c.pick(
        "assert torch.isfinite(x).all(), 'not finite'",
        "assert x.shape[1] == x.shape[1]",
        "torch._assert(x.shape[0] > 0, 'empty')",
        "torch._assert_async((x < 1e9).all())",
        "assert (x < 1e9).all()",
        "torch._assert(bool((x < 1e9).all()), 'large')",
    )
    return Part("pass", f"{how}\nreturn x * 1.0")


@block("assert that fails later", border=True)
def assert_fails(c: Draw) -> Part:
    how = c.pick(
        "assert (x * self.k < 1e5).all(), 'large'",
        "torch._assert_async((x * self.k < 1e5).all())",
        "torch._assert(bool((x * self.k < 1e5).all()), 'large')",
        "assert torch.isfinite(x * self.k).all()",
    )
    return Part(
        "self.register_buffer('k', torch.ones(()))",
        f"{how}\nreturn x * 1.0",
        between="b.k.fill_(1.0 if step < 2 else float('inf'))",
    )


@block("branch on a flag", border=True)
def branch(c: Draw) -> Part:
    read, change = c.rng.choice(
        [
            ("self.training", "b.train(step % 2 == 0)"),
            ("self.flag", "b.flag = not b.flag"),
            ("(self.step > 0)", "b.step = step"),
            ("hasattr(self, 'extra')", "b.extra = 1"),
            ("isinstance(self.flag, bool)", "b.flag = 1"),
            ("torch.is_grad_enabled()", "pass"),
        ]
    )
    return Part("self.flag, self.step = True, 0", f"return x * 2 if {read} else x * 0.5", between=change)


@block("module replaced", "flat seq", border=True)
def module_replaced(c: Draw) -> Part:
    change = c.pick("b.act = nn.Sigmoid()", "b.acts = b.acts[::-1]", "b.fn = torch.sin", "b.acts.append(nn.Tanh())")
    return Part(
        f"self.act, self.acts, self.fn = nn.Tanh(), nn.ModuleList([nn.Tanh(), nn.Softplus()]), torch.cos\nself.a = nn.Linear({c.d}, {c.d})",
        "h = self.act(self.a(x))\nfor a in self.acts:\n    h = a(h)\nreturn self.fn(h)",
        between=change,
    )


@block("method replaced", border=True)
def method_replaced(c: Draw) -> Part:
    if c.pick("instance", "class") == "instance":
        return Part("self.inner = torch.sin", "return self.inner(x)", between="b.inner = lambda x: x * 2")
    change = "if step == 1:\n    type(b).turn = lambda self, x: x * 2"
    return Part("type(self).turn = lambda self, x: x.sin()", "return self.turn(x)", between=change)


@block("reads a scalar", border=True)
def reads_scalar(c: Draw) -> Part:
    return Part(
        "self.register_buffer('k', torch.tensor(1.5))",
        "return x * self.k.item()",
        between=c.pick("pass", "b.k.add_(0.5)"),
    )


@block("nested call with keywords", "flat seq", border=True)
def keywords(c: Draw) -> Part:
    top = (
        "class Inner_{n}(nn.Module):\n    def __init__(self, d):\n        super().__init__()\n"
        "        self.a = nn.Linear(d, d)\n    def forward(self, x, *, scale=1.0, **kw):\n"
        "        return {'y': self.a(x) * scale * kw.get('more', 1.0)}\n"
    )
    return Part(
        f"self.m, self.k = Inner_{{n}}({c.d}), 0.5",
        "return self.m(x, scale=self.k, more=2.0)['y']",
        top,
        "b.k = 0.5 + step",
    )
