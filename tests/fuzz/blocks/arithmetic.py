"""Tensor operators: reductions, indexing, sorting, complex numbers, linear algebra, views, in-place, custom functions."""

from __future__ import annotations

from . import Draw, Part, block


@block("scale and shift", smooth=True)
def scale_shift(c: Draw) -> Part:
    shape = f"{c.d}, 1, 1" if c.layout == "image" else str(c.d)
    return Part(
        f"self.g, self.s = nn.Parameter(torch.ones({shape})), nn.Parameter(torch.zeros({shape}))",
        "return x * self.g + self.s",
    )


@block("einsum", smooth=True)
def einsum(c: Draw) -> Part:
    text = {"flat": "bd,de->be", "seq": "btd,de->bte", "image": "bdhw,de->behw"}[c.layout]
    return Part(
        f"self.w = nn.Parameter(torch.randn({c.d}, {c.d}) * 0.4)", f"return torch.einsum({text!r}, x, self.w).sin()"
    )


@block("gather and scatter")
def gather_scatter(c: Draw) -> Part:
    how = c.pick(
        "x.gather(1, i)",
        "torch.zeros_like(x).scatter_add(1, i, x)",
        "torch.zeros_like(x).scatter_reduce(1, i, x, 'amax', include_self=False)",
        "x.index_select(1, i.flatten(1)[0, :1].expand(x.shape[1]))",
        "torch.take_along_dim(x, i, 1)",
    )
    return Part("pass", f"i = x.detach().argsort(1)\nreturn {how}")


@block("cumulative sums")
def cumulative(c: Draw) -> Part:
    how = c.pick(
        "x.cumsum(1)",
        "x.cumprod(1)",
        "torch.logcumsumexp(x, 1)",
        "torch.cummax(x, 1)[0]",
        "x.diff(dim=1, prepend=x[:, :1])",
    )
    return Part("pass", f"return ({how}).tanh()")


@block("sort and topk")
def sort_topk(c: Draw) -> Part:
    how = c.pick(
        "x.sort(1)[0]",
        "torch.zeros_like(x).scatter(1, x.topk(2, 1)[1], x.topk(2, 1)[0])",
        "x + x.median(1, keepdim=True)[0]",
        "x - x.kthvalue(2, 1, keepdim=True)[0]",
        "x.msort().tanh() if x.shape[0] == 1 else x + x.sort(1, descending=True)[0]",
        "x + torch.quantile(x.double(), 0.3, dim=1, keepdim=True).to(x.dtype)",
    )
    return Part("pass", f"return {how}")


@block("complex product")
def complex_product(c: Draw) -> Part:
    shape = f"{c.d}, 1, 1" if c.layout == "image" else str(c.d)
    return Part(
        f"self.r, self.i = nn.Parameter(torch.randn({shape})), nn.Parameter(torch.randn({shape}))",
        "z = torch.complex(x, x.sin()) * torch.complex(self.r, self.i)\nreturn z.real + 0.5 * z.abs().sqrt()",
    )


@block("complex parameter")
def complex_parameter(c: Draw) -> Part:
    shape = f"{c.d}, 1, 1" if c.layout == "image" else str(c.d)
    return Part(
        f"self.z = nn.Parameter(torch.complex(torch.randn({shape}), torch.randn({shape})) * 0.5)",
        "return (x * self.z).imag + x",
    )


@block("fourier filter", smooth=True)
def fourier(c: Draw) -> Part:
    size = {"flat": c.d, "seq": c.time, "image": c.d}[c.layout] // 2 + 1
    tail = {"flat": "", "seq": ", 1", "image": ", 1, 1"}[c.layout]
    return Part(
        f"self.f = nn.Parameter(torch.randn({size}{tail}) * 0.5)",
        "return torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.f, n=x.shape[1], dim=1)",
    )


