"""The report is one page that needs nothing else, holds every program whole, and can be used in a browser.

The tests in a browser need Chromium and its driver (on Debian and Ubuntu: apt install chromium chromium-driver).
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import models
import pytest
import torch
from sweeps import sweep
from torch import nn
from typer.testing import CliRunner

from zgraph.build.pass_pipeline import PassFilter
from zgraph.cli.app import app
from zgraph.inspection import bundle
from zgraph.inspection.html_report import html_report
from zgraph.inspection.inspection import Inspection
from zgraph.inspection.make_inspection import of_model
from zgraph.inspection.memory import peak_of
from zgraph.inspection.page import SCRIPTS
from zgraph.inspection.page.data import runs, unpack
from zgraph.inspection.page.parameters import parameters_of
from zgraph.plan.plan import Plan
from zgraph.program.printer import render

HERE = Path(__file__).parents[1]
ASSETS = HERE.parent / "zgraph" / "inspection" / "page"
ADAMW = {"name": "AdamW", "lr": 1e-3}
HOSTILE = "</script><img src=x onerror=alert(1)>"
FIRST_PAINT = 3.0  # seconds, of a program with so many nodes
MANY = 20_000
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")

in_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs Chromium and its driver: apt install chromium chromium-driver"
)


def inspected(model: nn.Module, inputs: tuple, world: int = 2, origin: str = "test", **plan) -> Inspection:
    return of_model(model, Plan(**plan), inputs, world, origin=origin)


def of_net(world: int = 2, **plan) -> Inspection:
    return inspected(models.built(), models.batch(), world, **{"zero": 3, **plan})


@pytest.fixture(scope="module")
def training() -> Inspection:
    """A step with an update."""
    return of_net(optimizer=ADAMW)


class Hostile(nn.Module):
    """Its module's name would end the page's script, and run one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(HOSTILE, nn.Linear(7, 5))

    def forward(self, x):
        return getattr(self, HOSTILE)(x).sum()


def of_hostile() -> Inspection:
    found = inspected(Hostile(), (torch.randn(4, 7),), origin=f"a model {HOSTILE}", zero=3)
    way = found.way()
    node = way.last.program.nodes[5].name
    said = {"made_by": HOSTILE, "node": node, "what": HOSTILE, "why": "&lt;", "remedy": "'\"", "seconds": 1e-3}
    way.remarks.append({**said, "text": HOSTILE})
    return found


def of_evaluation() -> Inspection:
    return inspected(models.built().requires_grad_(False), models.batch(), zero=3)


def block_of(page: str) -> dict:
    """The data in a page."""
    found = re.search(r'<script type="application/gzip" id="data">([A-Za-z0-9+/=]*)</script>', page)
    assert found is not None
    return unpack(found[1])


def expanded(packed: list[int]) -> list[int]:
    return [first + i for first, count in zip(packed[::2], packed[1::2], strict=True) for i in range(count)]


