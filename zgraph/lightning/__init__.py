"""The Lightning interface: a Trainer or a Fabric whose modules run as compiled steps.

import zgraph.lightning

trainer = Trainer(strategy=zgraph.lightning.ZGraphStrategy(zgraph.Plan(zero=3)), devices=2)
trainer.fit(model, data)
"""

from __future__ import annotations

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from zgraph.torch_compat.private_names import refuse_release

refuse_release("Lightning")  # (before the imports that need the release's private names)

from zgraph.lightning import fabric  # noqa: E402
from zgraph.lightning.strategy import ZGraphStrategy  # noqa: E402

__all__ = ["ZGraphStrategy", "fabric"]

for _registry, _kind in ((StrategyRegistry, ZGraphStrategy), (STRATEGY_REGISTRY, fabric.ZGraphStrategy)):
    if "zgraph" not in _registry:
        _registry.register("zgraph", _kind, description="steps compiled by the plan zgraph.Plan()")
