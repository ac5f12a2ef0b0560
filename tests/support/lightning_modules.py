"""LightningModules as users write them, and a Trainer that trains them: over Lightning's DDP, or by a plan."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zgraph
from zgraph.lightning import ZGraphStrategy

WORDS = 23


@contextlib.contextmanager
def as_launched() -> Iterator[None]:
    """The variables that torchrun sets, where there are ranks; without them a process group of one, which ends here."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    before, ranks = dict(os.environ), dist.is_initialized()
    if ranks:
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0", WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="0")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        if not ranks and dist.is_initialized():
            dist.destroy_process_group()


class Notes(pl.LightningModule):
    """Keeps what it logs, and the norm of the gradients that each update is made of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seen: dict[str, list[float]] = {"loss": [], "norm": [], "val": [], "test": [], "lr": []}
        self.make()

    def make(self) -> None:
        """Make the modules."""
        raise NotImplementedError

    def note(self, what: str, value: torch.Tensor) -> None:
        self.log(what, value, prog_bar=True, sync_dist=True)
        self.seen[what].append(float(value))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.note("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.note("val", self.loss(batch))

    def test_step(self, batch: Any, index: int) -> None:
        self.note("test", self.loss(batch))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        self.seen["norm"].append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        self.seen["lr"].append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class OneModel(Notes):
    """Calls its model, and computes the loss outside of it."""

    def make(self) -> None:
        self.model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 3))

    def loss(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(self.model(batch[0]), batch[1])

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.model(batch[0])


class _Scaled(nn.Module):
    """Has a parameter that is one number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(width, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class ScaledModel(OneModel):
    """Is small, for tests that are not about the model."""

    def make(self) -> None:
        self.model = _Scaled(6)


class PartsOfAModel(OneModel):
    """Calls parts of its model."""

    def loss(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(self.model[2](self.model[0](batch[0]).relu()), batch[1])

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.model[2](self.model[0](batch[0]).relu())


class TwoModels(OneModel):
    """Calls two modules one after the other, the first of them twice; one in a dict is frozen."""

    def make(self) -> None:
        self.encoder = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
        self.heads = nn.ModuleDict({"mean": _Scaled(5), "frozen": nn.Linear(5, 3)})
        self.heads["frozen"].requires_grad_(False)
        self.register_buffer("weight", torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encoder(x) + self.encoder(-x).relu()
        return self.heads["mean"](z) + self.heads["frozen"](z).sigmoid()

    def loss(self, batch: Any) -> torch.Tensor:
        return ((self(batch[0]) - batch[1]) ** 2 @ self.weight).mean()

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(batch[0])


class OwnLayers(OneModel):
    """Has layers and a parameter of its own, and calls itself."""

    def make(self) -> None:
        self.down, self.up = nn.Linear(6, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x).relu()) * self.scale

    def loss(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(batch[0])


class _Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.mix = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        x = x + F.scaled_dot_product_attention(*self.mix(x).unsqueeze(1).chunk(3, -1), is_causal=True).squeeze(1)
        return self.head(self.norm(x))


class Texts(Notes):
    """A language model with a tied embedding, for texts of all lengths."""

    def make(self) -> None:
        self.model = _Texts()

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.model(batch).argmax(-1)


def rows(kind: type[Notes], count: int = 24, seed: int = 3, size: int = 2) -> Any:
    """A loader of so many rows. Texts are of one length in a batch."""
    made = torch.Generator().manual_seed(seed)
    if issubclass(kind, Texts):
        lengths = [4 + int(n) for n in torch.randint(9, (count,), generator=made)]
        texts = [torch.randint(WORDS, (n,), generator=made) for n in lengths]
        return torch.utils.data.DataLoader(texts, size, collate_fn=_padded)
    x, y = torch.randn(count, 6, generator=made), torch.randn(count, 3, generator=made)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), size)


def _padded(texts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)


def trainer_of(strategy: Any, folder: str = ".", **options: Any) -> pl.Trainer:
    """A Trainer on the CPU, over all ranks, that prints nothing."""
    usual: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "max_epochs": 1,
        "use_distributed_sampler": True,
    }
    devices = dist.get_world_size() if dist.is_initialized() else 1
    return pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, default_root_dir=folder, **{**usual, **options}
    )


def strategy_of(plan: dict[str, Any] | None, modules: Any = None) -> Any:
    """Lightning's DDP without a plan."""
    if plan is None:
        return "ddp_find_unused_parameters_true"
    return ZGraphStrategy(zgraph.Plan(**{"backend": "eager", **plan}), modules=modules)


def trained(
    kind: type[Notes],
    plan: dict[str, Any] | None,
    modules: Any = None,
    also: Callable[[Any, Any], Any] | None = None,
    ckpt: str | None = None,
    rows_of: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[dict[str, list[float]], Any]:
    """What was seen of a run with evaluations, and what `also` gives of the Trainer and the model after it."""
    with as_launched():
        model, trainer = kind(), trainer_of(strategy_of(plan, modules), **options)
        given = rows_of or {}
        held_out = {"count": 8, "seed": 5, "size": given.get("size", 2)}
        trainer.fit(model, rows(kind, **given), rows(kind, **held_out), ckpt_path=ckpt)
        return model.seen, also(trainer, model) if also is not None else None
