"""Ray Train: each of its workers is a rank, with torch's process group made before `train` is called. (`pip install "ray[train]"`.)"""

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device

import zgraph


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return (self.layer(x) - x.flip(1)).square().mean()


def train():
    device = get_device()
    plan = zgraph.Plan(zero=3, optimizer=zgraph.AdamW(lr=1e-2))
    model = zgraph.compile(Model().to(device), plan)
    for step in range(10):
        loss = model.train_step(torch.randn(4, 8, device=device))
        if torch.distributed.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    gpus = torch.cuda.is_available()  # (of this machine, which stands for the cluster's)
    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=4, use_gpu=gpus)).fit()
