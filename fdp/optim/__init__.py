"""Any `torch.optim` class as a pure pair of functions, `init` and `update`, and wrappers around such pairs.

`update` builds an instance of the class on copies of the parameters, hands it the gradients and the state
that came in as arguments, lets it take one step, and returns what it left behind. So the arithmetic is
torch's own, and what a trace records is the kernels that the class itself launches. There are three ways
through a class; the first that fits is taken, unless `fused=`, `foreach=` or `capturable=` says otherwise:

- fused: one kernel for all parameters of a dtype and device (Adam, AdamW, SGD, Adagrad).
- plain: the single-tensor code that the class runs by default on a CPU. Its scalars come from
  `Tensor.item()`, which a trace records as a number that each replay reads anew, so they are Python floats in
  both worlds.
- capturable: for classes whose plain code asks Python `if` about a tensor's value (ASGD, RAdam, Rprop).

`from_transform` takes optimizers in the form of Optax, whose `update` returns what is to be added to the parameters.

Around both: `partition` (parameter groups), `scheduled`, `clipped`, `averaged`, `skip_nonfinite` and `loss_scaled` take
optimizers and make one. Each adds its entries to the dict that is the state of the one inside.

argument_checks, tracing, first_state, kept_elsewhere -> rule -> optimizer -> entries, gradient_transformations ->
clipping -> skipping -> averaging, loss_scale; partition, schedules
"""

from fdp.optim.averaging import averaged, ema
from fdp.optim.clipping import clip_by_global_norm, clipped, global_norm
from fdp.optim.gradient_transformations import GradientTransformation, apply_updates, chain, from_transform
from fdp.optim.loss_scale import loss_scaled
from fdp.optim.optimizer import Optimizer, from_torch
from fdp.optim.partition import partition
from fdp.optim.schedules import Schedule, schedule_from_torch, scheduled
from fdp.optim.skipping import skip_nonfinite

__all__ = [
    "GradientTransformation", "Optimizer", "Schedule", "apply_updates", "averaged", "chain", "clip_by_global_norm",
    "clipped", "ema", "from_torch", "from_transform", "global_norm", "loss_scaled", "partition", "schedule_from_torch",
    "scheduled", "skip_nonfinite",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]
