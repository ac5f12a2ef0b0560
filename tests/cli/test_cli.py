"""The command line answers at once, names what is wrong, and works for any number of ranks without any."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import sweep
from typer.testing import CliRunner

from zgraph import __version__
from zgraph.cli.app import app, main
from zgraph.cli.output import use_color

HERE = Path(__file__).parents[1] / "support"
SMALL = "cli_targets:factory"


@pytest.fixture(autouse=True)
def in_tests_folder(monkeypatch):
    """Targets are named from the current directory."""
    monkeypatch.chdir(HERE)
    monkeypatch.syspath_prepend(str(HERE))


def zgraph(*args: object):
    return CliRunner().invoke(app, [str(a) for a in args])


def ok(*args: object) -> str:
    done = zgraph(*args)
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*args: object) -> str:
    """What a command that ends with 2 says; nothing of it on stdout, and no traceback."""
    done = zgraph(*args)
    assert done.exit_code == 2, done.output
    assert not done.stdout and "Traceback" not in done.stderr
    return done.stderr


def process(*args: str, cwd: Path = HERE, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zgraph", *args]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)


@pytest.fixture
def plan(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "plan.toml"
        path.write_text(text)
        return path

    return write


# Help and version.


@pytest.mark.core
@pytest.mark.parametrize("command", ["dump", "passes", "verify", "forecast", "calibrate"])
def test_the_help_of_a_command_does_not_load_torch(command):
    code = f"import sys; from zgraph.cli.app import app; app([{command!r}, '--help'], standalone_mode=False)"
    done = subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"])
    assert done.returncode == 0


@pytest.mark.core
@pytest.mark.parametrize("args", [["--help"], ["--version"]])
def test_help_and_version_load_neither_torch_nor_pydantic(args):
    code = f"""
