"""The planted faults of `tests/mutations.py` still fit the sources. (Planting them all takes minutes: it is a command.)"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from planted_faults import FAULTS, ROOT, Fault, sources


@pytest.fixture(scope="module")
def texts() -> dict[Path, str]:
    return sources()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_fits_the_source(fault: Fault, texts: dict[Path, str]) -> None:
    path, planted = fault.planted(texts)
    ast.parse(planted)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(texts[path]))
    assert fault.tests
    for test in fault.tests:
        file, *name = test.split("::")
        assert (ROOT / file).is_file()
        assert all(f"def {n.split('[')[0]}(" in (ROOT / file).read_text() for n in name)


def test_there_are_faults_for_every_wall() -> None:
    assert len(FAULTS) >= 25 and len({f.name for f in FAULTS}) == len(FAULTS)
    assert {f.wall for f in FAULTS} >= {"storage", "versions", "layout", "Python", "ranks"}
