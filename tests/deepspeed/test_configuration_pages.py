"""The pages on DeepSpeed's configurations say what `zgraph.deepspeed.plan` and `zgraph forecast` say."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def made():
    """What makes the pages."""
    spec = spec_from_file_location("deepspeed_configurations", ROOT / "docs/generate/deepspeed_configurations.py")
    sys.modules[spec.name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = made()


def test_there_is_a_page_for_each_configuration():
    names = {path.stem for path in PAGES.CONFIGS.glob("*.json")}
    assert names == PAGES.TITLES.keys() == {path.stem for path in PAGES.PAGES.glob("*.md")} - {PAGES.INDEX}
    index = (PAGES.PAGES / f"{PAGES.INDEX}.md").read_text()
    assert all(f"]({name}.md) | " in index for name in names)


@pytest.mark.parametrize("name", PAGES.TITLES)
def test_a_page_has_the_verdict_of_each_key_and_the_plan(name):
    """(`python docs/generate/deepspeed_configurations.py` writes them.)"""
    head, _, forecast = (PAGES.PAGES / f"{name}.md").read_text().partition(f"\n{PAGES.FORECAST}")
    assert head == PAGES.head(name)
    assert bool(forecast) == (PAGES.report_of(name).plan is not None)


@pytest.mark.slow  # (a capture and all passes for each, 10 to 30 s)
@pytest.mark.parametrize("name", PAGES.TITLES)
def test_a_page_has_the_forecast(name):
    assert (PAGES.PAGES / f"{name}.md").read_text() == PAGES.page(name)
    assert PAGES.index_row(name) in (PAGES.PAGES / f"{PAGES.INDEX}.md").read_text()
