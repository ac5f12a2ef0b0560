"""A pass that fails leaves a folder from which it is run again; `zgraph repro` says whether it still fails."""

from __future__ import annotations

import json
from pathlib import Path

import faults
import pytest
import torch
from typer.testing import CliRunner

import zgraph
from zgraph.build.planned_step import programs, update_program
from zgraph.cli.app import app
from zgraph.errors import BundleError, PassError, PlanError, VerifyError
from zgraph.inspection.repro import replay
from zgraph.passes import PassManager, graph_pass
from zgraph.passes.canonicalize.cleanup import cleanup

HERE = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True)
def in_tests_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(HERE)
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("ZGRAPH_REPRO_DIR", str(tmp_path))


def failing(tmp_path: Path, fault: str = "raises after regather", error: type = PassError, **plan: object) -> Path:
    """The folder that a fault has left."""
    model, inputs = faults.spoilt()
    made = zgraph.Plan(**{"backend": "eager", "passes": [f"faults:{fault}"], **plan})
    with pytest.raises(error) as caught:
        programs(model, made, inputs, 2)
    (folder,) = tmp_path.iterdir()
    assert str(folder) in str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
    return folder


def zgraph_(*args: object):
    return CliRunner().invoke(app, [str(a) for a in args])


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_same_error_comes_again(tmp_path, zero, backend):
    anchor = "regather" if zero in (0, 3) else "keep_gathered"
    found = replay(failing(tmp_path, f"raises after {anchor}", zero=zero, backend=backend))
    assert found.same and found.now.name == "raises"
    assert found.now.error == "ZeroDivisionError: no bytes to share" and found.now.node is None
    assert found.passes[:2] == ("raises", "reduce_gradients")
    assert len(list(tmp_path.iterdir())) == 1, "running it again leaves no other"


def test_a_program_of_symbolic_sizes_is_replayed(tmp_path):
    folder = failing(tmp_path, dynamic={"x": {0: "rows"}, "y": {0: "rows"}})
    assert "f32[rows, 8]" in (folder / "program.txt").read_text()
    assert replay(folder).same


def test_the_node_is_shown_with_its_neighbours(tmp_path):
    found = replay(failing(tmp_path, "breaks after regather", VerifyError))
    assert found.same and found.now.node == "tanh" and found.now.error.startswith("VerifyError: ")
    (marked,) = [text for text in found.lines if text.startswith(">")]
    assert "tanh" in marked and len(found.lines) == 9


def test_a_pass_that_was_mended_does_not_fail_any_more(tmp_path, monkeypatch):
    folder = failing(tmp_path)
    monkeypatch.setattr(faults, "raises", graph_pass("raises", "can do it")(lambda program: None))
    found = replay(folder)
    assert found.now is None and not found.same


def test_another_error_is_not_the_same(tmp_path, monkeypatch):
    folder = failing(tmp_path)

    def fails(program):
        raise KeyError("bytes")

    monkeypatch.setattr(faults, "raises", graph_pass("raises", "can't do it either")(fails))
    found = replay(folder)
    assert found.now.error == "KeyError: 'bytes'" and not found.same


def test_a_failure_of_a_search_within_a_budget_is_replayed(tmp_path):
    """The search itself keeps no snapshots."""
    found = replay(failing(tmp_path, "raises_late after shard_parameters", memory_budget="1GiB"))
    assert found.same and found.passes[0] == "raises_late"
    assert json.loads((Path(found.folder) / "pipeline.json").read_text())["recipe"]["choice"]["room"] == 0


def test_a_failure_before_what_a_search_changes_is_replayed(tmp_path):
    assert replay(failing(tmp_path, "raises after cleanup", memory_budget="1GiB")).same


def test_a_program_that_a_search_can_make_nothing_of_is_replayed(tmp_path):
    found = replay(failing(tmp_path, "breaks before shard_parameters", VerifyError, memory_budget="1GiB"))
    assert found.same and found.now.node == "tanh"


