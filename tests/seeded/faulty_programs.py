"""Small steps that each meet some of what an emitter decides: where values lie, what is packed when, what waits."""

from __future__ import annotations

import faulty_meshes
import faulty_messages
import faulty_models
import faulty_state
import faulty_values
from faulty_program import Program

PROGRAMS: dict[str, Program] = {
    name: program
    for part in (faulty_models, faulty_messages, faulty_meshes, faulty_state, faulty_values)
    for name, program in part.PROGRAMS.items()
}
