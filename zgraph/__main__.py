"""`python -m zgraph` is `zgraph`."""

from __future__ import annotations

from zgraph.cli import main

if __name__ == "__main__":
    main()
