"""The proof that a program computes what its trace says, made before it runs, without the code that wrote it.

Trace and program both run on memory that holds terms in place of numbers (`memory`, `terms`): the trace in
its own order with memory of its own for each value (`reference`), the program by calling it on tensors without values
(`execution`). Then results, messages and memory are compared (`obligations`). What is known of operators is read off
their schemas (`operators`); which calls compute the same as others is listed in `rules`. What is made in real memory
for a program, each time that it is made, is compared with what it was proved with (`made`); what sends its messages is
carried out, too (`sent`).

References: Pnueli, Siegel and Singerman, Translation Validation (TACAS 1998); Tristan and Leroy, Formal Verification of
Translation Validators: A Case Study on Instruction Scheduling Optimizations (POPL 2008), for CompCert.
"""

from fdp.verify.failure import VerificationError
from fdp.verify.made import verify_made
from fdp.verify.obligations import verify_program
from fdp.verify.sent import verify_sent

__all__ = ["VerificationError", "verify_made", "verify_program", "verify_sent"]


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]
