"""When a step is compared again: a later call may show what the first one did not.

Before the first call a step was compared on the very inputs of that call. Before the second one it is compared on
perturbed inputs, which stand for those of all calls to come. From then on it is compared at calls 4, 8, ... of a
signature, as long as all of these comparisons together take less than a hundredth of the time that the steps have
taken. Each rank decides by its own clock: a comparison sends nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SHARE = 0.01
"""The largest share of the time of steps that comparisons after the first may take."""

clock: Callable[[], float] = time.perf_counter


class Again:
    """Comparisons of one signature after its first call.

    Args:
        first_s: seconds that the comparison at the first call took: about what a later one does.
        owed: whether there has to be one at the next call that is looked at.

    Attributes:
        at: the next call to look at, counted from one; 0 for none.
        spent_s: seconds that comparisons have taken.
    """

    def __init__(self, first_s: float, owed: bool) -> None:
        self.at = 2
        self._owed = owed
        self.spent_s = 0.0
        self._expected_s = first_s
        self._step_s = float("inf")

    def look(self, compare: Callable[[], bool], run: Callable[[], Any]) -> Any:
        """Make a call, after a comparison if one is due, or if there is time for one.

        Args:
            compare: compares on the inputs of the call; returns whether it is to come again.
            run: makes the call.

        Returns:
            What the call returns.
        """
        calls = self.at
        taken_s = calls * self._step_s if self._step_s < float("inf") else 0.0
        comes_again = True
        if self._owed or self.spent_s + self._expected_s <= SHARE * taken_s:
            # What has been refused once is not run at the next call either.
            was_owed, self._owed, self.at = self._owed, True, calls + 1
            begun = clock()
            comes_again = compare()
            self._expected_s = clock() - begun
            self.spent_s += 0.0 if was_owed else self._expected_s
            self._owed = False
        self.at = 2 * calls if comes_again else 0
        # The shortest of the calls that were looked at: others may have waited for something.
        begun = clock()
        result = run()
        self._step_s = min(self._step_s, clock() - begun)
        return result
