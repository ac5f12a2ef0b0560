"""A step can be looked at as it is, from a model, from a run and from a bundle, and other tools open what is written of it."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import types
from pathlib import Path

import models
import pytest
import torch
from sweeps import sweep
from typer.testing import CliRunner

import zgraph
from zgraph.build.planned_step import programs
from zgraph.cli.app import app
from zgraph.errors import BundleError, TargetError, ZgraphError
from zgraph.inspection import bundle
from zgraph.inspection.compare_profile import beside
from zgraph.inspection.diff import compare
from zgraph.inspection.formats.dot import dot
from zgraph.inspection.formats.explorer import explorer, overlays
from zgraph.inspection.formats.python import python_source
from zgraph.inspection.inspection import EVALUATION, STEP, UPDATE
from zgraph.inspection.make_inspection import of_model
from zgraph.inspection.memory import parse_bound, peak_of
from zgraph.inspection.memory_viz import pickle_of, snapshot_of
from zgraph.inspection.trace import first_reader, trace_of
from zgraph.passes.analysis.live_memory import memory_of
from zgraph.program import collectives
from zgraph.program.node import Role, info
from zgraph.program.serialize import from_json, to_json

HERE = Path(__file__).parents[1]
PLAN = zgraph.Plan(mesh={"dp": -1}, backend="eager", optimizer=zgraph.AdamW(lr=1e-3), hardware="h100-80g")


@pytest.fixture(scope="module")
def inspected():
    """A Llama of transformers at world 4, with its update."""
    case = models.shallow("llama")
    return of_model(case.model, PLAN, case.inputs, 4, origin="llama")


@pytest.fixture(scope="module")
def folder(inspected, tmp_path_factory):
    """The same as a bundle."""
    path = tmp_path_factory.mktemp("bundles") / "llama"
    bundle.write(inspected, path)
    return path


def command(*args: object):
    return CliRunner().invoke(app, [str(a) for a in args])


# What an inspection has.


def test_a_step_has_its_programs_after_every_pass(inspected):
    assert [way.kind for way in inspected.ways.values()] == [STEP, UPDATE]
    names = [s.name for s in inspected.way().snapshots]
    assert names[0] == "capture" and "shard_parameters" in names
    assert not any(collectives.is_start(n) for n in inspected.way().snapshots[0].program.graph.nodes)
    assert inspected.way().after("overlap").facts["options"]["costs"] == "h100-80g"


def test_a_model_without_gradients_is_an_evaluation(inspected):
    case = models.build("uneven_mlp")
    with torch.no_grad():
        found = of_model(case.model.requires_grad_(False), PLAN, case.inputs, 2)
    assert [way.kind for way in found.ways.values()] == [EVALUATION] and found.forecast.seconds > 0


def test_the_peak_is_the_forecasts_and_its_holders_make_it_up(inspected):
    peak = peak_of(inspected, count=10**6)
    program = inspected.way(peak.program).last.program
    assert peak.bytes == max(sum(at.values()) for at in memory_of(program)) + inspected.way(peak.program).held
    assert sum(h.bytes for h in peak.holders) + inspected.way(peak.program).held == peak.bytes
    assert sum(peak.categories.values()) == sum(peak.modules.values()) == peak.bytes
    assert all(h.born <= peak.position < h.gone for h in peak.holders)


@pytest.mark.parametrize("text", ["peak", "peak>=3GiB", "peak<=many", "<=3GiB", "peak<=-3"])
def test_a_bound_that_says_nothing_is_refused(text):
    with pytest.raises(TargetError):
        parse_bound(text)


def test_a_bound_is_in_bytes_or_with_a_unit():
    assert parse_bound("peak <= 72GiB").bytes == 72 * 2**30 and parse_bound("activations<1000").bytes == 1000
    assert parse_bound("peak<=5").holds(5) and not parse_bound("peak<5").holds(5)


# Differences.


def test_the_difference_of_a_pass_is_what_it_did(inspected):
    way = inspected.way()
    found = compare(way.before("release"), way.after("release"))
    assert {row.operator for row in found.added} == {"zgraph.release"}
    assert not (found.removed or found.moved or found.changed)
    assert len(found.added) == way.after("release").facts["stats"]["released"]


def test_a_program_does_not_differ_from_itself(inspected):
    assert compare(inspected.way().last, inspected.way().last).empty


def test_moved_are_the_fewest_nodes_that_explain_the_order(inspected):
    """One node that goes to the end is one that moved, not all behind it."""
    way = inspected.way()
    rows = list(way.last.data["nodes"])
    name = rows[len(rows) // 2]["name"]
    other = {**way.last.data, "nodes": [r for r in rows if r["name"] != name]}
    other["nodes"].append(next(r for r in rows if r["name"] == name))
    fake = types.SimpleNamespace(name="moved", data=other, figures=way.last.figures)
    found = compare(way.last, fake)
    assert [row.name for row in found.moved] == [name] and not found.changed


# Bundles.


def test_a_bundle_says_what_the_live_one_says(inspected, folder):
    read = bundle.read(folder)
    assert read.ways.keys() == inspected.ways.keys() and read.world == 4
    assert read.forecast.seconds == pytest.approx(inspected.forecast.seconds)
    assert peak_of(read).holders == peak_of(inspected).holders
    for a, b in zip(read.way().snapshots, inspected.way().snapshots, strict=True):
        assert a.facts == b.facts and a.data == b.data and a.figures == b.figures
    assert {p.name for p in folder.iterdir()} >= {
        "bundle.json",
        "plan.json",
        "memory.json",
        "timeline.json",
        "report.html",
    }
    assert zgraph.Plan.load(folder / "plan.json") == PLAN
    assert (folder / "train/00-capture.txt").read_text().startswith("# program train: captured")


def test_two_passes_of_a_bundle_are_compared_without_torch(folder):
    code = f"""
