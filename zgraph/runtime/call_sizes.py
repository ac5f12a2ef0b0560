"""Decides which sizes of a rank's calls are symbols in its programs, as the plan says: learned from the calls,
declared, or none.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zgraph.build.step_program import Entry
from zgraph.capture.learned_sizes import Family, LearnedSizes, Numbers, Shapes, Signature, Value
from zgraph.capture.replaced_forward import signature_of
from zgraph.capture.symbolic_capture import SymbolicSizes, distinct
from zgraph.errors import CaptureError, RankMismatchError, SignatureError, SizeError, ZgraphError
from zgraph.plan.shapes import buckets_of, fixed_by, sizes_in, values_in
from zgraph.runtime.rank import Rank
from zgraph.torch_compat.dynamo import depends_on_values

logger = logging.getLogger(__name__)


RankCall = tuple[Shapes, tuple[Value, ...], Numbers]
"""The parts of a rank's call that may differ between ranks."""


class TwoSidesError(RankMismatchError):
    """Raised on all ranks where they have sizes that no one program serves."""


class CallSizeTracker:
    """What is known of the sizes of one compiled module's calls."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        plan = rank.plan
        self.fixed = fixed_by(plan)
        self.varies = plan.shapes != "static" and self.fixed is None
        self.anticipate = plan.shapes == "dynamic" and not sizes_in(plan.dynamic)
        self._told_fixed = plan.shapes == "static" or self.fixed is None
        self._varying: LearnedSizes | None = None
        # reasons why sizes are numbers that the user has not been told yet
        self.reasons: list[tuple[list[str], ZgraphError]] = []
        self.told_scattered: set[str] = set()  # declared inputs that the user was told are not contiguous
        self._seen: dict[str, Shapes] = {}  # of static programs: the first shapes seen, by the call's family

    def of(self, call: Signature) -> CallSizes:
        """Return the `CallSizes` of a call."""
        if not self.varies:
            self._tell_fixed(call)
            return CallSizes(self, call, None)
        if self._varying is None:
            parameters = list(signature_of(self.rank.forward_function).parameters.values())[1:]
            buckets = buckets_of(self.rank.plan)
            padded = {name: pad.dims for name, pad in buckets.padded().items()} if buckets is not None else {}
            dynamic = self.rank.plan.dynamic
            self._varying = LearnedSizes(sizes_in(dynamic), parameters, padded, values_in(dynamic))
        return CallSizes(self, call, self._varying.family(call))

    def _tell_fixed(self, call: Signature) -> None:
        """Warn once, at the first call that differs from an earlier one only in sizes, why it is compiled as a program
        of its own.
        """
        if self._told_fixed or self._seen.setdefault(call.family, call.shapes) == call.shapes:
            return
        self._told_fixed = True
        if self.rank.everyone.first() and self.fixed is not None:
            logger.warning("each size of the inputs is a program of its own: %s is set, and %s", *self.fixed)


class CallSizes:
    """The sizes of one call, and what calls of its form have shown so far. `learn` is true if ranks are to learn from
    such calls.
    """

    def __init__(self, known: CallSizeTracker, call: Signature, family: Family | None) -> None:
        self.known, self.call, self.family = known, call, family
        self.learn = family is not None
        self._asked: dict[str, int] | None = None  # sizes that no program serves yet
        self._refused: Entry | None = None  # a program that refuses these
        # sizes of one call, at which a program is made because the largest of several calls do not go together
        self._beside: dict[str, int] | None = None
        self._fixed: set[str] = set()  # sizes that are numbers in this call's program, and symbols in others
        self._before: Family | None = None  # a copy of the family before this call
        self._alike = True  # whether all ranks have the same sizes
        self.closed = False  # whether sizes that were symbols are numbers from this call on
        self.apart = False  # whether ranks have different sizes or constants, which may need different programs
        self.gives_numbers = (
            True  # whether the program takes Python numbers, besides sizes, as inputs, if there are any
        )
        self.takes_numbers = False  # whether there are any
        # (where elements of an input decide, each batch has others, and with these other sizes)
        self._anticipate = known.anticipate or bool(family is not None and family.elements)
        if family is not None and not family.first and (family.declared or self._anticipate):
            family.expect(call.shapes, call.values, anticipate=self._anticipate)

    @property
    def key(self) -> str:
        """The key of the program that serves this call: the same for calls that differ only in sizes that are
        symbols.
        """
        if self.family is None or not self.family.serves(self.call):
            return self.call.text(given=self.family.given if self.family is not None else ())
        return self.call.text(self.family.names_in(self.call), self.family.given)

    @property
    def point(self) -> Mapping[str, int]:
        """The values of the sizes that are symbols in this call's program, by name."""
        return self.family.point(self.call) if self.family is not None else {}

    def take_in(self, calls: Sequence[RankCall]) -> None:
        """Learn from this call, given as each rank has it."""
        assert self.family is not None
        forms = [(shapes, values) for shapes, values, _ in calls]
        self._before = copy.deepcopy(self.family)
        self.apart = any(form != forms[0] for form in forms)
        self._alike = not self.apart
        self.family.learn(forms, anticipate=self._anticipate)
        self.family.learn_numbers([numbers for _, _, numbers in calls])

    def others(self, ranks: Sequence[RankCall]) -> list[CallSizes]:
        """Return one call for each program that the ranks' calls need, or [] if one program serves all.

        Several are needed where some sizes are 1 (numbers in programs) or constants differ. The call for this rank's
        own program is this one; each other is a stand-in for the first rank's call that needs it.
        """
        if self.family is None or self.known.rank.held is not None:
            return []
        forms = dict.fromkeys((shapes, values) for shapes, values, _ in ranks)
        keys = {form: self._at(*form, "meta").key for form in forms}
        if len(set(keys.values())) == 1:
            return []
        calls: dict[str, CallSizes] = {}
        for form, key in keys.items():
            calls.setdefault(key, self if key == self.key else self._at(*form))
        for key, one in calls.items():
            served = {form for form, its in keys.items() if its == key}
            one._before, one._alike, one.apart = self._before, len(served) == 1, True
        return list(calls.values())

    def each(self, ranks: Sequence[RankCall], device: str | None = None) -> list[CallSizes]:
        """Return one call for each of the ranks' different sizes and constants: this one for its own, stand-ins for
        others, on `device`; [] where ranks can't run several programs in one step.
        """
        if self.known.rank.held is not None:
            return []
        forms = dict.fromkeys((shapes, values) for shapes, values, _ in ranks)
        return [self if form == (self.call.shapes, self.call.values) else self._at(*form, device) for form in forms]

    def alone(self, own: CallSizes) -> CallSizes:
        """Let this call have a program for itself, whatever sizes other ranks have in the step of this rank's `own`
        call; return it.
        """
        self._before, self._alike, self.apart = own._before, True, True
        self._asked, self._refused, self._beside, self._fixed = None, None, None, set()
        return self

    def _at(self, shapes: Shapes, values: tuple[Value, ...], device: str | None = None) -> CallSizes:
        """Return a stand-in for a call of these shapes and constants."""
        return CallSizes(self.known, self.call.at(shapes, values, device), self.family)

    def open_sizes(self) -> SymbolicSizes | None:
        """Return what the capture of this call's program treats as symbols; None if all sizes are numbers."""
        if self.family is None:
            return None
        open_sizes = self.family.open_sizes(self.call, self._asked, self._fixed, self._beside)
        if open_sizes is None or self._asked is None or self._refused is None or self.call.values:
            return open_sizes
        # (Of equal sizes all but one grow: the point must stay on the same side of what the program there is refuses.)
        asked = {name: self._asked.get(name, size) for name, size in open_sizes.points.items()}
        side = self._refused.bound(self._asked)
        tries = [open_sizes.points, *(distinct(asked, {name}) for name in asked)]
        points = next((p for p in tries if self._refused.bound({**self._asked, **p}) == side), open_sizes.points)
        return replace(open_sizes, points=points)

    def made_at(self, sizes: dict[str, int] | None, refused: Entry | None) -> None:
        """Make the next program at these sizes, which the last one, `refused`, refuses; if the last one was made so
        already, for exactly these sizes. Raises `TwoSidesError` if ranks have different sizes that no one program serves.
        """
        if self._asked is not None and sizes is not None:
            if not self._alike:
                raise TwoSidesError(
                    "ranks have sizes that no one program serves",
                    why=f"the model's code branches on sizes, and {sizes} of one rank is on another side than those of another",
                    hint="let the ranks' batches be on one side of what the model's code branches on",
                )
            self._fixed = set(self.point)
        self._asked, self._refused = sizes, refused

    def give_up(self, error: ZgraphError, refused: Entry | None) -> bool:
        """Turn symbols into numbers after a capture with symbols has failed. Return False, with the knowledge before
        this call restored, if nothing is left to give up. Raises `SignatureError` if the sizes are out of the range of
        the `refused` program, `TwoSidesError` if they are numbers in a program for one rank's alone.
        """
        family = self.family
        names = set(self.point) - self._fixed
        told = names.intersection(error.sizes if isinstance(error, SizeError) else ())
        if refused is None and self.open_elements and not told and depends_on_values(error):
            self._give_up_constants(error)
            return True
        if self.gives_numbers and names and not told:  # (the Python numbers may be the reason)
            self.gives_numbers = False
            if any(self.known.rank.everyone.gather("whether a program takes Python numbers", self.takes_numbers)):
                return True
        if refused is None and not told and self._made_of_one_call(names):
            return True
        if refused is not None and told and not self._alike:  # (words but for the last one, of two)
            raise TwoSidesError(
                "ranks have sizes that no one program serves",
                where=error.where,
                why=f"{error.what} in the program for those of one rank",
                hint="let the ranks' batches be on one side of what the model's code makes a number",
            )
        if family is None or not names or (refused is not None and not self._alike):
            self.restore()
            if refused is not None and isinstance(error, CaptureError):
                condition, where = refused.bound(self._asked or self.point)
                raise SignatureError(
                    "the model does not take a call of these sizes",
                    where=where,
                    why=f"it is made for calls in which {condition}; {error.what}",
                    hint="cut the batch, or enlarge what bounds it (a table of positions, say)",
                ) from error
            return False
        declared = {size.name for size in family.declared.values()}
        dims = {dim for _, dim in family.small(self.call)}
        near = {name for (_, dim), name in family.names.items() if dim in dims} & names
        gone = told or near or names
        elements = self.open_elements & gone
        if elements and (told or gone & declared or not family.presumed(gone)):
            self._give_up_elements(elements, error, refused)
            gone = told - elements  # (sizes without a maximum beside a budget: all at once)
            if not gone:
                return True
        logger.info("%s can't differ from call to call in one program: %s", ", ".join(sorted(gone)), error)
        # (In a program for other sizes they can be symbols. One of 2 * seq + 1 is a number where seq is one.)
        if refused is not None or (gone <= near and self._alike):
            self._fixed |= gone
            return True
        if gone & declared:
            self.restore()
            return False
        self.closed = True
        if family.close(sorted(gone), error.what):
            self.known.reasons.append((sorted(gone), error))
        return True

    def _made_of_one_call(self, names: set[str]) -> bool:
        """Let the next program be made at the sizes of one call, where the last one was made at the largest of several:
        a model may take sizes that go together alone (words of a prompt and of an answer, and of both). Return whether
        that is another try.
        """
        if self.family is None or self._asked is not None or self._beside is not None or self.call.values:
            return False
        before = self.open_sizes()
        self._beside = self.family.of_one_call(names)
        after = self.open_sizes()
        return before is not None and after is not None and before.points != after.points

    @property
    def open_elements(self) -> set[str]:
        """The names of the elements of constants that are symbols in this call's program."""
        if self.family is None:
            return set()
        return {name for (number, _), name in self.family.names_in(self.call).items() if number < 0} - self._fixed

    def _give_up_elements(self, names: set[str], error: ZgraphError, refused: Entry | None) -> None:
        """Turn elements of constants into numbers after a capture with these as symbols has failed."""
        logger.info("elements %s can't differ from call to call in one program: %s", ", ".join(sorted(names)), error)
        if refused is not None:
            self._fixed |= names
            return
        assert self.family is not None
        values = self.family.close_elements(self.call, names, error.what)
        self.closed = True
        self.known.reasons.append(([f"value of {value}" for value in values], error))

    def _give_up_constants(self, error: ZgraphError) -> None:
        """Turn all elements of constants into numbers, and sizes that did not differ, after a capture has failed because
        forward decides by what it computes of them: what follows is as if they were declared to be constants."""
        assert self.family is not None
        logger.info("no element can differ from call to call in one program: %s", error)
        why = SizeError(
            "its elements can't be sizes",
            where=error.where,
            why="forward decides by something that is computed of them, and is no sum or product of them",
        )
        self.known.reasons.append(([f"value of {path}" for path in self.family.elements.values()], why))
        self._anticipate = self.known.anticipate
        self.family.close_constants(anticipate=self._anticipate)
        self.closed = True

    def restore(self) -> None:
        """Forget what this call taught: no program can be made for it."""
        if self._before is not None and self.family is not None:
            vars(self.family).update(vars(self._before))

    def settled(self, entry: Entry) -> None:
        """Record which calls a new program serves, and tell the user; warn of the sizes that are not symbols."""
        if self.family is None:
            return
        if self._fixed:
            entry.only = {n: size for n, size in self.point.items() if n in self._fixed}
        self.family.note_constants(entry.trace.flat.constant_numbers)
        reasons, self.known.reasons = self.known.reasons, []
        scattered = [name for name in self.family.scattered if name not in self.known.told_scattered]
        self.known.told_scattered.update(scattered)
        if not self.known.rank.everyone.first():
            return
        for name in scattered:
            logger.warning(
                "each size of %s is a program of its own, though dynamic declares it: it is not contiguous (%s.contiguous())",
                name,
                name,
            )
        for names, error in reasons:
            where = f" ({error.where})" if error.where else ""
            why = f"{error.what}: {error.why}" if error.why else error.what
            logger.warning("each %s is a program of its own: %s%s", " and each ".join(names), why, where)
        if entry.open:
            sizes = [s for s in entry.program().captured.sizes.every if len(s.elements) < 2]
            ranges = "; ".join(f"{s.name} is {s.range}{f' ({s.where})' if s.where else ''}" for s in sizes)
            logger.warning("program %s serves all calls that differ in these sizes: %s", entry.name, ranges)