@block("linear algebra", "flat seq")
def linear_algebra(c: Draw) -> Part:
    how = c.pick(
        "torch.linalg.solve(m, x.reshape(-1, x.shape[-1]).t()).t().reshape(x.shape)",
        "x @ torch.linalg.inv(m)",
        "x @ torch.linalg.cholesky(m)",
        "x @ torch.matrix_exp(0.1 * self.w)",
        "x * torch.linalg.slogdet(m)[1].tanh()",
        "x * torch.linalg.det(0.5 * m).tanh()",
        "x @ torch.linalg.qr(m)[1].tanh()",
        "x * torch.linalg.eigvalsh(m).tanh()",
        "x @ torch.linalg.pinv(m)",
        "x * torch.linalg.svdvals(m).tanh()",
    )
    return Part(
        f"self.w = nn.Parameter(torch.randn({c.d}, {c.d}) * 0.3)",
        f"m = self.w @ self.w.t() + torch.eye({c.d}, dtype=x.dtype) * torch.linspace(1.0, 3.0, {c.d}, dtype=x.dtype)\nreturn {how}",
    )


@block("statistics", "flat seq")
def statistics(c: Draw) -> Part:
    how = c.pick(
        "x * x.std(-1, keepdim=True)",
        "x + torch.logsumexp(x, -1, keepdim=True)",
        "x / (x.norm(dim=-1, keepdim=True) + 0.5)",
        "F.normalize(x + 0.1, dim=-1)",
        "x @ torch.cov(x.reshape(-1, x.shape[-1]).t()).tanh()",
        "x @ torch.corrcoef(x.reshape(-1, x.shape[-1]).t() + 0.01).tanh()",
        "x + torch.cdist(x, x).mean(-1, keepdim=True)" if c.layout == "seq" else "x.softmax(-1) * 3",
        "x - x.var(-1, keepdim=True, unbiased=False)",
    )
    return Part("pass", f"return {how}")


@block("masked")
def masked(c: Draw) -> Part:
    how = c.pick(
        "x.masked_fill(x > 0.7, 0.1)",
        "torch.where(x > 0, x, 0.1 * x)",
        "x * (x.abs() < 1.5)",
        "x.clamp(-0.8, 0.9)",
        "x.masked_scatter(x > 0.5, x * 2)",
        "torch.maximum(x, -x)",
        "x.fmod(1.0)",
    )
    return Part("pass", f"return {how}")


@block("boolean mask")
def boolean_mask(c: Draw) -> Part:
    how = c.pick(
        "x + x[x > 0].sum() * 0.01",
        "x * torch.masked_select(x, x < 0.5).square().mean()",
        "x.index_put((x > 0.3,), torch.tensor(0.2, dtype=x.dtype))",
        "x + x[m].mean(0, keepdim=True)",
    )
    return Part("pass", f"m = x.flatten(1).sum(1) > -1e6\nreturn {how}")


@block("shapes", smooth=True)
def shapes(c: Draw) -> Part:
    how = c.pick(
        "x.flip(1)",
        "x.roll(1, 1)",
        "torch.cat([x[:, 1:], x[:, :1]], 1) * 0.9",
        "x.unfold(1, 1, 1).squeeze(-1)",
        "x.repeat_interleave(2, 1)[:, ::2]",
        "x.transpose(0, 1).contiguous().transpose(0, 1)",
        "torch.stack([x, x * 2]).sum(0)",
        "x.view(x.shape[0], -1).t().reshape(-1, x.shape[0]).t().reshape(x.shape)",
        "torch.tensor_split(x, 2, 1)[0].repeat_interleave(2, 1)",
    )
    return Part("pass", f"return {how}")


@block("triangles", "seq flat", smooth=True)
def triangles(c: Draw) -> Part:
    return Part(
        f"self.w = nn.Parameter(torch.randn({c.d}, {c.d}) * 0.4)",
        f"return torch.tanh(x @ {c.pick('self.w.tril()', 'self.w.triu(1)', '(self.w - self.w.t())', 'torch.diag(self.w.diagonal())')})",
    )


