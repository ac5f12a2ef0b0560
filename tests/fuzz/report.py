"""What a campaign found, as a progress bar while it runs and tables at its end."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .blocks import KINDS
from .runner import Outcome

WORDS = ("equal", "refused", "unclear", "wrong")


@dataclass
class Report:
    """Counts of what cases came to, by kind of run, mesh dimension, style and block."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    bad: list[Outcome] = field(default_factory=list)
    seconds: Counter[str] = field(default_factory=Counter)
    both_raise: int = 0

    def add(self, outcome: Outcome) -> None:
        case, verdict = outcome.case, outcome.verdict
        rows = [f"run {case.run}", "all", f"zero {dict(case.plan)['zero']}"]
        rows += [f"mesh {d}" for d in case.mesh]
        rows += [f"style {case.style}"] if case.run != "virtual" else []
        rows += [f"option {o}" for o in case.options] + ([f"argument {case.argument}"] if case.argument else [])
        rows += [f"block {k}" for line in case.lines for k in line.kinds]
        for row in set(rows):
            self.counts.setdefault(row, Counter())[verdict.word] += 1
        self.seconds[case.run] += outcome.seconds  # type: ignore[assignment]
        self.both_raise += verdict.reason == "both raise"
        if verdict.word == "refused":
            self.refusals[verdict.reason] += 1
        if outcome.bad:
            self.bad.append(outcome)

    def show(self, console: Console, blocks: bool = False) -> None:
        """Print the tables: of runs and meshes, of refusals by their reason, of what is wrong or unclear with its seed."""
        shown = [k for k in self.counts if k.startswith(("run", "mesh", "all", "zero"))]
        shown += [k for k in self.counts if blocks and k not in shown]
        table = Table("cases", *WORDS, "seconds a case", title="held against plain PyTorch")
        for key in sorted(shown, key=lambda k: (k == "all", k.split()[0] not in ("run",), k)):
            count = self.counts[key]
            run = key.removeprefix("run ")
            mean = f"{self.seconds[run] / count.total():.1f}" if run in self.seconds else ""
            table.add_row(key, *(str(count[w] or "") for w in WORDS), mean)
        console.print(table)
        used = sum(f"block {k}" in self.counts for k in KINDS)
        console.print(f"{used} of {len(KINDS)} kinds of block; in {self.both_raise} of the equal cases both raise")
        if self.refusals:
            table = Table("refused", "cases")
            for reason, count_ in self.refusals.most_common():
                table.add_row(reason, str(count_))
            console.print(table)
        if self.bad:
            table = Table("seed", "run", "what", "detail")
            for outcome in sorted(self.bad, key=lambda o: (o.verdict.word, o.verdict.reason)):
                verdict = outcome.verdict
                table.add_row(
                    str(outcome.case.seed), outcome.case.run, f"{verdict.word}: {verdict.reason}", verdict.detail[:300]
                )
            console.print(table)

    def save(self, path: Path) -> None:
        """Write the counts, and each bad seed, as JSON."""
        found = {
            "counts": {k: dict(v) for k, v in sorted(self.counts.items())},
            "refused": dict(self.refusals.most_common()),
            "bad": [
                {"seed": o.case.seed, "run": o.case.run, "word": o.verdict.word, "reason": o.verdict.reason}
                for o in self.bad
            ],
        }
        path.write_text(json.dumps(found, indent=1))


def progress(console: Console) -> Progress:
    """A bar with the counts beside it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)
