"""What the documentation says is true: blocks run, commands exist, tables are complete.

A Python block that begins with a comment `# name.py` is a file, which the other blocks can import; one of TOML is a plan.
These run in order in one namespace, as a reader would type them; files that the README shows are there for every page.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
from sweeps import sweep

from zgraph.build import step_program
from zgraph.codegen.eager import compile_eager

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
GUIDE = ROOT / "docs/guide.md"
FEATURES = ROOT / "docs/features"
GENERATED = ROOT / "docs/reference"
"""Where the site has pages that are made from the code: no file is there."""
DOCUMENTS = [README, ARCHITECTURE, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md"))]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
WITH_CODE = [path for path in DOCUMENTS if "```python" in path.read_text()]
LONG = ("deepspeed.md", "huggingface.md")  # (their blocks train models, 20 s)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, language: str) -> list[tuple[int, str]]:
    """(line number, text) of each fenced block in that language."""
    text = path.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    return [(text[: m.start(1)].count("\n") + 1, m[1]) for m in found]


def file_name(block: str) -> str | None:
    first = re.match(r"# (\w+\.(?:py|toml))\n", block)
    return first[1] if first else None


def write_files(path: Path, folder: Path) -> None:
    for _, block in [*blocks(path, "python"), *blocks(path, "toml")]:
        if name := file_name(block):
            (folder / name).write_text(block)


def reference(name: str = "reference") -> ModuleType:
    """What makes the generated pages, or their charts."""
    spec = spec_from_file_location(name, ROOT / f"docs/generate/{name}.py")
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@cache
def text_of(path: Path) -> str | None:
    """A document's text, that of a page which is made from the code as well; None for any other file."""
    if path.is_relative_to(GENERATED):
        page = reference().PAGES.get(path.relative_to(ROOT / "docs").as_posix())
        return page() if page else None
    return path.read_text() if path.suffix == ".md" and path.is_file() else None


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current directory; modules can be imported from it, and are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


# -- code -------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@sweep("path", WITH_CODE, quick=[at for at, path in enumerate(WITH_CODE) if path.name not in LONG], ids=name_of)
def test_python_blocks_run(path, folder, capsys, monkeypatch):
    """Without Inductor, which would only take longer."""
    eagerly = lambda program, groups, **_: compile_eager(program, groups)  # noqa: E731
    monkeypatch.setattr(step_program, "compile_inductor", eagerly)
    run_blocks(path, folder)


@pytest.mark.inductor
@pytest.mark.slow
def test_inductor_compiles_what_the_readme_shows(folder, capsys):
    run_blocks(README, folder)


def run_blocks(path: Path, folder: Path) -> None:
    write_files(README, folder)
    write_files(path, folder)
    namespace: dict[str, object] = {"__name__": "docs"}
    for line, block in blocks(path, "python"):
        name = file_name(block)
        if name is None or (name == "train.py" and path == README):  # (a script, and the first that a reader runs)
            code = compile("\n" * (line - 1) + block, str(path), "exec")
            exec(code, namespace)
    if torch.distributed.is_initialized():  # (what DeepSpeed's `initialize` makes where there is none)
        torch.distributed.destroy_process_group()


def test_a_file_that_several_pages_show_is_the_same_program_on_each():
    shown: dict[str, str] = {}
    for path in WITH_CODE:
        for name, block in ((file_name(b), b) for _, b in blocks(path, "python")):
            if name is not None:
                program = ast.dump(ast.parse(block))
                assert shown.setdefault(name, program) == program, f"{name_of(path)}: {name}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_plans_that_are_shown_can_be_loaded(path, tmp_path):
    from zgraph.plan.plan import Plan

    for number, (_, block) in enumerate(blocks(path, "toml")):
        file = tmp_path / f"{number}.toml"
        file.write_text(block)
        Plan.load(file)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_the_new_side_of_a_diff_is_python(path):
    for _, block in blocks(path, "diff"):
        new = [line[1:] for line in block.splitlines() if not line.startswith("-")]
        ast.parse("\n".join(new))


