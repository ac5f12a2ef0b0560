"""How the death of a rank reaches the launcher: as marked lines in the output of its node, which every way of starting nodes carries.

What this believes: a rank that dies of another's death says so in its last lines (`_PEER_LOST`), or prints something after the other did. Clocks of
machines are not compared: a rank's watcher says how long the rank has been failing, and the launcher knows when it read that.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

_MARK = re.compile(r"zgraph launch: rank (\d+)(?: died (\{.*\})|\| (.*))")
_PEER_LOST = re.compile(  # what Gloo, NCCL and torch's store say of a peer that is gone
    r"connection (?:was )?(?:likely )?(?:closed|reset|refused)|broken pipe|remote process exited|ncclremoteerror"
    r"|communicator was aborted|collective operation timeout|timed out waiting|distnetworkerror",
    re.IGNORECASE,
)
_LONGEST = (
    1000  # bytes of a line that are reported: a pipe takes 4096 of one write in one piece, among other ranks' writes
)


@dataclass(frozen=True)
class Death:
    """How a rank ended that failed."""

    rank: int  # among all ranks
    local_rank: int  # on its machine
    host: str  # the machine, by its own name
    attempt: int  # how often torchrun had started the ranks again
    code: int  # the exit code; -N of signal N
    asked: bool  # it was failing already, and torchrun, or who else ends the job, was faster
    failing_for: float  # seconds from the first sign of the failure to its report
    last: list[str] = field(default_factory=list)  # the lines that the rank printed last

    def report(self) -> list[bytes]:
        """Return the marked lines, each short enough to be written in one piece."""
        facts = {name: value for name, value in asdict(self).items() if name not in ("rank", "last")}
        lines = [f"zgraph launch: rank {self.rank} died {json.dumps(facts)}"]
        lines += [f"zgraph launch: rank {self.rank}| {line}" for line in self.last]
        return [line.encode(errors="replace")[:_LONGEST] + b"\n" for line in lines]

    def how(self) -> str:
        """Return "ended with 7", or "was ended by SIGSEGV"."""
        if self.asked:
            return "was failing when it was ended"
        if self.code >= 0:
            return f"ended with {self.code}"
        name = {number.value: number.name for number in signal.Signals}.get(-self.code, f"signal {-self.code}")
        return f"was ended by {name}" + (", as by the kernel where memory runs out" if name == "SIGKILL" else "")

    def followed(self) -> bool:
        """Return whether the rank says that it has lost another."""
        return any(_PEER_LOST.search(line) for line in self.last)


class Deaths:
    """The deaths that nodes report in their output."""

    def __init__(self) -> None:
        self._deaths: dict[int, tuple[Death, str, float]] = {}  # by rank, with the node and when the rank began to fail

    def take(self, node: str, line: str) -> bool:
        """Read a line of a node's output; return whether it is of a report. (torchrun and pdsh may put a prefix before it; one that
        was torn on its way is shown as any line.)"""
        match = _MARK.search(line)
        if match is None:
            return False
        rank, facts = int(match[1]), match[2]
        if facts is not None:
            try:
                death = Death(rank, **json.loads(facts))
            except (ValueError, TypeError):
                return False
            self._deaths[rank] = death, node, time.monotonic() - death.failing_for
        elif rank in self._deaths:
            self._deaths[rank][0].last.append(match[3])
        return True

    def forget(self, node: str) -> None:
        """Drop the deaths on a node without which the job goes on."""
        for rank, (_, where, _) in self._deaths.copy().items():
            if where == node:
                del self._deaths[rank]

    def in_order(self) -> Sequence[tuple[Death, str]]:
        """Return the deaths of the last attempt with their nodes, the one that the others followed first."""
        deaths = sorted(self._deaths.copy().values(), key=lambda entry: (entry[0].followed(), entry[0].asked, entry[2]))
        attempt = max((death.attempt for death, _, _ in deaths), default=0)
        return [(death, node) for death, node, _ in deaths if death.attempt == attempt]
