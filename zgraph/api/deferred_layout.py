"""A compiled model with tensor parallelism before its first call: the weights to divide are only known after
capture."""

from __future__ import annotations

import contextlib
from typing import Any

from zgraph.capture.former_storages import former_storages
from zgraph.capture.tensor_parallel_layout import divided_layout
from zgraph.errors import PlanError
from zgraph.machine.measured_costs import agreed_costs, at_disk_rate
from zgraph.parameters.layout import with_requires_grad
from zgraph.parameters.mixed_precision import prepare
from zgraph.parameters.shard_module import shard
from zgraph.program.program import ParamSpec
from zgraph.runtime.rank import RankContext, opened_tiers
from zgraph.runtime.runtime import Runtime
from zgraph.runtime.train_step import in_order
from zgraph.stages.partition_model import DeferredPipeline, as_in_training


class DeferredLayout(DeferredPipeline):
    """A `DeferredPipeline` for a plan with tensor parallelism and without a pipeline."""

    def runtime(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Runtime:
        """Capture the model by a call with these arguments, and replace its parameters by this rank's shards. All ranks
        must call it.

        Raises what `zgraph.compile` does with inputs.
        """
        params = dict(self.module.named_parameters(remove_duplicate=False))
        specs = with_requires_grad(self.specs, params)
        precision = self.plan.resolved_precision()
        costs = agreed_costs(self.plan, self.device, self.everyone, self.mesh)

        def attempt() -> dict[str, ParamSpec]:
            with prepare(self.module, precision, specs), as_in_training(self.module) as trains:
                capture = self.to_cut_by(args, in_order(self, kwargs), trains)
            return divided_layout(capture.joint, self.plan, costs, self.module)

        def refused(rank: int, said: str) -> PlanError:
            return PlanError(f"rank {rank} can't divide the model", where="tensor_parallel", why=said)

        with contextlib.ExitStack() as undo:  # (once divided, parameters are replaced)
            undo.callback(former_storages(self.module).note_early(self.module))
            specs = self.everyone.together("the division of weights", attempt, refused)
        self.everyone.vote("the division of weights", repr({n: s.division for n, s in specs.items()}))
        tiers = opened_tiers(self.module, self.plan, specs, self.device, self.everyone)
        costs = at_disk_rate(costs, self.everyone, tiers)
        shards = shard(self.module, specs, self.mesh, self.device, self.seed, tiers.of("parameters"))
        prepare(self.module, precision, specs)
        context = RankContext(self.sizes, self.mesh, self.device, self.everyone, self.everyone, costs, tiers)
        return Runtime(self.module, self.forward_function, self.plan, shards, context)