def test_a_failure_of_an_update_is_replayed(tmp_path, monkeypatch):
    faults.in_update(monkeypatch, faults.raises_in_update)
    model, _ = faults.spoilt()
    with pytest.raises(PassError):
        update_program(model, zgraph.Plan(backend="eager", optimizer=zgraph.AdamW(lr=1e-3), grad_clip=1.0), 2)
    (folder,) = tmp_path.iterdir()
    found = replay(folder)
    assert found.same and found.passes == ("write_in_place", "group_updates")
    monkeypatch.undo()
    assert replay(folder).now is None


# -- folders that can't be replayed


def refused(folder: Path) -> BundleError:
    with pytest.raises(BundleError) as caught:
        replay(folder)
    return caught.value


def changed(folder: Path, **values: object) -> Path:
    path = folder / "pipeline.json"
    head = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in head.items() if v != "left out"}))
    return folder


def test_a_folder_without_a_reproducer_is_refused(tmp_path):
    assert "there is no such folder" in refused(tmp_path / "nowhere").what
    assert "it has no pipeline.json" in str(refused(tmp_path))
    (tmp_path / "bundle.json").write_text("{}")
    assert "it is a bundle" in str(refused(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("pipeline.json", "{", "can't be read"),
        ("pipeline.json", "[]", "is damaged"),
        ("pipeline.json", '{"format": 1, "passes": [], "error": ""}', "is damaged"),
        ("program.json", "{", "can't be read"),
        ("program.json", "{}", "no program in JSON form"),
        ("program.json", '{"format": 1}', "damaged"),
    ],
)
def test_a_damaged_one_is_refused(tmp_path, name, content, says):
    folder = failing(tmp_path)
    (folder / name).write_text(content)
    error = refused(folder)
    assert says in str(error) and name in error.where


def test_a_program_that_is_gone_is_said_so(tmp_path):
    folder = failing(tmp_path)
    (folder / "program.json").unlink()
    assert "No such file" in refused(folder).why


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"format": 7}, "is of format 7, and this zgraph reads format 1"),
        ({"format": "left out"}, "is older than formats"),
        ({"recipe": None}, "does not say how its passes were made"),
        ({"recipe": {"plan": {}}}, "recipe is damaged"),
        ({"node": 3}, "its node is no name"),
        ({"passes": ["raises", "overlap"]}, "the pipeline is another one by now"),
        ({"passes": ["nothing"]}, "the pipeline is another one by now"),
    ],
)
def test_one_of_another_version_is_refused_with_what_can_still_be_done(tmp_path, values, says):
    error = refused(changed(failing(tmp_path), **values))
    assert says in str(error)
    if "recipe" in values or "format" in values:
        assert "program.txt" in error.hint and "raises" in error.hint


def test_passes_that_were_run_by_hand_leave_no_recipe(tmp_path):
    model, inputs = faults.spoilt()
    captured = programs(model, zgraph.Plan(backend="eager"), inputs, 2).records[0].program
    with pytest.raises(PassError):
        PassManager([cleanup(), faults.raises()]).run(captured)
    (folder,) = tmp_path.iterdir()
    assert "run by hand" in refused(folder).why


def test_a_pass_of_the_users_that_is_gone_is_named(tmp_path, monkeypatch):
    folder = failing(tmp_path)
    monkeypatch.delattr(faults, "raises")
    with pytest.raises(PlanError, match="'faults:raises' can't be loaded"):
        replay(folder)


# -- the command


def test_the_command_ends_with_one_as_long_as_it_fails(tmp_path, monkeypatch):
    folder = failing(tmp_path)
    done = zgraph_("repro", folder)
    assert done.exit_code == 1, done.output
    assert (
        "pass 'raises' fails again, with the same error" in done.stdout and f"torch {torch.__version__}" in done.stdout
    )
    found = json.loads(zgraph_("repro", folder, "--json").stdout)
    assert found["fails"] and found["same"] and found["now"]["name"] == "raises"
    monkeypatch.setattr(faults, "raises", graph_pass("raises", "can do it")(lambda program: None))
    out = tmp_path / "said.txt"
    assert zgraph_("repro", folder, "-o", out).exit_code == 0
    assert "nothing fails any more" in out.read_text()


def test_the_command_refuses_what_is_no_reproducer(tmp_path):
    done = zgraph_("repro", tmp_path)
    assert done.exit_code == 2 and "this folder is no reproducer" in done.stderr and not done.stdout
