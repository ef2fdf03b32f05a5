"""Learning rates as functions of a step count: tables made by torch's schedulers, and optimizers that follow them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from fdp.optim.argument_checks import optimizer_error, value_text
from fdp.optim.entries import added, check_optimizer, parted
from fdp.optim.optimizer import Optimizer
from fdp.pytree import Tree
from fdp.tracebacks import hiding_frames

_COUNT = "count"


@dataclass(frozen=True, eq=False)
class Schedule:
    """A pure function of a step count that looks its values up in a table; its last value holds for ever.

    Args:
        table: the values, a float64 tensor on the CPU.
        summary: what `print` shows.
    """

    table: Tensor
    summary: str = "Schedule"

    @hiding_frames
    def __call__(self, count: Tensor) -> Tensor:
        """Look up the value of the update with a given number.

        Args:
            count: how many updates came before; an integer tensor on the CPU, of any shape.

        Returns:
            A float64 tensor of the shape of `count`. A count beyond the table gives its last value, a negative one its
            first.

        Raises:
            ArgumentError: `count` is no such tensor.
        """
        integers = isinstance(count, Tensor) and not (count.is_floating_point() or count.is_complex())
        if not integers or count.dtype == torch.bool or count.device.type != "cpu":
            # A number would be frozen into the graph of a step.
            what = f"a schedule takes a count as an integer tensor on the CPU, not {value_text(count)}."
            raise optimizer_error(
                what, "keep the count in the state: torch.zeros((), dtype=torch.int64), and add 1 a step."
            )
        at = count.long().clamp(0, len(self.table) - 1)
        return self.table.index_select(0, at.reshape(-1)).reshape(count.shape)

    def __repr__(self) -> str:
        return self.summary


@hiding_frames
def schedule_from_torch(make: Callable[[torch.optim.Optimizer], Any], lr: float, steps: int) -> Schedule:
    """Make a pure function of the step count of a `torch.optim.lr_scheduler`, with the same bits.

    The scheduler runs once, in Python, for `steps` steps; its learning rates become a table. So whatever it does with
    Python numbers is exact, lambdas included, and the function that looks them up can be traced: a step follows the
    schedule without a retrace.

    Args:
        make: `make(optimizer) -> scheduler`. Schedulers may be composed in it (`SequentialLR`, `ChainedScheduler`).
        lr: the base learning rate, as given to the optimizer.
        steps: how many updates to tabulate. The last value holds for all later ones.

    Returns:
        `schedule(count)`, the learning rate (a float64 tensor) of the update that `count` updates came before, an
        int64 tensor on the CPU: what the class sets if `scheduler.step()` follows every update.

    Raises:
        ArgumentError: `ReduceLROnPlateau`, whose learning rate follows the loss; a scheduler that changes more than
            the learning rate; arguments that are none of these.

    Example:
        >>> from torch.optim.lr_scheduler import LinearLR
        >>> schedule = schedule_from_torch(lambda opt: LinearLR(opt, 0.25, total_iters=3), lr=1.0, steps=10)
        >>> schedule(torch.tensor(1)), schedule(torch.arange(5))
        (tensor(0.5000, dtype=torch.float64), tensor([0.2500, 0.5000, 0.7500, 1.0000, 1.0000], dtype=torch.float64))
    """
    if not callable(make):
        hint = "schedule_from_torch(lambda optimizer: CosineAnnealingLR(optimizer, T_max=1000), lr, steps)."
        raise optimizer_error(f"schedule_from_torch takes a function of an optimizer, not {value_text(make)}.", hint)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise optimizer_error(
            f"schedule_from_torch takes steps as a positive int, not {value_text(steps)}.", "steps=1000."
        )
    try:
        optimizer = torch.optim.SGD([torch.zeros(1, device="cpu")], lr=float(lr))
    except (TypeError, ValueError) as error:
        raise optimizer_error(
            f"schedule_from_torch takes lr as a number, not {value_text(lr)}: {error}.", "lr=0.1."
        ) from error
    (group,) = optimizer.param_groups
    before = _others(group)
    scheduler = make(optimizer)
    kind = type(scheduler).__name__
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        what = "ReduceLROnPlateau follows the loss, so its learning rate is no function of the step count."
        remedy = "average the loss over ranks, step the class in Python, and write its lr into opt_state['lr']."
        raise optimizer_error(what, remedy)
    if not isinstance(scheduler, lr_scheduler.LRScheduler):
        raise optimizer_error(
            f"make returned {value_text(scheduler)}, not a scheduler of the optimizer.", "return the scheduler."
        )
    if scheduler.optimizer is not optimizer:
        remedy = "make one for the optimizer that make is called with."
        raise optimizer_error(f"make returned a {kind} for another optimizer.", remedy)
    table = []
    for step in range(steps):
        changed = sorted(key for key, value in before.items() if _others(group).get(key) != value)
        if changed:
            what = f"{kind} changes {', '.join(changed)} beside the learning rate, which this schedule would leave out."
            raise optimizer_error(what, "leave it constant (cycle_momentum=False).")
        table.append(float(group["lr"]))
        if step + 1 < steps:
            optimizer.step()
            with warnings.catch_warnings():
                # SequentialLR and others call their parts in the deprecated way.
                warnings.filterwarnings("ignore", message=r"The epoch parameter in `scheduler.step\(\)`")
                _step(scheduler, kind)
    summary = f"{kind}({steps} steps from {table[0]:g} to {table[-1]:g})"
    return Schedule(torch.tensor(table, dtype=torch.float64, device="cpu"), summary)


@hiding_frames
def scheduled(optimizer: Optimizer, schedule: Callable[[Tensor], Tensor] | Mapping[str, Any]) -> Optimizer:
    """Let an optimizer count its updates and set its learning rate by the count.

    Args:
        optimizer: what has an entry `lr` in its state, such as what `from_torch` makes.
        schedule: a function of the number of updates so far (a 0-dim int64 tensor on the CPU) that returns the
            learning rate of the next one, a 0-dim tensor: of `schedule_from_torch`, or of torch operations. Or a dict
            of such functions, by the entries of the state that they set, `{"lr": f, "momentum": g}`.

    Returns:
        An `Optimizer` whose state has the entry `count` beside those of the one inside, where `lr` is that of the
        last update (float64). Inside of `loss_scaled` a skipped update does not count; around it every one does.

    Raises:
        ArgumentError: what was given is no optimizer or function; later: the state inside has no such entry (as that
            of `partition`: schedule its parts), or a function returns something else.

    Example:
        >>> from fdp.optim import from_torch
        >>> optimizer = scheduled(from_torch(torch.optim.SGD), lambda count: 1.0 / (1.0 + count.double()))
        >>> w = torch.tensor(0.0)
        >>> opt_state = optimizer.init(w)
        >>> for _ in range(3):
        ...     w, opt_state = optimizer.update(torch.tensor(-1.0), opt_state, w)
        ...     print(f"{opt_state['lr'].item():.3f}")
        1.000
        0.500
        0.333
    """
    check_optimizer("scheduled", optimizer)
    by_entry = dict(schedule) if isinstance(schedule, Mapping) else {"lr": schedule}
    for name, function in by_entry.items():
        if not callable(function) or isinstance(function, type):
            what = f"scheduled takes a function of the step count for {name!r}, not {value_text(function)}."
            raise optimizer_error(what, "write a function of a tensor, or use schedule_from_torch.")

    def now(count: Tensor) -> dict[str, Tensor]:
        return {name: _value(name, function(count)) for name, function in by_entry.items()}

    def init(params: Tree) -> Tree:
        count = torch.zeros((), dtype=torch.int64, device="cpu")
        state = added("scheduled", optimizer.init(params), {_COUNT: count})
        _check_entries(optimizer, by_entry, state)
        return {**state, **now(count)}

    @torch.no_grad()
    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        inner, own = parted("scheduled", opt_state, (_COUNT,))
        _check_entries(optimizer, by_entry, inner)
        params, inner = optimizer.update(grads, {**inner, **now(own[_COUNT])}, params)
        return params, {**inner, _COUNT: own[_COUNT] + 1}

    functions = by_entry["lr"] if by_entry.keys() == {"lr"} else by_entry
    shown = getattr(functions, "__qualname__", functions)
    return Optimizer(init, update, f"scheduled({optimizer!r}, {shown})")


def _step(scheduler: Any, kind: str) -> None:
    try:
        scheduler.step()
    except TypeError as error:
        what = f"{kind} takes more than the step count to step: {error}."
        raise optimizer_error(what, "use schedulers whose learning rate is a function of the step count.") from error


def _others(group: dict[str, Any]) -> dict[str, Any]:
    """The options that a scheduler must not change."""
    return {key: value for key, value in group.items() if key not in ("params", "lr")}


def _check_entries(optimizer: Optimizer, by_entry: Mapping[str, Any], state: dict[str, Any]) -> None:
    absent = [name for name in by_entry if not isinstance(state.get(name), Tensor)]
    if absent:
        what = f"the state of {optimizer!r} has no tensor {', '.join(map(repr, absent))} that a schedule could set."
        if "parts" in state:
            raise optimizer_error(
                what, "schedule each part: partition(label, {key: scheduled(optimizer, schedule), ...})."
            )
        remedy = "give the hyperparameter as a tensor, as in from_torch(torch.optim.SGD, momentum=torch.tensor(0.9))."
        raise optimizer_error(what, remedy)


def _value(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point() or value.device.type != "cpu":
        what = f"the schedule of {name!r} returned {value_text(value)}, not a 0-dim floating point tensor on the CPU."
        raise optimizer_error(what, "compute it of the count, a tensor: 0.1 * 0.99 ** count.double().")
    return value.detach().double()
