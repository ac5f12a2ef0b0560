"""The bytes that torch's CPU allocator holds, now and at most.

`install()` comes before the first tensor that is to count. Then `live()`, `peak()` and `reset_peak()`, all in bytes.
The size of the resident set would be too coarse: it keeps what malloc does not give back.
"""

from __future__ import annotations

from link.build import load

_module = load("memory.cpp")
install, live, peak, reset_peak = _module.install, _module.live, _module.peak, _module.reset_peak
