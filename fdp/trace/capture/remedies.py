"""The remedy for a step that cannot be traced, by the function of torch that cannot be traced.

Functions of torch that are written in C++ leave no trace of themselves in an exception. So the remedy goes by the
names in the line of the user's code, as well as by those of the functions of torch that were called from there.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping

from fdp.errors import error_text
from fdp.trace.operators.source import Source, failing_line, library_line

READ_VALUE = (
    "choose between values with torch.where(condition, a, b), between functions with "
    "torch.cond(condition, f, g, operands); index with x.index_select(0, i); return a metric as a tensor and read it "
    "outside."
)
MADE_SHAPE = (
    "keep the shape and mask instead: torch.where(mask, x, 0) for x[mask], and divide by mask.sum() for a mean."
)

_SCALER = (
    "a GradScaler decides by values: use fdp.optim.loss_scaled(optimizer), and multiply the loss by "
    'state["opt"]["scale"].'
)

_TOO_LONG = "the length of a tensor cannot be read from another: make the longest one, and mask what is too much."

_BY_FUNCTION = {
    "arange": _TOO_LONG,
    "one_hot": "pass num_classes to one_hot; without it, the largest value decides on the shape.",
    "cov": "torch.cov looks at values: centre the rows with x - x.mean(1, keepdim=True), and take x @ x.mT / (n - 1).",
    "corrcoef": "torch.corrcoef looks at values: centre the rows and divide them by their norms, and take x @ x.mT.",
    "gaussian_nll_loss": "gaussian_nll_loss looks whether a variance is negative: write it out, with "
    "v = var.clamp(min=1e-6), as 0.5 * (v.log() + (input - target) ** 2 / v).",
    "get_total_norm": "leave out error_if_nonfinite, and return the norm to look at it outside.",
    "clip_grad_norm_": "leave out error_if_nonfinite, and return the norm to look at it outside.",
    "unscale_": _SCALER,
    "_maybe_opt_step": _SCALER,
    "tensor_split": "pass the places to split at as Python numbers, not as a tensor.",
    "istft": "torch.istft looks at the values of its window: take torch.fft.irfft and torch.nn.functional.fold.",
    "repeat_interleave": "pass output_size, the length of the result.",
    "bincount": "count with torch.zeros(n).index_add(0, i, torch.ones(len(i))), which has a known length.",
    "unique": "how many values are different is not known ahead: find them outside of the step, and pass them in.",
    "unique_consecutive": "how many values are different is not known ahead: find them outside of the step.",
    "ctc_loss": "pass the lengths to ctc_loss as tensors, not as Python numbers.",
    "scan": "torch cannot differentiate its scan while it is traced: write a Python loop, which is unrolled into the "
    "graph, or associative_scan.",
    "lstsq": "solve by torch.linalg.pinv(a) @ b, or torch.linalg.solve(a.mT @ a, a.mT @ b).",
    "pack_padded_sequence": "run the padded sequences, and take the result of the last real place of each with gather.",
    "deepcopy": "copy tensors with x.clone(), and trees of them with optree.tree_map(torch.clone, tree).",
    "save": "save what the step returns, outside of it, for instance with fdp.save.",
    "dumps": "save what the step returns, outside of it, for instance with fdp.save.",
}
_BY_FUNCTION_OF_PYTHON = {
    "sqrt": "of a tensor take x.sqrt(); of a number that x.item() gives at each call, torch.sym_sqrt(number), or "
    "number ** 0.5.",
    "pow": "write a ** b: math.pow takes no number that is read at each call.",
    "min": "of tensors take torch.minimum(a, b); of numbers that are read at each call, torch.sym_min(a, b).",
    "max": "of tensors take torch.maximum(a, b); of numbers that are read at each call, torch.sym_max(a, b).",
    **{
        name: f"math.{name} takes no number that is read at each call: take x.{name}() of the tensor, then .item()."
        for name in ("cos", "erf", "exp", "expm1", "lgamma", "log", "log10", "log1p", "log2", "sin", "tan", "tanh")
    },
}
"""Of Python's own functions and those of `math`, which take a number out of what they are given."""

_WHOLE_POWER = "write 2.0 ** n for 2 ** n: of a whole number Python asks first whether n is negative."
_BY_TEXT = {
    "its data is not allocated yet": "put tensors together with torch.stack, not with torch.tensor; give operators "
    "numbers where they take numbers.",
    "expected b_val": "the branches of torch.cond have gradients with other strides (that of x.sum() is one number, "
    "expanded): sum behind torch.cond, not in it; or choose between results with torch.where.",
    "dispatch_on_subclass": _TOO_LONG,
    "tensors do not have strides": "of torch's sparse layouts take A.to_sparse_coo() for this; or A.to_dense().",
}
_VALIDATED = (
    "it checks the values of its arguments: leave out validate_args=True, which is off anyway while a step is traced "
    "and on in the comparison at the first call."
)
_NAMES: Mapping[str, str] = {"_unique2": "unique", "unique_dim": "unique", "linalg_lstsq": "lstsq",
                             "_pack_padded_sequence": "pack_padded_sequence"}  # fmt: skip


def remedy_for(error: BaseException, usual: str, operator: str = "") -> str:
    """The remedy for the failure of a traced step.

    Args:
        error: the failure, with its traceback.
        usual: what helps most.
        operator: the operator that failed, if that is known: "aten.bincount.default".

    Returns:
        The remedy, of the function of torch that it came from if that has one of its own.
    """
    inner = library_line(error.__traceback__)
    if inner is not None and "distributions" in inner.file:
        return _VALIDATED
    bare = operator.split(".")[1] if operator.count(".") else operator
    named = _NAMES.get(bare, bare)
    if named in _BY_FUNCTION:
        return _BY_FUNCTION[named]
    if inner is not None and inner.function in _BY_FUNCTION:
        return _BY_FUNCTION[inner.function]
    if operator:
        return usual
    text = _text_of(failing_line(error.__traceback__))
    for word in re.findall(r"(\w+)\(", text):
        if word in _BY_FUNCTION:
            return _BY_FUNCTION[word]
    for word in re.findall(r"(?<![\w.])(?:math\.)?(\w+)\(", text):
        if word in _BY_FUNCTION_OF_PYTHON:
            return _BY_FUNCTION_OF_PYTHON[word]
    if re.search(r"(?<![\w.])\d+ ?\*\*", text):
        return _WHOLE_POWER
    return next((remedy for text, remedy in _BY_TEXT.items() if text in error_text(error)), usual)


def _text_of(line: Source | None) -> str:
    return "" if line is None else linecache.getline(line.file, line.line)
