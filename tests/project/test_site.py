"""The site of the documents: built strictly, read in a browser at two widths, and searched without a network.

The tests in a browser need Chromium and its driver (on Debian and Ubuntu: apt install chromium chromium-driver).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the site is built by MkDocs: pip install -e '.[docs]'")
pytest.importorskip("mkdocstrings", reason="and mkdocstrings")

ROOT = Path(__file__).parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")

in_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium with its driver")
pytestmark = pytest.mark.slow  # (`make docs` builds it as well)

# What sticks out of the page on the right and can't be scrolled to within a box of its own.
STICKS_OUT = """
const width = document.documentElement.clientWidth;
const scrolls = e => e && e !== document.body && (
  ["auto", "scroll", "hidden"].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
return [...document.querySelectorAll(".md-content *, .md-header *, .md-footer *")]
  .filter(e => { const box = e.getBoundingClientRect(); return box.width && box.left >= 0 && box.right > width + 1; })
  .filter(e => !scrolls(e.parentElement))
  .map(e => e.outerHTML.slice(0, 120));
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built strictly: a link that leads nowhere and a page that is in no menu are errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(params=[1280, 400], scope="module")
def browser(request, tmp_path_factory):
    """Headless Chromium of this width, which reaches nothing but this machine."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = f"user-data-dir={tmp_path_factory.mktemp('profile')}"
    offline = "host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
    for switch in ("headless=new", "no-sandbox", "disable-gpu", "disable-background-networking", offline, profile):
        options.add_argument(f"--{switch}")
    screen = {"deviceMetrics": {"width": request.param, "height": 900, "pixelRatio": 1.0}}
    options.add_experimental_option("mobileEmulation", screen)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def pages(site: Path) -> list[str]:
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))


def test_no_page_asks_for_anything_of_another_host(site):
    for page in pages(site):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="?([^" >]+)', (site / page).read_text())
        loaded += re.findall(
            r'<link[^>]* rel="?(?:stylesheet|preconnect|icon)"?[^>]* href="?([^" >]+)', (site / page).read_text()
        )
        assert [address for address in loaded if "://" in address or address.startswith("//")] == [], page


def test_a_link_out_of_the_documents_is_no_link_on_the_site(site):
    for page in pages(site):
        links = re.findall(r'<a[^>]* href="?([^" >]+)', (site / page).read_text())
        gone = [link.partition("#")[0] for link in links if "://" not in link and page != "404.html"]
        assert [link for link in gone if link and not ((site / page).parent / link).resolve().exists()] == [], page


@in_browser
def test_nothing_sticks_out_of_a_page_at_any_width(browser, address, site):
    for page in pages(site):
        browser.get(address + page)
        assert browser.execute_script(STICKS_OUT) == [], page
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth"), page
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    addresses = [a["params"]["request"]["url"] for a in asked if a["method"] == "Network.requestWillBeSent"]
    assert [a for a in addresses if not a.startswith((address, "data:", "blob:", "chrome", "about:"))] == []
    assert [entry["message"] for entry in browser.get_log("browser")] == []


@in_browser
def test_search_works_without_a_network(browser, address):
    browser.get(f"{address}index.html")
    browser.execute_script("document.querySelector('#__search').click()")
    field = "document.querySelector('.md-search__input')"
    end = time.monotonic() + 30
    found: list[str] = []
    while not any("offloading" in title.lower() for title in found):
        assert time.monotonic() < end, f"nothing was found: {found}"
        browser.execute_script(
            f"{field}.value = 'twin-flow'; {field}.dispatchEvent(new Event('keyup', {{bubbles: true}}))"
        )
        time.sleep(0.3)
        found = browser.execute_script(
            "return [...document.querySelectorAll('.md-search-result__link')].map(e => e.textContent)"
        )
