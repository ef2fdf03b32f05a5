"""When things happen in a step: as a value, a table, a picture, and a file for Perfetto.

timeline -> rows -> report, picture, perfetto
"""

from fdp.timeline.perfetto import save_trace
from fdp.timeline.picture import draw
from fdp.timeline.report import print_timeline
from fdp.timeline.timeline import Interval, Timeline

__all__ = ["Interval", "Timeline", "draw", "print_timeline", "save_trace"]


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]
