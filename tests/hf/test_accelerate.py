"""accelerate, which knows nothing of zgraph, prepares a compiled model on several ranks: it wraps nothing, and drops no precision in silence."""

from __future__ import annotations

import pytest
import torch
from ranks import Ranks
from sweeps import sweep
from torch import nn
from trainers import as_launched

import zgraph
from zgraph.errors import ModelError

pytest.importorskip("accelerate")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, generator=generator) for _ in range(24)]


def loop(plan: zgraph.Plan | None, mixed_precision: str = "no") -> list[float]:
    """Losses over all ranks, and norms, of a loop with accumulation and clipping."""
    from accelerate import Accelerator

    with as_launched():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed_precision)
        made = model() if plan is None else zgraph.compile(model(), plan)
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, foreach=False)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        loader = torch.utils.data.DataLoader(rows(), batch_size=2)
        made, optimizer, loader, schedule = accelerator.prepare(made, optimizer, loader, schedule)
        assert plan is None or accelerator.unwrap_model(made) is made
        found = []
        for x in loader:
            with accelerator.accumulate(made):
                loss = made(x).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found.append(float(accelerator.clip_grad_norm_(made.parameters(), 0.1)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found.append(float(accelerator.gather(loss.detach()).mean()))
        return found


@pytest.mark.gloo
@sweep("zero", [0, 3], quick=1)
def test_a_loop_is_that_of_ddp(two: Ranks, zero):
    plain = two.run(loop, None)
    for one, other in zip(two.run(loop, zgraph.Plan(backend="eager", zero=zero)), plain, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-7)


@pytest.mark.gloo
def test_a_loop_on_one_rank_of_a_launcher_is_that_of_ddp():
    with Ranks(1) as one:
        plain = one.run(loop, None)[0]
        assert one.run(loop, zgraph.Plan(backend="eager", zero=3))[0] == pytest.approx(plain, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP"])
def test_an_accelerator_that_would_run_another_engine_is_refused(kind):
    from accelerate import Accelerator, DistributedType
    from accelerate.state import AcceleratorState

    with as_launched():
        made = zgraph.compile(model(), zgraph.Plan(backend="eager"))
        accelerator = Accelerator(cpu=True)
        AcceleratorState._shared_state["distributed_type"] = DistributedType[kind]  # (which a launcher's variables say)
        with pytest.raises(ModelError, match=f"distributed_type {kind}") as caught:
            zgraph.compile(model(), zgraph.Plan(backend="eager"))
        assert "zgraph plan --from-accelerate" in caught.value.hint
        with pytest.raises(ModelError, match=f"distributed_type {kind}"):
            accelerator.prepare_model(made)


def test_a_hook_that_compresses_ddps_gradients_is_refused():
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    with as_launched():
        made = zgraph.compile(model(), zgraph.Plan(backend="eager"))
        wanted = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
        with pytest.raises(ModelError, match="comm_hook='bf16'"):
            Accelerator(cpu=True, kwargs_handlers=[wanted]).prepare_model(made)


@pytest.mark.gloo
def test_a_mixed_precision_that_the_plan_has_not_is_refused(two: Ranks):
    for outcome in two.attempt(loop, zgraph.Plan(backend="eager"), "bf16", keep=True):
        assert isinstance(outcome.error, ModelError), outcome.traceback
        assert "mixed_precision is 'bf16'" in str(outcome.error) and 'precision="bf16"' in str(outcome.error)
    assert len(two.run(loop, zgraph.Plan(backend="eager", precision="bf16"), "bf16")) == 2


def saved_and_loaded(folder: str, plan: zgraph.Plan | None, load: str | None, save: str | None) -> list[float]:
    """Losses over all ranks, of three steps from a state or from the beginning; and the state saved after them."""
    from accelerate import Accelerator

    with as_launched():
        accelerator = Accelerator(cpu=True)
        made = model() if plan is None else zgraph.compile(model(), plan)
        own = None if plan is None else made.zgraph.optimizer
        optimizer = own or torch.optim.AdamW(made.parameters(), lr=1e-2, foreach=False)
        loader = torch.utils.data.DataLoader(rows(), batch_size=4 // accelerator.num_processes)
        made, optimizer, loader = accelerator.prepare(made, optimizer, loader)
        if load is not None:
            accelerator.load_state(f"{folder}/{load}")
        found = []
        for x in [next(iter(loader))] * 3:
            loss = made(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(accelerator.gather(loss.detach()).mean()))
        if save is not None:
            accelerator.save_state(f"{folder}/{save}")
            accelerator.wait_for_everyone()
        return found


@pytest.mark.gloo
@sweep("optimizer", [None, zgraph.AdamW(lr=1e-2)], ids=["the user's optimizer", "the plan's"], quick=(0,))
def test_a_state_goes_on_on_other_ranks(two: Ranks, tmp_path, optimizer):
    plain = [
        saved_and_loaded(str(tmp_path), None, None, "plain"),
        saved_and_loaded(str(tmp_path), None, "plain", "plain2"),
    ]
    plain.append(saved_and_loaded(str(tmp_path), None, "plain2", None))
    plan = zgraph.Plan(backend="eager", zero=3, optimizer=optimizer)
    mine = [
        two.run(saved_and_loaded, str(tmp_path), plan, None, "one")[1],
        saved_and_loaded(str(tmp_path), plan, "one", "two"),
        two.run(saved_and_loaded, str(tmp_path), plan, "two", None)[0],
    ]
    for one, other in zip(mine, plain, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def whole(folder: str) -> tuple[int, bool]:
    """What `get_state_dict` gives, and what of it is written by accelerate's own means, of a model and of one of transformers'."""
    from accelerate import Accelerator
    from safetensors.torch import load_file
    from trainers import model_of

    with as_launched():
        accelerator = Accelerator(cpu=True)
        plan = zgraph.Plan(backend="eager", zero=3)
        made, other = accelerator.prepare(zgraph.compile(model(), plan), zgraph.compile(model_of("llama"), plan))
        state = accelerator.get_state_dict(made)
        accelerator.save_model(made, f"{folder}/model")
        inner = accelerator.unwrap_model(other)
        inner.save_pretrained(
            f"{folder}/llama",
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(other),
        )
        accelerator.wait_for_everyone()
        saved = [load_file(f"{folder}/{name}/model.safetensors") for name in ("model", "llama")]
        plain = [model().state_dict(), model_of("llama").state_dict()]
        return len(state), all(torch.equal(s[n], p[n]) for s, p in zip(saved, plain, strict=True) for n in s)


@pytest.mark.gloo
def test_whole_weights_are_saved_by_accelerates_own_means(two: Ranks, tmp_path):
    assert two.run(whole, str(tmp_path)) == [(4, True), (0, True)]
