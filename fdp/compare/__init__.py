"""Comparison of trace and program with the step itself, before a signature first runs, and now and then later.

copies, leaves, restored -> side_by_side; replay, lockstep, rounding: why results differ; op_by_op, compiled
-> by_backend; recheck; strides: of steps that are not compared
"""

from fdp.compare.by_backend import check_again, check_program
from fdp.compare.copies import copy_of, give_back_memory, inputs_for_one_run
from fdp.compare.fits_in_memory import if_memory_allows
from fdp.compare.op_by_op import check_emitted
from fdp.compare.partitioned import check_partition, on_whole_values
from fdp.compare.recheck import Again
from fdp.compare.restored import undisturbed
from fdp.compare.strides import check_strides

__all__ = [
    "Again",
    "check_again",
    "check_emitted",
    "check_partition",
    "check_program",
    "check_strides",
    "copy_of",
    "give_back_memory",
    "if_memory_allows",
    "inputs_for_one_run",
    "on_whole_values",
    "undisturbed",
]


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]
