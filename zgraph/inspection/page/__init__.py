"""The parts of the report's page.

`data.py` packs the data that the scripts show; `parameters.py` makes the table of parameters; `summary.py` the part
that is shown before any script has run. The page itself is `page.html` with `page.css` and the scripts, one for each
view, in the order of `SCRIPTS`.
"""

SCRIPTS = (
    "dom.js",
    "virtual_list.js",
    "data.js",
    "changes.js",
    "pipeline.js",
    "graph.js",
    "details.js",
    "chart.js",
    "memory.js",
    "timeline.js",
    "parameters.js",
    "main.js",
)