@pytest.mark.core
def test_the_graphs_shown_in_the_readme_are_those_that_zgraph_dump_prints(folder):
    from zgraph.build.planned_step import programs
    from zgraph.cli.targets import load_target
    from zgraph.plan.plan import Plan
    from zgraph.program.printer import render

    write_files(README, folder)
    target = load_target("tiny:factory")
    plan = Plan.load(ROOT / "examples/plans/eager.toml")
    history = programs(target.model, plan, target.inputs, 2)
    (block,) = (text for _, text in blocks(README, "text") if "$ zgraph dump" in text)
    shown = [part.splitlines() for part in block.split("$ ")[1:]]
    assert len(shown) == 2
    for command, *lines in shown:
        program = history.after("cleanup") if "--after cleanup" in command else history.program
        printed = [" ".join(line.split()) for line in render(program, filter="down").splitlines()]
        at = 0
        for line in (" ".join(line.split()) for line in lines):
            if line not in ("", "…"):
                assert line in printed[at:], line
                at = printed.index(line, at) + 1
        assert ("…" in "".join(lines)) == (sum(bool(line.strip()) for line in lines) < len(printed) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("path", [GUIDE], ids=name_of)
def test_the_guides_commands_print_what_it_shows(path, folder, monkeypatch):
    """Each command is run; the lines shown come in this order, "…" stands for any lines, and in a line for anything."""
    from typer.testing import CliRunner

    from zgraph.cli.app import app

    write_files(path, folder)
    for line, block in blocks(path, "text"):
        for command, *shown in (part.splitlines() for part in block.split("$ zgraph ")[1:]):
            done = CliRunner().invoke(app, shlex.split(command))
            assert done.exit_code == 0, f"{name_of(path)}:{line}: {done.output}"
            printed = done.stdout.splitlines()
            at = 0
            for wanted in shown:
                if wanted in ("", "…"):
                    continue
                pattern = ".*".join(re.escape(" ".join(part.split())) for part in wanted.split("…"))
                match = [i for i, p in enumerate(printed[at:], at) if re.fullmatch(pattern, " ".join(p.split()))]
                assert match, f"{name_of(path)}:{line}: {wanted}\n{done.stdout}"
                at = match[0] + 1


# -- commands ---------------------------------------------------------------------------------------
def commands(path: Path) -> list[list[str]]:
    """Every `zgraph …` command in a document, in words: in blocks, after a prompt, and in running text."""
    text = path.read_text()
    found = [*blocks(path, "sh"), *blocks(path, "text")]
    lines = [line for _, block in found for line in block.splitlines()]
    lines += [m[1].replace("\n", " ") for m in re.finditer(r"`(zgraph [a-z][^`]*)`", text)]
    lines = [line.strip().removeprefix("$ ") for line in lines]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("zgraph ")]


@pytest.mark.core
@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_exist_with_their_options(path):
    import typer

    from zgraph.cli.app import app

    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for words in commands(path):
        assert words[1] in known, words
        command = known[words[1]]
        if hasattr(command, "commands") and words[2:]:  # (of a group: "zgraph ckpt inspect …")
            assert words[2] in command.commands, words
            command = command.commands[words[2]]
        options = {option for parameter in command.params for option in parameter.opts}
        given = [word.partition("=")[0] for word in words[2:] if word.startswith("-")]
        assert set(given) <= options, words


def test_the_pages_show_every_command():
    import typer

    from zgraph.cli.app import app

    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {words[1] for words in commands(FEATURES / "inspection.md")} == set(known)
    groups = {name: set(group.commands) for name, group in known.items() if hasattr(group, "commands")}
    shown = [words for path in FEATURES.glob("*.md") for words in commands(path)]
    for name, inner in groups.items():
        assert {words[2] for words in shown if words[1] == name and words[2:]} >= inner


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_make_targets_exist(path):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([\w-]+)", path.read_text())) <= targets


# -- tables, names and links ------------------------------------------------------------------------
def rows(path: Path, header: str) -> list[str]:
    """The first cell, without backquotes, of each row of the table whose first column is headed so."""
    text = path.read_text()
    found: list[str] = []
    for m in re.finditer(rf"^\| {re.escape(header)} \|.*\n\|[-| ]+\n((?:\|.*\n)+)", text, re.M):
        found += [row.split("|")[1].strip().strip("`") for row in m[1].splitlines()]
    return found


@pytest.mark.core
def test_the_plans_table_has_every_field_and_its_default():
    from zgraph.plan.plan import Plan

    page = FEATURES / "plan.md"
    assert rows(page, "field") == list(Plan.model_fields)
    text = page.read_text()
    for name, shown in {"mesh": '`{"dp": -1}`', "zero": "3", "backend": '`"inductor"`'}.items():
        assert re.search(rf"^\| `{name}` \|.*\| {re.escape(shown)} \|$", text, re.M)
    assert (Plan().mesh, Plan().zero, Plan().backend) == ({"dp": -1}, 3, "inductor")
    assert (Plan().param_persistence_threshold, Plan().passes) == (0, ())


def test_the_architecture_lists_every_rule_of_the_verifier():
    from zgraph.passes import verifier

    rules = [rule.__name__ for rule in verifier.RULES] + ["check_values"]
    assert [name for name in rows(ARCHITECTURE, "rule")] == rules


def test_the_architecture_lists_every_fact_that_passes_provide():
    from zgraph.build.pass_pipeline import build
    from zgraph.plan.plan import Plan

    text = ARCHITECTURE.read_text()
    for plan in (Plan(zero=1), Plan(zero=3)):
        for step in build(plan):
            for fact in step.contract.provides:
                assert f"`{fact}`" in text, fact


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_files_that_are_named_are_there(path):
    mentioned = re.findall(
        r"`((?:zgraph|passes|codegen|tests|examples|benchmarks|docs)/[\w/-]+\.\w+)`", path.read_text()
    )
    assert [name for name in mentioned if not (ROOT / name).exists()] == []


