"""A plan takes what it knows and refuses all else, means the same in every format, and can't be changed."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zgraph.errors import MeshError, PlanError
from zgraph.plan import planfile
from zgraph.plan.clipping_and_ema import Clip
from zgraph.plan.communication import Prefetch
from zgraph.plan.conflicts import CONFLICTS
from zgraph.plan.offloading import Offload
from zgraph.plan.plan import MESH_DIMENSIONS, Plan, Record, UserPass
from zgraph.plan.precision import Precision
from zgraph.plan.shapes import Buckets, Hot
from zgraph.plan.wire import Wire

pytestmark = pytest.mark.core

SUFFIXES = [".toml", ".yaml", ".yml", ".json"]


class Bucket(Record, frozen=True):
    """A record inside a plan, as later fields are."""

    max_bytes: int = 1024


class NestedPlan(Plan, frozen=True):
    bucket: Bucket | None = Bucket()


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Writes a plan file and loads it; `where` in errors then begins with the bare file name."""
    monkeypatch.chdir(tmp_path)

    def load(name: str, text: str, kind: type[Plan] = Plan) -> Plan:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return kind.load(name)

    return load


def test_the_default_is_zero3_over_all_ranks_compiled_by_inductor():
    plan = Plan()
    assert (plan.mesh, plan.zero, plan.backend) == ({"dp": -1}, 3, "inductor")
    assert (plan.param_persistence_threshold, plan.passes) == (0, ())


# Refusals.


@pytest.mark.parametrize(
    ("values", "where", "says"),
    [
        ({"zreo": 3}, "zreo", "did you mean 'zero'?"),
        ({"Backend": "eager"}, "Backend", "did you mean 'backend'?"),
        ({"qqqq": 3}, "qqqq", "the known ones are mesh, zero, backend"),
        ({"zero": 4}, "zero", "0, 1, 2 or 3"),
        ({"recompute": None}, "recompute", "None is no way of recomputing"),
        ({"recompute": ["blocks.*", 3]}, "recompute", "3 is no pattern"),
        (
            {"optimizer": {"name": "AdamW"}, "offload": {"delayed_after": 0}},
            "offload.delayed_after",
            "stay on the device",
        ),
        ({"optimizer": {"name": "AdamW"}, "offload": {"ratio": 0.5}}, "offload.ratio", "stay on the device"),
        ({"zero": True}, "zero", "not an integer"),
        ({"zero": 3.0}, "zero", "not an integer"),
        ({"zero": "3"}, "zero", "not an integer"),
        ({"backend": "eagr"}, "backend", "'inductor' or 'eager'"),
        ({"param_persistence_threshold": -1}, "param_persistence_threshold", "greater than or equal to 0"),
        ({"param_persistence_threshold": True}, "param_persistence_threshold", "valid integer"),
        ({"mesh": 8}, "mesh", "valid dictionary"),
        ({"mesh": {"replicat": 2}}, "mesh.replicat", "did you mean 'replicate'?"),
        ({"mesh": {"dp": 0}}, "mesh.dp", "positive size"),
        ({"mesh": {"dp": -2}}, "mesh.dp", "positive size"),
        ({"mesh": {"dp": 2.0}}, "mesh.dp", "valid integer"),
        ({"mesh": {"dp": True}}, "mesh.dp", "valid integer"),
        ({"mesh": {"dp": -1, "replicate": -1}}, "mesh", "only one mesh dimension can be -1"),
        ({"mesh": {"dp": 2}, "sequence_dim": 1}, "sequence_dim", "without ranks that divide a sequence"),
        ({"schedule": "zb"}, "schedule", "without a pipeline"),
        ({"mesh": {"pp": 2}, "schedule": "1f1bb"}, "schedule", "did you mean '1f1b'?"),
        ({"mesh": {"pp": 2}, "partition": "tim"}, "partition", "did you mean 'time'?"),
        ({"mesh": {"pp": 2}, "partition": []}, "partition", "names no module"),
        ({"mesh": {"pp": 2}, "partition": ["h.1", "h.1"]}, "partition", "or one twice"),
        ({"mesh": {"pp": 2}, "partition": "type:["}, "partition", "no pattern"),
        ({"mesh": {"pp": 2}, "virtual_stages": 0}, "virtual_stages", "greater than or equal to 1"),
        ({"passes": "pkg:f"}, "passes", "valid tuple"),
        ({"passes": ["pkg.f"]}, "passes[0]", "package.module:function"),
        ({"passes": ["pkg:f", "pkg:g behind h"]}, "passes[1]", "before NAME"),
        (
            {"passes": [test_the_default_is_zero3_over_all_ranks_compiled_by_inductor]},
            "passes[0]",
            "write its name",
        ),
    ],
)
def test_a_bad_value_is_refused_with_its_place_and_the_way_out(values, where, says):
    with pytest.raises(PlanError) as caught:
        Plan(**values)
    assert caught.value.where == where
    assert says in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_every_conflict_names_a_field_of_the_plan_and_a_way_out():
    for row in CONFLICTS:
        record, _, field = row.where.partition(".")
        inner = {
            "grad_clip": [Clip],
            "prefetch": [Prefetch],
            "offload": [Offload],
            "wire": [Wire],
            "precision": [Precision],
            "shapes": [Buckets, Hot],
        }
        records = inner.get(record, [])
        assert record in Plan.model_fields and (not field or any(field in one.model_fields for one in records))
        assert row.hint and not row.when(Plan())
        assert row.error(Plan()).where == row.where


