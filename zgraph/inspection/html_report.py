"""The report: all of an inspection as one HTML page that needs neither a network nor a library.

Figures, plan and remarks are text in the page, so they are seen at once; the programs are one compressed block in it,
which the page's scripts unpack. Names are the user's and may hold anything: in the page they are escaped, in the block
they are encoded as letters and digits, and scripts put them into the page as text. The page's content security policy
forbids every script but its own, and every connection.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from string import Template

from zgraph._version import __version__
from zgraph.inspection.inspection import Inspection
from zgraph.inspection.page import SCRIPTS
from zgraph.inspection.page.data import data_of, pack
from zgraph.inspection.page.summary import remarks_of, summary_of, title_of


def html_report(inspection: Inspection) -> str:
    """Return the page."""
    style, script = _asset("page.css"), _script()
    return Template(_asset("page.html")).substitute(
        title=title_of(inspection),
        version=__version__,
        policy=f"default-src 'none'; style-src {_allowed(style)}; script-src {_allowed(script)}; base-uri 'none'; form-action 'none'",
        style=style,
        summary=summary_of(inspection),
        remarks=remarks_of(inspection),
        data=pack(data_of(inspection)),
        script=script,
    )


@cache
def _asset(name: str) -> str:
    return resources.files("zgraph.inspection.page").joinpath(name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    """Return all scripts as one, which leaves no global names in the page."""
    parts = "\n".join(_asset(name) for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}\n}})();\n'


def _allowed(text: str) -> str:
    """Return the hash by which a content security policy allows an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"
