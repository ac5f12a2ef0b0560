"""A data set in, a loader of each rank's own rows out; the configuration's path on the command line: `--deepspeed_config ds_config.json`."""

import argparse
import json
import tempfile

import torch
from torch import nn

import zgraph.deepspeed as deepspeed

CONFIG = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        x = torch.linspace(-1, 1, 4) * (index % 7)
        return x, (x * x).sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x, y):
        return ((self.layers(x).squeeze(-1) - y / 50) ** 2).mean()


def main(arguments=None, epochs=2):
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = Model()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Squares()
    )
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(CONFIG, file)
        file.flush()
        print(main(["--deepspeed", "--deepspeed_config", file.name]))