# -- the page as a file ---------------------------------------------------------------------------------------------
class Elements(HTMLParser):
    """How many elements of each kind a page has, and the attributes of all of them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += attrs


def test_the_page_asks_for_nothing_but_itself(training):
    elements = Elements(html_report(training))
    targets = [value for name, value in elements.attributes if name in ("href", "src", "action", "data", "srcset")]
    assert targets and all(str(target).startswith("#") for target in targets)
    assert elements.tags["link"] == elements.tags["img"] == elements.tags["iframe"] == 0
    texts = "".join((ASSETS / name).read_text() for name in ("page.css", *SCRIPTS))
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(|https://", texts)
    assert set(re.findall(r"http://[^\"]*", texts)) == {"http://www.w3.org/2000/svg"}  # (a name, not a place)


def test_every_script_beside_the_page_is_in_it():
    assert sorted(SCRIPTS) == sorted(path.name for path in ASSETS.glob("*.js"))


def test_the_page_allows_no_script_but_its_own(training):
    page = html_report(training)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and "default-src 'none'" in policy[1] and "unsafe" not in policy[1]
    assert not [name for name, _ in Elements(page).attributes if name.startswith("on") or name == "style"]


def test_the_page_holds_every_line_of_every_program_after_every_pass(training):
    data = block_of(html_report(training))
    assert [p["name"] for p in data["programs"]] == list(training.ways)
    for program, way in zip(data["programs"], training.ways.values(), strict=True):
        for shown, snapshot in zip(program["passes"], way.snapshots, strict=True):
            text = "\n".join(data["rows"]["text"][row] for row in expanded(shown["rows"]))
            assert text + "\n" == render(snapshot.program)


def test_a_line_that_passes_leave_alone_is_in_the_page_once(training):
    data = block_of(html_report(training))
    lines = Counter(text for text in data["rows"]["text"] if " = aten.mm(" in text)
    shown = sum(len(expanded(p["rows"])) for program in data["programs"] for p in program["passes"])
    assert lines and set(lines.values()) == {1}
    assert len(data["rows"]["text"]) < shown / 3


def test_runs_give_back_what_they_were_made_of():
    for numbers in ([], [3], [0, 1, 2, 7, 8, 3, 3, 4]):
        assert expanded(runs(numbers)) == numbers


def test_names_that_are_markup_are_text():
    page = html_report(of_hostile())
    tags = Elements(page).tags
    assert tags["img"] == 0 and tags["script"] == 2
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in page
    assert any(HOSTILE in text for text in block_of(page)["strings"])


def test_a_page_of_a_bundle_is_that_of_the_live_step_but_for_its_origin(training, tmp_path):
    bundle.write(training, tmp_path / "bundle")
    read = bundle.read(tmp_path / "bundle")
    read.origin = training.origin
    live, other = html_report(training), html_report(read)
    assert block_of(live) == block_of(other)
    assert live == other
    assert (tmp_path / "bundle" / "report.html").read_text() == live + "\n"


def test_what_was_measured_stands_beside_the_forecast():
    found = of_net()
    assert "measured (" not in html_report(found)
    found.measured = {"steps": 5, "seconds": found.forecast.seconds * 2, "peak": peak_of(found).bytes}
    page = html_report(found)
    assert "measured (forecast -50.0%)" in page and "measured (forecast +0.0%)" in page


# -- parameters -----------------------------------------------------------------------------------------------------
def parameters(found: Inspection) -> dict[str, dict]:
    update = found.update
    rows = parameters_of(found.way().last.program, update.last.program if update else None)
    return {row["name"]: row for row in rows}


def test_zero3_parameters_are_gathered_for_each_phase_but_for_the_last_which_is_held(training):
    case = models.stack(3)
    rows = parameters(inspected(case.model, case.inputs, zero=3))
    said = {name: (row["forward"], row["backward"], row["between"]) for name, row in rows.items()}
    assert said["layers.0.3.weight"] == (1, 1, "released after use")
    assert said["layers.2.3.weight"] == (1, 0, "kept for the backward")


def test_a_shard_its_gradient_and_its_states_are_counted_in_bytes_of_a_rank(training):
    row = parameters(training)["last.weight"]
    assert (row["layout"], row["rows"], row["reduction"]) == ("Shard(0) over dp", 3, "reduce_scatter avg over dp")
    assert row["bytes"] == row["gradient"] == 3 * 12 * 4
    assert row["states"] == 2 * row["bytes"]  # AdamW's two


def test_readers_of_a_parameter_are_what_computes_with_it_not_what_brings_it(training):
    row, nodes = parameters(training)["first.weight"], training.way().last.program.nodes
    first, last = (next(n for n in nodes if n.name == row[key]) for key in ("first", "last"))
    assert "addmm" in str(first.target) or "mm" in str(first.target)
    assert nodes.index(first) <= nodes.index(last)


def test_zero1_parameters_are_kept_and_those_of_plain_data_parallelism_are_whole():
    kept, whole = (parameters(of_net(zero=stage))["last.weight"] for stage in (1, 0))
    assert (kept["between"], kept["backward"]) == ("kept until weights change", 0)
    assert (whole["between"], whole["layout"], whole["forward"]) == ("always whole", "whole", 0)
    assert whole["reduction"] == "all_reduce avg over dp"


# -- the command ----------------------------------------------------------------------------------------------------
def test_the_command_writes_a_page_and_says_where(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(HERE / "support"))
    done = CliRunner().invoke(app, ["report", "cli_targets:factory", "--world", "2", "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    page = (tmp_path / "zgraph-report.html").read_text()
    assert said["report"] == "zgraph-report.html" and said["bytes"] == len(page.encode())
    assert said["programs"][0]["nodes"] == len(block_of(page)["programs"][0]["forecast"]["clock"])


def test_the_command_refuses_a_place_that_cannot_be_written_and_a_target_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE / "support"))
    for args in (["cli_targets:factory", "-o", str(tmp_path / "no" / "page.html")], ["cli_targets:factori"]):
        assert CliRunner().invoke(app, ["report", *args]).exit_code == 2


# -- in a browser ---------------------------------------------------------------------------------------------------
class Browser:
    """A page in headless Chromium."""

    def __init__(self, folder: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for switch in (
            "headless=new",
            "no-sandbox",
            "disable-gpu",
            "disable-quic",
            "no-first-run",
            "disable-background-networking",
            "disable-component-update",
            "disable-sync",
            "disable-dev-shm-usage",
            "window-size=1500,1100",
            f"user-data-dir={folder / 'profile'}",
        ):
            options.add_argument(f"--{switch}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.folder = folder
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))

    def open(self, page: str, name: str = "page", at: str = "") -> None:
        path = self.folder / f"{name}.html"
        path.write_text(page)
        self.driver.get("about:blank")  # (another fragment alone would not load the page anew)
        self.errors()
        self.driver.get(f"{path.as_uri()}{at}")
        self.until("document.documentElement.dataset.ready === 'yes'")

    def run(self, script: str, *args):
        return self.driver.execute_script(script, *args)

    def get(self, expression: str, *args):
        return self.run(f"return {expression}", *args)

    def until(self, expression: str, *args, seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not self.get(expression, *args):
            assert time.monotonic() < end, f"not within {seconds} s: {expression}; {self.errors()}"
            time.sleep(0.03)

    def text(self, selector: str) -> str:
        return self.get("document.querySelector(arguments[0]).textContent", selector)

    def texts(self, selector: str) -> list[str]:
        return self.get("[...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector)

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def enter(self, selector: str, value: str) -> None:
        """Put a value into a field, as a user would."""
        self.run(
            "const field = document.querySelector(arguments[0]); field.value = arguments[1];"
            "for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, {bubbles: true}))",
            selector,
            value,
        )

    def show(self, section: str) -> None:
        """Scroll to a section; it has drawn itself then."""
        self.run("document.getElementById(arguments[0]).scrollIntoView()", section)
        drawn = {
            "pipeline": "document.querySelector('#text .line')",
            "graph": "document.querySelector('#nodes .node')",
            "memory": "document.querySelector('#memory-legend b')",
            "timeline": "document.querySelector('#timeline-legend b')",
            "parameters": "document.querySelector('#parameter-table tbody tr')",
        }[section]
        self.until(f"{drawn} !== null")

    def at(self, selector: str, across: float, down: float):
        """The pointer over an element, at shares of its width and height."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.by import By

        found = self.driver.find_element(By.CSS_SELECTOR, selector)
        size = found.size
        pixels = int((across - 0.5) * size["width"]), int((down - 0.5) * size["height"])
        return ActionChains(self.driver, duration=50).move_to_element_with_offset(found, *pixels)

    def errors(self) -> list[str]:
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    pytest.importorskip("selenium", reason="needs selenium: pip install selenium")
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.driver.quit()