import sys
sys.argv = ["zgraph", *{args!r}]
from zgraph.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code
assert not {{"torch", "pydantic", "numpy"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.core
def test_version_is_the_packages():
    assert ok("--version") == f"zgraph {__version__}\n"


def test_the_installed_command_and_the_module_say_the_same():
    installed = Path(sys.executable).with_name("zgraph")
    if not installed.exists():
        pytest.skip("zgraph is on the path but not installed")
    done = subprocess.run([installed, "--help"], capture_output=True, text=True)
    assert done.stdout == process("--help").stdout


def test_a_mistyped_command_is_usage():
    assert "dump" in refused("dupm", SMALL)


# dump


TARGETS = [(SMALL, 8), (SMALL, 512), ("train_lm", 8)]


@pytest.mark.core
@sweep("target, world", TARGETS, quick=(1,))
def test_dump_prints_the_program_for_any_world(target, world):
    text = ok("dump", target, "--world", world)
    assert f"mesh dp {world}" in text.splitlines()[0]
    assert f', {world}, "dp")' in text and "dist.reduce_scatter(" in text


def test_dump_needs_no_process_group_even_under_the_variables_of_a_launcher(monkeypatch):
    elsewhere = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in (elsewhere | {"NO_COLOR": "1", "FORCE_COLOR": "1"}).items():
        monkeypatch.setenv(name, value)
    text = ok("dump", SMALL, "--world", "8")
    assert "mesh dp 8" in text and "\x1b" not in text, "NO_COLOR gets plain text"


@pytest.mark.slow
def test_an_example_is_found_from_inside_the_checkout_and_from_outside(tmp_path):
    for cwd in (HERE, tmp_path):
        done = process("dump", "train_lm", "--after", "capture", "--filter", "*wq*", cwd=cwd)
        assert done.returncode == 0 and "layers_0_attention_wq_weight" in done.stdout, done.stderr


@pytest.mark.parametrize("after, holds", [("capture", False), ("shard_parameters", True)])
def test_dump_after_a_pass_is_the_program_as_that_pass_left_it(after, holds):
    text = ok("dump", SMALL, "--world", 2, "--after", after)
    assert ("dist.all_gather(" in text) is holds and "dist.reduce_scatter(" not in text


def test_the_update_is_shown_for_any_world(plan):
    path = plan('grad_clip = 1.0\noptimizer = {name = "AdamW", lr = 1e-3}\n')
    text = ok("dump", SMALL, "--plan", path, "--world", 8, "--update")
    assert "# program update" in text and re.search(r'dist\.all_reduce\(\w+, "sum", "dp"\)', text)
    assert "first_weight_exp_avg" in text and "aten.copy_(" in text
    before = ok("dump", SMALL, "--plan", path, "--update", "--after", "capture")
    assert "aten.copy_(" not in before
    passes = json.loads(ok("passes", SMALL, "--plan", path, "--update", "--json"))["passes"]
    assert [p["name"] for p in passes] == ["capture", "write_in_place", "group_updates"] and passes[1]["stats"][
        "written"
    ] > 4
    assert "write_in_place" in ok("passes", "--plan", path, "--update")
    assert "the plan has no optimizer" in refused("dump", SMALL, "--update")


def test_dump_without_a_world_takes_two_for_what_the_mesh_leaves_open(plan):
    assert "mesh dp 2" in ok("dump", SMALL, "--after", "capture")
    path = plan('mesh = { replicate = 2, dp = 2 }\nbackend = "eager"')
    assert "mesh replicate 2 x dp 2" in ok("dump", SMALL, "--plan", path)


def test_dump_filter_keeps_only_nodes_that_match():
    text = ok("dump", SMALL, "--world", 2, "--filter", "first.*")
    assert "first_weight" in text and "second_weight" not in text and "def forward" not in text


def test_dump_json_is_a_program_that_loads_again():
    from zgraph.passes import verify_program
    from zgraph.program.printer import render
    from zgraph.program.serialize import from_json

    program = from_json(json.loads(ok("dump", SMALL, "--world", 8, "--json")))
    verify_program(program)
    assert render(program) == ok("dump", SMALL, "--world", 8)


def test_dump_for_a_rank_says_which_rows_it_holds(plan):
    path = plan("mesh = { replicate = 2, dp = 4 }")
    text = ok("dump", SMALL, "--world", 8, "--rank", 7, "--plan", path)
    assert "# rank 7 of 8" in text
    assert "dp 3, in a group with ranks 4 to 7" in text and "replicate 1, in a group with ranks 3, 7" in text
    assert "first.weight: rows 9 to 9" in text  # 10 rows over 4 ranks: 3, 3, 3, 1
    assert "second.weight: no rows, padding only" in text  # 3 rows over 4 ranks
    place = json.loads(ok("dump", SMALL, "--world", 8, "--rank", 7, "--plan", path, "--json"))["rank"]
    assert place["rows"]["first.bias"] == [9, 10] and place["coordinates"] == {"replicate": 1, "dp": 3}


def test_dump_into_a_file_prints_nothing_else(tmp_path):
    out = tmp_path / "program.py"
    assert ok("dump", SMALL, "-o", out) == ""
    assert out.read_text() == ok("dump", SMALL)


def test_output_that_is_no_terminal_has_no_color():
    assert "\x1b" not in ok("dump", SMALL, "--world", 2)


@pytest.mark.core
def test_color_is_for_terminals_without_no_color(monkeypatch):
    class Stream:
        def __init__(self, terminal: bool) -> None:
            self.isatty = lambda: terminal

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert use_color(Stream(True)) and not use_color(Stream(False))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_color(Stream(True))


# Wrong names, each answered with the right one.


@pytest.mark.core
@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("trian_lm", "did you mean 'train_lm'?"),
        ("cli_targets:factroy", "did you mean 'factory'?"),
        ("cli_target:factory", "did you mean 'cli_targets'?"),
        ("zgraph.paln:Plan", "did you mean 'zgraph.plan'?"),
        (":factory", "names no module"),
        ("cli_targets:", "has no attribute ''"),
        ("cli_targets:not_callable", "is not callable but int"),
        ("cli_targets:only_model", "returned Regressor, not a pair"),
        ("cli_targets:failing", "ValueError: no weights today"),
    ],
)
def test_a_bad_target_is_named_with_what_is_right(target, says):
    assert says in refused("dump", target)


def test_a_target_that_fails_is_shown_with_the_users_line():
    line = 1 + next(i for i, t in enumerate(HERE.joinpath("cli_targets.py").open()) if "no weights today" in t)
    assert f"{HERE / 'cli_targets.py'}:{line}" in refused("dump", "cli_targets:failing")


