"""DeepSpeed's knobs of communication mean something in a plan."""

import pytest

import zgraph
from zgraph.build.pass_pipeline import build
from zgraph.deepspeed.config_sections import communication, offloading
from zgraph.errors import PlanError

SECTION = {
    "stage": 3,
    "overlap_comm": True,
    "allgather_bucket_size": 5e8,
    "reduce_bucket_size": 1e6,
    "stage3_prefetch_bucket_size": 2e6,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 3e6,
    "stage3_param_persistence_threshold": 1e4,
}


def test_every_knob_reaches_the_pass_that_it_means():
    plan = zgraph.Plan(**communication(SECTION, itemsize=2), precision="bf16")
    options = {p.name: p.options for p in build(plan)}
    assert (options["bucket"].gather, options["bucket"].reduce) == (10**9, 2 * 10**6)
    assert (options["overlap"].ahead_bytes, options["overlap"].max_bytes) == (4 * 10**6, 2 * 10**9)
    assert options["overlap"].ahead and options["regather"].reuse_bytes == 6 * 10**6
    assert plan.param_persistence_threshold == 10_000 and plan.zero == 3


def test_sizes_are_elements_of_what_is_communicated():
    fields = communication({"reduce_bucket_size": 100}, itemsize=4)
    assert fields == {"bucket": {"reduce": 400}}


def test_overlap_comm_false_waits_for_each_collective_where_it_starts():
    plan = zgraph.Plan(**communication({"overlap_comm": False}))
    assert not {p.name: p.options for p in build(plan)}["overlap"].ahead


def test_auto_leaves_a_key_to_zgraph():
    assert communication({"reduce_bucket_size": "auto", "overlap_comm": "auto"}) == {}


def test_an_unknown_key_names_the_nearest_one():
    with pytest.raises(PlanError, match="did you mean 'reduce_bucket_size'"):
        communication({"reduce_bucket": 5})


@pytest.mark.parametrize("value", [-1, 2.5, "large", True, None, float("inf"), float("nan")])
def test_a_size_that_is_no_number_of_elements_is_refused(value):
    with pytest.raises(PlanError, match="no number of elements"):
        communication({"reduce_bucket_size": value})


# -- offloading -----------------------------------------------------------------------------------------------------------
def test_knobs_of_offloading_are_fields_of_a_plan():
    section = {
        "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt", "ratio": 0.5, "pin_memory": True},
        "offload_param": {"device": "cpu"},
        "sub_group_size": 1e6,
    }
    made = zgraph.Plan(**offloading(section, {"cpu_checkpointing": True}), optimizer=zgraph.AdamW()).offload
    assert (made.optimizer, made.parameters, made.activations) == ("nvme:/mnt", "cpu", "cpu")
    assert (made.ratio, made.sub_group_bytes) == (0.5, 16_000_000)


def test_activations_are_partitioned_and_offloaded_as_deepspeed_s_config_says():
    both = {"cpu_checkpointing": True, "partition_activations": True}
    made = zgraph.Plan(mesh={"tp": 2}, **offloading({}, both))
    assert (made.partition_activations, made.offload.activations) == (True, "cpu")
    assert not zgraph.Plan(**offloading({}, {"partition_activations": False})).partition_activations
    with pytest.raises(PlanError, match="partition_activations is set without ranks"):
        zgraph.Plan(**offloading({}, both))
    with pytest.raises(PlanError, match="neither true nor false"):
        offloading({}, {"cpu_checkpointing": "yes"})
    with pytest.raises(PlanError, match="unknown key 'partition_activation'"):
        offloading({}, {"partition_activation": True})


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"offload_optimiser": {"device": "cpu"}}, "offload_optimizer"),
        ({"offload_param": {"device": "nvme"}}, "nvme_path"),
        ({"offload_param": {"device": "disk"}}, "is no place"),
        ({"offload_param": {"devise": "cpu"}}, "device"),
        ({"sub_group_size": "many"}, "no number"),
        ({"sub_group_size": float("inf")}, "no number"),
        ({"offload_optimizer": "cpu"}, "no section"),
    ],
)
def test_knobs_of_offloading_that_can_not_be_had_are_refused(section, said):
    with pytest.raises(PlanError, match=said):
        offloading(section)