@pytest.fixture
def opened(browser, training) -> Browser:
    browser.open(html_report(training), "training")
    return browser


SECTIONS = ("pipeline", "graph", "memory", "timeline", "parameters")


@in_browser
@sweep(
    "make",
    [
        lambda: of_net(optimizer=ADAMW),
        of_net,
        of_evaluation,
        lambda: of_net(world=1),
        lambda: of_net(world=512, optimizer=ADAMW),
        lambda: of_net(offload={"optimizer": "cpu"}, optimizer=ADAMW, hardware="h100-80g"),
        of_hostile,
    ],
    quick=(6,),
    ids=["update", "no optimizer", "evaluation", "one rank", "512 ranks", "offloaded", "hostile names"],
)
def test_every_section_draws_without_an_error(make, browser):
    browser.open(html_report(make()), "each")
    for name in browser.get("[...document.querySelectorAll('#program option')].map(o => o.value)"):
        browser.enter("#program", name)
        for section in SECTIONS:
            browser.show(section)
    assert browser.errors() == []
    assert browser.get("document.getElementById('failure').hidden")


@in_browser
def test_the_slider_shows_each_pass_with_what_it_changed(opened, training):
    opened.show("pipeline")
    way = training.way()
    for at, (before, after) in enumerate(pairwise(way.snapshots), 1):
        opened.enter("#pass", str(at))
        opened.until("document.querySelector('#pass-card h3').textContent === arguments[0]", after.name)
        assert after.summary in opened.text("#pass-card")
        assert opened.text("#pass-names [aria-current]") == after.name
        old, new = ({n.name for n in s.program.nodes if n.op != "output"} for s in (before, after))
        said = opened.text("#change-count").replace(",", "")
        assert (f"{len(new - old)} added" in said) == bool(new - old)
        assert (f"{len(old - new)} removed" in said) == bool(old - new)
    opened.enter("#pass", str([s.name for s in way.snapshots].index("shard_parameters")))
    opened.until("document.querySelectorAll('#text .line.added').length > 0")
    assert any("dist.all_gather(" in text for text in opened.texts("#text .line.added"))
    assert opened.errors() == []


