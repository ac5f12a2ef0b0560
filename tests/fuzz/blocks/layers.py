"""Modules of torch.nn: linear, convolutions, norms, embeddings, recurrent, dropout, pooling."""

from __future__ import annotations

from . import Draw, Part, block


def _features(c: Draw) -> tuple[str, str]:
    """What brings the features last, and back: (before, after)."""
    return ("x.movedim(1, -1)", ".movedim(-1, 1)") if c.layout == "image" else ("x", "")


@block("linear", smooth=True)
def linear(c: Draw) -> Part:
    before, after = _features(c)
    bias = c.pick("True", "False")
    return Part(f"self.a = nn.Linear({c.d}, {c.d}, bias={bias})", f"return torch.tanh(self.a({before})){after}")


@block("mlp", smooth=True)
def mlp(c: Draw) -> Part:
    before, after = _features(c)
    act = c.pick("F.gelu", "F.silu", "F.softplus", "torch.tanh", "F.elu", "F.mish")
    return Part(
        f"self.up, self.down = nn.Linear({c.d}, {2 * c.d}), nn.Linear({2 * c.d}, {c.d})",
        f"return self.down({act}(self.up({before}))){after}",
    )


@block("relu mlp")
def relu_mlp(c: Draw) -> Part:
    before, after = _features(c)
    act = c.pick("F.relu", "F.leaky_relu", "F.relu6", "F.hardswish", "F.threshold_", "F.celu")
    act = "(lambda v: F.threshold(v, 0.05, -0.1))" if act == "F.threshold_" else act
    return Part(
        f"self.up, self.down = nn.Linear({c.d}, {2 * c.d}), nn.Linear({2 * c.d}, {c.d})",
        f"return self.down({act}(self.up({before}))){after}",
    )


@block("swiglu", smooth=True)
def swiglu(c: Draw) -> Part:
    before, after = _features(c)
    return Part(
        f"self.gate, self.up, self.down = (nn.Linear({c.d}, {c.d}, bias=False) for _ in range(3))",
        f"h = {before}\nreturn self.down(F.silu(self.gate(h)) * self.up(h)){after}",
    )


@block("glu chunk", smooth=True)
def glu(c: Draw) -> Part:
    before, after = _features(c)
    return Part(
        f"self.a = nn.Linear({c.d}, {2 * c.d})",
        f"a, g = self.a({before}).chunk(2, -1)\nreturn (a * torch.sigmoid(g)){after}",
    )


@block("prelu")
def prelu(c: Draw) -> Part:
    return Part(f"self.a = nn.PReLU({c.pick('1', str(c.time if c.layout == 'seq' else c.d))})", "return self.a(x) + x")


@block("bilinear", "flat seq", smooth=True)
def bilinear(c: Draw) -> Part:
    return Part(f"self.a = nn.Bilinear({c.d}, {c.d}, {c.d})", "return torch.tanh(self.a(x, x))")


@block("conv1d", "seq", smooth=True)
def conv1d(c: Draw) -> Part:
    groups = c.pick("1", "2", str(c.d))
    return Part(
        f"self.a = nn.Conv1d({c.d}, {c.d}, 3, padding=1, groups={groups}, padding_mode={c.pick('zeros', 'circular')!r})",
        "return torch.tanh(self.a(x.transpose(1, 2)).transpose(1, 2))",
    )


@block("causal conv1d", "seq", smooth=True)
def causal_conv1d(c: Draw) -> Part:
    return Part(
        f"self.a = nn.Conv1d({c.d}, {c.d}, 2)", "return self.a(F.pad(x.transpose(1, 2), (1, 0))).transpose(1, 2).sin()"
    )


@block("conv2d", "image", smooth=True)
def conv2d(c: Draw) -> Part:
    kernel, padding = c.rng.choice([(1, 0), (3, 1)])
    return Part(
        f"self.a = nn.Conv2d({c.d}, {c.d}, {kernel}, padding={padding}, groups={c.pick('1', '2')})",
        "return torch.tanh(self.a(x))",
    )