import sys
from zgraph.cli.app import app
app(["diff", {str(folder)!r}, "--from", "regather", "--to", "overlap"], standalone_mode=False)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "reduce_scatter" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "name, args",
    [
        ("dump", ["--after", "regather", "--filter", "*q_proj*"]),
        ("dump", ["--format", "json"]),
        ("dump", ["--print-changed=diff"]),
        ("passes", []),
        ("diff", []),
        ("explain", ["peak"]),
        ("memory", []),
        ("forecast", []),
        ("timeline", []),
    ],
)
def test_commands_take_a_bundle(folder, name, args):
    done = command(name, folder, *args)
    assert done.exit_code == 0 and done.stdout, done.output


def test_dump_writes_a_bundle_without_a_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE / "support"))
    done = command("dump", "cli_targets:factory", "--format", "bundle", "-o", tmp_path / "b")
    assert done.exit_code == 0 and bundle.read(tmp_path / "b").way().kind == STEP
    assert command("dump", "cli_targets:factory", "--format", "bundle").exit_code == 2


def test_a_bundle_has_a_plan_of_its_own(folder):
    done = command("memory", folder, "--world", 8)
    assert done.exit_code == 2 and "a bundle takes no --world" in done.stderr


def test_an_old_bundle_is_refused_with_who_wrote_it(folder, tmp_path):
    head = json.loads((folder / "bundle.json").read_text()) | {"format": 0, "zgraph": "0.0.1"}
    (tmp_path / "bundle.json").write_text(json.dumps(head))
    with pytest.raises(BundleError, match=r"format 0(.|\n)*zgraph 0.0.1 wrote it"):
        bundle.read(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 1, "programs": [{"name": "a"}]}'])
def test_a_damaged_bundle_is_refused(content, tmp_path):
    (tmp_path / "bundle.json").write_text(content)
    with pytest.raises(BundleError, match="bundle"):
        bundle.read(tmp_path)


def spoilt(head: dict, *path, value=None) -> dict:
    """A copy of a bundle's head in which something is another thing, or is not there."""
    head = copy.deepcopy(head)
    at = head
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return head


@pytest.mark.parametrize(
    "path, value",
    [
        (("programs",), []),
        (("programs", 0, "passes", 1, "facts", "nodes"), None),
        (("programs", 0, "passes", 1, "figures"), {"seconds": "x"}),
        (("programs", 0, "passes"), []),
        (("programs", 0, "remarks"), [{"made_by": "me"}]),
        (("measured",), {"peak": "much"}),
        (("plan",), {"zero": 9}),
        (("hardware",), {"name": "x"}),
    ],
)
@pytest.mark.parametrize("name", ["memory", "passes", "diff", "explain", "report"])
def test_every_command_refuses_a_bundle_in_which_something_is_wrong(folder, path, value, name, tmp_path):
    shutil.copytree(folder, tmp_path / "b")
    head = json.loads((folder / "bundle.json").read_text())
    (tmp_path / "b/bundle.json").write_text(json.dumps(spoilt(head, *path, value=value)))
    out = ["-o", tmp_path / "out"] if name == "report" else []
    done = command(name, tmp_path / "b", *(["peak"] if name == "explain" else []), *out)
    if name in ("passes", "diff") and path[0] in ("plan", "hardware"):
        assert done.exit_code == 0  # (they need neither)
    else:
        assert done.exit_code == 2 and str(tmp_path / "b") in done.stderr, done.output


