"""All operators that are treated otherwise than torch does where tensors are divided over ranks."""

from __future__ import annotations

import functools
from typing import Any

from zgraph.torch_compat.noise_of_shards import NOISE
from zgraph.torch_compat.numbers_of_shards import NUMBERS
from zgraph.torch_compat.operators_of_shards import Treatment
from zgraph.torch_compat.plain_operands import with_plain_operands
from zgraph.torch_compat.sums_of_shards import SUMS
from zgraph.torch_compat.whole_operands import WHOLE
from zgraph.torch_compat.writes_to_parts import WRITES


@functools.cache
def treatments() -> dict[Any, Treatment]:
    """Return what is called in each operator's place."""
    return with_plain_operands({**NUMBERS, **NOISE, **SUMS, **WRITES, **WHOLE})
