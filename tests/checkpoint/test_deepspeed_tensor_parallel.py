"""A checkpoint of DeepSpeed's tensor parallelism is put together as DeepSpeed describes it, and what is not described is refused."""

import deepspeed_scripts
import pytest
import torch
from torch import nn

import zgraph
from zgraph.checkpoint.detect_format import open_checkpoint
from zgraph.checkpoint.formats.deepspeed_tensor_parallel import INFO
from zgraph.errors import CheckpointError, UnsupportedError

WIDE = 8
SPECS = [
    {"patterns": [".*qkv\\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
    {"patterns": [".*up\\.weight$"], "partition_type": "column"},
    {"patterns": [".*(out|down)\\.weight$"], "partition_type": "row"},
]
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-2}},
}


class Block(nn.Module):
    """Attention with one fused weight, and a feed-forward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.qkv = nn.Linear(WIDE, 3 * WIDE)
        self.out = nn.Linear(WIDE, WIDE)
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE, bias=False)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        heads = [t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in (q, k, v)]
        mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.out(mixed) * self.scale.to(x.dtype)
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(1))
        self.head = nn.Linear(WIDE, WIDE)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (self.head(x) - x.detach()).square().mean()


def batch(step):
    return torch.randn(2, 4, WIDE, generator=torch.Generator().manual_seed(step))


def written(folder, stage, low, steps, after):
    """Losses of DeepSpeed's own steps on tensor-parallel ranks; saved after `steps` of them."""
    deepspeed = deepspeed_scripts.ready()
    config = deepspeed_scripts.of_torch({**CONFIG, "zero_optimization": {"stage": stage}})
    config["tensor_parallel"] = {
        "autotp_size": 2,
        "partition_config": {"use_default_specs": False, "layer_specs": SPECS},
    }
    if low:
        config["bf16"] = {"enabled": True}
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    losses = []
    for step in range(steps + after):
        if step == steps:
            engine.save_checkpoint(folder, tag="t")
        loss = engine(batch(step).to(torch.bfloat16 if low else torch.float32))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def resumed(folder, first, steps, plan):
    """Losses of zgraph's steps from there, each rank with the same rows."""
    torch.manual_seed(7)
    optimizer = zgraph.AdamW(lr=3e-2, weight_decay=0.0)
    model = zgraph.compile(Net(), zgraph.Plan(backend="eager", optimizer=optimizer, **plan), inputs=(batch(0),))
    model.load_checkpoint(folder)
    return [float(model.train_step(batch(step))) for step in range(first, first + steps)]


@pytest.mark.slow  # (engines of DeepSpeed's and of ours on two ranks, seconds each)
@pytest.mark.parametrize("stage, low", [(0, False), (1, False), (2, True), (3, False)])
def test_a_tensor_parallel_checkpoint_goes_on(two, deepspeeds, tmp_path, stage, low):
    theirs = deepspeeds.run(written, str(tmp_path), stage, low, 3, 3)
    for plan in ({"zero": 3}, {"zero": 1, "mesh": {"dp": 1, "tp": 2}}):
        mine = two.run(resumed, str(tmp_path), 3, 3, plan)
        assert mine[0] == pytest.approx(theirs[0][3:], abs=5e-3 if low else 1e-5)