@pytest.mark.parametrize("content", ["[]", "{}", '{"nodes": [1]}', '{"nodes": [{"name": 1}]}'])
def test_a_damaged_program_of_a_bundle_is_named(folder, content, tmp_path):
    shutil.copytree(folder, tmp_path / "b")
    (tmp_path / "b/train/00-capture.json").write_text(content)
    for name in ("diff", "passes"):
        done = command(name, tmp_path / "b")
        assert done.exit_code == 2 and "00-capture.json" in done.stderr, done.output


def test_a_bundle_that_is_written_again_keeps_nothing_of_the_one_before(inspected, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "b")
    renamed = dataclasses.replace(inspected.way(), name="other", step="other")
    bundle.write(dataclasses.replace(inspected, ways={"other": renamed}), tmp_path / "b")
    assert [p.name for p in (tmp_path / "b").iterdir() if p.is_dir()] == ["other"]


def test_a_bundle_is_compared_with_a_model_under_a_plan(folder, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE / "support"))
    done = command("diff", folder, "cli_targets:factory", "--world", 4)
    assert done.exit_code == 0 and "whole step" in done.stdout, done.output


def test_a_folder_without_a_bundle_is_refused(tmp_path):
    done = command("memory", tmp_path)
    assert done.exit_code == 2 and "this folder is no bundle" in done.stderr


def test_a_program_of_a_bundle_that_is_gone_is_named(folder, tmp_path):
    (tmp_path / "bundle.json").write_text((folder / "bundle.json").read_text())
    done = command("dump", tmp_path)
    assert done.exit_code == 2 and "release.json" in done.stderr


# For other tools.


def test_the_timeline_is_a_valid_trace(inspected):
    """By the Trace Event Format: phases, times, names; each arrow has two ends, its head on the node that reads first."""
    trace = trace_of(inspected, ranks=2)
    events = trace["traceEvents"]
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    assert {e["ph"] for e in events} == {"M", "X", "C", "s", "f"}
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        assert event["ph"] == "M" or event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(v, int) for v in event["args"].values())
    for ph in "sf":
        ids = [e["id"] for e in events if e["ph"] == ph]
        assert len(ids) == len(set(ids)) > 0
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    for start in (e for e in events if e["ph"] == "s"):
        assert start["ts"] <= ends[start["id"]]["ts"] + 1e-6
    total = sum(e["dur"] for e in events if e["ph"] == "X" and e["cat"] == "train" and e["pid"] == 0)
    assert total == pytest.approx(sum(inspected.forecast.programs[0].busy.values()) * 1e6)


def test_lanes_of_a_trace_do_not_overlap_themselves(inspected):
    events = [e for e in trace_of(inspected)["traceEvents"] if e["ph"] == "X" and e["cat"] != "exposed"]
    for tid in {e["tid"] for e in events}:
        lane = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == tid)
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(lane))


@sweep(
    "changes",
    [
        {"offload": {"optimizer": "cpu", "parameters": "cpu"}},
        {"offload": {"optimizer": "cpu", "delayed_after": 1}},
        {"zero": 1, "micro_batches": 4},
        {"prefetch": {"across_steps": True}},
    ],
    quick=2,
)
def test_no_lane_does_two_things_at_once_and_the_trace_is_as_long_as_the_step(changes):
    case = models.stack(4)
    found = of_model(case.model, PLAN.model_copy(update=changes), case.inputs, 2)
    events = [e for e in trace_of(found)["traceEvents"] if e["ph"] == "X"]
    for tid in {e["tid"] for e in events}:
        for kind in ("busy", "exposed"):  # (a lane waits while it does nothing)
            lane = sorted(
                (e["ts"], e["ts"] + e["dur"])
                for e in events
                if e["tid"] == tid and (e["cat"] == "exposed") is (kind == "exposed")
            )
            assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(lane)), (tid, kind)
    before = sum(e["dur"] for e in events if e["cat"] == "before")
    if not found.late:
        assert max(e["ts"] + e["dur"] for e in events) - before == pytest.approx(found.forecast.seconds * 1e6)