@block("in-place operators", border=True)
def in_place(c: Draw) -> Part:
    before, after = ("x.movedim(1, -1)", ".movedim(-1, 1)") if c.layout == "image" else ("x", "")
    how = c.pick(
        "h.add_(1).mul_(0.5)",
        "F.relu_(h)",
        "h.sigmoid_()",
        "h[..., 0].mul_(2)\nh[..., 1:].add_(0.1)",
        "h[..., 0] = 0.5",
        "h.clamp_(-0.5, 0.5)",
        "h.masked_fill_(h > 0.5, 0.0)",
        "h.copy_(h.flip(-1))",
        "h.t_().t_() if h.dim() == 2 else h.transpose_(0, 1).transpose_(0, 1)",
        "v = h.view(-1)\nv[::2].mul_(3)",
    )
    return Part(f"self.a = nn.Linear({c.d}, {c.d})", f"h = self.a({before})\n{how}\nreturn h{after}")


@block("in place on the input", border=True)
def in_place_input(c: Draw) -> Part:
    return Part(
        "pass", f"y = x * 1.0\n{c.pick('y.tanh_()', 'y += 0.3', 'y[:, 0] *= 2', 'y.sin_().add_(0.1)')}\nreturn y"
    )


@block("expanded view", border=True)
def expanded(c: Draw) -> Part:
    before, after = ("x.movedim(1, -1)", ".movedim(-1, 1)") if c.layout == "image" else ("x", "")
    return Part(
        f"self.p, self.a = nn.Parameter(torch.randn(1, {c.d})), nn.LayerNorm({c.d}, eps=0.1)",
        f"h = {before}\nreturn self.a(h + self.p.expand(3, {c.d}).mean(0)){after}",
    )


@block("custom autograd function", border=True)
def custom_function(c: Draw) -> Part:
    body = c.pick("g * (1 - y * y)", "g * 0.5", "g.clone()", "(g * y).contiguous()")
    top = (
        "class Fn_{n}(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        "        y = torch.tanh(x)\n        ctx.save_for_backward(y)\n"
        "        return y\n    @staticmethod\n    def backward(ctx, g):\n        (y,) = ctx.saved_tensors\n        return "
        + body
        + "\n"
    )
    return Part("pass", "return Fn_{n}.apply(x)", top)


@block("detached branch", border=True)
def detached(c: Draw) -> Part:
    how = c.pick("x * x.detach().sigmoid()", "x + (x.round() - x).detach()", "x * (x.detach() > 0)", "x - 0.5 * x.data")
    return Part("pass", f"return {how}")


@block("no_grad inside", border=True)
def no_grad_inside(c: Draw) -> Part:
    return Part("pass", "with torch.no_grad():\n    m = x.abs().mean()\nreturn x / (m + 0.5)")


@block("gradient inside", "flat", border=True)
def gradient_inside(c: Draw) -> Part:
    return Part(
        f"self.w = nn.Parameter(torch.randn({c.d}) * 0.4)",
        "return x * self.w + torch.nn.functional.normalize(self.w, dim=0)",
    )


@block("casts")
def casts(c: Draw) -> Part:
    how = c.pick(
        "x.double().exp().tanh().to(x.dtype)",
        "(x.float() * 2).to(x.dtype)",
        "x * torch.tensor(0.7)",
        "x * 3 // 1 * 0.1 + x",
        "x + x.long().to(x.dtype) * 0.1",
        "x * x.new_tensor([0.5])",
    )
    return Part("pass", f"return {how}")


@block("autocast region", "flat seq", border=True)
def autocast(c: Draw) -> Part:
    return Part(
        f"self.a = nn.Linear({c.d}, {c.d})",
        "with torch.autocast('cpu', enabled=False):\n    return torch.tanh(self.a(x))",
    )