@block("strided conv and back", "image", smooth=True)
def strided_conv(c: Draw) -> Part:
    return Part(
        f"self.a = nn.Conv2d({c.d}, {2 * c.d}, 2, stride=2)\nself.b = nn.ConvTranspose2d({2 * c.d}, {c.d}, 2, stride=2)",
        "return self.b(torch.tanh(self.a(x)))",
    )


@block("conv of channels_last", "image", smooth=True, border=True)
def conv_channels_last(c: Draw) -> Part:
    return Part(
        f"self.a = nn.Conv2d({c.d}, {c.d}, 3, padding=1).to(memory_format=torch.channels_last)",
        "return torch.tanh(self.a(x.contiguous(memory_format=torch.channels_last)))",
    )


@block("layer norm")
def layer_norm(c: Draw) -> Part:
    before, after = _features(c)
    return Part(f"self.a = nn.LayerNorm({c.d}, eps=0.1)", f"return self.a({before}){after}")


@block("rms norm", smooth=True)
def rms_norm(c: Draw) -> Part:
    before, after = _features(c)
    if c.pick("torch", "own") == "torch":
        return Part(f"self.a = nn.RMSNorm({c.d}, eps=0.1)", f"return self.a({before}){after}")
    return Part(
        f"self.g = nn.Parameter(torch.ones({c.d}))",
        f"h = {before}\nreturn (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 0.1) * self.g){after}",
    )


@block("batch norm")
def batch_norm(c: Draw) -> Part:
    momentum = c.pick("0.1", "0.3", "None") if c.rng.random() < 0.4 else "0.1"
    stats = c.pick("True", "True", "False")
    if c.layout == "image":
        return Part(
            f"self.a = nn.BatchNorm2d({c.d}, eps=0.1, momentum={momentum}, track_running_stats={stats})",
            "return self.a(x)",
        )
    swap = ".transpose(1, 2)" if c.layout == "seq" else ""
    return Part(
        f"self.a = nn.BatchNorm1d({c.d}, eps=0.1, momentum={momentum}, track_running_stats={stats})",
        f"return self.a(x{swap}){swap}",
    )


@block("group norm", "flat image")
def group_norm(c: Draw) -> Part:
    return Part(f"self.a = nn.GroupNorm({c.pick('1', '2', str(c.d // 2))}, {c.d}, eps=0.1)", "return self.a(x)")


@block("group norm of a transposed tensor", "seq", border=True)
def group_norm_transposed(c: Draw) -> Part:
    end = c.pick("", ".contiguous()")
    return Part(
        f"self.a, self.w = nn.GroupNorm({c.pick('1', '2')}, {c.d}, eps=0.1), nn.Linear({c.d}, {c.d})",
        f"h = self.w(x)\nreturn torch.tanh(self.a(h.transpose(1, 2)).transpose(1, 2)){end}",
    )


@block("norms between views", "image", border=True)
def norms_between_views(c: Draw) -> Part:
    inner = c.pick(f"nn.LayerNorm({c.d}, eps=0.1)", f"nn.Linear({c.d}, {c.d})")
    return Part(
        f"self.a, self.b, self.g = nn.GroupNorm(2, {c.d}, eps=0.1), {inner}, nn.GroupNorm(1, {c.d}, eps=0.1)",
        "b, c, h, w = x.shape\nt = self.a(x).flatten(2).transpose(1, 2)\nt = self.b(t)\nreturn self.g(t.transpose(1, 2).view(b, c, h, w)) + x",
    )


@block("instance norm", "seq image")
def instance_norm(c: Draw) -> Part:
    if c.layout == "image":
        return Part(f"self.a = nn.InstanceNorm2d({c.d}, eps=0.1, affine=True)", "return self.a(x)")
    return Part(
        f"self.a = nn.InstanceNorm1d({c.d}, eps=0.1, affine=True)", "return self.a(x.transpose(1, 2)).transpose(1, 2)"
    )


