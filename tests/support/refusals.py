"""What a refused memory budget says, as a number."""

from collections.abc import Callable

import pytest

from zgraph.errors import PlanError


def smallest(attempt: Callable[[], object]) -> int:
    """The bytes that the refusal of `attempt`, which has too small a budget, says are the least."""
    with pytest.raises(PlanError, match="the smallest that works is") as caught:
        attempt()
    return int(str(caught.value).split("the smallest that works is ")[1].split(" bytes")[0])
