"""`zgraph bisect` blames the pass that changes what a step computes, and no other."""

from __future__ import annotations

import json
import math
from pathlib import Path

import faults
import models
import pytest
import torch
from sweeps import product, sweep
from torch import nn
from typer.testing import CliRunner

import zgraph
from zgraph.cli.app import app
from zgraph.cli.verify import global_batch
from zgraph.errors import MeshError, ModelError, PassError, PlanError
from zgraph.inspection.bisect import bisect
from zgraph.verification.virtual_step import virtual_step

HERE = Path(__file__).parents[1] / "support"
ADAM = {"name": "AdamW", "lr": 1e-3}


@pytest.fixture(autouse=True)
def in_tests_folder(monkeypatch, tmp_path_factory):
    monkeypatch.chdir(HERE)
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("ZGRAPH_REPRO_DIR", str(tmp_path_factory.mktemp("repro")))


def searched(world: int = 2, **plan: object):
    model, inputs = faults.spoilt()
    batch, _ = global_batch(inputs, world)
    return bisect(model, zgraph.Plan(**{"backend": "eager", **plan}), world, batch)


def with_fault(fault: str, world: int, **plan: object):
    return searched(world, passes=[f"faults:{fault}"], **plan)


# (the fault with its place; how it is found: more than rounding, bits that it says it keeps, by the verifier; smallest world; plan)
PLANTED = [
    ("scaled_gradient after cleanup", "beyond", 1, {}),
    ("last_bit after checkpoint", "bits", 1, {}),
    ("zeroed_row before reduce_gradients", "beyond bits", 1, {}),
    ("zeroed_row after regather", "beyond bits", 1, {"backend": "inductor"}),
    ("summed after reduce_gradients", "beyond bits refused", 2, {}),
    ("summed after bucket", "beyond bits refused", 2, {"zero": 1}),
    ("unreduced after reduce_gradients", "beyond refused", 2, {"zero": 0}),
    ("swapped after cleanup", "beyond", 1, {}),
    ("other_shard after regather", "beyond bits", 2, {}),
    ("other_shard after shard_parameters", "beyond bits", 2, {"zero": 2}),
    ("other_epsilon after shard_parameters", "beyond bits", 1, {}),
    ("straight_through after regather", "beyond", 1, {}),
    ("off_by_one before cleanup", "beyond bits", 1, {}),
    ("rounded after bucket", "beyond", 1, {}),
    ("rounded after reduce_gradients", "beyond", 1, {"dynamic": {"x": {0: "rows"}, "y": {0: "rows"}}}),
    ("stale_buffer after overlap", "beyond", 1, {}),
    ("kept_too_small after keep_gathered", "beyond bits", 2, {"zero": 2}),
    ("swapped", "beyond", 1, {"zero": 1, "optimizer": ADAM}),
]


@sweep("fault, found, least, plan", PLANTED, ids=[p[0].replace(" ", "-") for p in PLANTED], quick=7)
def test_a_planted_fault_is_found_where_it_stands(fault, found, least, plan):
    finds(fault, found, plan, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "found", "least", "plan"), PLANTED[::2], ids=[p[0].replace(" ", "-") for p in PLANTED[::2]]
)
def test_a_planted_fault_is_found_on_the_fewest_ranks_and_on_more(fault, found, least, plan):
    for world in {least, 4}:
        finds(fault, found, plan, world)


def finds(fault: str, found: str, plan: dict, world: int) -> None:
    made = with_fault(fault, world, **plan)
    culprit = made.culprit
    assert culprit is not None and culprit.name == fault.split(" ")[0] and culprit.program == "step"
    assert [k for k in ("beyond", "bits", "refused") if getattr(culprit, k)] == found.split()
    assert culprit.changed is not None and not culprit.changed.empty
    assert [c.name for c in made.culprits] == [culprit.name], "what comes after it does as it says"


def test_the_tensors_that_differ_are_named_with_their_errors():
    culprit = with_fault("scaled_gradient after cleanup", 2).culprit
    assert {d.name for d in culprit.beyond} == {"first.weight"} and {d.rank for d in culprit.beyond} == {0, 1}
    assert culprit.beyond[0].error == pytest.approx(1e-3, rel=0.01)
    assert [row.name for row in culprit.changed.added] == ["fault0"]


