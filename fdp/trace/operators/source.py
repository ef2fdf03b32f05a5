"""The line of the user's code that each node of a trace came from, also in the backward pass.

In the forward pass the innermost line that belongs neither to torch nor to fdp is noted for every operator as it is
recorded, under the sequence number that autograd gave the operation. In the backward pass the node of the autograd
graph that is running has the same number, and leads back to that line.
(This relies on `torch._C._current_autograd_node`, `torch._C._autograd._get_sequence_nr`, and `_sequence_nr` of nodes.)
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import optree
import torch
from torch import fx

from fdp import pytree
from fdp.pytorch.parts import unsupported_torch

_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(str(path))) + os.sep for path in (torch.__file__, optree.__file__, pytree.__file__)
)
_MODELS = tuple(
    os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), *path)
    for path in (("nn", ""), ("distributions", ""), ("optim", ""), ("amp", ""), ("functional.py",))
)
"""Parts of torch that call the public functions of torch as users do, and may read values."""

_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


@dataclass(frozen=True)
class Source:
    """A line of the user's code.

    Attributes:
        file: path of the file.
        line: line number, from 1.
        function: name of the function that the line is in.
    """

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """What the line says; nothing if its file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"


@contextmanager
def source_lines(tracer: Any) -> Iterator[None]:
    """Give every node that a tracer makes a `meta["source"]` and a `meta["backward"]` flag.

    (A dispatch mode above the tracer would see as much, but torch.cond does not run again after it has met one.)
    """
    lines: dict[int, Source | None] = {}
    create_node = tracer.create_node

    def create_node_with_source(*args: Any, **kwargs: Any) -> fx.Node:
        node: fx.Node = create_node(*args, **kwargs)
        current = torch._C._current_autograd_node()
        if current is None:
            source = user_line(sys._getframe(1))
            # An operator that autograd does not record leaves the number of the one before it as it was.
            lines.setdefault(torch._C._autograd._get_sequence_nr() - 1, source)
        else:
            number_of = getattr(current, "_sequence_nr", None)
            if number_of is None:
                raise unsupported_torch("tracing a step", ["a node of autograd has no _sequence_nr"])
            source = lines.get(number_of()) or _source_of_arguments(node)
        node.meta["source"], node.meta["backward"] = source, current is not None
        return node

    tracer.create_node = create_node_with_source
    try:
        yield
    finally:
        del tracer.create_node


def _source_of_arguments(node: fx.Node) -> Source | None:
    """The source of a node's arguments: what a hook does to a gradient belongs to the line of the gradient."""
    found = [argument.meta.get("source") for argument in node.all_input_nodes if argument.op == "call_function"]
    return next((source for source in reversed(found) if source is not None), None)


def user_line(frame: FrameType | None) -> Source | None:
    """The innermost line, from a frame outwards, that belongs neither to torch nor to fdp."""
    while frame is not None:
        code = frame.f_code
        if _is_users(code.co_filename):
            return Source(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return None


def failing_line(traceback: TracebackType | None) -> Source | None:
    """The innermost line of the user's code that an exception passed through."""
    found = None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if _is_users(code.co_filename):
            found = Source(code.co_filename, traceback.tb_lineno, code.co_name)
        traceback = traceback.tb_next
    return found


def library_line(traceback: TracebackType | None) -> Source | None:
    """The innermost line of torch's own models, losses and the like that the user's innermost line had called."""
    found = None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if _is_users(code.co_filename):
            found = None
        elif code.co_filename.startswith(_MODELS):
            found = Source(code.co_filename, traceback.tb_lineno, code.co_name)
        traceback = traceback.tb_next
    return found


def users_lines(traceback: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that lies in the user's code; all of it if none does."""
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    kept: TracebackType | None = None
    for entry in reversed(entries):
        if _is_users(entry.tb_frame.f_code.co_filename):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept if kept is not None or not entries else entries[0]


def located(node: fx.Node) -> str:
    """An operator of a trace with its line, for messages."""
    return f"{node.meta.get('stands_for', node.target)} at {node.meta.get('source')}"


@functools.lru_cache(maxsize=4096)
def _is_users(path: str) -> bool:
    if path.startswith((*_LIBRARIES, "<frozen", "<string>", "<eval_with_key>", "<fdp step")):
        return False
    return not path.startswith(_STANDARD_LIBRARY) or "-packages" in path
