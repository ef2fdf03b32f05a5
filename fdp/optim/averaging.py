"""Moving averages of parameters, for evaluation: as a function, and as part of an optimizer's state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdp import pytree
from fdp.optim.argument_checks import alike, names, optimizer_error, trains, value_text
from fdp.optim.entries import added, check_optimizer, parted
from fdp.optim.optimizer import Optimizer
from fdp.optim.skipping import everywhere
from fdp.pytree import Tree
from fdp.state.containers import copied
from fdp.tracebacks import hiding_frames


@torch.no_grad()
@hiding_frames
def ema(average: Tree, params: Tree, decay: float) -> Tree:
    """Move an average of tensors towards their present values: `decay * average + (1 - decay) * params`.

    Bit for bit `torch.optim.swa_utils.get_ema_multi_avg_fn(decay)`, out of place.

    Args:
        average: the average so far, a pytree of tensors; the first one is a copy of the parameters.
        params: a pytree of the same structure, with tensors of the same shapes and dtypes. It may be one of buffers:
            integers are averaged as the class does it, rounded towards zero.
        decay: a number from 0 to 1, how much of the average stays.

    Returns:
        The new average; without a graph of autograd. Leaves that are not tensors are those of `params`.

    Raises:
        ArgumentError: `decay` is out of range, or the trees do not match.

    Example:
        >>> ema({"w": torch.tensor(1.0)}, {"w": torch.tensor(2.0)}, decay=0.75)
        {'w': tensor(1.2500)}
    """
    _check_decay("ema", decay)
    return _moved("average", average, params, lambda a, p: _toward(a, p, decay))


@hiding_frames
def averaged(optimizer: Optimizer, decay: float, name: str = "average") -> Optimizer:
    """Let an optimizer keep an exponential moving average of the parameters that it makes.

    The average is in the state, `opt_state["average"]`, and mirrors the parameters: use it where you would use them.
    Bit for bit `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`, updated after each step: the
    first update copies the parameters. Buffers are not its business; `ema` averages those.

    Args:
        optimizer: what makes new parameters. Inside of `loss_scaled` a skipped update leaves the average alone,
            around it every update counts.
        decay: a number from 0 to 1, how much of the average stays.
        name: the entry of the state, so that averages of several decays can nest.

    Returns:
        An `Optimizer` whose state has the entries `name`, and f"{name}_count", the number of updates so far (a 0-dim
        int64 tensor on the CPU), beside those of the one inside.

    Raises:
        ArgumentError: `optimizer` is no `Optimizer`, or `decay` out of range; later: the state is of other making.

    Example:
        >>> optimizer = averaged(Optimizer(lambda p: {}, lambda g, s, p: (p - g, s)), decay=0.5)
        >>> w = torch.tensor(0.0)
        >>> opt_state = optimizer.init(w)
        >>> for _ in range(3):
        ...     w, opt_state = optimizer.update(torch.tensor(-1.0), opt_state, w)
        ...     print(w.item(), opt_state["average"].item())
        1.0 1.0
        2.0 1.5
        3.0 2.25
    """
    check_optimizer("averaged", optimizer)
    _check_decay("averaged", decay)
    if not isinstance(name, str) or not name:
        raise optimizer_error(
            f"averaged takes the name of an entry, not {value_text(name)}.", 'name="average" is the default.'
        )
    count_name = f"{name}_count"

    def init(params: Tree) -> Tree:
        own = {name: copied(params), count_name: torch.zeros((), dtype=torch.int64, device="cpu")}
        return added("averaged", optimizer.init(params), own)

    @torch.no_grad()
    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        inner, own = parted("averaged", opt_state, (name, count_name))
        params, inner = optimizer.update(grads, inner, params)
        is_first = everywhere(own[count_name] == 0)

        def move(average: Tensor, p: Tensor) -> Tensor:
            if not trains(p):  # an average of equal integers may round to another one
                return p
            return torch.where(is_first(p.device), p.detach(), _toward(average, p, decay))

        average = _moved(f"opt_state[{name!r}]", own[name], params, move)
        return params, {**inner, name: average, count_name: own[count_name] + 1}

    return Optimizer(init, update, f"averaged({optimizer!r}, decay={decay:g})")


def _toward(average: Tensor, p: Tensor, decay: float) -> Tensor:
    p = p.detach()
    if trains(p):
        return torch.lerp(average, p, 1 - decay)
    return (average * decay + p * (1 - decay)).to(average.dtype)


def _moved(root: str, average: Tree, params: Tree, move: Any) -> Tree:
    """The new average, leaf by leaf."""
    leaves, spec = pytree.flatten(params, none_is_leaf=True)
    try:
        old: list[Any] = spec.flatten_up_to(average)
    except ValueError as error:
        what = f"{root} does not mirror the parameters: {error}."
        raise optimizer_error(what, "start the average as a copy of the parameters.") from error
    bad, result = [], []
    for where, a, p in zip(names(params, root), old, leaves, strict=True):
        if not isinstance(p, Tensor) and not isinstance(a, Tensor):
            result.append(p)
        elif not alike(a, p):
            bad.append(f"{where} is {value_text(a)}, not like {value_text(p)}")
        else:
            result.append(move(a.detach(), p))
    if bad:
        raise optimizer_error(
            f"{root} does not mirror the parameters.", "start the average as a copy of the parameters.", bad
        )
    return spec.unflatten(result)


def _check_decay(who: str, decay: Any) -> None:
    number = isinstance(decay, (int, float)) and not isinstance(decay, bool)
    if not number or not 0 <= decay <= 1:
        raise optimizer_error(
            f"{who} takes decay as a number from 0 to 1, not {value_text(decay)}.", "decay=0.999 is usual."
        )