@in_browser
@pytest.mark.slow
def test_changes_and_what_is_folded_are_the_program_whole(opened, training):
    """Lines that are not gone stand in the order of the program after the pass, once its folds are opened."""
    opened.show("pipeline")
    for snapshot in training.way().snapshots[1:]:
        opened.click(f"#pass-names button[title={json.dumps(snapshot.summary)}]")
        opened.until("document.querySelector('#pass-card h3').textContent === arguments[0]", snapshot.name)
        opened.run("document.getElementById('text').style.height = '40000px'")
        opened.until("document.querySelectorAll('#text .line').length > 0 || !document.querySelector('.fold')")
        while opened.get("document.querySelector('#text .fold') !== null"):
            opened.click("#text .fold")
        shown = opened.get(
            "[...document.querySelectorAll('#text .line:not(.removed):not(.gone):not(.former)')]"
            ".map(line => line.lastChild.textContent)"
        )
        if shown:  # (nothing is shown of a pass that changed nothing)
            assert "\n".join(shown) + "\n" == render(snapshot.program)


@in_browser
def test_the_selector_changes_the_program_everywhere(opened, training):
    assert training.update is not None
    opened.show("graph")
    opened.enter("#program", "update")
    nodes = len(training.update.last.program.nodes) - 1
    opened.until("document.getElementById('node-count').textContent === arguments[0]", f"{nodes:,} nodes")
    opened.show("pipeline")
    assert [t for t in opened.texts("#pass-names button")] == [s.name for s in training.update.snapshots]
    opened.show("parameters")
    assert "on each rank" in opened.text("#parameter-count")