def test_the_way_of_a_call_names_files_that_are_there():
    named = [n for _, block in blocks(ARCHITECTURE, "text") for n in re.findall(r"\b[\w/]+/\w+\.py\b", block)]
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if "://" in link:
            continue
        target, _, heading = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        text = text_of(file)
        assert file.exists() or text is not None, link
        if heading:
            headings = re.findall(r"^#+ (.+)$", text, re.M)
            assert heading in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings], link


@pytest.mark.parametrize("path, most", [(README, 250), (ARCHITECTURE, 200)], ids=["README", "ARCHITECTURE"])
def test_what_is_read_first_is_short(path, most):
    assert len(path.read_text().splitlines()) <= most


def test_terms_stand_in_order_in_the_glossary():
    terms = rows(ROOT / "docs/glossary.md", "term")
    assert len(terms) > 40
    assert terms == sorted(terms, key=str.lower)


def test_the_sites_menu_has_every_page():
    import yaml

    menu = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2], re.M)
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    pages += reference().PAGES
    pages += [f"benchmarks/{path.name}" for path in (ROOT / "benchmarks/results").glob("*.md")]
    pages += ["index.md", "internals/architecture.md", "contributing.md", "changelog.md", "examples.md"]
    assert sorted(menu) == sorted(pages)
    assert yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]


# -- pages that are made from the code --------------------------------------------------------------
def test_the_plan_reference_has_every_field_with_an_example_that_is_a_plan(tmp_path):
    from zgraph.plan.plan import Plan

    page = text_of(GENERATED / "plan.md")
    parts = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    for name in Plan.model_fields:
        (example,) = re.findall(r"^```toml\n(.*?)^```$", parts[name], re.M | re.S)
        file = tmp_path / f"{name}.toml"
        file.write_text(example)
        plan = Plan.load(file)
        assert getattr(plan, name) != getattr(Plan(), name), f"{name}: the example is the default"
        assert "| type | default |" in parts[name] and "any value" not in parts[name]
    for record in ("Precision", "Bucket", "Prefetch", "Offload", "AdamW", "Cosine", "Elastic", "Watch"):
        assert "| field | type | default | meaning |" in parts[f"{record} (record)"]
    assert [row for row in page.splitlines() if row.endswith("|  |")] == [], "a field without a description"


def test_the_passes_reference_has_every_pass_of_a_pipeline():
    from zgraph.build.pass_pipeline import build, build_update_passes
    from zgraph.plan.optimizers import AdamW
    from zgraph.plan.plan import Plan

    listed = set(re.findall(r"^### (\w+)$", text_of(GENERATED / "passes.md"), re.M))
    plans = [
        Plan(zero=1),
        Plan(zero=3),
        Plan(zero=3, mesh={"dp": 2, "tp": 2}),
        Plan(mesh={"dp": 2, "cp": 2}, recompute="full"),
    ]
    for plan in plans:
        assert {step.name for step in build(plan)} <= listed
    assert {step.name for step in build_update_passes(Plan(optimizer=AdamW()))} <= listed


def test_the_command_reference_has_every_command_and_option():
    import typer

    from zgraph.cli.app import app

    page = text_of(GENERATED / "commands.md")
    parts = dict(re.findall(r"^## (zgraph [\w ]+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    for path, command in reference().walk("zgraph", typer.main.get_command(app)):
        for parameter in command.params:
            assert all(f"{option}" in parts[path] for option in parameter.opts if option.startswith("-")), (
                path,
                parameter,
            )


def test_the_other_references_have_every_public_name():
    import zgraph

    errors = re.findall(r"^## (\w+)$", text_of(GENERATED / "errors.md"), re.M)
    assert errors == list(zgraph.errors.__all__)
    described = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", text_of(GENERATED / "api.md"), re.M)}
    assert set(zgraph.__all__) - {"__version__", "errors"} <= described


def test_every_public_function_says_what_it_is():
    import zgraph
    from zgraph import passes
    from zgraph.api.handle import Handle

    public = {name: getattr(zgraph, name) for name in zgraph.__all__ if name not in ("__version__", "errors")}
    public |= {name: getattr(passes, name) for name in passes.__all__}
    public |= {name: value for name, value in vars(Handle).items() if not name.startswith("_")}
    own = {n: vars(v).get("__doc__") if isinstance(v, type) else v.__doc__ for n, v in public.items()}
    # (a dataclass without a docstring is given its signature as one)
    assert [name for name, doc in own.items() if not doc or doc.startswith(f"{name}(")] == []


def test_results_are_drawn_from_their_tables():
    plots = reference("plots")
    results = {path.stem: path.read_text() for path in (ROOT / "benchmarks/results").glob("*.md")}
    assert set(plots.PLOTS) <= set(results)
    for name, plot in plots.PLOTS.items():
        rows = plots.groups(results[name], plot)
        assert len(rows) >= 3 and all(set(bars) <= set(plot.bars) for _, bars in rows), name
        assert f"{rows[0][1][next(iter(plot.bars))]:g}</text>" in plots.with_plot(name, results[name])
