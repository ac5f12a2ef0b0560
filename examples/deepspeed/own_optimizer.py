"""An optimizer and a torch scheduler of the script's own, groups without weight decay, and a loss that is computed outside of the model."""

import torch
from torch import nn

import zgraph.deepspeed as deepspeed

CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 2},
}


def main(steps=4):
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 5e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=CONFIG
    )
    losses = []
    data = torch.Generator().manual_seed(engine.global_rank)
    for _ in range(steps * engine.gradient_accumulation_steps()):
        x = torch.randn(4, 8, generator=data)
        output = engine(x)
        loss = nn.functional.mse_loss(output, x[:, :4].tanh())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(main())