def test_a_module_that_lacks_one_of_its_imports_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import surely_not_installed\n")
    monkeypatch.chdir(tmp_path)
    text = refused("dump", "needs_more:factory")
    assert "module 'needs_more' can't be imported" in text and f"{tmp_path / 'needs_more.py'}:1" in text


def test_a_model_that_cannot_be_captured_is_refused_with_its_line():
    assert re.search(r"cli_targets\.py:\d+", refused("dump", "cli_targets:branching"))


@pytest.mark.parametrize("command", [["dump", SMALL], ["passes"], ["verify", SMALL]])
def test_a_bad_plan_key_is_answered_with_the_nearest(command, plan):
    assert "did you mean 'zero'?" in refused(*command, "--plan", plan("zreo = 2"))


def test_a_plan_that_is_not_there_is_said_so(tmp_path):
    assert "missing.toml" in refused("passes", "--plan", tmp_path / "missing.toml")


def test_a_bad_pass_name_is_answered_with_the_nearest():
    assert "did you mean 'regather'?" in refused("dump", SMALL, "--after", "regathr")


def test_a_pass_that_this_plan_does_not_run_is_not_in_the_pipeline(plan):
    path = plan('zero = 1\nbackend = "eager"')
    assert "no pass 'release'" in refused("dump", SMALL, "--plan", path, "--after", "release")


def test_a_filter_that_matches_nothing_is_refused():
    assert "no node matches 'third.*'" in refused("dump", SMALL, "--world", 2, "--filter", "third.*")


def test_a_world_that_the_mesh_does_not_divide_is_refused(plan):
    text = refused("dump", SMALL, "--world", 3, "--plan", plan("mesh = { replicate = 2, dp = -1 }"))
    assert "does not divide a world of 3" in text


@pytest.mark.parametrize("options", [["--rank", "8"], ["--world", "0"], ["--json", "--filter", "x"], ["--wrold", "8"]])
def test_options_that_mean_nothing_are_usage_errors(options):
    assert "Usage:" in refused("dump", SMALL, *(options if "--world" in options else ["--world", "8", *options]))


# passes


@pytest.mark.core
def test_passes_lists_the_pipeline_with_what_each_requires_and_provides(plan):
    text = ok("passes", "--plan", plan("zero = 3"))
    assert "requires clean; provides sharded" in text
    rows = json.loads(ok("passes", "--plan", plan("zero = 2"), "--json"))["passes"]
    names = [r["name"] for r in rows]
    assert "keep_gathered" in names and "release" not in names
    assert all(r["summary"] for r in rows) and rows[names.index("shard_parameters")]["provides"] == ["sharded"]


def test_passes_why_says_of_every_pass_whether_the_plan_runs_it_and_why(plan):
    path = plan('zero = 2\nrecompute = "full"\npasses = ["cli_targets:double_gradients after regather"]')
    refused("passes", "--why", "--plan", path)  # (regather does not run with it)
    path = plan('zero = 2\nrecompute = "full"\npasses = ["cli_targets:double_gradients after keep_gathered"]')
    rows = json.loads(ok("passes", "--why", "--plan", path, "--json"))["passes"]
    ran = [r["name"] for r in json.loads(ok("passes", "--plan", path, "--json"))["passes"]]
    assert [r["name"] for r in rows if r["runs"]] == ran
    why = {r["name"]: r["why"] for r in rows}
    assert why["regather"] == "zero is 2" and why["divide"] == "mesh.tp is 1"
    assert why["rematerialize"] == "recompute is 'full'" and all(why.values())
    assert re.search(r"^offload_update +- +nothing is offloaded$", ok("passes", "--why", "--update"), re.M)


@sweep("target, world", TARGETS, quick=(0,))
def test_passes_on_a_target_counts_what_each_did(target, world):
    rows = json.loads(ok("passes", target, "--world", world, "--json"))["passes"]
    assert rows[0]["name"] == "capture" and all(r["nodes"] > 0 and r["seconds"] >= 0 for r in rows)
    stats = next(r["stats"] for r in rows if r["name"] == "shard_parameters")
    assert stats["gathers"] == (4 if target == SMALL else 39)


