"""A pipeline of two stages: layers by their classes, an embedding that is tied to the head, micro-batches (inputs, labels)."""

import torch
from torch import nn

import zgraph.deepspeed as deepspeed
from zgraph.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

VOCABULARY, DIM = 32, 16
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 1},
}


class Embedding(nn.Embedding):
    """(Each layer draws its values by a seed of its own, so that they are the same however layers lie.)"""

    def __init__(self, *sizes):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            super().__init__(*sizes)


class Layer(nn.Module):
    def __init__(self, seed):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.norm = nn.LayerNorm(DIM)
            self.inner = nn.Linear(DIM, 2 * DIM)
            self.outer = nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))


def head(embedding, x):
    return x @ embedding.weight.t()


def loss_fn(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def batches(rank):
    """Micro-batches without an end: the same ones on all ranks of a pipeline."""
    data = torch.Generator().manual_seed(rank)
    while True:
        ids = torch.randint(VOCABULARY, (2, 8), generator=data)
        yield ids, ids.roll(-1, 1)


def main(steps=3):
    deepspeed.init_distributed()
    layers = [
        TiedLayerSpec("embedding", Embedding, VOCABULARY, DIM),
        *(LayerSpec(Layer, seed) for seed in (2, 3, 4)),
        TiedLayerSpec("embedding", Embedding, VOCABULARY, DIM, forward_fn=head),
    ]
    model = PipelineModule(layers=layers, num_stages=2, loss_fn=loss_fn, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=CONFIG)
    data = batches(engine.grid.get_data_parallel_rank())
    return [engine.train_batch(data_iter=data).item() for _ in range(steps)]


if __name__ == "__main__":
    print(main())
