"""The table of what was equal, and of what was refused and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

VERDICTS = (
    "wrong",
    "unclear",
    "refused",
    "equal",
)  # that of a module or operator is the first that one of its samples has

Row = dict[str, str]


def written(rows: Sequence[Row]) -> str:
    """A page in Markdown."""
    lines = [
        HEAD,
        "| backend | database | names | equal | refused | unclear | wrong | samples equal |",
        "| --- " * 8 + "|",
    ]
    for backend, database in sorted({(r["backend"], r["database"]) for r in rows}):
        mine = [r for r in rows if (r["backend"], r["database"]) == (backend, database) and r["verdict"] != "void"]
        names = Counter(worst(r["verdict"] for r in mine if r["name"] == n) for n in {r["name"] for r in mine})
        equal = sum(r["verdict"] == "equal" for r in mine)
        counts = " | ".join(str(names[v]) for v in ("equal", "refused", "unclear", "wrong"))
        lines.append(f"| {backend} | {database}s | {names.total()} | {counts} | {equal} of {len(mine)} |")
    for verdict in VERDICTS[:-1]:
        lines += ["", f"## {verdict.capitalize()}", "", *(listed(rows, verdict) or ["None."])]
    return "\n".join(lines) + "\n"


def worst(verdicts: Iterable[str]) -> str:
    return min(verdicts, key=VERDICTS.index)


def listed(rows: Sequence[Row], verdict: str) -> list[str]:
    """A line for each name, with its samples and the reasons."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["verdict"] == verdict:
            found.setdefault((row["name"], row["why"].split(" | where:")[0]), []).append(row)
    if not found:
        return []
    lines = ["| name | backends | samples | reason |", "| --- | --- | --- | --- |"]
    for (name, why), mine in sorted(found.items()):
        reason = why.replace("|", "/").replace("\n", " ")
        lines.append(f"| `{name}` | {', '.join(sorted({r['backend'] for r in mine}))} | {len(mine)} | {reason} |")
    return lines


HEAD = """# PyTorch's own databases

Written by `python -m tests.databases --write docs/databases.md`. Each module of `torch.testing._internal.common_modules.module_db` (train and
eval), and each differentiable operator of `op_db` applied to a parameter, its other tensors inputs in every other sample and buffers in the rest,
ran forward and backward by zgraph and by plain PyTorch from one seed, in float32: outputs, gradients of parameters and inputs, buffers.
A name counts by its worst sample. Samples that plain PyTorch itself refuses do not count.
On Inductor random numbers are drawn as plain PyTorch draws them.

Refused are lazy modules; sparse tensors, whose memory is as large as their values say; and `as_strided` with a `storage_offset` of its own on a
tensor that begins within its storage, which may read memory that was not given to the model.
"""
