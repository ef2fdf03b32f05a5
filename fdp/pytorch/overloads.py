"""Operators as torch registers them: one overload each, its schema, its name, its kernels, and the common way in.

Private to torch: `torch._ops.OpOverload`, the class of what graphs call; its `_schema`, which says what the operator
takes, writes and returns; its `_overloadname`, "default" for the one without a name; its `_op`, which takes any
arguments, and boxes each. `torch._C._dispatch_has_kernel_for_dispatch_key(name, key)` is true of kernels registered for
that key alone, and false of those for any key, as generated out overloads have. `torch._C._dispatch_get_all_op_names`
has the name of every overload, "namespace::name" or "namespace::name.overload".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

OpOverload = torch._ops.OpOverload


def schema_of(operator: Any) -> torch.FunctionSchema:
    """What an operator takes and returns, and which arguments it writes to or returns views of."""
    found: torch.FunctionSchema = operator._schema
    return found


@functools.cache
def schema_arguments(operator: OpOverload) -> Sequence[torch.Argument]:
    """What the schema says of each argument, in order. Each `schema.arguments` makes these objects anew."""
    return tuple(schema_of(operator).arguments)


def overload_name_of(operator: Any) -> str:
    """The name of an overload among those of its operator."""
    return str(operator._overloadname)


def boxed_call_of(operator: OpOverload) -> Callable[..., Any]:
    """What calls an overload with any arguments that it takes, without a step through Python."""
    call: Callable[..., Any] = operator._op
    return call


def has_kernel(operator: OpOverload, dispatch_key: str) -> bool:
    """Whether an overload has a kernel that was registered for a dispatch key, as "CPU", and for no others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), dispatch_key)


def all_overloads() -> Sequence[str]:
    """The qualified names of all overloads that are registered by now."""
    return torch._C._dispatch_get_all_op_names()