@pytest.mark.parametrize(
    "make",
    [
        lambda: Plan(zreo=3),
        lambda: Plan.model_validate({"zreo": 3}),
        lambda: Plan.model_validate_json('{"zreo": 3}'),
        lambda: Plan().model_copy(update={"zreo": 3}),
        lambda: NestedPlan(bucket={"zreo": 3}),
        lambda: NestedPlan.model_validate({"bucket": {"zreo": 3}}),
        lambda: Bucket(zreo=3),
    ],
)
def test_no_way_of_making_a_plan_takes_an_unknown_key(make):
    with pytest.raises(PlanError, match="unknown key 'zreo'"):
        make()


def test_an_unknown_key_in_a_record_names_the_path_and_the_nearest_key_of_that_record():
    with pytest.raises(PlanError) as caught:
        NestedPlan(bucket={"max_byts": 3})
    assert caught.value.where == "bucket.max_byts"
    assert caught.value.hint == "did you mean 'max_bytes'?"


def test_all_faults_are_told_at_once():
    with pytest.raises(PlanError) as caught:
        NestedPlan(zreo=3, backend="x", bucket={"a": 1, "b": 2})
    assert {problem.where for problem in caught.value.problems} == {"zreo", "backend", "bucket.a", "bucket.b"}
    assert all(problem.what in str(caught.value) for problem in caught.value.problems)


def test_a_plan_and_its_mesh_cannot_be_changed():
    plan = Plan(mesh={"dp": 4})
    with pytest.raises(PlanError):
        plan.zero = 1
    with pytest.raises(PlanError):
        del plan.zero
    for change in (
        lambda: plan.mesh.update(dp=2),
        lambda: plan.mesh.__setitem__("dp", 2),
        lambda: plan.mesh.pop("dp"),
        lambda: plan.mesh.clear(),
    ):
        with pytest.raises(PlanError):
            change()
    assert plan == Plan(mesh={"dp": 4})


def test_a_copy_with_a_bad_value_is_refused():
    with pytest.raises(PlanError):
        Plan().model_copy(update={"zero": 7})


# Values.


def test_the_mesh_is_ordered_outermost_first_however_it_was_given():
    assert list(Plan(mesh={"dp": 4, "replicate": 2}).mesh) == ["replicate", "dp"]
    assert list(Plan(mesh=dict.fromkeys(reversed(MESH_DIMENSIONS), 1)).mesh) == list(MESH_DIMENSIONS)


def test_equality_and_hash_are_of_values_not_of_origins(load):
    loaded = load("p.toml", "zero = 3\n")
    assert loaded == Plan() == Plan(zero=3)
    assert len({loaded, Plan(), Plan(zero=3)}) == 1
    assert loaded.hash() == Plan().hash()
    assert Plan(zero=2) != Plan()
    assert Plan(zero=2).hash() != Plan().hash()
    assert Plan() != {"zero": 3}


def test_the_hash_does_not_depend_on_the_process():
    code = "from zgraph.plan.plan import Plan; print(Plan(mesh={'dp': 4, 'replicate': 2}, passes=('a:b',)).hash())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == Plan(mesh={"replicate": 2, "dp": 4}, passes=("a:b",)).hash()


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_copies_and_pickles_are_equal_and_keep_origins(clone, load):
    plan = load("p.json", '{"mesh": {"replicate": 2, "dp": -1}, "bucket": {"max_bytes": 7}}', NestedPlan)
    twin = clone(plan)
    assert twin == plan
    assert hash(twin) == hash(plan)
    assert twin.origins() == plan.origins()
    with pytest.raises(PlanError):
        twin.mesh["dp"] = 3


