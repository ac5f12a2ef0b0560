"""Makes `python -m zgraph` run the command line."""

from __future__ import annotations

from zgraph.cli import main

if __name__ == "__main__":
    main()