def test_a_late_update_costs_the_device_what_it_computes():
    case = models.stack(4)
    plan = PLAN.model_copy(update={"offload": {"optimizer": "cpu", "delayed_after": 1}})
    step = of_model(case.model, plan, case.inputs, 2).forecast
    assert step.late and step.seconds >= sum(p.busy["compute"] for p in step.programs)


def test_parameters_that_are_not_used_take_memory_all_the_same():
    case = models.build("unused_parameter")
    found = of_model(case.model, PLAN.model_copy(update={"optimizer": None}), case.inputs, 1)
    taken = {port.name for port in found.way().last.program.inputs}
    idle = sum(p.nbytes for n, p in case.model.named_parameters() if n not in taken)
    assert idle and found.way().held == idle


def test_an_arrow_points_to_the_first_that_computes_with_a_weight(inspected):
    nodes = inspected.way().last.program.graph.nodes
    start = next(n for n in nodes if collectives.is_start(n) and info(n).role is Role.GATHER and "q_proj" in n.name)
    reader = first_reader(start)
    assert reader is not None and "mm" in str(reader.target)


def test_perfetto_reads_the_timeline(inspected, tmp_path):
    processor = pytest.importorskip("perfetto.trace_processor", reason="perfetto is not installed")
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace_of(inspected)))
    try:
        trace = processor.TraceProcessor(trace=str(path))
    except Exception as error:  # (the package fetches its parser, a program, when it is first used)
        pytest.skip(f"perfetto's parser can't be had here: {error}")
    with trace:
        slices = next(iter(trace.query("select count(*) as n from slice"))).n
        lanes = {row.name for row in trace.query("select name from thread")}
    assert slices == sum(e["ph"] == "X" for e in trace_of(inspected)["traceEvents"]) and "compute" in lanes


def test_the_memory_snapshot_opens_in_torchs_visualiser(inspected):
    from torch.cuda import _memory_viz

    data = pickle.loads(pickle_of(inspected))
    assert "viz" in _memory_viz.trace_plot(data).lower() and len(_memory_viz.segment_plot(data)) > 1000
    assert _memory_viz.trace(data)


def test_the_memory_snapshot_has_the_forecasts_peak_and_frees_what_it_allocates(inspected):
    live, size, most = {}, 0, 0
    for event in snapshot_of(inspected)["device_traces"][0]:
        if event["action"] == "alloc":
            assert all(event["addr"] + event["size"] <= a or a + n <= event["addr"] for a, n in live.items())
            live[event["addr"]] = event["size"]
            size += event["size"]
            most = max(most, size)
        elif event["action"] == "free_completed":
            size -= live.pop(event["addr"])
    assert not live and most == peak_of(inspected).bytes


def test_model_explorer_loads_the_graph_and_its_overlays(inspected):
    builder = pytest.importorskip("model_explorer.graph_builder", reason="ai-edge-model-explorer is not installed")
    data_builder = pytest.importorskip("model_explorer.node_data_builder")
    import dacite

    program = inspected.way().last.program
    strict = dacite.Config(strict=True)
    [collection] = [dacite.from_dict(builder.GraphCollection, c, strict) for c in explorer(program)]
    nodes = {n.id: n for n in collection.graphs[0].nodes}
    assert len(nodes) == len(program.graph.nodes)
    assert all(edge.sourceNodeId in nodes for n in nodes.values() for edge in n.incomingEdges)
    assert "forward/model/layers/0/self_attn/q_proj" in {n.namespace for n in nodes.values()}
    for data in overlays(program, inspected.costs).values():
        made = dacite.from_dict(data_builder.GraphNodeData, data[program.name], strict)
        assert made.results.keys() <= nodes.keys() and made.results


def test_a_drawing_has_every_node_once(inspected):
    program = inspected.way().last.program
    text = dot(program)
    assert text.startswith('digraph "train" {') and text.count("[label=") == len(program.graph.nodes)
    assert text.count("{") == text.count("}")


