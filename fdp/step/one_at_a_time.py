"""One thread at a time traces, compares or compiles a step: all of that sets switches of torch for the whole process.

No thread waits for another rank meanwhile.
"""

from __future__ import annotations

import threading

one_at_a_time = threading.RLock()
"""Held while switches of torch are set."""
