"""The planted faults of `tests/mutations.py` still fit the sources. (Planting them all takes minutes: it is a command.)"""

from __future__ import annotations

from pathlib import Path

import pytest
from planted_faults import FAULTS, Fault

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_fits_the_source(fault: Fault) -> None:
    fault.planted((ROOT / fault.file).read_text())
    assert fault.tests
    assert all((ROOT / test.split("::")[0]).is_file() for test in fault.tests)


def test_there_are_faults_for_every_wall() -> None:
    assert len(FAULTS) >= 25 and len({f.name for f in FAULTS}) == len(FAULTS)
    assert {f.wall for f in FAULTS} >= {"storage", "versions", "layout", "Python", "ranks"}