@block("local response norm", "image", smooth=True)
def local_response_norm(c: Draw) -> Part:
    return Part("self.a = nn.LocalResponseNorm(2)", "return self.a(x)")


@block("weight norm", "flat seq")
def weight_norm(c: Draw) -> Part:
    return Part(
        f"self.a = torch.nn.utils.parametrizations.weight_norm(nn.Linear({c.d}, {c.d}))", "return torch.tanh(self.a(x))"
    )


@block("spectral norm", "flat seq")
def spectral_norm(c: Draw) -> Part:
    return Part(
        f"self.a = torch.nn.utils.parametrizations.spectral_norm(nn.Linear({c.d}, {c.d}))",
        "return torch.tanh(self.a(x))",
    )


@block("positions", "seq", smooth=True)
def positions(c: Draw) -> Part:
    return Part(
        f"self.a = nn.Embedding({c.time}, {c.d})", "return x + self.a(torch.arange(x.shape[1], device=x.device))"
    )


@block("learned positions", "seq", smooth=True)
def learned_positions(c: Draw) -> Part:
    return Part(f"self.p = nn.Parameter(torch.randn(1, {c.time}, {c.d}) * 0.2)", "return x + self.p[:, : x.shape[1]]")


@block("embedding bag", "flat")
def embedding_bag(c: Draw) -> Part:
    return Part(
        f"self.a = nn.EmbeddingBag(5, {c.d}, mode={c.pick('sum', 'mean')!r})",
        "ids = (x[:, :3].detach() * 3).long().remainder(5)\nreturn x + self.a(ids)",
    )


@block("embedding with padding")
def embedding_padding(c: Draw) -> Part:
    where = {"flat": "x[:, 0]", "seq": "x[..., 0]", "image": "x[:, 0]"}[c.layout]
    back = ".movedim(-1, 1)" if c.layout == "image" else ""
    return Part(
        f"self.a = nn.Embedding(6, {c.d}, padding_idx=0)",
        f"ids = ({where}.detach() * 4).long().remainder(6)\nreturn x + self.a(ids){back}",
    )


@block("lstm", "seq", smooth=True)
def lstm(c: Draw) -> Part:
    layers, both = c.pick("1", "2"), c.pick("True", "False")
    hidden = c.d // 2 if both == "True" else c.d
    return Part(
        f"self.a = nn.LSTM({c.d}, {hidden}, num_layers={layers}, bidirectional={both}, batch_first=True)",
        "return self.a(x)[0]",
    )


@block("gru", "seq", smooth=True)
def gru(c: Draw) -> Part:
    return Part(f"self.a = nn.GRU({c.d}, {c.d}, batch_first=True)", "y, h = self.a(x)\nreturn y + h[-1][:, None]")


@block("rnn cells", "seq", smooth=True)
def cells(c: Draw) -> Part:
    cell = c.pick("GRUCell", "RNNCell")
    return Part(
        f"self.a = nn.{cell}({c.d}, {c.d})",
        "h = torch.zeros_like(x[:, 0])\nrows = []\nfor t in range(x.shape[1]):\n"
        "    h = self.a(x[:, t], h)\n    rows.append(h)\nreturn torch.stack(rows, 1)",
    )


@block("dropout", random=True)
def dropout(c: Draw) -> Part:
    kind = c.pick("Dropout", "AlphaDropout", "FeatureAlphaDropout", "Dropout")
    kind = "Dropout2d" if c.layout == "image" and kind == "AlphaDropout" else kind
    kind = "Dropout" if c.layout == "flat" and kind.startswith("Feature") else kind
    before, after = _features(c)
    return Part(
        f"self.a, self.w = nn.{kind}({c.pick('0.1', '0.4')}), nn.Linear({c.d}, {c.d})",
        f"return self.a(self.w({before}){after})",
    )


