"""One thread at a time in dynamo, AOTAutograd and Inductor."""

from __future__ import annotations

import threading

# Held while dynamo, AOTAutograd or Inductor works: their state is the process's, not a thread's.
ONE_AT_A_TIME = threading.RLock()