@sweep(
    "make", [lambda: models.build("uneven_mlp"), lambda: models.shallow("gpt2")], ids=["uneven_mlp", "gpt2"], quick=(0,)
)
def test_a_program_as_python_runs(make, tmp_path):
    """A program for one rank, of real numbers: the file's forward gives what the program gives."""
    case = make()
    program = of_model(case.model, PLAN, case.inputs, 1).way().last.program
    path = tmp_path / "made.py"
    path.write_text(python_source(program))
    namespace = {"__name__": "made"}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    given = namespace["inputs"]()
    torch.manual_seed(0)  # (the model has dropout)
    mine = namespace["forward"](namespace["constants"](), *given)
    torch.manual_seed(0)
    for a, b in zip(mine, program.module(*given), strict=True):
        assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def test_json_of_a_program_loads_back(inspected):
    program = inspected.way().last.program
    assert to_json(from_json(to_json(program))) == to_json(program)


# Beside a profile.


@sweep("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)], quick=(0,))
def test_a_profile_is_set_beside_the_forecast_node_by_node(backend, tmp_path):
    case = models.build("even_mlp")
    plan = PLAN.model_copy(update={"backend": backend, "hardware": "cpu"})
    model = zgraph.compile(case.model, plan)
    args, kwargs = (case.inputs, {}) if isinstance(case.inputs, tuple) else ((), case.inputs)
    for _ in range(2):
        model.train_step(*args, **kwargs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            model.train_step(*args, **kwargs)
    path = tmp_path / "trace.json"
    profile.export_chrome_trace(str(path))
    found = beside(model.zgraph.inspect(), json.loads(path.read_text()))
    assert {name for name, *_ in found.ranges} >= {"train0.forward", "train0.backward", "update0"}
    assert all(runs == 3 for *_, runs in found.ranges)
    products = [row for row in found.rows if row.operator in ("aten::mm", "aten::addmm")]
    calls = sum("mm" in str(n.target) for n in model.zgraph.inspect().way().last.program.graph.nodes)
    assert len(products) == calls and all(row.measured > 0 for row in products)


def test_on_cuda_a_nodes_time_is_that_of_its_kernels(inspected):
    """A profile as CUDA makes it: the host is done at once, and the kernel runs later."""
    node = next(n for n in inspected.way().last.program.graph.nodes if "mm" in str(n.target))
    same = {"pid": 1, "tid": 1, "ph": "X"}
    events = [
        {**same, "cat": "user_annotation", "name": "zgraph:train.forward", "ts": 0.0, "dur": 100.0},
        {**same, "cat": "cpu_op", "name": str(node.target._schema.name), "ts": 10.0, "dur": 20.0},
        {**same, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 15.0, "dur": 2.0, "args": {"correlation": 7}},
        {**same, "cat": "kernel", "name": "gemm", "pid": 0, "ts": 500.0, "dur": 250.0, "args": {"correlation": 7}},
    ]
    found = beside(inspected, {"traceEvents": events})
    row = next(r for r in found.rows if r.node == node.name)
    assert row.measured == pytest.approx(250e-6) and found.ranges[0][2] == pytest.approx(250e-6)


def test_a_profile_of_another_model_is_told(inspected):
    """Its operators ran more often than the program has nodes for them."""
    same = {"pid": 1, "tid": 1, "ph": "X"}
    events = [{**same, "cat": "user_annotation", "name": "zgraph:train.forward", "ts": 0.0, "dur": 100.0}]
    events += [
        {**same, "cat": "cpu_op", "name": "aten::convolution", "ts": float(at), "dur": 0.5} for at in range(1, 9)
    ]
    found = beside(inspected, {"traceEvents": events})
    assert found.strange == {"aten::convolution": 8} and "is it of this model and plan?" in str(found)


def test_a_profile_of_something_else_is_refused(inspected, tmp_path):
    with pytest.raises(TargetError, match="no program of zgraph"):
        beside(inspected, {"traceEvents": []})
    (tmp_path / "trace.json").write_text("{}")
    done = command("timeline", "cli_targets:factory", "--against", tmp_path / "trace.json")
    assert done.exit_code == 2 and "no profile" in done.stderr


# While a model runs.


def test_a_run_leaves_a_bundle_with_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("ZGRAPH_BUNDLE", str(tmp_path / "run"))
    case = models.build("even_mlp")
    model = zgraph.compile(case.model, PLAN)
    args, kwargs = (case.inputs, {}) if isinstance(case.inputs, tuple) else ((), case.inputs)
    for _ in range(6):
        model.train_step(*args, **kwargs)
    found = bundle.read(tmp_path / "run")
    assert found.ways.keys() == {"train0", "update0"} and found.measured["seconds"] > 0
    assert found.forecast.seconds == pytest.approx(model.zgraph.forecast().seconds)


def test_a_second_model_of_a_process_gets_a_bundle_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("ZGRAPH_BUNDLE", str(tmp_path / "run"))
    for _ in range(2):
        case = models.build("even_mlp")
        zgraph.compile(case.model, PLAN, inputs=case.inputs)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "run-2"]


def test_a_folder_that_can_not_be_written_is_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZGRAPH_BUNDLE", str(tmp_path / "file" / "run"))
    case = models.build("even_mlp")
    with pytest.raises(BundleError, match="can't be written here"):
        zgraph.compile(case.model, PLAN, inputs=case.inputs)


def test_a_disk_that_fills_up_ends_the_bundle_and_not_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ZGRAPH_BUNDLE", str(tmp_path / "run"))
    case = models.build("even_mlp")
    model = zgraph.compile(case.model, PLAN)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    args, kwargs = (case.inputs, {}) if isinstance(case.inputs, tuple) else ((), case.inputs)
    for _ in range(2):
        model.train_step(*args, **kwargs)
    assert "No space left on device" in caplog.text and model.zgraph.runtime.recorder is None


def test_passes_go_into_torchs_structured_trace(monkeypatch):
    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(f"{record.metadata} {record.payload}")

    heard: list[str] = []
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [Listening()])
    case = models.build("even_mlp")
    programs(case.model, zgraph.Plan(mesh={"dp": -1}, backend="eager"), case.inputs, 2)
    text = "".join(heard)
    assert "zgraph_train_00_capture" in text and "_shard_parameters" in text and "dist.all_gather" in text


