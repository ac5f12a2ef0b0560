"""A checkpoint of a DeepSpeed pipeline is loaded with any plan, and goes on with its numbers."""

import deepspeed_scripts
import pytest
import torch
from torch import nn

import zgraph
from zgraph.checkpoint.detect_format import open_checkpoint
from zgraph.errors import UnsupportedError

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-2}},
}


def batches(step):
    data = torch.Generator().manual_seed(step)
    return iter([(torch.randn(2, 6, generator=data), torch.randn(2, 6, generator=data)) for _ in range(2)])


class Running(nn.Module):
    """A layer with a weight and a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x):
        return self.inner(x).tanh() * self.scale


def layers(pipe):
    tied = (nn.Linear, 6, 6)
    return [
        pipe.TiedLayerSpec("ends", *tied, bias=False),
        pipe.LayerSpec(Running),
        torch.tanh,
        pipe.LayerSpec(Running),
        pipe.TiedLayerSpec("ends", *tied, bias=False),
    ]


def trained(system, folder, stage, first, steps, save):
    """Losses of a pipeline's steps; saved after them, or begun from what is there."""
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    if system == "zgraph":
        import zgraph.deepspeed as deepspeed
        from zgraph.deepspeed import pipe

        config = deepspeed_scripts.eager(config)
    else:
        deepspeed, config = deepspeed_scripts.ready(), deepspeed_scripts.of_torch(config)
        pipe = deepspeed.pipe
    deepspeed.init_distributed()
    torch.manual_seed(first)
    model = pipe.PipelineModule(layers=layers(pipe), num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    groups = [{"params": [p for p in model.parameters() if p.requires_grad], "kind": "all"}]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=groups)
    if not save:
        assert engine.load_checkpoint(folder)[0] is not None
    losses = [float(engine.train_batch(batches(first + n))) for n in range(steps)]
    if save:
        engine.save_checkpoint(folder, tag="t")
        losses += [float(engine.train_batch(batches(first + steps + n))) for n in range(3)]
    engine.destroy()
    return losses


class Plain(nn.Module):
    """The same layers in one module, by the pipeline's names."""

    def __init__(self):
        super().__init__()
        self.tied_modules = nn.ModuleDict({"ends": nn.Linear(6, 6, bias=False)})
        self.add_module("1", Running())
        self.add_module("3", Running())

    def forward(self, x, y):
        ends = self.tied_modules["ends"]
        return nn.functional.mse_loss(ends(self.get_submodule("3")(self.get_submodule("1")(ends(x)).tanh())), y)


def undivided(folder, first):
    """Losses of the plain module on two ranks at stage 3, from a pipeline's checkpoint."""
    torch.manual_seed(first)
    optimizer = zgraph.AdamW(lr=3e-2, weight_decay=0.0)
    model = zgraph.compile(Plain(), zgraph.Plan(backend="eager", optimizer=optimizer, micro_batches=2))
    model.load_checkpoint(folder)
    losses = []
    for step in range(first, first + 3):
        rows = [torch.cat(parts) for parts in zip(*batches(step), strict=True)]
        losses.append(float(model.train_step(*rows)))
    return losses


def test_a_pipelines_checkpoint_goes_on(two, deepspeeds, tmp_path):
    folder = str(tmp_path)
    theirs = deepspeeds.run(trained, "deepspeed", folder, 1, 0, 3, True)[0][3:]
    source = open_checkpoint(tmp_path, "t")
    assert {"model.1.scale", "model.3.inner.weight", "model.tied_modules.ends.weight"} <= source.tensors.keys()
    assert "model.0.weight" not in source.tensors  # (a tied layer's other name)
    assert two.run(undivided, folder, 3)[0] == pytest.approx(theirs, abs=1e-5)


def test_a_pipeline_without_zero_is_refused(deepspeeds, tmp_path):
    deepspeeds.run(trained, "deepspeed", str(tmp_path), 0, 0, 1, True)
    with pytest.raises(UnsupportedError, match="pipeline without ZeRO"):
        open_checkpoint(tmp_path, "t")


def test_a_pipeline_takes_groups_of_parameters(two, tmp_path):
    assert len(two.run(trained, "zgraph", str(tmp_path), 1, 0, 2, True)[0]) == 5
