"""Mistakes that a tired programmer makes in what emits a step, each as one replacement in one file.

`make faults` makes them one at a time, and looks at two things: whether a number of `faulty_programs` changes, and
whether the validator refused the program before that number was computed. They were written without a look at how the
validator works.
"""

from __future__ import annotations

from faults_in_compiling import BARRIERS, DRAWS, GRAPH, PASSES
from faults_in_memory import DONATION, LAYOUT, LIFETIMES
from faults_in_messages import ARENA, EXCHANGES, HEADER, PACKING, SENDING
from faults_in_places import FORMS, PLACES
from faults_in_writing import SCHEDULE, SHORTCUTS, WRITING
from seeded_fault import Fault

FAULTS: dict[str, tuple[Fault, ...]] = {
    "layout": LAYOUT,
    "lifetimes": LIFETIMES,
    "donation": DONATION,
    "packing": PACKING,
    "places": PLACES,
    "forms": FORMS,
    "writing": WRITING,
    "shortcuts": SHORTCUTS,
    "schedule": SCHEDULE,
    "arena": ARENA,
    "header": HEADER,
    "sending": SENDING,
    "exchanges": EXCHANGES,
}
"""Faults in what emits a step operator by operator, by what they are in."""

COMPILED_FAULTS: dict[str, tuple[Fault, ...]] = {
    "graph": GRAPH,
    "passes": PASSES,
    "barriers": BARRIERS,
    "draws": DRAWS,
}
"""Faults in what is handed to the compiler."""

COMPILED_PROGRAMS = (
    "lies_otherwise",
    "by_places",
    "adamw",
    "foreach",
    "accumulate",
    "large",
    "early",
    "in_the_bucket",
    "old_values",
    "returned",
    "drawn_anywhere",
)
"""The steps that these are tried on."""
