"""What the report's page is made of.

`data.py` is what the page shows when it is used, packed; `parameters.py` the table of parameters; `summary.py` what stands in the
page before any script has run. The page itself is `page.html` with `page.css` and the scripts, one a view, in the order of `SCRIPTS`.
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
