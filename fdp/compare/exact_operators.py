"""Which operators round nothing: they choose numbers, move them, or change their signs.

Whatever runs them gets the same numbers out of the same numbers. Only so is one element equal to the largest, or not
below a threshold that was taken from among them. Were the threshold moved as rounding moves a sum, none would be.
"""

from __future__ import annotations

import torch
from torch import fx

from fdp.pytorch.overloads import OpOverload, overload_name_of, schema_of
from fdp.trace.operators.effects import tensors_in

_EXACT_TEXT = """
    _reshape_copy _to_copy _unsafe_index _unsafe_masked_index abs adaptive_max_pool2d adaptive_max_pool3d
    alias_copy amax amin aminmax arange as_strided_copy as_strided_scatter bernoulli cat ceil clamp clamp_max
    clamp_min clone constant_pad_nd copy copysign cummax cummin detach_copy diag_embed diagonal_copy
    diagonal_scatter embedding empty empty_like empty_strided expand_copy eye fill flip floor fmax fmin full
    full_like gather hardtanh heaviside index index_copy index_fill index_select kthvalue lift_fresh_copy
    masked_fill masked_scatter masked_select max max_pool2d_with_indices max_pool3d_with_indices maximum median
    min minimum mode nan_to_num nanmedian neg new_empty new_empty_strided new_full new_ones new_zeros ones
    ones_like permute_copy pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d relu
    repeat replication_pad1d replication_pad2d replication_pad3d roll scalar_tensor select_copy select_scatter sgn
    sign slice_copy slice_scatter sort split_copy split_with_sizes_copy squeeze_copy t_copy take threshold
    threshold_backward topk transpose_copy tril triu trunc unbind_copy unfold_copy unsqueeze_copy
    upsample_nearest1d upsample_nearest2d upsample_nearest3d view_copy where zero zeros zeros_like
"""
_EXACT = frozenset(_EXACT_TEXT.split())
_EXACT_IN_PART = {"round": ("default",), "scatter": ("src", "value")}
_MAY_ADD_UP = frozenset(("index_put", "_unsafe_index_put", "put"))
"""They add where `accumulate` says so."""


def rounds_nothing(node: fx.Node) -> bool:
    """Whether an operator computes exactly, for any inputs.

    Args:
        node: a call of an operator, with example values.

    Returns:
        False also where nothing is known of the operator.
    """
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    name = schema_of(target).name.split("::")[1]
    name = name.removesuffix("_") if schema_of(target).is_mutable else name
    if name in _MAY_ADD_UP:
        exact = not any(argument is True for argument in (*node.args, *node.kwargs.values()))
    elif name in _EXACT_IN_PART:
        exact = overload_name_of(target) in _EXACT_IN_PART[name]
    else:
        exact = name in _EXACT
    return exact and not _narrows(node)


def _narrows(node: fx.Node) -> bool:
    """Whether a result has fewer digits than what it is made of, or both are complex: a size, a sign is computed."""
    made = tensors_in(node.meta.get("val"))
    given = [tensor for each in node.all_input_nodes for tensor in tensors_in(each.meta.get("val"))]
    if any(tensor.is_complex() for tensor in (*made, *given)):
        return True
    digits = [[torch.finfo(x.dtype).eps for x in some if x.is_floating_point()] for some in (given, made)]
    return bool(all(digits) and max(digits[1]) > min(digits[0]))
