"""Compares between ranks what they are about to run: the program, the batch, the random states."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from zgraph.build.step_program import Entry, StepProgram
from zgraph.parameters.tensor_bits import fingerprint
from zgraph.plan.plan import Plan
from zgraph.program.digest import digest, node_digests
from zgraph.program.program import DATA_DIMS, TEAM_DIMS, InputRole, Program
from zgraph.ranks.agreement import Agreement, Verdict
from zgraph.ranks.rng import random_states

logger = logging.getLogger(__name__)

INPUTS = "the inputs of a call"
SAME_ROWS = (
    'ranks that differ only in their place along "tp", "cp" or "pp" compute the same rows: give them the same batch, padded to one length '
    '(a sampler does if its rank is model.zgraph.mesh.get_local_rank("dp")), and the same numbers'
)
SAME_FORM = (
    "give every rank the same model, and inputs of the same structure, dtypes and numbers of dimensions. Their sizes may differ; but those of "
    "inputs that are not contiguous (with strides above: a batch cut to its longest row, say) are numbers of a program: x.contiguous()"
)


class Votes:
    """The votes of one rank with one compiled module."""

    def __init__(
        self,
        plan: Plan,
        mesh: DeviceMesh | None,
        sizes: dict[str, int],
        device: torch.device,
        agreement: Agreement,
        everyone: Agreement,
    ) -> None:
        self.plan = plan
        self.mesh, self.sizes, self.device = mesh, sizes, device
        self.agreement, self.everyone = agreement, everyone
        self.digests: dict[str, str] = {}  # of the programs that ranks have agreed on
        self.expected: dict[str, str] = {}  # digests of the run that saved the checkpoint, with the same plan and world
        self._compared: set[str] = set()  # shared names of the programs whose inputs ranks have compared

    def program(self, program: Program) -> None:
        """Let the ranks compare a program before it is compiled."""

        def compare(views: Sequence[Any]) -> str:
            for rank, view in enumerate(views):
                for mine, first in zip(view, views[0], strict=False):
                    if mine != first:
                        return f"the first node that differs is {first[0]!r} on rank 0, {mine[0]!r} on rank {rank}"
                if len(view) != len(views[0]):
                    longer = max(view, views[0], key=len)
                    return f"the first node that differs is {longer[min(len(view), len(views[0]))][0]!r}, which only one of ranks 0 and {rank} has"
            return "inputs, outputs or the mesh differ"

        program_digest = self.digests[program.name] = digest(program)
        if self.expected.get(program.name, program_digest) != program_digest:
            logger.warning(
                "program %s is another than that of the run the checkpoint is of, by the same plan: numbers may round otherwise",
                program.name,
            )
        ballot = f"{self.plan.hash()} {program_digest}"
        self.agreement.vote(f"program {program.name}", ballot, lambda: node_digests(program), compare)
        for voters in (self.agreement, self.everyone):
            voters.relax()  # (compiling comes next)

    def random(self, step: StepProgram) -> None:
        """Let ranks that compute one program together compare their random states before a forward that draws: each
        computes a part of the same rows, and with different numbers the parts would not fit. Raises `RankMismatchError`
        on every rank of a stage.
        """
        if not any(one.random for one in step.beside) or math.prod(self.sizes.get(d, 1) for d in TEAM_DIMS) == 1:
            return
        host, device = random_states(self.device)
        state = (host if device is None else device).numpy().tobytes()
        self._in_teams(
            "random numbers",
            f"a random state of {hashlib.sha256(state).hexdigest()[:16]}",
            'ranks that differ only in their place along "tp" or "cp" draw the same: torch.manual_seed(seed + the rank within "dp")',
        )

    def batch(self, entry: Entry, step: StepProgram, flat: Sequence[Any]) -> None:
        """Let ranks that compute one program together compare their inputs before its first run: parts of different
        rows would be combined as if they were of the same. Raises `RankMismatchError` on every rank.
        """
        if step.shared_name in self._compared or math.prod(self.sizes.get(d, 1) for d in TEAM_DIMS) == 1:
            return
        given = [x for p, x in zip(entry.trace.inputs, flat, strict=True) if p.role is InputRole.INPUT]
        self._in_teams(
            "the batch",
            f"inputs {[int(fingerprint(x)) for x in given if isinstance(x, torch.Tensor)]}",
            'ranks that differ only in their place along "tp" or "cp" have the same rows: a sampler\'s rank is '
            'model.zgraph.mesh.get_local_rank("dp"), of the mesh\'s "dp" ranks',
        )
        self._compared.add(step.shared_name)

    def forget(self, name: str) -> None:
        """Forget the programs of one signature, by its name."""
        for program in [p for p in self.digests if p.split(".")[0] == name]:
            del self.digests[program]
        self._compared = {
            shared for shared in self._compared if name not in [p.split(".")[0] for p in shared.split(" beside ")]
        }

    def call(self, outline: str, call: str, key: str, *, new: bool, worst: int = 0) -> Verdict:
        """Let all ranks compare the `outline` of their calls, and ranks that see the same rows (same position in the
        mesh's data dimensions) the whole `call`, whose sizes and numbers may differ between others.

        The verdict's flag tells whether the program is `new` on a rank or ranks have different `key`s; its `worst` is
        the largest of all ranks. Raises `RankMismatchError` on every rank.
        """
        at = [(d, self.mesh.get_local_rank(d)) for d in DATA_DIMS if d in self.sizes and self.mesh is not None]
        count = math.prod(self.sizes[d] for d, _ in at)
        if len(self.everyone.ranks) in (0, count):
            return self.everyone.vote(INPUTS, outline, flag=new, proposal=key, worst=worst, hint=SAME_FORM)
        team = functools.reduce(lambda number, dim: number * self.sizes[dim[0]] + dim[1], at, 0)
        verdict = self.everyone.vote(
            INPUTS, call, team=team, teams=count, flag=new, proposal=key, worst=worst, hint=SAME_ROWS
        )
        if verdict.flag:
            self.everyone.vote(INPUTS, outline, hint=SAME_FORM)
        return verdict

    def _in_teams(self, subject: str, ballot: str, hint: str) -> None:
        """Let the ranks of each team (those that see the same rows) compare what must be equal in it."""
        at = [
            (d, self.mesh.get_local_rank(d) if self.mesh is not None else 0) for d in self.sizes if d not in TEAM_DIMS
        ]
        team = functools.reduce(lambda number, dim: number * self.sizes[dim[0]] + dim[1], at, 0)
        self.agreement.vote(
            subject,
            ballot,
            team=team,
            teams=math.prod(self.sizes[d] for d, _ in at),
            hint=hint,
        )
