"""The pages on DeepSpeed's configurations say what `zgraph.deepspeed.plan` and `zgraph forecast` say."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from sweeps import sweep
from torch import nn
from torch.distributed.tensor import DTensor

import zgraph.deepspeed as deepspeed

pytestmark = pytest.mark.usefixtures("no_group_left")

ROOT = Path(__file__).parents[2]


def made():
    """What makes the pages."""
    spec = spec_from_file_location("deepspeed_configurations", ROOT / "docs/generate/deepspeed_configurations.py")
    sys.modules[spec.name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = made()


def test_there_is_a_page_for_each_configuration():
    names = {path.stem for path in PAGES.CONFIGS.glob("*.json")}
    assert names == PAGES.TITLES.keys() == {path.stem for path in PAGES.PAGES.glob("*.md")} - {PAGES.INDEX}
    index = (PAGES.PAGES / f"{PAGES.INDEX}.md").read_text()
    assert all(f"]({name}.md) | " in index for name in names)


@pytest.mark.parametrize("name", PAGES.TITLES)
def test_a_page_has_the_verdict_of_each_key_and_the_plan(name):
    """(`python docs/generate/deepspeed_configurations.py` writes them.)"""
    head, _, forecast = (PAGES.PAGES / f"{name}.md").read_text().partition(f"\n{PAGES.FORECAST}")
    assert head == PAGES.head(name)
    assert bool(forecast) == (PAGES.report_of(name).plan is not None)


@sweep("name", ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero_infinity"], quick=1)
def test_a_configuration_of_the_documents_names_each_key_and_trains(tmp_path, name):
    """It trains as it does without offloading, to the bit; where a document says a disk, this is a folder."""
    config = json.loads((PAGES.CONFIGS / f"{name}.json").read_text())
    config |= {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "zgraph": {"backend": "eager"}}
    if "scheduler" in config:
        config["scheduler"]["params"]["warmup_num_steps"] = 2  # (else the first steps change nothing that bf16 shows)
    section = config["zero_optimization"]
    bare = {**config, "zero_optimization": {k: v for k, v in section.items() if not k.startswith("offload_")}}
    for key in ("offload_optimizer", "offload_param"):
        if section.get(key, {}).get("device") == "nvme":
            section[key]["nvme_path"] = str(tmp_path)
    found = []
    for given in (config, bare):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        engine, *_ = deepspeed.initialize(model=model, config=given)
        dtype, losses = engine.module[0].weight.dtype, []
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
        for _ in range(6 * engine.gradient_accumulation_steps()):
            loss = nn.functional.mse_loss(engine(x).float(), x.flip(1).float())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert engine.global_steps == 6 and losses[-1] < losses[0]
        weights = [
            p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in engine.module.parameters()
        ]
        found.append((losses, weights))
        told = {row.key for row in engine.report.rows}
        leaves = {key for key in keys_of(given) if not key.startswith("zgraph")}
        assert not {key for key in leaves if key not in told}
    (losses, weights), (plain, others) = found
    assert losses == plain and all(map(torch.equal, weights, others))


def keys_of(config, before=""):
    """The keys of a configuration that have values."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{before}{name}.")
        else:
            yield f"{before}{name}"


@pytest.mark.slow  # (a capture and all passes for each, 10 to 30 s)
@pytest.mark.parametrize("name", PAGES.TITLES)
def test_a_page_has_the_forecast(name):
    assert (PAGES.PAGES / f"{name}.md").read_text() == PAGES.page(name)
    assert PAGES.index_row(name) in (PAGES.PAGES / f"{PAGES.INDEX}.md").read_text()