def test_passes_as_text_shows_nodes_seconds_and_counts():
    assert re.search(r"\d+ nodes, \d\.\d+ s \(verified in \d\.\d+ s\), 4 gathers", ok("passes", SMALL))


def test_a_users_own_pass_is_listed_where_the_plan_puts_it(plan):
    path = plan('passes = ["cli_targets:double_gradients after regather"]')
    names = [r["name"] for r in json.loads(ok("passes", "--plan", path, "--json"))["passes"]]
    assert names.index("double_gradients") == names.index("regather") + 1


# verify


@pytest.mark.parametrize("world", [1, 2, 8])
def test_verify_compares_with_the_plain_model(world):
    assert f"on {world} virtual ranks" in ok("verify", SMALL, "--world", world)


@pytest.mark.slow
def test_verify_of_the_example_is_within_tolerance():
    assert "on 8 virtual ranks" in ok("verify", "train_lm", "--world", 8)


@sweep("world", [64, 512], quick=(0,))
def test_verify_on_many_ranks(world):
    report = json.loads(ok("verify", SMALL, "--world", world, "--json"))
    assert report["ok"] and report["world"] == world and report["compared"] == world * 5


def test_verify_of_a_wrong_program_exits_with_one_and_says_what_differs(plan):
    path = plan('passes = ["cli_targets:double_gradients before reduce_gradients"]')
    done = zgraph("verify", SMALL, "--plan", path, "--world", 2)
    assert done.exit_code == 1
    assert "BAD gradient first.weight" in done.stdout and "relative error 1" in done.stdout


def test_verify_lists_all_faults_of_a_broken_program_if_asked(plan):
    path = plan('passes = ["cli_targets:false_dtypes after regather"]')
    one = refused("verify", SMALL, "--plan", path)
    assert "in pass 'false_dtypes'" in one and "further faults of this program: --all-faults lists them" in one
    said = refused("verify", SMALL, "--plan", path, "--all-faults")
    assert said.count("has the wrong") > one.count("has the wrong") and "further" not in said


def test_verify_gives_every_rank_other_rows_of_the_batch():
    import torch

    from zgraph.cli.verify import global_batch

    x = torch.arange(12.0).view(4, 3)
    (rows, twice, other), different = global_batch((x, x * 2, torch.ones(2)), 3)
    assert different and rows.shape == (12, 3) and torch.equal(rows[:4], x)
    assert torch.equal(twice, rows * 2), "a row of one input stays with that row of the others"
    assert not torch.equal(rows[4:8].sum(0), x.sum(0))
    assert other.shape == (2,), "what is not batched is not repeated"


def test_verify_says_when_a_batch_of_one_row_hides_reductions():
    done = zgraph("verify", "cli_targets:one_row", "--world", 2)
    assert done.exit_code == 0 and "all ranks see the same data" in done.stderr


# forecast


@pytest.mark.core
def test_forecast_tells_time_and_memory_of_step_and_update(plan):
    path = plan('optimizer = {name = "AdamW", lr = 1e-3}\n')
    text = ok("forecast", SMALL, "--plan", path, "--world", 8, "--hardware", "h200-141g")
    assert text.startswith("8 rank(s) of h200-141g") and "train:" in text and "update:" in text
    assert "exposed reduce" in text and "peak memory" in text and "step:" in text
    found = json.loads(ok("forecast", SMALL, "--plan", path, "--world", 8, "--json"))
    assert found["hardware"]["name"] == "h100-80g" and [p["name"] for p in found["programs"]] == ["train", "update"]
    train = found["programs"][0]
    assert sum(train["exposed"].values()) == pytest.approx(sum(s["seconds"] for s in train["stalls"]))


@pytest.mark.core
def test_forecast_refuses_hardware_that_is_not_there(tmp_path, plan):
    assert "did you mean 'h200-141g'?" in refused("forecast", SMALL, "--hardware", "h200")
    path = tmp_path / "mine.toml"
    rates = "memory = 1e12\ncapacity = 1\nhost = 1e9\nflops = {float32 = 1e12}\n"
    path.write_text(f'name = "mine"\n{rates}[links.replicate]\nbandwidth = 1e9\n')
    assert "has no link for mesh dimension 'dp'" in refused("forecast", SMALL, "--hardware", path)