@block("noise", random=True)
def noise(c: Draw) -> Part:
    how = c.pick("torch.randn_like(x)", "torch.rand(x.shape)", "torch.bernoulli(torch.full_like(x, 0.5))")
    return Part("pass", f"return x + 0.1 * {how} if self.training else x")


@block("pool1d", "seq")
def pool1d(c: Draw) -> Part:
    kind = c.pick("F.avg_pool1d(t, 3, 1, 1)", "F.max_pool1d(t, 3, 1, 1)", "F.adaptive_avg_pool1d(t, 1) + t")
    return Part("pass", f"t = x.transpose(1, 2)\nreturn ({kind}).transpose(1, 2)")


@block("pool2d", "image")
def pool2d(c: Draw) -> Part:
    kind = c.pick(
        "F.avg_pool2d(x, 3, 1, 1)",
        "F.max_pool2d(x, 3, 1, 1)",
        "F.interpolate(F.max_pool2d(x, 2), scale_factor=2)",
        "F.adaptive_avg_pool2d(x, 1) + x",
        "F.lp_pool2d(x.abs() + 0.5, 2.0, 1)",
    )
    return Part("pass", f"return {kind}")


@block("upsample", "image", smooth=True)
def upsample(c: Draw) -> Part:
    mode = c.pick("nearest", "bilinear", "bicubic")
    corners = "" if mode == "nearest" else ", align_corners=False"
    return Part(
        f"self.a = nn.Conv2d({c.d}, {c.d}, 2, stride=2)",
        f"return F.interpolate(self.a(x), scale_factor=2, mode={mode!r}{corners})",
    )


@block("pixel shuffle", "image", smooth=True)
def pixel_shuffle(c: Draw) -> Part:
    return Part(
        f"self.a = nn.Conv2d({4 * c.d}, {4 * c.d}, 1)",
        "return F.pixel_shuffle(torch.tanh(self.a(F.pixel_unshuffle(x, 2))), 2)",
    )


@block("grid sample", "image", smooth=True)
def grid_sample(c: Draw) -> Part:
    return Part(
        "self.a = nn.Parameter(torch.tensor([[0.9, 0.1, 0.0], [-0.1, 0.8, 0.1]]))",
        "g = F.affine_grid(self.a.expand(x.shape[0], 2, 3), list(x.shape), align_corners=False)\nreturn F.grid_sample(x, g, align_corners=False)",
    )


@block("unfold and fold", "image", smooth=True)
def unfold(c: Draw) -> Part:
    return Part(
        f"self.a = nn.Linear({4 * c.d}, {4 * c.d})",
        "u = F.unfold(x, 2, stride=2).transpose(1, 2)\nreturn F.fold(torch.tanh(self.a(u)).transpose(1, 2), x.shape[-2:], 2, stride=2)",
    )


@block("squeeze and excite", "image", smooth=True)
def squeeze_excite(c: Draw) -> Part:
    return Part(
        f"self.a = nn.Linear({c.d}, {c.d})",
        "return x * torch.sigmoid(self.a(x.mean((2, 3))))[:, :, None, None]",
    )


@block("mixture of experts", "flat seq")
def experts(c: Draw) -> Part:
    return Part(
        f"self.r = nn.Linear({c.d}, 3)\nself.w = nn.Parameter(torch.randn(3, {c.d}, {c.d}) * 0.4)",
        "p = self.r(x).softmax(-1)\nv, i = p.topk(2, -1)\ng = torch.zeros_like(p).scatter(-1, i, v)\n"
        "return torch.einsum('...e,...d,edf->...f', g, x, self.w)",
    )


@block("checkpointed region")
def checkpointed(c: Draw) -> Part:
    before, after = _features(c)
    return Part(
        f"self.a, self.b = nn.Linear({c.d}, {c.d}), nn.Linear({c.d}, {c.d})",
        f"run = lambda h: self.b(torch.tanh(self.a(h)))\nreturn checkpoint(run, {before}, use_reentrant=False){after}",
    )