@in_browser
@pytest.mark.slow
def test_search_and_filters_narrow_the_list(opened, training):
    opened.show("graph")
    nodes = [n for n in training.way().last.program.nodes if n.op != "output"]
    lines = {n.name: n.meta["zgraph"] for n in nodes}

    def shown() -> list[str]:
        opened.run("document.getElementById('nodes').style.height = '20000px'")
        opened.run("return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return opened.get("[...document.querySelectorAll('#nodes .node')].map(row => row.dataset.node)")

    assert shown() == [n.name for n in nodes]
    opened.enter("#search", "ERF")
    assert 0 < len(shown()) < len(nodes) and all("erf" in str(n.target) for n in nodes if n.name in shown())
    opened.enter("#search", "")
    opened.enter("#filter-role", "gather")
    assert shown() == [name for name, record in lines.items() if record.role == "gather"]
    opened.enter("#filter-phase", "backward")
    assert shown() == [n for n, r in lines.items() if (r.role, r.phase) == ("gather", "backward")]
    opened.click("#clear")
    opened.enter("#filter-module", "last")
    assert shown() == [n for n, r in lines.items() if re.match(r"last(\.|$)", r.param or r.module)]
    opened.click("#clear")
    opened.enter("#filter-made_by", "reduce_gradients")
    assert shown() == [n for n, r in lines.items() if r.made_by == "reduce_gradients"]
    opened.enter("#search", "no such node")
    assert shown() == [] and "0 of" in opened.text("#node-count")
    assert opened.errors() == []


@in_browser
def test_a_click_on_a_node_tells_all_of_it_and_its_links_lead_on(opened, training):
    opened.show("graph")
    node = next(n for n in training.way().last.program.nodes if "addmm" in str(n.target))
    opened.enter("#search", node.name)
    opened.until("document.querySelectorAll('#nodes .node').length < 9")
    opened.click(f"#nodes [data-node={node.name}]")
    opened.until("!document.getElementById('details').hidden")
    details = opened.text("#details")
    record = node.meta["zgraph"]
    for said in (
        node.name,
        "aten.addmm",
        record.module,
        Path(record.source).name,
        "capture",
        "compute",
        "from",
        "3 operands",
    ):
        assert said in details, said
    assert opened.texts("#details svg .self title") == [node.name]
    names = [a.name for a in node.all_input_nodes]
    assert opened.texts("#details h3 + .links")[0] == "".join(names)
    opened.click("#details .links a")
    opened.until("document.querySelector('#details h2').textContent === arguments[0]", names[0])
    opened.driver.back()
    opened.until("document.querySelector('#details h2').textContent === arguments[0]", node.name)
    opened.click("#details button")
    opened.until("document.getElementById('details').hidden")


@in_browser
def test_an_address_opens_the_page_at_its_node(browser, training):
    node = training.way().last.program.nodes[20].name
    browser.open(html_report(training), "training", at=f"#/train/overlap/{node}")
    browser.until("document.querySelector('#details h2')?.textContent === arguments[0]", node)
    browser.show("pipeline")
    assert browser.text("#pass-card h3") == "overlap"


@in_browser
@pytest.mark.parametrize("axis", ["position", "time"])
def test_pointing_at_memory_tells_what_is_there_and_a_click_takes_it(opened, axis):
    opened.show("memory")
    opened.click(f"input[name=axis][value={axis}]")
    opened.at("#memory-chart", 0.6, 0.5).perform()
    opened.until("!document.getElementById('memory-tip').hidden")
    tip, name = opened.text("#memory-tip"), opened.text("#memory-tip strong")
    assert "parameters" in tip and "largest" in tip
    opened.at("#memory-chart", 0.6, 0.5).click().perform()
    opened.until("document.querySelector('#details h2')?.textContent === arguments[0]", name)
    assert opened.errors() == []


@in_browser
def test_the_curve_of_the_page_has_the_forecasts_peak(opened, training):
    opened.show("memory")
    shown = opened.get("document.getElementById('memory-chart').getAttribute('aria-label')")
    peak = peak_of(training)
    assert shown.endswith(f"at {peak.node}")
    assert f"{peak.bytes / 1024:.2f} KiB" in shown


@in_browser
def test_the_timeline_tells_its_nodes_and_zooms(opened):
    opened.show("timeline")
    whole = opened.text("#timeline-range")
    boxes = [(x / 40, 0.3) for x in range(8, 39)]
    for across, down in boxes:
        opened.at("#timeline-chart", across, down).perform()
        if not opened.get("document.getElementById('timeline-tip').hidden"):
            break
    name = opened.text("#timeline-tip strong")
    assert "takes" in opened.text("#timeline-tip")
    opened.at("#timeline-chart", across, down).click().perform()
    opened.until("document.querySelector('#details h2')?.textContent === arguments[0]", name)
    opened.click("#zoom-in")
    zoomed = opened.text("#timeline-range")
    assert zoomed != whole
    opened.at("#timeline-chart", 0.6, 0.3).click_and_hold().move_by_offset(-80, 0).release().perform()
    assert opened.text("#timeline-range") not in (zoomed, whole)
    opened.click("#zoom-all")
    assert opened.text("#timeline-range") == whole
    assert opened.errors() == []


@in_browser
def test_parameters_sort_by_any_column_both_ways(opened):
    opened.show("parameters")
    names = opened.texts("#parameter-table tbody td:first-child")
    assert names[0] == "first.weight"
    head = "#parameter-table th:nth-child({}) button"
    opened.click(head.format(1))
    assert opened.texts("#parameter-table tbody td:first-child") == sorted(names)
    opened.click(head.format(1))
    assert opened.texts("#parameter-table tbody td:first-child") == sorted(names, reverse=True)
    opened.click(head.format(6))
    assert opened.texts("#parameter-table tbody td:first-child")[0] == "first.weight"  # the largest
    assert opened.get("document.querySelectorAll('#parameter-table th[aria-sort=descending]').length") == 1
    opened.enter("#parameter-search", "norm")
    opened.until("document.querySelectorAll('#parameter-table tbody tr').length === 2")


@in_browser
def test_hostile_names_are_shown_as_what_they_are(browser):
    browser.open(html_report(of_hostile()), "hostile")
    assert HOSTILE in browser.text("h1") and HOSTILE in browser.text("#remarks") and HOSTILE in browser.driver.title
    browser.show("graph")
    browser.enter("#search", HOSTILE)
    browser.until("document.querySelectorAll('#nodes .node').length > 0")
    assert any(HOSTILE in text for text in browser.texts("#nodes .node"))
    browser.click("#nodes .node")
    browser.until("!document.getElementById('details').hidden")
    assert HOSTILE in browser.text("#details")
    browser.show("parameters")
    assert f"{HOSTILE}.weight" in browser.texts("#parameter-table td:first-child")
    assert browser.get("document.querySelectorAll('img, main script, aside script').length") == 0
    assert browser.errors() == []


@in_browser
def test_a_block_that_is_damaged_is_said_and_leaves_what_needs_no_script(browser, training):
    page = re.sub(r'(id="data">.{40}).{8}', r"\1AAAAAAAA", html_report(training))
    (browser.folder / "damaged.html").write_text(page)
    browser.driver.get((browser.folder / "damaged.html").as_uri())
    browser.until("!document.getElementById('failure').hidden")
    assert "can't be shown" in browser.text("#failure") and "Step time" in browser.text("#summary")
    browser.errors()


@in_browser
@pytest.mark.slow
def test_twenty_thousand_nodes_are_painted_at_once_and_searched_while_typing(browser, capsys):
    case = models.stack(252)
    found = of_model(
        case.model, Plan(zero=3), case.inputs, 8, pass_filter=PassFilter(verified=False)
    )  # (that takes half of the time)
    nodes = len(found.way().last.program.nodes)
    assert nodes >= MANY
    page = html_report(found)
    browser.open(page, "large")
    browser.until("performance.getEntriesByName('first-contentful-paint').length > 0")
    paint = browser.get("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1e3
    browser.show("graph")
    typed = (
        "const done = arguments[1], start = performance.now(), field = document.getElementById('search');"
        "field.value = arguments[0]; field.dispatchEvent(new Event('input'));"
        "requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)))"
    )
    took = max(browser.driver.execute_async_script(typed, text) for text in ("t", "ta", "tan", "tanh 19"))
    for section in SECTIONS:
        browser.show(section)
    with capsys.disabled():
        size = len(page.encode()) / 1e6
        print(f"\n{nodes} nodes: {size:.1f} MB, first paint in {paint:.2f} s, search in {took:.0f} ms")
    assert len(page.encode()) < 30e6 and paint < FIRST_PAINT and took < 300
    assert browser.get("document.querySelectorAll('#nodes .node, #text .line').length") < 200
    assert browser.errors() == []
