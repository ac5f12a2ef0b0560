"""Computes what a rank of a pipeline holds at each of its actions, to decide whether a step fits and for forecasts.

Besides what the running program has and what is there all the time, a rank holds: values of micro-batches between
forward and backward; whole weights; sums of gradients (made by a stage's first backward, added to in place by later
ones); messages that arrived early or are being sent; the batch; and outputs, which stay until the step ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zgraph.build.build_context import ResidentMemory
from zgraph.build.pass_pipeline import Variant
from zgraph.passes.analysis.costs import most_bytes
from zgraph.passes.stages.cut_stages import StageMessage, Stages
from zgraph.plan.pipeline_schedules.actions import Action, Kind
from zgraph.plan.pipeline_schedules.schedule import Schedule
from zgraph.program.program import InputRole, Program
from zgraph.stages.channels import AHEAD, Message, Routes
from zgraph.stages.simulated_stage import SimulatedStage, sent_names
from zgraph.stages.stage_tasks import stage_tasks

IN_FLIGHT = "in flight"
MESSAGES = "messages"
UPDATE = "update"


@dataclass(frozen=True)
class Moment:
    """An action of a rank, and what the rank holds meanwhile, counted without sizes."""

    action: Action  # what runs
    last: bool  # whether it is the last backward of its stage in a step
    sums: frozenset[int]  # stages that have sums of gradients
    saved: tuple[tuple[int, int], ...]  # (stage, how many other micro-batches wait between forward and backward)
    kept: tuple[tuple[int, int], ...]  # (stage, how many other micro-batches wait between the two parts of a backward)
    given: tuple[tuple[int, int], ...]  # (stage, for how many micro-batches it has returned outputs)
    # messages that may not have left: (stage, index among all that the stage sends forward, -1 for a gradient sent
    # back, bytes)
    sent: tuple[tuple[int, int, int], ...]
    coming: int  # bytes of receives that were started early

    @property
    def first(self) -> bool:
        """Whether it is the first forward of its stage in a step."""
        return self.action.kind is Kind.F and self.action.stage not in self.begun

    @property
    def begun(self) -> set[int]:
        """The stages that have run a forward."""
        return {stage for stage, _ in self.given}


class RankMemory:
    """The memory of the rank at position `rank` of "pp", for any programs of its `stages`. `inputs` are the bytes of a
    micro-batch's inputs.
    """

    def __init__(self, schedule: Schedule, rank: int, stages: Stages, inputs: int) -> None:
        self.schedule = schedule
        self.rank = rank
        self.inputs = inputs
        places = {(s, n): at for s, program in enumerate(stages.programs) for at, n in enumerate(sent_names(program))}
        self.row = _moments(schedule, rank, _Post(Routes(schedule, stages.transfers, rank), places))
        # (of moments that differ in the micro-batch alone the first is enough)
        self.moments = list({replace(m, action=replace(m.action, micro_batch=0)): m for m in self.row[::-1]}.values())[
            ::-1
        ]

    def waiting(self, stage: int) -> int:
        """Return the most micro-batches of a stage that wait for their backward while another micro-batch of it is
        computed.
        """
        return max(dict(m.saved).get(stage, 0) for m in self.moments if m.action.stage == stage)

    def states(self, outside: ResidentMemory) -> int:
        """Return the bytes of the optimizer's states, among what is held outside of programs. (`outside.held` also
        counts gradients that wait between micro-batches.)
        """
        return outside.held - outside.waiting

    def peak(
        self, stages: Mapping[int, SimulatedStage], states: int, update: Mapping[str, int] | None = None
    ) -> tuple[str, dict[str, int]]:
        """Return (the action, or "update", at the rank's peak; the bytes by category there). Stages that `stages` lacks
        are not counted. `states` are the bytes of the optimizer's states; `update` has those of the update's peak.
        """
        candidates = []
        if update is not None:
            given = sum(self.schedule.micro_batches * s.given for s in stages.values())
            batch = self.inputs * self.schedule.micro_batches
            candidates.append((UPDATE, dict(Counter(update) + Counter(inputs=batch, outputs=given))))
        for moment in self.moments:
            if moment.action.stage in stages:
                candidates.append((str(moment.action), self.at(moment, stages, states)))
        return max(candidates, key=lambda f: sum(f[1].values()))

    def at(self, moment: Moment, stages: Mapping[int, SimulatedStage], states: int) -> dict[str, int]:
        """Return the bytes by category while an action runs."""
        action, stage = moment.action, stages[moment.action.stage]
        variant = variant_of(moment, stage)
        sums = moment.sums & stages.keys()
        makes = action.kind in (Kind.B, Kind.W)
        adds = makes and action.stage in sums and not variant.accumulated
        program_bytes = Counter(stage.memory(action.kind, variant, adds=adds))
        if makes and not adds:
            sums -= {action.stage}  # (the program counts them)
        resident_bytes = Counter(states=states, parameters=sum(s.parameters for s in stages.values()))
        resident_bytes["inputs"] = self.inputs * self.schedule.micro_batches
        resident_bytes["gradients"] = sum(stages[s].gradients for s in sums)
        resident_bytes["gathered"] = sum(stages[s].gathered for s in moment.begun & stages.keys())
        return dict(program_bytes + resident_bytes + self.waits(moment, stages))

    def waits(self, moment: Moment, stages: Mapping[int, SimulatedStage]) -> Counter[str]:
        """Return the bytes, by category, that other micro-batches keep beside an action's program."""
        in_flight = sum(stages[s].saved * n for s, n in moment.saved if s in stages)
        in_flight += sum(stages[s].kept * n for s, n in moment.kept if s in stages)
        sent = sum(size for s, place, size in moment.sent if s in stages and place not in stages[s].lent)
        given = sum(stages[s].given * n for s, n in moment.given if s in stages)
        return Counter({IN_FLIGHT: in_flight, MESSAGES: sent + moment.coming, "outputs": given})

    def besides(self, stage: int, stages: Mapping[int, SimulatedStage]) -> int:
        """Return the most bytes that the rank holds, while a stage runs, beside what the stage's program and
        `StepProgram.outside` count.
        """
        most = max(sum(self.waits(m, stages).values()) for m in self.moments if m.action.stage == stage)
        others = sum(s.parameters + s.gathered for number, s in stages.items() if number != stage)
        return most + others + self.inputs * self.schedule.micro_batches - stages[stage].inputs


def memory_of_rank(joint: Program, stages: Stages, schedule: Schedule, rank: int) -> RankMemory:
    """Return the memory of a rank, for a captured model that is cut into `stages`."""
    inputs = sum(most_bytes(node) for node in joint.input_nodes(InputRole.INPUT).values())
    return RankMemory(schedule, rank, stages, inputs)


def variant_of(moment: Moment, stage: SimulatedStage) -> Variant:
    """Return the variant of its stage's program that an action runs."""
    return stage.variant(moment.action, first=moment.first, last=moment.last)


def _moments(schedule: Schedule, rank: int, post: _Post) -> list[Moment]:
    """Return a rank's moments, in the order of its actions."""
    moments: list[Moment] = []
    saved_counts, kept_counts, given_counts = Counter[int](), Counter[int](), Counter[int]()
    sums: set[int] = set()
    last = {duty.last for duty in stage_tasks(schedule, rank).values()}
    actions = schedule.of(rank)
    for at, action in enumerate(actions):
        kind, stage = action.kind, action.stage
        if kind in (Kind.B, Kind.I):
            saved_counts[stage] -= 1
        elif kind is Kind.W:
            kept_counts[stage] -= 1
        sent, coming = post.during(actions[at : at + AHEAD])
        saved_items, kept_items, given_items = (
            tuple(sorted(by.items())) for by in (saved_counts, kept_counts, given_counts)
        )
        moments.append(
            Moment(action, action in last, frozenset(sums), saved_items, kept_items, given_items, tuple(sent), coming)
        )
        if kind in (Kind.B, Kind.W):
            sums.add(stage)
        if kind is Kind.F:
            saved_counts[stage] += 1
            given_counts[stage] += 1
        elif kind is Kind.I:
            kept_counts[stage] += 1
        post.send(action)
    return moments


class _Post:
    """The messages that a rank holds, following `Channels`. `places` gives, by (stage, name of the value), the index
    for `Moment.sent`.
    """

    def __init__(self, routes: Routes, places: Mapping[tuple[int, str], int]) -> None:
        self.routes = routes
        self.places = places
        self._asked: set[Message] = set()
        self._next: Counter[int] = Counter()
        self._here: set[Message] = set()
        self._leaving: set[Message] = set()

    def during(self, actions: Sequence[Action]) -> tuple[list[tuple[int, int, int]], int]:
        """Return (the messages sent, the bytes being received) that are held while the first of these actions, the next
        ones of the rank, runs.
        """
        for action in actions:
            for message in self.routes.incoming.get(action, ()):
                if message.source != message.target:
                    coming = self.routes.order[message.source]
                    self._asked.update(coming[self._next[message.source] : message.number + 1])
                    self._next[message.source] = max(self._next[message.source], message.number + 1)
        for message in self.routes.incoming.get(actions[0], ()):
            self._asked.discard(message)
            self._here.discard(message)
            self._leaving = {sent for sent in self._leaving if not sent.read_before(message)}
        sent = sorted(self._sent(message.transfer) for message in (*self._here, *self._leaving))
        return sent, sum(m.transfer.nbytes for m in self._asked)

    def _sent(self, transfer: StageMessage) -> tuple[int, int, int]:
        place = -1 if transfer.back else self.places[transfer.source, transfer.name]
        return transfer.source, place, transfer.nbytes

    def send(self, action: Action) -> None:
        for message in self.routes.outgoing.get(action, ()):
            (self._here if message.source == message.target else self._leaving).add(message)
