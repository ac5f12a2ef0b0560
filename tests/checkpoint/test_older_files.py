"""What an earlier commit wrote is read today: a checkpoint that training goes on from, a bundle, a plan file. See `tests/data/write.py`."""

import json
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from data.write import PLAN, model, train

import zgraph
from zgraph.inspection import bundle

FILES = sorted((Path(__file__).parents[1] / "data").glob("*.zip"))


@pytest.fixture(scope="module", params=FILES, ids=lambda f: f.stem)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("older")
    zipfile.ZipFile(request.param).extractall(path)
    return path


def goes_on(folder):
    """What this rank loads, and the numbers of the steps after it."""
    compiled = zgraph.compile(model(), zgraph.Plan(**PLAN), loss_fn=lambda out, y: F.mse_loss(out, y))
    state = compiled.load_checkpoint(f"{folder}/checkpoint")
    return state["means"], train(compiled, 3, dist.get_rank())


def test_training_goes_on_from_an_older_checkpoint(folder, two):
    found = two.run(goes_on, str(folder))
    for (loaded, trained), (kept, written) in zip(found, json.loads((folder / "means.json").read_text()), strict=True):
        assert loaded == kept
        # Another processor may have written the file: its products round differently.
        torch.testing.assert_close(torch.tensor(trained), torch.tensor(written))


def test_an_older_plan_file_is_the_same_plan(folder):
    assert zgraph.Plan.load(folder / "plan.toml") == zgraph.Plan(**PLAN)


def test_an_older_bundle_shows_its_programs(folder):
    read = bundle.read(folder / "bundle")
    assert list(read.ways) == ["train0", "train0-next", "update0"]
    for way in read.ways.values():
        for snapshot in way.snapshots:
            assert len(snapshot.program.graph.nodes) == len(snapshot.data["nodes"])
