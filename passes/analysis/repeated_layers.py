"""A model's repeated blocks, found in the numbers of its modules' paths: h.0, h.1, ..., or encoder.block.0, ...,
decoder.block.0, ...

A *list* is a module that has numbered children ("h"). Its children are blocks if at least half of them are alike: if
they read parameters of the same names. Lists of unlike children (stages of a convolutional network, an embedding before
a list in one Sequential) are searched for lists inside. The list with most anchors gives its blocks, and so do others
that come before or after it and whose blocks have at least half as many anchors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from zgraph.passes.stages.min_cuts import Anchor


def repeated_layers(anchors: Sequence[Anchor]) -> list[int]:
    """Return the first anchor of each block, in order; in a model without blocks, that of each module that holds
    parameters.
    """
    lists = _lists(anchors)
    chosen: list[dict[str, list[int]]] = []
    for children in sorted(lists, key=_size, reverse=True):
        apart = all(max(_all(children)) < min(_all(c)) or max(_all(c)) < min(_all(children)) for c in chosen)
        if not chosen or (apart and 2 * _size(children) * len(chosen[0]) >= _size(chosen[0]) * len(children)):
            chosen.append(children)
    starts = sorted(members[0] for children in chosen for members in children.values())
    return starts if len(starts) > 1 else _modules(anchors)


def _modules(anchors: Sequence[Anchor]) -> list[int]:
    reading = [i for i, a in enumerate(anchors) if a.params]
    before = [None, *(anchors[i].module for i in reading)]
    return [i for i, module in zip(reading, before, strict=False) if anchors[i].module != module]


def _lists(anchors: Sequence[Anchor]) -> list[dict[str, list[int]]]:
    """Return the outermost lists of children that are alike, each as the anchors of each child."""
    all_lists: dict[str, dict[str, list[int]]] = {}
    for i, anchor in enumerate(anchors):
        parts = anchor.module.split(".")
        for depth, part in enumerate(parts):
            if part.isdigit():
                children = all_lists.setdefault(".".join(parts[:depth]), {})
                children.setdefault(".".join(parts[: depth + 1]), []).append(i)
    outermost_lists: list[dict[str, list[int]]] = []
    inside: list[str] = []
    for path in sorted(all_lists, key=lambda p: p.count(".") + bool(p)):
        children = all_lists[path]
        if any(path.startswith(f"{child}.") or path == child for child in inside):
            continue
        shapes = Counter(_shape(anchors, child, members) for child, members in children.items())
        if 2 * max(shapes.values()) >= len(children):
            outermost_lists.append(children)
            inside += children
    return outermost_lists


def _shape(anchors: Sequence[Anchor], path: str, members: Sequence[int]) -> tuple[str, ...]:
    return tuple(sorted({name.removeprefix(f"{path}.") for i in members for name in anchors[i].params}))


def _all(children: dict[str, list[int]]) -> list[int]:
    return [i for members in children.values() for i in members]


def _size(children: dict[str, list[int]]) -> int:
    return len(_all(children))