@pytest.mark.slow
def test_passes_are_in_the_folder_of_torchs_structured_trace(tmp_path):
    code = """
import models, zgraph
from zgraph.build.planned_step import programs
case = models.build("even_mlp")
programs(case.model, zgraph.Plan(mesh={"dp": -1}, backend="eager"), case.inputs, 2)
"""
    env = {**os.environ, "TORCH_TRACE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=HERE, env=env, check=True)
    text = "".join(p.read_text() for p in tmp_path.iterdir())
    assert '"zgraph_train_00_capture"' in text and "_shard_parameters" in text and "dist.all_gather" in text


def test_a_run_of_several_micro_batches_leaves_all_of_their_programs(tmp_path, monkeypatch):
    monkeypatch.setenv("ZGRAPH_BUNDLE", str(tmp_path / "run"))
    case = models.stack(2)
    model = zgraph.compile(case.model, PLAN.model_copy(update={"zero": 1, "micro_batches": 4}))
    args, kwargs = (case.inputs, {}) if isinstance(case.inputs, tuple) else ((), case.inputs)
    model.train_step(*args, **kwargs)
    found = bundle.read(tmp_path / "run")
    assert {name: way.runs for name, way in found.ways.items()} == {
        "train0": 1,
        "train0-next": 2,
        "train0-last": 1,
        "update0": 1,
    }


# From Python.


def test_before_the_first_program_that_is_said():
    case = models.build("even_mlp")
    model = zgraph.compile(case.model, PLAN)
    for ask in (
        lambda: model.zgraph.explain("peak"),
        lambda: model.zgraph.report().html(),
        lambda: model.zgraph.inspect().way(),
    ):
        with pytest.raises(ZgraphError, match="there is no program yet"):
            ask()


def test_a_model_explains_itself(tmp_path):
    case = models.build("even_mlp")
    model = zgraph.compile(case.model, PLAN, inputs=case.inputs)
    name = next(iter(dict(model.named_parameters())))
    assert name in str(model.zgraph.explain(name)) and "after its start" in str(model.zgraph.explain("peak"))
    with pytest.raises(TargetError, match="did you mean 'overlap'"):
        model.zgraph.explain("overlop")
    report = model.zgraph.report()
    assert report._repr_html_().startswith("<iframe") and "<!doctype html>" in report.html().lower()
    report.save(tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 10_000