@sweep("world", [1, 2, 4], quick=(1,))
def test_a_faulty_pass_of_the_update_is_found(monkeypatch, world):
    faults.in_update(monkeypatch, faults.other_sign)
    culprit = searched(world, optimizer=ADAM).culprit
    assert (culprit.program, culprit.name) == ("update", "write_in_place")
    assert {(d.what, d.name) for d in culprit.beyond} == {("parameter", "first.weight")} and culprit.bits
    assert culprit.beyond[0].error == pytest.approx(2, rel=0.01)


@sweep("world", [1, 2, 4], quick=(1,))
def test_a_fault_of_later_micro_batches_is_found_in_their_program(world):
    made = with_fault("forgotten after reduce_gradients", world, zero=1, micro_batches=2)
    assert made.culprit.name == "forgotten" and "gradients added to earlier ones" in made.culprit.program
    assert made.culprit.beyond[0].error == pytest.approx(0.5, rel=0.01)
    assert with_fault("forgotten after reduce_gradients", world, zero=1).ok, "one micro-batch has none before it"


def test_the_first_of_two_faults_is_the_culprit_and_the_second_is_told():
    passes = ["faults:last_bit after checkpoint", "faults:swapped after regather"]
    made = searched(passes=passes)
    assert [c.name for c in made.culprits] == ["last_bit", "swapped"] and made.culprit.name == "last_bit"


def test_a_pass_that_fails_is_no_excuse_for_the_one_that_spoilt_its_program():
    made = searched(passes=["faults:swapped after cleanup", "faults:raises after regather"])
    assert made.culprit.name == "swapped" and "pass 'raises' failed" in made.failure
    with pytest.raises(PassError, match="pass 'raises' failed"):
        searched(passes=["faults:raises after regather"])


def test_a_program_that_the_verifier_refuses_is_found_without_running_it():
    culprit = searched(passes=["faults:breaks after regather"]).culprit
    assert culprit.name == "breaks" and "tanh" in culprit.refused


def test_a_fault_that_a_later_pass_undoes_is_found_all_the_same():
    """The buffer's new value is put back: a search by halves from the end would see nothing."""
    made = searched(passes=["bisect_passes:negate after cleanup", "bisect_passes:negate_again after regather"])
    assert [c.name for c in made.culprits] == ["negate"]
    assert made.stages[-1].worst.ok


def test_a_bound_of_ones_own_takes_the_place_of_rounding():
    model, inputs = faults.spoilt()
    plan = zgraph.Plan(backend="eager", passes=["faults:rounded after bucket"])
    assert bisect(model, plan, 1, inputs, bound=0.1).ok
    assert bisect(model, plan, 1, inputs, bound=1e-3).culprit.name == "rounded"


CORRECT = [
    {},
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"recompute": "full"},
    {"micro_batches": 2},
    {"param_persistence_threshold": 20},
    {"offload": {"activations": "cpu", "optimizer": "cpu", "least_bytes": 0}},
    {"grad_clip": 0.1, "ema": 0.9},
]


@sweep("zero, backend", [(0, "eager"), (1, "inductor"), (2, "eager"), (3, "inductor"), (3, "eager")], quick=3)
@sweep("plan", CORRECT, quick=2, ids=[next(iter(c), "plain") for c in CORRECT])
def test_a_correct_pipeline_is_not_accused(plan, zero, backend):
    made = searched(2, zero=zero, backend=backend, optimizer=ADAM, **plan)
    assert made.ok, [(c.program, c.name, c.beyond[:2], c.bits[:2]) for c in made.culprits]
    assert {"capture", "cleanup", "split"} <= {s.name for s in made.stages}
    assert {s.program for s in made.stages} >= {"step", "update"}


@product("world, optimizer", [1, 4], ["Muon", "LAMB", "Lion"], together=1)
def test_updates_that_communicate_are_not_accused(optimizer, world):
    assert searched(world, optimizer={"name": optimizer, "lr": 1e-2}).ok


def test_parameters_that_lie_elsewhere_are_not_accused():
    everything = {"parameters": "cpu", "optimizer": "cpu", "activations": "cpu", "least_bytes": 0}
    assert searched(2, optimizer=ADAM, offload=everything).ok


