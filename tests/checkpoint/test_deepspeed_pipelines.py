"""A checkpoint of a DeepSpeed pipeline is loaded with any plan, and goes on with its numbers."""

import importlib

import deepspeed_scripts
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn

import zgraph
from zgraph.checkpoint.detect_format import open_checkpoint
from zgraph.errors import CheckpointError, UnsupportedError

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


class _ToAll(torch.autograd.Function):
    """Before a weight that ranks divide: its gradients are summed over them."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _OfAll(torch.autograd.Function):
    """Behind a weight that ranks divide: its outputs are summed over them."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


GROUPS = {}  # of this rank, the ranks that divide weights with it


class Divided(nn.Module):
    """A feed-forward whose weights `parts` ranks divide; with one of them it is whole."""

    def __init__(self, parts=1):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.parts = parts
        if parts > 1:
            mine = dist.get_rank() % parts
            self.up.weight = nn.Parameter(self.up.weight.detach().chunk(parts)[mine].clone())
            self.up.bias = nn.Parameter(self.up.bias.detach().chunk(parts)[mine].clone())
            self.down.weight = nn.Parameter(self.down.weight.detach().chunk(parts, 1)[mine].clone())

    def forward(self, x):
        y = self.norm(x)
        if self.parts == 1:
            return x + self.down(self.up(y).tanh()) * self.scale
        y = self.down(self.up(_ToAll.apply(y, GROUPS["mine"])).tanh())
        return x + _OfAll.apply(y, GROUPS["mine"]) * self.scale


SAID = {  # as Megatron-DeepSpeed describes what it has divided
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r".*norm\..*"],
    "parameter_with_row_parallelism_patterns": [r".*down\.weight"],
}


def in_stages_and_parts(folder, described):
    """Losses of DeepSpeed's own steps on two stages of two tensor-parallel ranks each, after the three that it saves behind."""
    deepspeed = deepspeed_scripts.ready()
    deepspeed.init_distributed()
    topologies = importlib.import_module("deepspeed.runtime.pipe.topology")
    topology = topologies.PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    GROUPS["mine"] = groups[dist.get_rank() // 2]
    layers = []
    for seed in range(3):
        torch.manual_seed(seed)
        layers.append(Divided(2))
    model = deepspeed.pipe.PipelineModule(
        layers=layers, topology=topology, loss_fn=nn.MSELoss(), partition_method="uniform"
    )
    config = deepspeed_scripts.of_torch({**CONFIG, "zero_optimization": {"stage": 1}})
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    for step in range(3):
        engine.train_batch(batches(step))
    engine.save_checkpoint(folder, tag="t", client_state={"universal_checkpoint_info": SAID} if described else {})
    losses = [float(engine.train_batch(batches(step))) for step in range(3, 6)]
    engine.destroy()
    return losses


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        for at in range(3):
            self.add_module(str(at), Divided())

    def forward(self, x, y):
        for at in range(3):
            x = self.get_submodule(str(at))(x)
        return nn.functional.mse_loss(x, y)


def goes_on(folder):
    optimizer = zgraph.AdamW(lr=3e-2, weight_decay=0.0)
    model = zgraph.compile(Whole(), zgraph.Plan(backend="eager", optimizer=optimizer, micro_batches=2))
    model.load_checkpoint(folder)
    rows = [[torch.cat(parts) for parts in zip(*batches(step), strict=True)] for step in range(3, 6)]
    return [float(model.train_step(*row)) for row in rows]


@pytest.mark.slow  # (four ranks of DeepSpeed's)
def test_a_pipeline_with_tensor_parallelism_goes_on_where_it_says_what_it_has_divided(two, tmp_path):
    with Ranks(4) as ranks:
        theirs = ranks.run(in_stages_and_parts, str(tmp_path / "said"), True)[0]
        ranks.run(in_stages_and_parts, str(tmp_path / "unsaid"), False)
    names = {p.name for p in (tmp_path / "said" / "t").iterdir()}
    assert {"layer_01-model_01-model_states.pt", "mp_rank_03_model_states.pt"} <= names
    source = open_checkpoint(tmp_path / "said", "t")
    assert source.tensors["model.1.up.weight"].shape == (8, 6) and source.tensors["model.1.down.weight"].shape == (6, 8)
    assert two.run(goes_on, str(tmp_path / "said"))[0] == pytest.approx(theirs, abs=1e-5)
    with pytest.raises(UnsupportedError, match="without a description"):
        open_checkpoint(tmp_path / "unsaid", "t")
    (tmp_path / "said" / "t" / "mp_rank_03_model_states.pt").unlink()
    for lost in (tmp_path / "said" / "t").glob("*_mp_rank_03_optim_states.pt"):
        lost.unlink()
    with pytest.raises(CheckpointError, match="files of 3 mp_rank, and each stage of the pipeline has 2"):
        open_checkpoint(tmp_path / "said", "t")
