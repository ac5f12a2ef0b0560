"""DeepSpeed's `sparse_attention` section as a plan's `attention`."""

from __future__ import annotations

import pytest

import zgraph
import zgraph.deepspeed

BASE = {"train_micro_batch_size_per_gpu": 2}


@pytest.mark.parametrize(
    ("section", "sparsity"),
    [
        ({"block": 32, "num_local_blocks": 8}, zgraph.Fixed(block=32, num_local_blocks=8)),
        (
            {"mode": "fixed", "different_layout_per_head": True, "num_differnt_global_patterns": 4},
            zgraph.Fixed(different_layout_per_head=True, num_different_global_patterns=4),
        ),
        (
            {"mode": "variable", "local_window_blocks": [2, 4], "global_block_indices": [0, 3], "num_random_blocks": 1},
            zgraph.Variable(local_window_blocks=(2, 4), global_block_indices=(0, 3), num_random_blocks=1),
        ),
        (
            {"mode": "bigbird"},
            zgraph.BigBird(num_random_blocks=0),
        ),  # (DeepSpeed's section has another default than its class)
        ({"mode": "bslongformer", "global_block_end_indices": [2]}, zgraph.Longformer(global_block_end_indices=(2,))),
        ({"mode": "dense"}, zgraph.Dense()),
    ],
    ids=lambda value: value.get("mode", "no mode") if isinstance(value, dict) else "",
)
def test_modes(section, sparsity):
    plan, report = zgraph.deepspeed.plan({**BASE, "sparse_attention": section}, world=2)
    assert plan.attention == {"*": sparsity}
    verdicts = {row.key: row.verdict for row in report.rows}
    assert all(verdicts[f"sparse_attention.{key}"] == "applied" for key in (*section, "mode"))


def test_a_key_of_another_mode_has_no_effect_and_is_told():
    _, report = zgraph.deepspeed.plan({**BASE, "sparse_attention": {"num_random_blocks": 2}}, world=2)
    assert {row.key: row.verdict for row in report.rows}["sparse_attention.num_random_blocks"] == "no effect here"


def test_an_empty_section_asks_for_nothing():
    plan, _ = zgraph.deepspeed.plan({**BASE, "sparse_attention": {}}, world=2)
    assert not plan.attention