@sweep("name", ["tied", "dropout", "batch_norm", "channels_last", "frozen", "shared_gradient"], quick=3)
def test_odd_models_are_not_accused(name):
    case = models.build(name)
    torch.manual_seed(1)
    made = bisect(case.model, zgraph.Plan(backend="eager"), 3, case.inputs, case.loss_fn)
    assert made.ok, [(c.name, c.beyond[:2], c.bits[:2]) for c in made.culprits]


def test_a_mesh_of_two_dimensions_is_not_accused_and_its_fault_is_found():
    mesh = {"replicate": 2, "dp": 2}
    assert searched(4, mesh=mesh, zero=2).ok
    assert with_fault("summed after reduce_gradients", 4, mesh=mesh, zero=3).culprit.name == "summed"


def test_a_model_that_draws_random_numbers_is_not_accused():
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return torch.nn.functional.dropout(self.layer(x), 0.5).sum()

    assert bisect(Drawing(), zgraph.Plan(backend="eager"), 2, (torch.randn(4, 4),)).ok


def test_model_and_random_state_stay_as_they_were():
    model, inputs = faults.spoilt()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    bisect(model, zgraph.Plan(backend="eager", precision="bf16", optimizer=ADAM), 2, inputs)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_what_is_wrong_with_the_question_is_said():
    model, inputs = faults.spoilt()
    with pytest.raises(MeshError):
        bisect(model, zgraph.Plan(mesh={"dp": 2}), 4, inputs)
    with torch.device("meta"):
        empty = faults.Spoilt()
    with pytest.raises(ModelError, match="no numbers"), virtual_step(empty, zgraph.Plan(), 2, inputs):
        pass


# -- the command


def zgraph_(*args: object):
    return CliRunner().invoke(app, [str(a) for a in args])


@pytest.fixture
def plan(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "plan.toml"
        path.write_text(text)
        return path

    return write


def test_the_command_ends_with_one_and_says_what_the_pass_did(plan):
    path = plan('backend = "eager"\npasses = ["faults:zeroed_row after regather"]')
    done = zgraph_("bisect", "faults:spoilt", "--plan", path, "--world", 2)
    assert done.exit_code == 1
    assert "zeroed_row is the first pass that changes numerics" in done.stdout
    assert "gradient first.weight (rank 0)" in done.stdout and "said to keep bits and did not" in done.stdout
    assert "it added 2 node(s):" in done.stdout and "aten.constant_pad_nd" in done.stdout


def test_the_command_ends_with_zero_where_all_is_well(plan, tmp_path):
    done = zgraph_("bisect", "faults:spoilt", "--world", 2, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["ok"] and found["culprit"] is None and found["world"] == 2
    assert all(math.isfinite(s["worst"]["error"]) for s in found["stages"])
    out = tmp_path / "found.txt"
    assert zgraph_("bisect", "faults:spoilt", "-o", out).exit_code == 0
    assert "no pass changes numerics" in out.read_text()


def test_the_commands_bound_counts(plan):
    path = plan('backend = "eager"\npasses = ["faults:rounded after bucket"]')
    assert zgraph_("bisect", "faults:spoilt", "--plan", path, "--bound", "0.1").exit_code == 0
    assert zgraph_("bisect", "faults:spoilt", "--plan", path).exit_code == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["faults:spiolt"], "did you mean 'spoilt'?"),
        (["."], "zgraph bisect needs the model"),
        (["faults:spoilt", "--batch", "4"], "--batch is for hf:DIR"),
        (["hf:nowhere"], "there is no config.json"),
        (["faults:spoilt", "--bound", "-1"], "Invalid value for '--bound'"),
        (["faults:spoilt", "--plan", "missing.toml"], "there is no such plan file"),
    ],
)
def test_bad_input_is_refused(args, says):
    done = zgraph_("bisect", *args)
    assert done.exit_code == 2 and says in done.stderr and not done.stdout


@pytest.mark.slow
def test_a_transformers_folder_is_run_with_numbers_of_its_own(tmp_path):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "intermediate_size": 32, "vocab_size": 40}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    done = zgraph_("bisect", f"hf:{tmp_path}", "--batch", "2x8", "--json")
    assert done.exit_code == 0, done.output
    assert all(s["worst"]["error"] < 1e-4 for s in json.loads(done.stdout)["stages"])


def test_a_pipeline_is_refused():
    with pytest.raises(PlanError, match="no search for a faulty pass of a plan with a pipeline"):
        searched(2, mesh={"pp": 2})