# Targets of transformers.


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with a config.json."""
    hf = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = tmp_path_factory.mktemp("llama")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    hf.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_config_of_transformers_is_a_target(llama):
    text = ok("dump", f"hf:{llama}", "--batch", "2x16", "--world", 512, "--filter", "*up_proj*")
    assert "mesh dp 512" in text and "dist.all_gather(" in text and "f32[2, 16, 64]" in text


@pytest.mark.parametrize(
    "model",
    ["BertForMaskedLM", "BertForSequenceClassification", "ViTForImageClassification", "T5ForConditionalGeneration"],
)
@pytest.mark.slow
def test_models_that_are_no_decoders_get_inputs_that_they_take(model, tmp_path):
    hf = pytest.importorskip("transformers", reason="transformers is not installed")
    if model.startswith("T5"):
        config = hf.T5Config(
            d_model=32, d_ff=64, num_layers=1, num_heads=2, d_kv=16, vocab_size=64, decoder_start_token_id=0
        )
    else:
        kind = hf.BertConfig if model.startswith("Bert") else hf.ViTConfig
        config = kind(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    config.architectures = [model]
    config.save_pretrained(tmp_path)
    assert "step: " in ok("forecast", f"hf:{tmp_path}", "--batch", "2x16", "--world", 4)


@pytest.mark.parametrize("batch", ["0", "x", "4x", "4x0", "-1"])
def test_a_batch_that_is_none_is_refused(llama, batch):
    assert "is no batch" in refused("dump", f"hf:{llama}", "--batch", batch)


def test_a_folder_without_a_config_is_refused(tmp_path):
    assert "there is no config.json" in refused("dump", f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text("{}")
    assert "the config makes no model" in refused("dump", f"hf:{tmp_path}")


def test_a_batch_is_for_transformers_only():
    assert "--batch is for hf:DIR" in refused("dump", SMALL, "--batch", "4x16")


# What all commands have.

EVERY = {
    "dump": [SMALL, "--format", "json"],
    "diff": [SMALL],
    "passes": [SMALL],
    "explain": [SMALL, "peak"],
    "memory": [SMALL],
    "timeline": [SMALL],
    "forecast": [SMALL],
    "plan": [SMALL],
    "verify": [SMALL],
    "bisect": [SMALL],
    "check": [SMALL],
    "env": [],
}


@pytest.mark.parametrize("command", EVERY)
def test_every_command_writes_json_to_a_file(command, tmp_path):
    path = tmp_path / "out.json"
    out = ["-o", path] if command != "plan" else []  # (its file is the best plan)
    done = zgraph(command, *EVERY[command], "--json", *out)
    assert done.exit_code == 0, done.output
    text = path.read_text() if out else done.stdout
    assert isinstance(json.loads(text), dict) and (not out or (not done.stdout and f"wrote {path}" in done.stderr))


@pytest.mark.parametrize("command", EVERY)
def test_an_output_that_can_not_be_written_is_usage(command, tmp_path):
    if command == "plan":
        pytest.skip("its file is a plan: see tests/forecast/test_plans.py")
    assert "can't be written" in refused(command, *EVERY[command], "-o", tmp_path / "no" / "out")


def test_memory_fails_a_check_with_the_top_holders():
    done = zgraph("memory", SMALL, "--assert", "peak<=100", "--assert", "activations<=10GiB")
    assert done.exit_code == 1 and "peak<=100 does not hold" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("  ")]) == 3
    assert zgraph("memory", SMALL, "--assert", "peak<=1GiB").exit_code == 0


def test_a_bound_on_a_category_that_there_is_none_of_names_those_that_there_are():
    assert "did you mean 'activations'" in refused("memory", SMALL, "--assert", "activation<=1GiB")


def test_dump_runs_a_part_of_the_pipeline():
    text = ok("dump", SMALL, "--stop-after", "shard_parameters")
    assert "dist.all_gather(" in text and "dist.reduce_scatter(" not in text
    assert "zgraph.release(" not in ok("dump", SMALL, "--disable", "release")
    assert "requires ['sharded']" in refused("dump", SMALL, "--disable", "shard_parameters")


def test_dump_prints_what_each_pass_changed():
    whole, diff = ok("dump", SMALL, "--print-changed"), ok("dump", SMALL, "--print-changed=diff")
    for text in (whole, diff):
        assert "# ==== after shard_parameters: " in text
    assert "def forward(" in whole and "+    gather_first_weight" in diff


def test_a_category_that_there_is_nothing_of_is_within_its_bound():
    assert zgraph("memory", SMALL, "--world", 1, "--assert", "gathered<=1KiB").exit_code == 0


def test_a_failed_bound_on_a_category_names_holders_of_that_category():
    done = zgraph("memory", SMALL, "--assert", "parameters<=1")
    assert done.exit_code == 1 and done.stderr.count(" of parameters, ") == 3


@pytest.mark.parametrize(
    "args",
    [
        ["passes", "--hw", "cpu"],
        ["passes", "--program", "train"],
        ["dump", SMALL, "--print-changed", "--after", "cleanup"],
        ["dump", SMALL, "--print-changed=diff", "--filter", "*first*"],
        ["dump", SMALL, "--update", "--program", "train"],
        ["dump", SMALL, "--format", "python", "--filter", "*first*"],
        ["plan", SMALL, "-o", "plan.txt"],
    ],
)
def test_options_that_mean_nothing_together_are_usage(args):
    done = zgraph(*args)
    assert done.exit_code == 2 and not done.stdout


def test_what_a_factory_prints_is_not_in_the_answer(tmp_path, monkeypatch):
    (tmp_path / "noisy.py").write_text(
        "print('imported')\nimport cli_targets\ndef factory():\n    print('called')\n    return cli_targets.factory()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    done = zgraph("memory", "noisy:factory", "--json")
    assert json.loads(done.stdout) and "called" in done.stderr


def test_a_factory_that_ends_the_process_is_refused(tmp_path, monkeypatch):
    (tmp_path / "ending.py").write_text("import sys\ndef factory():\n    sys.exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "target 'ending:factory' failed" in refused("memory", "ending:factory")


@pytest.mark.parametrize("command", ["plan", "verify", "bisect", "check", "calibrate"])
def test_commands_that_need_the_model_refuse_a_bundle(command, tmp_path):
    (tmp_path / "bundle.json").write_text("{}")
    out = ["-o", tmp_path / "here.json"] if command == "calibrate" else []
    assert f"zgraph {command} needs the model" in refused(command, tmp_path, *out)


class Stopped(Exception):
    """Ends a command that has made its batch."""


@pytest.mark.parametrize(
    "command, function", [("verify", "zgraph.api.verify.verify"), ("bisect", "zgraph.inspection.bisect.bisect")]
)
def test_ranks_that_divide_work_see_the_same_rows(command, function, plan, monkeypatch):
    rows = []

    def seen(model, plan, world, inputs, *args, **kwargs):
        rows.append(len(inputs[0]))
        raise Stopped

    monkeypatch.setattr(function, seen)
    path = plan('backend = "eager"\ntensor_parallel = "auto"\n[mesh]\ndp = 2\ntp = 2\n')
    ended = zgraph(command, SMALL, "--plan", path, "--world", 4)
    assert isinstance(ended.exception, Stopped), ended.output
    assert rows == [8]  # (of two data-parallel ranks, with the target's four each)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zgraph", "passes"])
    full = open("/dev/full", "w")  # noqa: SIM115
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "stdout", full)
        main()
    with contextlib.suppress(OSError):  # (what it holds can't be written)
        full.close()
    assert ended.value.code == 2 and "No space left on device" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_behind_a_pipe_is_an_error_without_a_traceback():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "zgraph", "passes"]
        done = subprocess.run(command, cwd=HERE, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "No space left on device" in done.stderr and "Traceback" not in done.stderr


def test_a_model_of_nothing_takes_no_time(tmp_path, monkeypatch):
    (tmp_path / "nothing.py").write_text(
        "import torch\nclass N(torch.nn.Module):\n    def forward(self, x):\n        return x\ndef factory():\n    return N(), (torch.zeros(2),)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "step: 0.000 ms" in ok("forecast", "nothing:factory")
    assert zgraph("plan", "nothing:factory").exit_code == 0
