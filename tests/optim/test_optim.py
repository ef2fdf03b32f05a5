"""`fdp.optim.from_torch` against the torch class itself, bit for bit: called, and traced and replayed."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from typing import Any

import optree
import pytest
import torch
from bits import same_leaves
from optimizer_classes import (
    CLASSES,
    NEW_LR,
    NEW_LR_AT,
    REFUSED,
    STEPS,
    by_fdp,
    by_hand,
    equivalent,
    numbers,
    sample,
    tensor,
    trace,
)
from samples import ALL_SAMPLES, exhaustive, some
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.common_optimizers import optim_db

import fdp
from fdp.errors import ArgumentError
from fdp.optim import from_torch


def configurations() -> list[Any]:
    """Every configuration that torch tests its classes with, the first and last by every route there is."""
    cases = []
    for info in optim_db:
        cls = info.optim_cls
        if cls in REFUSED:
            continue
        accepted = inspect.signature(cls).parameters
        configs = [c for c in info.optim_inputs_func(device="cpu") if not c.kwargs.get("differentiable")]
        for config in configs:
            routes: list[dict[str, Any]] = [{}]
            taken = {"capturable", "foreach", "fused"} & config.kwargs.keys()
            if config in (configs[0], configs[-1]) and not taken:
                routes += [{"fused": False}] if "fused" in accepted else []
                capturable = {"capturable": True} if "capturable" in accepted else {}
                lists = "foreach" in accepted and cls is not torch.optim.Adafactor  # refused by name
                routes += [{"foreach": True, **capturable}] if lists else []
                routes += [capturable] if capturable else []
            for route in routes:
                given = {**config.kwargs, **route}
                label = ",".join(f"{k}={v}" for k, v in numbers(given).items())
                # By default the first of each class, and some of the others: they are alike.
                marks = exhaustive if given and len(cases) % 7 else ()
                cases.append(pytest.param(cls, given, id=f"{cls.__name__}({label})", marks=marks))
    return cases


@pytest.mark.parametrize(("cls", "given"), configurations())
def test_every_configuration_has_the_bits_of_the_class(cls: type, given: dict[str, Any]) -> None:
    params, data = sample(torch.float32, ndim_2_only=cls is torch.optim.Muon)
    expected = by_hand(cls, params, data, equivalent(cls, given, torch.float32))
    for traced in (False, True):
        assert same_leaves(by_fdp(from_torch(cls, **given), params, data, traced), expected), f"{traced=}"


@pytest.mark.parametrize(
    ("cls", "dtype"),
    some(itertools.product(CLASSES, [torch.float64, torch.bfloat16, torch.float16, torch.complex64]), 5),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_class_in_other_dtypes(cls: type, dtype: torch.dtype) -> None:
    if cls in (torch.optim.Muon, torch.optim.Adafactor) and dtype.is_complex:
        pytest.skip(f"{cls.__name__} takes no complex parameters")
    given = {"momentum": 0.9} if cls in (torch.optim.SGD, torch.optim.RMSprop) else {}
    params, data = sample(dtype, ndim_2_only=cls is torch.optim.Muon)
    expected = by_hand(cls, params, data, equivalent(cls, given, dtype))
    for traced in (False, True):
        assert same_leaves(by_fdp(from_torch(cls, **given), params, data, traced), expected), f"{traced=}"


def test_every_class_that_torch_has_is_either_exact_or_refused() -> None:
    shipped = {c for c in vars(torch.optim).values() if isinstance(c, type)} - {torch.optim.Optimizer}
    shipped = {c for c in shipped if issubclass(c, torch.optim.Optimizer)}
    assert shipped == set(CLASSES) | REFUSED


DYNAMIC: list[tuple[type, dict[str, Any], dict[str, Any]]] = [
    (torch.optim.SGD, {"nesterov": True}, {"momentum": 0.8, "weight_decay": 0.1}),
    (torch.optim.SGD, {}, {"momentum": 0.8, "dampening": 0.3}),
    (torch.optim.Adam, {}, {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}),
    (torch.optim.AdamW, {}, {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}),
    (torch.optim.Adadelta, {}, {"rho": 0.8, "eps": 1e-3, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {}, {"lr_decay": 0.1, "eps": 1e-3, "weight_decay": 0.1}),
    (torch.optim.Adamax, {}, {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}),
    (torch.optim.ASGD, {}, {"lambd": 0.1, "alpha": 0.7, "t0": 2.0, "weight_decay": 0.1}),
    (torch.optim.NAdam, {}, {"betas": (0.9, 0.99), "momentum_decay": 0.01, "weight_decay": 0.1}),
    (torch.optim.RAdam, {}, {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}),
    (torch.optim.RMSprop, {"centered": True}, {"alpha": 0.9, "eps": 1e-6, "momentum": 0.8}),
    (torch.optim.Rprop, {}, {"etas": (0.4, 1.3), "step_sizes": (1e-5, 5.0)}),
    (torch.optim.Muon, {}, {"momentum": 0.8, "weight_decay": 0.1, "eps": 1e-6}),
    (torch.optim.Adafactor, {}, {"weight_decay": 0.1, "d": 1.2, "eps": (1e-6, 1e-2)}),
]


@pytest.mark.parametrize(("cls", "fixed", "first"), some(DYNAMIC, 3), ids=lambda v: getattr(v, "__name__", None))
def test_hyperparameters_given_as_tensors_follow_a_schedule_without_a_retrace(
    cls: type, fixed: dict[str, Any], first: dict[str, Any]
) -> None:
    params, data = sample(torch.float32, ndim_2_only=cls is torch.optim.Muon)
    later = optree.tree_map(lambda v: v * 0.97, first)

    hand = {name: p.clone() for name, p in params.items()}
    route = equivalent(cls, {**fixed, **optree.tree_map(tensor, first)}, torch.float32)
    reference = cls(list(hand.values()), **route)
    compiling = torch.compiler._compile_session_context if route.get("capturable") else contextlib.nullcontext

    optimizer = from_torch(cls, **fixed, **optree.tree_map(tensor, first))
    opt_state = optimizer.init(params)
    replay = trace(optimizer.update, data[0], opt_state, params)
    eager = (params, opt_state)
    for step, grads in enumerate(data):
        if step == 2:
            reference.param_groups[0].update(later)
            for state in (opt_state, eager[1]):
                state.update(optree.tree_map(tensor, later))
        for name, p in hand.items():
            p.grad = grads[name].clone()
        with compiling():
            reference.step()
        params, opt_state = replay(grads, opt_state, params)
        eager = optimizer.update(grads, eager[1], eager[0])
    assert same_leaves(params, hand)
    assert same_leaves(eager, (params, opt_state))


def test_adafactor_compares_numbers_as_python_does_also_where_they_are_not_numbers() -> None:
    # Each parameter by itself has the bits of the class; together, the first one's dtype decides on eps.
    params = {"a": torch.randn(3, 4).bfloat16(), "b": torch.randn(4), "c": torch.randn(2, 3, 4).double()}
    data = [optree.tree_map(torch.randn_like, params) for _ in range(STEPS)]
    data[1]["b"][0] = float("nan")
    data[2]["a"][0, 0] = float("inf")
    for grads in data:
        grads["c"] *= 1e-6  # so small that eps counts
    expected = by_hand(torch.optim.Adafactor, params, data, {"foreach": False})
    for traced in (False, True):
        assert same_leaves(by_fdp(from_torch(torch.optim.Adafactor), params, data, traced), expected), f"{traced=}"


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="plain"),
        pytest.param({"lr": 0.3, "beta2_decay": -0.1, "weight_decay": 0.1}, id="slow", marks=exhaustive),
    ],
)
def test_adafactor_is_compiled(given: dict[str, Any]) -> None:
    """A number that it reads of its counter falls below a half with the third call; torch's own code asks on which side
    of that it is."""
    params, data = sample(torch.float32)
    if not ALL_SAMPLES:  # one parameter is compiled much sooner than four
        params, data = {"b": params["b"]}, [{"b": grads["b"]} for grads in data]
    expected, _ = by_hand(torch.optim.Adafactor, params, data, {"foreach": False, **given})
    optimizer = from_torch(torch.optim.Adafactor, **given)
    step = fdp.data_parallel(lambda state, g: optimizer.update(fdp.pmean(g), state[1], state[0]), compile=True)
    state = (params, optimizer.init(params))
    for call, grads in enumerate(data):
        if call == NEW_LR_AT:
            state[1]["lr"] = torch.tensor(NEW_LR, dtype=torch.float64)
        state = step(state, grads)
    torch.testing.assert_close(state[0], expected, rtol=1e-5, atol=1e-6)


def test_the_fused_step_is_one_node() -> None:
    params, data = sample(torch.float32)
    optimizer = from_torch(torch.optim.AdamW, lr=1e-3)
    graph = trace(optimizer.update, data[0], optimizer.init(params), params).graph
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert [name for name in names if "fused" in name] == ["aten._fused_adamw_.tensor_lr"]
    assert not [name for name in names if "profiler" in name]
    assert not [name for name in names if "lift_fresh" in name or "empty" in name]


def test_parameters_of_several_dtypes_and_nesting() -> None:
    params = {
        "half": [torch.randn(40).bfloat16(), (torch.randn(5, 5, dtype=torch.float64),)],
        "complex": torch.randn(6, dtype=torch.complex64),
        "float": torch.randn(40),
    }
    data = [optree.tree_map(torch.randn_like, params) for _ in range(STEPS)]
    optimizer = from_torch(torch.optim.Adam, lr=0.1)
    replay = trace(optimizer.update, data[0], optimizer.init(params), params)
    together = (params, optimizer.init(params))
    replayed = (params, optimizer.init(params))
    leaves = optree.tree_leaves(params)
    alone = [(p, optimizer.init(p)) for p in leaves]
    for grads in data:
        together = optimizer.update(grads, together[1], together[0])
        replayed = replay(grads, replayed[1], replayed[0])
        gs = optree.tree_leaves(grads)
        alone = [optimizer.update(g, opt, p) for g, (p, opt) in zip(gs, alone, strict=True)]
    assert same_leaves(together[0], [p for p, _ in alone])
    assert same_leaves(together, replayed)
    assert optree.tree_structure(together[0]) == optree.tree_structure(params)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad], ids=lambda c: c.__name__)
def test_fused_kernels_get_gradients_in_the_layout_of_the_parameter(cls: type) -> None:
    image = torch.randn(8, 3, 5, 5)
    for p, g in [
        (torch.randn(6, 9), torch.randn(9, 6).t()),
        (torch.randn(9, 6).t(), torch.randn(6, 9)),
        (image.to(memory_format=torch.channels_last), torch.randn(8, 3, 5, 5)),
        (image, torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last)),
        (torch.randn(6, 18)[:, ::2], torch.randn(6, 9)),
    ]:
        optimizer = from_torch(cls, lr=0.1)
        opt_state = optimizer.init(p)
        new, _ = optimizer.update(g, opt_state, p)
        traced, _ = trace(optimizer.update, g, opt_state, p)(g, opt_state, p)
        dense = p.contiguous()
        expected, _ = optimizer.update(g.contiguous(), optimizer.init(dense), dense)
        # Up to rounding: the kernels treat the last few elements in memory order apart from the rest.
        torch.testing.assert_close(new, expected)
        assert same_leaves(new, traced)
        assert new.stride() == p.clone().stride()


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_first_momentum_is_the_gradient_to_the_last_bit(nesterov: bool) -> None:
    grad = torch.tensor([-0.0, 0.0, 1e-45, -3.0, float("inf"), float("nan"), 1.0, 2.0, -0.0])
    params = torch.zeros(9)
    for fused in (False, True):
        optimizer = from_torch(torch.optim.SGD, momentum=0.9, nesterov=nesterov, fused=fused)
        _, opt_state = optimizer.update(grad, optimizer.init(params), params)
        buffer = opt_state["state"]["momentum_buffer"]
        assert buffer.view(torch.int32).tolist() == grad.view(torch.int32).tolist()


def test_dampening_spares_the_first_gradient_of_each_parameter() -> None:
    params, data = sample(torch.float32)
    expected = {name: p.clone() for name, p in params.items()}
    reference = torch.optim.SGD(list(expected.values()), lr=0.1, momentum=0.9, dampening=0.4, foreach=False)
    optimizer = from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.4)
    opt_state = optimizer.init(params)
    for step, grads in enumerate(data):
        given: dict[str, Tensor | None] = dict(grads)
        if step < 2:
            given["w"] = None  # "w" comes in late
        for name, p in expected.items():
            p.grad = given[name]
        reference.step()
        params, opt_state = optimizer.update(given, opt_state, params)
    assert same_leaves(params, expected)


def test_half_precision_momentum_on_a_cpu_avoids_the_fused_kernel() -> None:
    params, data = sample(torch.bfloat16)
    expected = by_hand(torch.optim.SGD, params, data, {"momentum": 0.9, "foreach": False})
    assert same_leaves(by_fdp(from_torch(torch.optim.SGD, momentum=0.9), params, data, False), expected)
    with pytest.raises(ArgumentError, match=r"loses the momentum of params\['b'\]"):
        from_torch(torch.optim.SGD, momentum=0.9, fused=True).init(params)


def test_a_parameter_without_a_gradient_stays_and_so_does_its_state() -> None:
    params = {"w": torch.randn(3), "count": torch.tensor(3), "frozen": torch.randn(2), "none": None}
    optimizer = from_torch(torch.optim.AdamW)
    opt_state = optimizer.init(params)
    assert opt_state["state"]["count"] == {}
    grads = {"w": torch.randn(3), "count": None, "frozen": None, "none": None}
    for update in (optimizer.update, trace(optimizer.update, grads, opt_state, params)):
        new, new_state = update(grads, opt_state, params)
        assert not torch.equal(new["w"], params["w"])
        assert same_leaves(new["frozen"], params["frozen"]) and new["count"].item() == 3
        assert same_leaves(new_state["state"]["frozen"], opt_state["state"]["frozen"])
        assert new_state["state"]["w"]["step"].item() == 1
    nothing = dict.fromkeys(params)
    assert optimizer.update(nothing, opt_state, params) == (params, opt_state)


def test_results_do_not_depend_on_torch_saying_that_it_is_compiling() -> None:
    for cls in (torch.optim.NAdam, torch.optim.ASGD):
        params, data = sample(torch.float32)
        outside = by_fdp(from_torch(cls), params, data, False)
        with torch.compiler._compile_session_context():
            inside = by_fdp(from_torch(cls), params, data, False)
            assert torch.compiler.is_compiling()
        assert not torch.compiler.is_compiling()
        assert same_leaves(outside, inside)


def test_a_tracer_that_refuses_to_read_values_lets_the_update_through() -> None:
    strict = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(shape_env=strict, static_shapes=True, allow_non_fake_inputs=True)
    params, data = sample(torch.float32)
    for cls in (torch.optim.NAdam, torch.optim.ASGD):
        optimizer = from_torch(cls)
        args = (data[0], optimizer.init(params), params)
        with mode:
            fakes = optree.tree_map(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype), args)
        assert same_leaves(trace(optimizer.update, *fakes)(*args), optimizer.update(*args))
    with pytest.raises(DataDependentOutputException):
        fakes[1]["lr"].item()


def test_foreach_code_that_works_on_the_gradients_does_not_reach_the_caller() -> None:
    params, data = sample(torch.float32)
    given = {"momentum": 0.9, "nesterov": True, "foreach": True}
    expected = by_hand(torch.optim.SGD, params, data, given)
    assert same_leaves(by_fdp(from_torch(torch.optim.SGD, **given), params, data, False), expected)


def test_state_does_not_alias_between_calls() -> None:
    optimizer = from_torch(torch.optim.AdamW, weight_decay=tensor(0.1))
    first, second = (optimizer.init(torch.randn(3)) for _ in range(2))
    storages = [t.data_ptr() for t in optree.tree_leaves([first, second])]
    assert len(set(storages)) == len(storages)


def test_parameters_that_require_gradients_give_detached_results() -> None:
    w = torch.randn(3, requires_grad=True)
    optimizer = from_torch(torch.optim.SGD, lr=0.1)
    new, opt_state = optimizer.update(torch.ones(3), optimizer.init(w), w)
    assert w.requires_grad and w.grad is None
    assert not any(t.requires_grad for t in optree.tree_leaves([new, opt_state]))


def test_printing_says_what_lives_in_the_state() -> None:
    optimizer = from_torch(torch.optim.AdamW, weight_decay=tensor(0.1), eps=1e-6)
    assert repr(optimizer) == "Optimizer(AdamW, in the state: lr, weight_decay, constant: eps=1e-06)"


def test_a_class_of_ones_own() -> None:
    class Sign(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

        def _init_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
            params += [p for p in group["params"] if p.grad is not None]
            for p in params:
                self.state[p].setdefault("step", torch.zeros(()))

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                params: list[Tensor] = []
                self._init_group(group, params)
                for p in params:
                    self.state[p]["step"] += 1
                    p.add_(p.grad.sign(), alpha=-group["lr"])

    params, data = sample(torch.float32)
    expected = by_hand(Sign, params, data, {})
    for traced in (False, True):
        assert same_leaves(by_fdp(from_torch(Sign), params, data, traced), expected)