# -- files as DeepSpeed writes them, without its run -------------------------------------------------------------------------
def save(folder, parts, info):
    """Model files of two tensor-parallel ranks, each with its part of every parameter; `info` may be None."""
    for rank in range(2):
        state = {"module": {n: p[rank] for n, p in parts.items()}, "buffer_names": [], "optimizer": None}
        state |= {"global_steps": 3, "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 2}
        torch.save(state if info is None else state | {INFO: info}, folder / f"mp_rank_{rank:02d}_model_states.pt")


def cut(whole, dim, *, fused=1):
    """The parts of a parameter that is cut in one dimension: of each of the `fused` ones in it, one part a rank."""
    halves = [piece.chunk(2, dim) for piece in whole.chunk(fused, dim)]
    return [torch.cat([half[rank] for half in halves], dim).clone() for rank in range(2)]


def test_patterns_of_names_say_how_parts_make_a_whole(tmp_path):
    torch.manual_seed(0)
    whole = {n: torch.randn(12, 4) for n in ("column", "row", "both", "gated", "fused", "words", "mean")}
    parts = {n: cut(whole[n], 0) for n in ("column", "words")} | {"row": cut(whole["row"], 1)}
    parts |= {"both": [whole["both"], whole["both"].clone()], "gated": cut(whole["gated"], 0, fused=2)}
    parts |= {"fused": cut(whole["fused"], 0, fused=3), "mean": [whole["mean"] - 1, whole["mean"] + 1]}
    patterns = {
        "universal_checkpoint_version": 0.2,
        "parameter_with_row_parallelism_patterns": [r"row"],
        "tp_replicated_parameter_patterns": [r"both"],
        "parameter_to_average_patterns": [r"mean"],
        "parameter_with_2_sub_params_cat_dim_0": [r"gated"],
        "parameter_with_sub_params": [{"patterns": [r"fused"], "shape": (3, -1), "partition_dim": 0}],
        "vocabulary_parameter_patterns": [r"words"],
        "original_vocab_size": 11,
    }
    save(tmp_path, parts, patterns)
    source = open_checkpoint(tmp_path)
    for name, wanted in whole.items():
        wanted = wanted[:11] if name == "words" else wanted
        torch.testing.assert_close(source.whole(f"model.{name}"), wanted, rtol=0, atol=1e-6 if name == "mean" else 0)


def by_map(shapes, pieces, scale=1.0):
    """A map of blocks of a parameter [4, 2]; of each rank its shape, and (first row, rows) of its block."""
    ranks = {
        rank: {
            "shard_shape": list(shape),
            "pieces": [
                {
                    "shape": [rows, 2],
                    "source": [2 * first, [2, 1]],
                    "dest": [0, [2, 1]],
                    "locations": [rank],
                    "scale": scale,
                }
            ],
        }
        for rank, (shape, (first, rows)) in enumerate(zip(shapes, pieces, strict=True))
    }
    return {"affine_map": {"version": 1, "params": {r"^weight$": {"logical_shape": [4, 2], "ranks": ranks}}}}


UNEVEN = ([3, 2], [1, 2])


def test_a_map_of_blocks_says_it_also_of_uneven_parts(tmp_path):
    whole = torch.randn(4, 2)
    save(tmp_path, {"weight": [whole[:3].clone(), whole[3:].clone()]}, by_map(UNEVEN, [(0, 3), (3, 1)]))
    assert torch.equal(open_checkpoint(tmp_path).whole("model.weight"), whole)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (None, "no universal_checkpoint_info"),
        ({"autotp_unsupported_parameter_patterns": {r"^weight$": "heads are shared"}}, "heads are shared"),
        ({"affine_map": {"version": 2, "params": {}}}, "version 2"),
        (by_map([[2, 2], [2, 2]], [(0, 2), (2, 2)]), r"rank 0 holds \[3, 2\], and its description says \[2, 2\]"),
        (by_map(UNEVEN, [(0, 3), (3, 1)], scale=0.5), "multiplied by 0.5"),
        (
            {"parameter_with_sub_params": [{"patterns": ["weight"], "shape": (3, -1), "partition_dim": 0}]},
            "3 parameters in one",
        ),
        ({"tp_replicated_parameter_patterns": ["weight"]}, "its description says"),
    ],
)
def test_what_is_not_described_is_refused_by_name(tmp_path, info, said):
    save(tmp_path, {"weight": [torch.ones(3, 2), torch.ones(1, 2)]}, info)
    with pytest.raises(UnsupportedError, match=said):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "pieces, said", [([(0, 3), (4, 1)], "outside"), ([(0, 3), (2, 1)], "different values|no tensor-parallel rank")]
)
def test_blocks_that_make_no_whole_are_damage(tmp_path, pieces, said):
    save(tmp_path, {"weight": [torch.ones(3, 2), torch.zeros(1, 2)]}, by_map(UNEVEN, pieces))
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path).whole("model.weight")


def test_ranks_that_have_drifted_apart_or_are_missing_are_told(tmp_path):
    info = {"tp_replicated_parameter_patterns": ["weight"]}
    save(tmp_path, {"weight": [torch.ones(2, 2), torch.zeros(2, 2)]}, info)
    with pytest.raises(CheckpointError, match="different values of weight"):
        open_checkpoint(tmp_path).whole("model.weight")
    (tmp_path / "mp_rank_00_model_states.pt").rename(tmp_path / "mp_rank_02_model_states.pt")
    with pytest.raises(CheckpointError, match="mp_rank 0 are missing"):
        open_checkpoint(tmp_path)
