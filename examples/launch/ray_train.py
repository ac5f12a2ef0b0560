"""Ray Train: each of its workers is a rank, with torch's process group made before `train` is called. (`pip install "ray[train]"`.)"""

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

import zgraph


def train():
    model = torch.nn.Linear(8, 8)
    plan = zgraph.Plan(zero=3, optimizer=zgraph.AdamW(lr=1e-3))
    model = zgraph.compile(model, plan, loss_fn=lambda output: output.square().mean())
    for _ in range(10):
        model.train_step(torch.randn(4, 8))


if __name__ == "__main__":
    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=4, use_gpu=torch.cuda.is_available())).fit()