def test_origins_tell_default_from_given_from_file(load):
    plan = load("p.toml", "zero = 1\n").model_copy(update={"backend": "eager"})
    origins = plan.origins()
    assert (origins["zero"], origins["backend"], origins["mesh"]) == ("file p.toml", "given", "default")


def test_a_plan_prints_each_field_with_value_and_origin():
    header, *rows = str(Plan(mesh={"replicate": 2, "dp": -1}, zero=1)).splitlines()
    assert header.split() == ["field", "value", "origin"]
    assert [row.split()[0] for row in rows] == list(Plan.model_fields)
    assert rows[0].split() == ["mesh", "replicate=2", "dp=-1", "given"]
    assert rows[1].split() == ["zero", "1", "given"]
    assert rows[2].split() == ["backend", "inductor", "default"]


def test_repr_is_what_differs_from_the_defaults_and_makes_the_plan_again():
    plan = Plan(mesh={"dp": 4}, zero=2, backend="inductor", passes=("a.b:c after d",))
    assert repr(plan) == "Plan(mesh={'dp': 4}, zero=2, passes=('a.b:c after d',))"
    assert eval(repr(plan)) == plan


def test_user_passes_are_parsed_with_their_place():
    plan = Plan(passes=["pkg.mod:first", " pkg:Class.second   after   zero_reduce ", "pkg:third before zero-gather"])
    assert plan.user_passes() == (
        UserPass("pkg.mod:first"),
        UserPass("pkg:Class.second", "after", "zero_reduce"),
        UserPass("pkg:third", "before", "zero-gather"),
    )
    assert plan.passes[1] == "pkg:Class.second after zero_reduce"  # one way to write it, so one hash


# Meshes and worlds.


@pytest.mark.parametrize(
    ("mesh", "world", "resolved"),
    [
        ({"dp": -1}, 8, {"dp": 8}),
        ({"dp": -1}, 1, {"dp": 1}),
        ({"replicate": 2, "dp": -1}, 8, {"replicate": 2, "dp": 4}),
        ({"replicate": -1, "dp": 4}, 4, {"replicate": 1, "dp": 4}),
        ({"replicate": 2, "dp": 4}, 8, {"replicate": 2, "dp": 4}),
        ({"replicate": 4}, 4, {"replicate": 4}),
        ({}, 1, {}),
    ],
)
def test_a_mesh_takes_its_rest_from_the_world(mesh, world, resolved):
    assert Plan(mesh=mesh).resolve_mesh(world) == resolved


@pytest.mark.parametrize(
    ("mesh", "world"),
    [
        ({"dp": 3}, 4),
        ({"dp": 4}, 2),
        ({"replicate": 3, "dp": -1}, 8),
        ({"replicate": 4, "dp": -1}, 2),
        ({}, 2),
    ],
)
def test_a_mesh_that_does_not_divide_the_world_is_refused_naming_both(mesh, world):
    with pytest.raises(MeshError) as caught:
        Plan(mesh=mesh).resolve_mesh(world)
    assert str(world) in caught.value.what
    assert all(f"{name}={size}" in caught.value.what for name, size in mesh.items())
    assert caught.value.hint


# Files.

sizes = st.integers(1, 2**40)
plans = st.builds(
    NestedPlan,
    mesh=st.one_of(
        st.fixed_dictionaries({}, optional={"dp": st.just(-1) | sizes, "replicate": sizes}),
        st.just({"replicate": -1, "dp": 2}),
    ),
    zero=st.integers(0, 3),
    backend=st.sampled_from(["inductor", "eager"]),
    param_persistence_threshold=st.integers(0, 2**60),
    passes=st.lists(st.sampled_from(["a:b", "módulo.ü:f", "a.b:C.d after x", "a:b before x-y.z"])),
    bucket=st.builds(Bucket, max_bytes=st.integers(0, 2**60)),
)


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=40, deadline=None)
@given(plan=plans)
def test_every_plan_comes_back_from_every_format(suffix, tmp_path_factory, plan):
    file = tmp_path_factory.mktemp("plan") / f"plan{suffix}"
    plan.save(file)
    assert NestedPlan.load(file) == plan


def test_a_plan_that_a_format_would_change_is_not_written(tmp_path):
    # TOML has no null: a field that is None where that is not its default would come back as the default.
    plan = NestedPlan(bucket=None)
    with pytest.raises(PlanError, match=r"save it as \.json"):
        plan.save(tmp_path / "plan.toml")
    assert not (tmp_path / "plan.toml").exists()
    plan.save(tmp_path / "plan.json")
    assert NestedPlan.load(tmp_path / "plan.json") == plan


