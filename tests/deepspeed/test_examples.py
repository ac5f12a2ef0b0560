"""The scripts in examples/deepspeed give DeepSpeed's own numbers: by both systems, on two ranks, with one import changed."""

import json
import math

import deepspeed_scripts
import pytest
import torch
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


IN_BF16 = sorted({*WITHOUT_ARGUMENTS} - {"communication"})  # (which trains nothing)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_BF16)
def test_a_script_in_bf16_gives_deepspeeds_numbers(two, deepspeeds, name):
    run = deepspeed_scripts.run_in_bf16
    mine, theirs = two.run(run, name, "zgraph"), deepspeeds.run(run, name, "deepspeed")
    hold_in_bf16(mine, theirs, two.run(deepspeed_scripts.run, name, "zgraph"))


def hold_in_bf16(mine, theirs, exact):
    """Within 5e-3; where the loss is a bf16 number itself, within two of its steps; else no farther from fp32's than DeepSpeed's is.

    (Only stage 0, which DeepSpeed reduces and accumulates otherwise, and losses that are bf16 numbers are ever that far apart.)
    """
    for rank in range(2):
        assert len(mine[rank]) > 2 and len(set(mine[rank])) > 1
        for one, other, wide in zip(mine[rank], theirs[rank], exact[rank], strict=True):
            own = torch.tensor(one).bfloat16().item() == one
            steps = 2 * torch.finfo(torch.bfloat16).eps * 2 ** math.floor(math.log2(one)) if own else 0.0
            assert abs(one - other) <= max(5e-3, steps) or abs(one - wide) <= abs(other - wide)


def test_a_checkpoint_by_tag_goes_on_as_deepspeeds(two, deepspeeds, tmp_path):
    mine = two.run(deepspeed_scripts.run, "checkpoint_by_tag", "zgraph", str(tmp_path / "mine"))
    hold(mine, deepspeeds.run(deepspeed_scripts.run, "checkpoint_by_tag", "deepspeed", str(tmp_path / "theirs")))
    assert mine[0][3:6] == mine[0][6:9]


@pytest.mark.slow
def test_a_checkpoint_by_tag_in_bf16_goes_on_as_deepspeeds(two, deepspeeds, tmp_path):
    name, run = "checkpoint_by_tag", deepspeed_scripts.run_in_bf16
    mine = two.run(run, name, "zgraph", str(tmp_path / "mine"))
    theirs = deepspeeds.run(run, name, "deepspeed", str(tmp_path / "theirs"))
    hold_in_bf16(mine, theirs, two.run(deepspeed_scripts.run, name, "zgraph", str(tmp_path / "exact")))
    assert mine[0][3:6] == mine[0][6:9]


def arguments_of_a_file(tmp_path):
    """Arguments that name a file of the script's configuration."""
    path = tmp_path / "ds.json"
    namespace = {}
    exec((EXAMPLES / "training_data.py").read_text().partition("class Squares")[0], namespace)
    path.write_text(json.dumps(namespace["CONFIG"]))
    return ["--deepspeed", "--deepspeed_config", str(path)]


@pytest.mark.slow
def test_training_data_gives_each_rank_deepspeeds_rows(two, deepspeeds, tmp_path):
    arguments = arguments_of_a_file(tmp_path)
    mine = two.run(deepspeed_scripts.run, "training_data", "zgraph", arguments)
    hold(mine, deepspeeds.run(deepspeed_scripts.run, "training_data", "deepspeed", arguments))
    assert mine[0] != mine[1]


@pytest.mark.slow
def test_training_data_in_bf16_gives_each_rank_deepspeeds_rows(two, deepspeeds, tmp_path):
    arguments, run = arguments_of_a_file(tmp_path), deepspeed_scripts.run_in_bf16
    mine = two.run(run, "training_data", "zgraph", arguments)
    theirs = deepspeeds.run(run, "training_data", "deepspeed", arguments)
    hold_in_bf16(mine, theirs, two.run(deepspeed_scripts.run, "training_data", "zgraph", arguments))
