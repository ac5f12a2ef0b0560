"""The command line: `zgraph`, or `python -m zgraph`.

`app.py` puts the commands together, each has a file of its own, and `targets.py` finds the models and bundles that they
look at. Importing this package loads neither torch nor pydantic: commands import what they need when they run, so
`--help` is answered at once.
"""

from __future__ import annotations

from zgraph.cli.app import main

__all__ = ["main"]
