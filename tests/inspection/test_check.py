"""`zgraph check` tells everything that would fail at once, and what could not be looked at for it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import check_targets
import cli_targets
import pytest
from sweeps import product
from torch import nn
from typer.testing import CliRunner

import zgraph
from zgraph.cli.app import app
from zgraph.inspection.check import Checked, Finding, check
from zgraph.offload.files import FileStore

HERE = Path(__file__).parents[1] / "support"
ALL = [
    "plan",
    "mesh",
    "hardware",
    "target",
    "passes",
    "batch",
    "parameters",
    "precision",
    "recompute",
    "tiles",
    "attention",
    "tensor_parallel",
    "optimizer",
    "schedule",
    "offload",
]
ALL += ["capture", "operators", "gradients", "memory"]
ADAM = {"name": "AdamW", "lr": 1e-3}


@pytest.fixture(autouse=True)
def in_tests_folder(monkeypatch, tmp_path_factory):
    monkeypatch.chdir(HERE)
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("ZGRAPH_REPRO_DIR", str(tmp_path_factory.mktemp("repro")))


def checked(find=cli_targets.factory, world: int | None = 2, device: str = "h100-80g", **plan: object) -> Checked:
    return check(find, zgraph.Plan(**{"backend": "eager", "optimizer": ADAM, **plan}), world, device)


def of(made: Checked, name: str, level: str = "error") -> list[Finding]:
    return [f for f in made.findings if f.check == name and f.level == level]


def only(made: Checked, name: str, level: str = "error") -> Finding:
    """The one finding of this level, which is of this check."""
    (found,) = [f for f in made.findings if f.level == level]
    assert found.check == name
    return found


@product(
    "plan, backend",
    [{}, {"precision": "bf16", "zero": 1}, {"memory_budget": "1GiB"}, {"micro_batches": 2}],
    ["eager", "inductor"],
    together=1,
    ids=str,
)
def test_a_sound_plan_passes_every_check(plan, backend):
    made = checked(backend=backend, **plan)
    assert made.ok and not made.skipped and list(made.passed) == ALL and made.world == 2
    assert not [f for f in made.findings if f.level != "note"]


def test_every_fault_is_told_at_once(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("""
zreo = 2
mesh = {dp = 3}
micro_batches = 3
precision = {compute = "bfloat16", keep_fp32 = ["nothing", "layer*", "neither"]}
optimizer = {name = "AdamW", groups = [{match = "nope*", lr = 1e-4}, {match = "nada", lr = 1e-4}]}
lr_schedule = {name = "TorchSchedule", scheduler = "NoSuch"}
passes = ["nowhere:thing", "faults:summed before cleanup", "faults:raises after nothing"]
offload = {optimizer = "nvme:/proc/x"}
prefetch = {max_bites = 3}
hardware = "h1000"
""")
    made = check(cli_targets.branching, path, 4)  # (of 4 rows)
    told = {f"{f.check}: {f.what}" for f in made.findings if f.level == "error"}
    wanted = [
        "plan: unknown key 'zreo'", "plan: unknown key 'max_bites'", "mesh: the mesh dp=3 is for a world of 3",
        "hardware: there is no hardware 'h1000'", "passes: pass 'nowhere:thing' can't be loaded",
        "passes: pass 'faults:raises' is to stand after 'nothing'", "passes: pass 'summed' can't run here",
        "precision: 'nothing' matches no parameter", "precision: 'neither' matches no parameter",
        "optimizer: the optimizer's group 'nope*' matches", "optimizer: the optimizer's group 'nada' matches",
        "schedule: the schedule 'NoSuch' can't be made", "offload: ", "capture: the model can't be captured",
    ]  # fmt: skip
    missing = [w for w in wanted if not any(t.startswith(w) for t in told)]
    assert not missing, told
    assert not [t for t in told if not t.startswith((*wanted, "batch: 3 micro-batches do not"))], "and nothing else"
    assert set(made.skipped) == {"operators", "gradients", "memory"}
    assert "a mesh for this world" in made.skipped["memory"] and made.world is None


@pytest.mark.parametrize(
    ("text", "wheres"),
    [
        ("zero = 7\nbackend = 3\n", [":1: zero", ":2: backend"]),
        ('ema = 0.9\nlr_schedule = {name = "Cosine", total_steps = 9}\n', [":1: ema", ":2: lr_schedule"]),
        ('optimizer = {name = "Adamm"}\nema = 0.9\n', [":1: optimizer"]),
        ("zero = 1\nprefetch = {max_bytes = 3}\noffload = {parameters = 'cpu'}\n", ["prefetch", "offload"]),
    ],
)
def test_all_faults_of_a_plan_file_are_told_each_with_its_line(tmp_path, text, wheres):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    made = check(cli_targets.factory, path, 2)
    found = of(made, "plan")
    assert len(found) >= len(wheres) and all(any(w in f.where for f in found) for w in wheres), found
    assert "capture" in made.passed and of(made, "plan", "note")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("plan.toml", "zero = = 2", "not valid TOML"),
        ("plan.yaml", "zero: 1\nzero: 2\n", "given twice"),
        ("plan.txt", "", "no format"),
    ],
)
def test_without_a_plan_the_model_is_looked_at_all_the_same(tmp_path, name, text, says):
    path = tmp_path / name
    path.write_text(text)
    made = check(cli_targets.branching, path, 2)
    assert says in of(made, "plan")[0].what and made.skipped["mesh"] == "needs a plan that can be read"
    assert "capture" in made.skipped or of(made, "capture")


def test_a_mesh_that_does_not_fit_the_world_keeps_only_what_needs_it():
    made = checked(world=3, mesh={"dp": 2})
    assert only(made, "mesh").where == "mesh" and set(made.skipped) == {"memory"}
    assert {"capture", "optimizer", "gradients"} <= set(made.passed)


# -- hardware


def test_hardware_must_be_known_and_have_a_link_for_every_dimension(tmp_path):
    assert "did you mean 'h200-141g'?" in only(checked(device="h200"), "hardware").hint
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nmemory = 1e12\ncapacity = 80000000000\nhost = 1e9\nflops = {float32 = 1e12}\n[links]\n'
    )
    made = checked(world=4, device=str(path), mesh={"replicate": 2, "dp": 2}, precision="bf16")
    assert [f.where for f in of(made, "hardware")] == ["links.replicate", "links.dp"]
    assert "no rate for bfloat16" in of(made, "hardware", "note")[0].what and "memory" in made.skipped


def test_a_budget_beyond_the_device_is_an_error():
    assert only(checked(memory_budget="100GiB"), "hardware").where == "memory_budget"


# -- what the user wrote


def test_passes_and_policies_are_loaded_each_by_itself():
    made = checked(passes=["faults:nothing", "cli_targets:factory"], recompute="check_targets:no_policy")
    assert [f.where for f in of(made, "passes")] == [
        "passes: faults:nothing", "passes: cli_targets:factory", "recompute: check_targets:no_policy",
    ]  # fmt: skip
    assert made.skipped["memory"] == "needs passes that are there and fit"
    assert checked(recompute="check_targets:policy").ok


def test_patterns_that_match_nothing_are_told_one_by_one_beside_other_faults():
    made = checked(
        world=4,
        mesh={"tp": 2, "dp": 2},
        precision={"compute": "bfloat16", "keep_fp32": ["nope", "first", "nix"]},
        recompute=["no*", "nada", "first"],
        tiles={"ni": 2, "nu": 2, "first": 3, "second": 2},
        tensor_parallel={"nil": "colwise", "null": "rowwise", "first": "colwise"},
        optimizer={"name": "Muon", "companion_modules": ["zip"], "groups": [{"match": "zero", "lr": 0.1}]},
        schedule="1f1b",
        micro_batches=3,
    )
    told = {(f.check, f.where, f.what.split(" that ")[0]) for f in made.findings if f.level == "error"}
    assert {check for check, _, _ in told} == {
        "batch", "precision", "recompute", "tiles", "tensor_parallel", "optimizer",
    }, told  # fmt: skip
    for field in ("recompute", "tiles", "tensor_parallel", "optimizer", "precision"):
        assert len([t for t in told if t[0] == field]) == 2, told


def test_all_faults_of_tiles_and_of_a_partition_are_told():
    made = checked(tiles={"first": 2, "second": 2, "loss": 2})
    assert {f.where for f in of(made, "memory")} == {"tiles.first", "tiles.second", "tiles.loss"}
    made = checked(mesh={"pp": 2}, partition=["nine", "ten"], micro_batches=2)
    assert {f.where for f in of(made, "memory")} == {"partition", "partition.0", "partition.1"}


def test_a_pass_that_fails_when_it_runs_is_found():
    assert "pass 'raises' failed" in only(checked(passes=["faults:raises after regather"]), "memory").what


def test_a_schedule_that_cannot_be_made_is_found():
    schedule = {"name": "TorchSchedule", "scheduler": "StepLR"}
    assert "step_size" in only(checked(lr_schedule=schedule), "schedule").why
    assert checked(lr_schedule=schedule | {"args": {"step_size": 3}}).ok
    assert checked(lr_schedule={"name": "Cosine", "total_steps": 9}).ok


def test_weights_that_float16_cannot_hold_are_found():
    assert "first.weight" in only(checked(check_targets.infinite, precision="fp16"), "precision").what


def test_a_micro_batch_may_be_one_row():
    """(The batch was once cut twice.)"""
    assert not [f for f in checked(micro_batches=4).findings if f.level == "error"]


def test_micro_batches_must_divide_the_batch():
    assert only(checked(micro_batches=3), "batch").where == "micro_batches"
    assert "4 row(s) of a rank, in 2 micro-batches: 8 of all 2" in of(checked(micro_batches=2), "batch", "note")[0].what


# -- disks


def test_a_folder_to_offload_to_must_be_there_and_have_room(tmp_path, monkeypatch):
    def offloading(folder: Path) -> Checked:
        return checked(offload={"optimizer": f"nvme:{folder}", "least_bytes": 0})

    assert offloading(tmp_path).ok and not list(tmp_path.iterdir())
    new = offloading(tmp_path / "a" / "b")
    assert new.ok and "will be made" in of(new, "offload", "note")[0].what and not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    assert "can't be made" in only(offloading(tmp_path / "file" / "b"), "offload").what
    monkeypatch.setattr("zgraph.offload.files._free", lambda folder: 100)
    assert "has no room for what is to be offloaded" in only(offloading(tmp_path), "offload").what
    monkeypatch.setattr("zgraph.offload.files._free", lambda folder: 700)
    assert "no room for all ranks" in only(offloading(tmp_path), "offload", "warning").what
    monkeypatch.undo()
    monkeypatch.setattr(FileStore, "_try_direct", lambda self: (self._fd, 1))
    assert "no O_DIRECT" in only(offloading(tmp_path), "offload", "warning").what


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to_is_found(tmp_path):
    tmp_path.chmod(0o500)
    assert of(checked(offload={"optimizer": f"nvme:{tmp_path}"}), "offload")


def test_what_the_host_has_no_room_for_is_a_warning(monkeypatch):
    monkeypatch.setattr("zgraph.inspection.check.host_free", lambda: 10)
    assert "has no room" in only(checked(offload={"optimizer": "cpu", "least_bytes": 0}), "offload", "warning").what


# -- the model


def test_a_model_that_cannot_be_captured_is_told_with_its_line():
    made = checked(cli_targets.branching)
    assert re.search(r"cli_targets\.py:\d+$", only(made, "capture").where)
    assert set(made.skipped) == {"operators", "gradients", "memory"}


def test_what_a_models_forward_raises_is_a_finding():
    found = only(checked(check_targets.raising), "capture")
    assert re.search(r"check_targets\.py:\d+$", found.where) and "exception" in found.why


def test_operators_that_programs_cannot_run_are_found():
    made = checked(check_targets.sparse)
    assert "sparse gradients" in only(made, "operators").what
    assert made.skipped == {"memory": "needs operators that programs can run"}


def test_rows_that_a_mask_selects_are_no_fault():
    assert not of(checked(check_targets.selecting), "operators", "error")


def test_parameters_without_gradients_and_an_output_without_a_loss_are_told():
    made = checked(check_targets.unused)
    assert "2 parameter(s) get no gradient: unused.weight, unused.bias" in only(made, "gradients", "warning").what
    assert "no loss" in of(made, "gradients", "note")[0].what


def test_a_model_that_does_not_train_is_told():
    assert "no parameter of the model trains" in of(checked(check_targets.frozen), "parameters", "warning")[0].what


def test_parameters_that_are_mostly_padding_are_told_with_the_threshold_that_leaves_them_whole():
    found = only(checked(world=8), "parameters", "warning")
    assert "second.weight, second.bias" in found.what
    threshold = int(re.search(r"threshold=(\d+)", found.hint)[1])
    assert not of(checked(world=8, param_persistence_threshold=threshold), "parameters", "warning")


def test_a_compiled_model_is_refused():
    model, inputs = cli_targets.factory()
    zgraph.compile(model, zgraph.Plan(backend="eager"))
    made = checked(lambda: (model, inputs))
    assert "compiled already" in only(made, "target").what and "memory" in made.skipped


def test_a_model_in_eval_mode_is_noted():
    def find():
        model, inputs = cli_targets.factory()
        return model.eval(), inputs

    assert "eval mode" in of(checked(find), "target", "note")[0].what


def test_the_model_stays_as_it_was():
    model, inputs = cli_targets.factory()
    before = {k: (v.dtype, v.clone()) for k, v in model.state_dict().items()}
    checked(lambda: (model, inputs), precision="bf16", lr_schedule={"name": "TorchSchedule", "scheduler": "ConstantLR"})
    assert type(model) is cli_targets.Regressor and isinstance(model.first.weight, nn.Parameter)
    assert all(v.dtype is before[k][0] and v.equal(before[k][1]) for k, v in model.state_dict().items())


# -- memory


@pytest.fixture
def small(tmp_path):
    """Hardware like an H100, with so many bytes."""

    def write(capacity: int) -> str:
        from zgraph.passes.analysis.costs import H100

        path = tmp_path / "small.json"
        path.write_text(json.dumps(H100.model_copy(update={"name": "small", "capacity": capacity}).model_dump()))
        return str(path)

    return write


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_told_with_its_largest_tensors_and_what_would_fit(small):
    device = small(6 * 10**6)
    made = checked(check_targets.wide, world=1, device=device, recompute="none")
    found = only(made, "memory")
    assert "does not fit into small" in found.what and "tanh" in found.why and "activations" in found.why
    changes = [line for line in found.hint.splitlines() if line.startswith("  ")]
    assert changes and any("recompute" in line for line in changes)
    assert checked(check_targets.wide, world=1, device=device, recompute="auto", memory_budget=5_500_000).ok


@pytest.mark.slow
def test_a_budget_that_is_too_small_is_told_with_the_least_that_works():
    found = only(checked(check_targets.wide, world=1, memory_budget=10_000), "memory")
    told = re.search(r"the smallest that works is (\d+) bytes with offload=(\{.*?\})", found.hint)
    least, offload = int(told[1]), json.loads(told[2])
    assert checked(check_targets.wide, world=1, memory_budget=least, offload=offload).ok
    assert not checked(check_targets.wide, world=1, memory_budget=least - 1, offload=offload).ok
    staying = only(checked(check_targets.wide, world=1, memory_budget=least), "memory")  # (so large that they stay)
    assert staying.hint.endswith('or offload={"parameters": "cpu"}')


def test_a_step_that_hardly_fits_is_a_warning(small):
    peak = re.search(r"the peak is ([\d.]+) MiB", of(checked(check_targets.wide, world=1), "memory", "note")[0].what)[1]
    made = checked(check_targets.wide, world=1, device=small(int(float(peak) * 2**20 * 1.01)))
    assert made.ok and "hardly fits" in only(made, "memory", "warning").what


# -- the command


def zgraph_(*args: object):
    return CliRunner().invoke(app, [str(a) for a in args])


def test_the_command_ends_with_zero_where_nothing_would_fail():
    done = zgraph_("check", "cli_targets:factory", "--world", 2)
    assert done.exit_code == 0, done.output
    assert "0 errors" in done.stdout and "for 2 rank(s); well: plan, mesh" in done.stdout


def test_the_command_ends_with_one_and_tells_all(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("zreo = 2\nmicro_batches = 3\n")
    done = zgraph_("check", "cli_targets:branching", "--plan", path, "--world", 2)
    assert done.exit_code == 1
    assert "did you mean 'zero'?" in done.stdout and "3 micro-batches do not divide" in done.stdout
    assert re.search(r"where: .*cli_targets\.py:\d+", done.stdout) and "skipped  memory" in done.stdout
    found = json.loads(zgraph_("check", "cli_targets:branching", "--plan", path, "--json").stdout)
    assert not found["ok"] and {f["level"] for f in found["findings"]} >= {"error", "note"}


def test_a_target_that_is_not_there_is_one_finding_among_others(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("zreo = 2\n")
    out = tmp_path / "found.txt"
    assert zgraph_("check", "cli_targets:factroy", "--plan", path, "-o", out).exit_code == 1
    assert "did you mean 'factory'?" in out.read_text() and "did you mean 'zero'?" in out.read_text()


def test_a_plan_file_that_is_not_there_is_told():
    done = zgraph_("check", "cli_targets:factory", "--plan", "missing.toml")
    assert done.exit_code == 1 and "there is no such plan file" in done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["."], "zgraph check needs the model"),
        (["cli_targets:factory", "--world", "0"], "Invalid value for '--world'"),
        ([], "Missing argument 'TARGET'"),
    ],
)
def test_wrong_usage_ends_with_two(args, says):
    done = zgraph_("check", *args)
    assert done.exit_code == 2 and says in done.stderr and not done.stdout


@pytest.mark.parametrize("command", ["check", "bisect", "repro"])
def test_the_help_does_not_load_torch(command):
    import subprocess
    import sys

    code = f"import sys; from zgraph.cli.app import app; app([{command!r}, '--help'], standalone_mode=False)"
    assert subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"]).returncode == 0