scalars = st.text(st.characters(exclude_categories=["Cs"])) | st.integers() | st.booleans() | st.floats(allow_nan=False)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


@settings(deadline=None)
@given(
    data=st.dictionaries(keys, st.recursive(scalars, lambda x: st.lists(x) | st.dictionaries(keys, x), max_leaves=8))
)
def test_any_plain_data_comes_back_from_our_toml(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "any.toml"
    assert planfile.parse(planfile.render(data, file), file) == data


def test_saving_writes_defaults_too_so_that_the_file_outlives_them(tmp_path):
    Plan().save(tmp_path / "plan.json")
    assert set(json.loads((tmp_path / "plan.json").read_text())) == set(Plan.model_fields)


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("p.toml", "# a plan\nzreo = 3\n", "p.toml:2: zreo"),
        ("p.toml", "[mesh]\ndp = 2\nreplicat = 2\n", "p.toml:3: mesh.replicat"),
        ("p.toml", "zero = 3\n\n[buckets]\nx = 1\n", "p.toml:3: buckets"),
        ("p.toml", 'passes = [\n"a:b",\n"c"]\n', "p.toml:1: passes[1]"),
        ("p.yaml", "zero: 3\nmesh:\n  replicat: 2\n", "p.yaml:3: mesh.replicat"),
        ("p.yml", "zero: 7\n", "p.yml:1: zero"),
        ("p.json", '{"zero": 3,\n "zreo": 3}', "p.json:2: zreo"),
        # Given twice.
        ("p.toml", "zero = 3\nzero = 3", "p.toml:2"),
        ("p.yaml", "zero: 3\nmesh: {}\nzero: 3\n", "p.yaml:3"),
        ("p.yaml", "mesh:\n  dp: 3\n  dp: 4\n", "p.yaml:3"),
        ("p.json", '{"zero": 3,\n "zero": 3}', "p.json:2"),
        # Not in the format at all.
        ("p.toml", "zero = 3\nbackend: eager\n", "p.toml:2"),
        ("p.yaml", "zero: 3\nmesh: {dp: 1\n", "p.yaml:3"),
        ("p.json", '{"zero": 3,\n}', "p.json:2"),
        ("p.json", "", "p.json:1"),
        ("p.json", "[" * 200_000, "p.json"),
        ("p.json", "[1]", "p.json"),
        ("p.yaml", "!!python/object/apply:os.getcwd []", "p.yaml:1"),
        ("p.ini", "zero = 3", "p.ini"),
    ],
)
def test_a_fault_in_a_file_names_file_and_line(load, name, text, where):
    with pytest.raises(PlanError) as caught:
        load(name, text)
    assert caught.value.where == where


def test_a_missing_a_binary_and_a_nameless_file_are_plan_errors(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.toml").mkdir()
    for name in ("missing.toml", "binary.toml", "folder.toml", "plan"):
        with pytest.raises(PlanError, match=name):
            Plan.load(tmp_path / name)


def test_saving_where_nothing_can_be_written_is_a_plan_error(tmp_path):
    with pytest.raises(PlanError, match="can't be written"):
        Plan().save(tmp_path / "missing" / "plan.toml")


def test_an_empty_file_is_the_default_plan(load):
    assert load("p.toml", "") == load("p.yaml", "# nothing\n") == load("p.json", "{}") == Plan()


def test_yaml_anchors_and_merges_may_still_override(load):
    assert load("p.yaml", "mesh: {<<: {dp: 2}, dp: 4}\n").mesh == {"dp": 4}


def test_the_json_schema_names_every_field_and_forbids_others():
    schema = Plan.json_schema()
    assert set(schema["properties"]) == set(Plan.model_fields)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["zero"]["enum"] == [0, 1, 2, 3]
    assert set(schema["properties"]["mesh"]["properties"]) == {"pp", "replicate", "dp", "cp", "tp"}
    assert all(field["description"] for field in schema["properties"].values())


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("field", ["max_bytes", "spare_bytes", "ahead_bytes", "reuse_bytes"])
def test_bounds_on_what_only_stage_3_gathers_for_a_time_are_refused_elsewhere(zero, field):
    with pytest.raises(PlanError, match=f"prefetch.{field}"):
        Plan(zero=zero, prefetch={field: 10**6})
    assert Plan(zero=3, prefetch={field: 10**6}) and Plan(zero=zero, prefetch={"reduce_bytes": 10**6})
