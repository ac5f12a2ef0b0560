"""The scripts in examples/deepspeed give DeepSpeed's own numbers: by both systems, on two ranks, with one import changed."""

import json

import deepspeed_scripts
import pytest
from deepspeed_scripts import EXAMPLES
from sweeps import sweep

WITHOUT_ARGUMENTS = sorted({p.stem for p in EXAMPLES.glob("*.py")} - {"checkpoint_by_tag", "training_data"})


def hold(mine, theirs):
    """Both ranks' numbers, within 1e-5."""
    for rank in range(2):
        assert mine[rank] == pytest.approx(theirs[rank], abs=1e-5, rel=1e-5)
        assert len(mine[rank]) > 2 and len(set(mine[rank])) > 1


@sweep("name", WITHOUT_ARGUMENTS, quick=1)
def test_a_script_gives_deepspeeds_numbers(two, deepspeeds, name):
    hold(two.run(deepspeed_scripts.run, name, "zgraph"), deepspeeds.run(deepspeed_scripts.run, name, "deepspeed"))


def test_a_checkpoint_by_tag_goes_on_as_deepspeeds(two, deepspeeds, tmp_path):
    mine = two.run(deepspeed_scripts.run, "checkpoint_by_tag", "zgraph", str(tmp_path / "mine"))
    hold(mine, deepspeeds.run(deepspeed_scripts.run, "checkpoint_by_tag", "deepspeed", str(tmp_path / "theirs")))
    assert mine[0][3:6] == mine[0][6:9]


@pytest.mark.slow
def test_training_data_gives_each_rank_deepspeeds_rows(two, deepspeeds, tmp_path):
    path = tmp_path / "ds.json"
    namespace = {}
    exec((EXAMPLES / "training_data.py").read_text().partition("class Squares")[0], namespace)
    path.write_text(json.dumps(namespace["CONFIG"]))
    arguments = ["--deepspeed", "--deepspeed_config", str(path)]
    mine = two.run(deepspeed_scripts.run, "training_data", "zgraph", arguments)
    hold(mine, deepspeeds.run(deepspeed_scripts.run, "training_data", "deepspeed", arguments))
    assert mine[0] != mine[1]
