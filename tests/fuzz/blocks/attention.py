"""Attention: sdpa, torch's multi-head attention, masks, rotary positions, encoder layers."""

from __future__ import annotations

from . import Draw, Part, block

_SPLIT = (
    "b, t, d = x.shape\nq, k, v = (p(x).view(b, t, {heads}, -1).transpose(1, 2) for p in (self.q, self.k, self.v))\n"
)


def _projections(c: Draw) -> str:
    return (
        f"self.q, self.k, self.v, self.o = (nn.Linear({c.d}, {c.d}, bias={c.pick('True', 'False')}) for _ in range(4))"
    )


@block("sdpa", "seq", smooth=True)
def sdpa(c: Draw) -> Part:
    causal, heads = c.pick("True", "False"), c.pick("1", "2", "4")
    return Part(
        _projections(c),
        _SPLIT.format(heads=heads)
        + f"y = F.scaled_dot_product_attention(q, k, v, is_causal={causal})\nreturn self.o(y.transpose(1, 2).reshape(b, t, d))",
    )


@block("sdpa with a mask", "seq", smooth=True)
def sdpa_mask(c: Draw) -> Part:
    mask = c.pick(
        "torch.ones(t, t, dtype=torch.bool).tril()",
        "torch.ones(t, t, dtype=torch.bool).tril().triu(-1)",
        "torch.zeros(t, t, dtype=x.dtype).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float('-inf'))",
        "(torch.arange(t)[None] - torch.arange(t)[:, None]).to(x.dtype) * 0.1",
    )
    return Part(
        _projections(c),
        _SPLIT.format(heads=2)
        + f"y = F.scaled_dot_product_attention(q, k, v, attn_mask={mask})\nreturn self.o(y.transpose(1, 2).reshape(b, t, d))",
    )


@block("attention by hand", "seq", smooth=True)
def by_hand(c: Draw) -> Part:
    return Part(
        _projections(c) + f"\nself.register_buffer('mask', torch.ones({c.time}, {c.time}, dtype=torch.bool).triu(1))",
        _SPLIT.format(heads=2)
        + "w = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(self.mask[:t, :t], -1e9).softmax(-1)\n"
        "return self.o((w @ v).transpose(1, 2).reshape(b, t, d))",
    )


@block("rotary attention", "seq", smooth=True)
def rotary(c: Draw) -> Part:
    half = c.d // 4
    top = "def turn_{n}(q, cos, sin):\n    a, b = q.chunk(2, -1)\n    return q * cos + torch.cat([-b, a], -1) * sin\n"
    return Part(
        _projections(c)
        + f"\nf = torch.arange({c.time})[:, None] / 10.0 ** (torch.arange({half}) / {half})\n"
        + "self.register_buffer('cos', torch.cat([f, f], -1).cos(), persistent=False)\n"
        "self.register_buffer('sin', torch.cat([f, f], -1).sin(), persistent=False)",
        _SPLIT.format(heads=2)
        + "q, k = turn_{n}(q, self.cos[:t], self.sin[:t]), turn_{n}(k, self.cos[:t], self.sin[:t])\n"
        + "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\nreturn self.o(y.transpose(1, 2).reshape(b, t, d))",
        top,
    )


@block("grouped queries", "seq", smooth=True)
def grouped(c: Draw) -> Part:
    return Part(
        f"self.q, self.kv, self.o = nn.Linear({c.d}, {c.d}), nn.Linear({c.d}, {c.d // 2}), nn.Linear({c.d}, {c.d})",
        f"b, t, d = x.shape\nq = self.q(x).view(b, t, 4, {c.d // 4}).transpose(1, 2)\n"
        + f"k, v = (z.view(b, t, 1, {c.d // 4}).transpose(1, 2) for z in self.kv(x).chunk(2, -1))\n"
        + "y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)\nreturn self.o(y.transpose(1, 2).reshape(b, t, d))",
    )


@block("fused projections", "seq", smooth=True)
def fused(c: Draw) -> Part:
    return Part(
        f"self.w, self.o = nn.Linear({c.d}, {3 * c.d}), nn.Linear({c.d}, {c.d})",
        "b, t, d = x.shape\nq, k, v = self.w(x).view(b, t, 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)\n"
        "y = F.scaled_dot_product_attention(q, k, v)\nreturn self.o(y.transpose(1, 2).reshape(b, t, d))",
    )


@block("multi-head attention", "seq", smooth=True)
def multihead(c: Draw) -> Part:
    call = c.pick("self.a(x, x, x, need_weights=False)[0]", "self.a(x, x, x)[0]", "self.a(x, x, x, attn_mask=m)[0]")
    return Part(
        f"self.a = nn.MultiheadAttention({c.d}, 2, batch_first=True, bias={c.pick('True', 'False')})",
        f"m = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)\nreturn {call}",
    )


@block("encoder layer", "seq")
def encoder_layer(c: Draw) -> Part:
    return Part(
        f"self.a = nn.TransformerEncoderLayer({c.d}, 2, {2 * c.d}, dropout=0.0, batch_first=True, norm_first={c.pick('True', 'False')}, "
        f"layer_norm_eps=0.1, activation={c.pick('gelu', 'relu')!r})",
        "return self.a(x)",
    )


@block("cross attention to the first half", "seq", smooth=True)
def cross(c: Draw) -> Part:
    return Part(
        _projections(c),
        "b, t, d = x.shape\nm = x[:, : t // 2]\nq = self.q(x).view(b, t, 2, -1).transpose(1, 2)\n"
        "k, v = (p(m).view(b, t // 2, 2, -1).transpose(1, 2) for p in (self.k, self.v))\n"
        "return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))",
    )


@block("linear attention", "seq", smooth=True)
def linear_attention(c: Draw) -> Part:
    return Part(
        _projections(c),
        "q, k, v = F.elu(self.q(x)) + 1.5, F.elu(self.k(x)) + 1.5, self.v(x)\ns = torch.einsum('btd,bte->btde', k, v).cumsum(1)\n"
        "return self.o(torch.einsum('btd,btde->bte', q, s) / torch.einsum('btd,btd->bt', q, k.cumsum(1))[..., None])",
    )


@block("weight used with its own transpose", "seq flat", smooth=True)
def tied_transpose(c: Draw) -> Part:
    return Part(f"self.a = nn.Linear({c.d}, {c.d})", "return F.linear(torch.tanh(self.a(x)), self.a.weight.t())")
