"""Functions that read modules, and objects of libraries, that change behind their backs; each with the changes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from hidden_reads import case
from outside_cases import Case
from torch import nn

import fdp

Hook = Callable[..., Any]


class Scale(nn.Module):
    by = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


class Other(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by + 1


def applied(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A module that was taken apart, with the tensors that it had."""
    apply, params, buffers = fdp.from_module(module)
    held = {name: param.detach() for name, param in params.items()}
    return lambda x: apply(held, buffers, x)[0]


def of_a_forward_that_comes_and_goes() -> Case:
    module = Scale()
    run = applied(module)
    give = lambda by: lambda: setattr(module, "forward", lambda x: x * by)  # noqa: E731
    take = lambda: delattr(module, "forward")  # noqa: E731
    return case(run, give(5.0), take, give(7.0), take)


def of_an_attribute_that_hides_that_of_the_class() -> Case:
    module = Scale()
    run = applied(module)
    return case(run, lambda: setattr(module, "by", 4.0), lambda: delattr(module, "by"))


def of_hooks_of_the_gradient() -> Case:
    module, added = Scale(), []  # type: ignore[var-annotated]
    run = applied(module)

    def tripled(module: Any, grad_input: Any, grad_output: Any) -> Any:
        return tuple(3 * each for each in grad_input)

    def doubled(module: Any, grad_output: Any) -> Any:
        return tuple(2 * each for each in grad_output)

    register: list[Hook] = [
        lambda: added.append(module.register_full_backward_hook(tripled)),
        lambda: added.append(module.register_full_backward_pre_hook(doubled)),
        lambda: added.append(nn.modules.module.register_module_full_backward_hook(tripled)),
    ]
    remove = lambda: added.pop().remove()  # noqa: E731
    return case(lambda w: fdp.grad(lambda w: run(w).square().sum())(w), *register, remove, remove, remove)


def of_spectral_norm_in_the_old_style() -> Case:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3)), nn.LeakyReLU(0.2))
    return case(applied(module), module.eval, module.train, module.eval)


def of_a_module_that_becomes_another() -> Case:
    module = nn.Sequential(Scale())
    return case(lambda w: module(w), lambda: setattr(module[0], "__class__", Other))


def of_attributes_that_functions_and_tensors_get_later() -> Case:
    def doubled(w: torch.Tensor) -> torch.Tensor:
        return w * 2

    held: Any = torch.ones(3)

    def fn(w: torch.Tensor) -> torch.Tensor:
        return doubled(w) * getattr(doubled, "rate", 1.0) * (held.rate if hasattr(held, "rate") else 1.0)

    return case(
        fn,
        lambda: setattr(doubled, "rate", 3.0),
        lambda: setattr(held, "rate", 5.0),
        lambda: delattr(doubled, "rate"),
        lambda: delattr(held, "rate"),
    )


def of_special_methods() -> Case:
    class Rates:
        def __call__(self, w: torch.Tensor) -> torch.Tensor:
            return w * 2

        def __getitem__(self, key: int) -> float:
            return 3.0

        def __len__(self) -> int:
            return 1

    held = Rates()
    return case(
        lambda w: held(w) * held[0] * len(held),
        lambda: setattr(Rates, "__call__", lambda self, w: w * 5),
        lambda: setattr(Rates, "__getitem__", lambda self, key: 7.0),
        lambda: setattr(Rates, "__len__", lambda self: 2),
    )


def of_whether_a_tensor_requires_a_gradient() -> Case:
    held = torch.ones(3)
    return case(
        lambda w: w * (2 if held.requires_grad else 1),
        lambda: held.requires_grad_(),
        lambda: held.requires_grad_(False),
    )


def of_arguments_by_name_of_a_partial() -> Case:
    def scaled(w: torch.Tensor, by: float, plus: float = 0.0) -> torch.Tensor:
        return w * by + plus

    held = functools.partial(scaled, by=2.0)
    return case(lambda w: held(w), lambda: held.keywords.update(by=3.0), lambda: held.keywords.update(plus=1.0))


def of_the_learning_rate_of_a_scheduler() -> Case:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def advance() -> None:
        optimizer.step()
        scheduler.step()

    return case(lambda w: w * scheduler.get_last_lr()[0], advance, advance)


CHANGED = [value for name, value in list(globals().items()) if name.startswith("of_")]
