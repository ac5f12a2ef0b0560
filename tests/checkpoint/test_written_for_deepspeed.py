"""DeepSpeed itself loads what `zgraph ckpt convert --to deepspeed` writes, and goes on with the numbers that zgraph would."""

from pathlib import Path

import deepspeed_scripts
import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

import zgraph
from zgraph.checkpoint.convert import convert
from zgraph.checkpoint.detect_format import open_checkpoint
from zgraph.cli.app import app
from zgraph.errors import CheckpointError

BEFORE, AFTER = 3, 3


class Net(nn.Module):
    """Sizes that no number of ranks divides, a frozen weight, a buffer that changes."""

    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False)
        self.scale = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        return self.two(self.norm(self.one(x)).tanh()) * self.scale


def configuration(stage, low, **others):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **others,
    }
    if low:
        config[low] = {"enabled": True, **({"initial_scale_power": 4} if low == "fp16" else {})}
    return config


def trained(system, folder, config, first, steps, load=False, save=False):
    """Losses of steps on this rank."""
    if system == "zgraph":
        import zgraph.deepspeed as deepspeed

        config = deepspeed_scripts.eager(config)
    else:
        deepspeed, config = deepspeed_scripts.ready(), deepspeed_scripts.of_torch(config)
    torch.manual_seed(first)
    model = Net()
    trains = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trains, config=config)
    if load:
        assert engine.load_checkpoint(folder)[0] is not None
    losses = []
    for step in range(first, first + steps):
        data = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(2, 5, generator=data)
        loss = (engine(x.to(model.one.weight.dtype)).float() - x[:, :3]).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if save:
        engine.save_checkpoint(folder, tag="t")
    counted = engine.global_steps
    engine.destroy()
    return losses, counted


SLOW = [("3", "bf16"), ("1", None), ("2", "bf16"), ("3", None), ("2", "fp16"), ("universal 3", "bf16")]
CASES = [("universal 1", None), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize("layout, low", CASES)  # (seconds each: three engines on two ranks)
def test_deepspeed_goes_on_from_a_converted_checkpoint(two, deepspeeds, tmp_path, layout, low):
    kind, _, loads = layout.rpartition(" ")
    stage = int(loads)
    mine, theirs = str(tmp_path / "mine"), str(tmp_path / "theirs")
    two.run(trained, "zgraph", mine, configuration(3, low), 0, BEFORE, False, True)
    arguments = ["ckpt", "convert", mine, theirs, "--to", "deepspeed", "--layout", kind or loads, "--as", "t"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    others = {"checkpoint": {"load_universal": True}} if kind else {}
    found = deepspeeds.run(trained, "deepspeed", theirs, configuration(stage, low, **others), BEFORE, AFTER, True)
    wanted = two.run(trained, "zgraph", mine, configuration(stage, low), BEFORE, AFTER, True)
    again = two.run(trained, "zgraph", theirs, configuration(stage, low), BEFORE, AFTER, True)
    for rank in range(2):
        assert found[rank][0] == pytest.approx(wanted[rank][0], abs=5e-3 if low else 1e-5)
        assert again[rank][0] == pytest.approx(wanted[rank][0], abs=1e-7)
        assert found[rank][1] == wanted[rank][1] == BEFORE + AFTER
    fresh = two.run(trained, "zgraph", mine, configuration(stage, low), BEFORE, AFTER)
    assert abs(fresh[0][0][0] - wanted[0][0][0]) > 2e-2  # (what was loaded matters)


def test_weights_without_an_optimizer_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no optimizer"):
        convert(open_checkpoint(tmp_path), tmp_path / "made", "t", "deepspeed")
    assert not Path(tmp_path / "made" / "t").exists()


@pytest.mark.parametrize("layout, pointer", [(3, "latest"), ("universal", "latest_universal")])
def test_the_newest_checkpoint_that_was_written_is_the_one_that_is_named(tmp_path, layout, pointer):
    model = zgraph.compile(Net(), zgraph.Plan(backend="eager", optimizer=zgraph.AdamW()), loss_fn=torch.sum)
    model.train_step(torch.randn(2, 5))
    model.save_checkpoint(tmp_path / "own", "own")
    for tag in ("first", "second"):
        made = convert(open_checkpoint(tmp_path / "own"), tmp_path / "made", tag, "deepspeed", layout=layout, ranks=2)
        assert (tmp_path / "made" / pointer).read_text() == tag and not (made / pointer).exists()
