"""What `fdp.optim.from_torch`, `init` and `update` refuse, by name."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from optimizer_classes import REFUSED, tensor
from torch.testing._internal.common_optimizers import optim_db

from fdp.errors import ArgumentError
from fdp.optim import from_torch


def test_every_configuration_that_is_not_exact_is_refused_by_name() -> None:
    refused = 0
    for info in optim_db:
        for config in info.optim_inputs_func(device="cpu"):
            if info.optim_cls in REFUSED or config.kwargs.get("differentiable"):
                refused += 1
                with pytest.raises(ArgumentError, match=rf"^{info.optim_cls.__name__}.*\nRemedy: "):
                    from_torch(info.optim_cls, **config.kwargs)
    assert refused > len(REFUSED)


REFUSALS: list[tuple[Any, dict[str, Any], str, str]] = [
    (torch.optim.LBFGS, {}, "LBFGS has no exact pure form: its step calls a closure", "first-order class"),
    (torch.optim.SparseAdam, {}, "SparseAdam has no exact pure form: it takes sparse", "torch.optim.Adam"),
    (torch.optim.Adafactor, {"foreach": True}, "Adafactor(foreach=True) takes lists", "leave foreach out"),
    (torch.optim.AdamW, {"momentum": 1}, "unexpected keyword argument 'momentum'", "it takes lr, betas, eps"),
    (torch.optim.AdamW, {"lr": -1.0}, "AdamW refuses its hyperparameters: Invalid learning rate: -1.0", "lr"),
    (torch.optim.Adam, {"differentiable": True}, "Adam(differentiable=True)", "leave differentiable out"),
    (
        torch.optim.AdamW,
        {"lr": torch.ones(2)},
        "lr is a torch.float32 tensor of shape (2,)",
        "lr=torch.tensor",
    ),
    (
        torch.optim.AdamW,
        {"weight_decay": torch.tensor(0.0)},
        "weight_decay is a tensor that starts at 0",
        "0",
    ),
    (torch.optim.AdamW, {"eps": torch.tensor(0.1), "fused": True}, "takes Python numbers", "leave fused out"),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "fused": True}, "dampens every", "leave fused out"),
    (
        torch.optim.RAdam,
        {"capturable": False},
        "RAdam(capturable=False) asks Python `if`",
        "leave capturable",
    ),
    (torch.optim.Adam, {"foreach": True}, "Adam(foreach=True) without capturable", "add capturable=True"),
    (torch.nn.Linear, {}, "takes a torch.optim class, not the class", "pass the class itself"),
    ("AdamW", {}, "takes a torch.optim class, not the str 'AdamW'", "pass the class itself"),
]


@pytest.mark.parametrize(("cls", "given", "what", "remedy"), REFUSALS, ids=lambda v: str(v)[:30])
def test_refusals_at_from_torch(cls: Any, given: dict[str, Any], what: str, remedy: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        from_torch(cls, **given)
    first, last = str(caught.value).split("\nRemedy: ")
    assert what in first and remedy in last


def test_init_names_the_parameter_that_the_class_refuses() -> None:
    with pytest.raises(ArgumentError, match=r"Muon refuses the parameter params\['layer'\]\['b'\]"):
        from_torch(torch.optim.Muon).init({"layer": {"w": torch.ones(2, 2), "b": torch.ones(2)}})
    with pytest.raises(ArgumentError, match=r"refuses the parameter params\[0\].*requires all the params"):
        from_torch(torch.optim.Adam, fused=True).init([torch.ones(2, dtype=torch.complex64)])


def break_update(change: Any) -> str:
    """The message of the error when `change` has spoilt one of the arguments of an update."""
    params: dict[str, Any] = {"w": torch.ones(2, 3), "b": torch.ones(3)}
    optimizer = from_torch(torch.optim.AdamW, lr=0.1)
    args: dict[str, Any] = {
        "grads": {name: torch.ones_like(p) for name, p in params.items()},
        "opt_state": optimizer.init(params),
        "params": params,
    }
    change(args)
    with pytest.raises(ArgumentError) as caught:
        optimizer.update(**args)
    return str(caught.value)


def test_update_refuses_trees_that_do_not_match() -> None:
    message = break_update(lambda a: a["grads"].pop("b"))
    assert message.startswith("The trees grads and params do not match.\n  params['b'] has no gradient\nRemedy:")
    message = break_update(lambda a: a["grads"].update(c=torch.ones(1)))
    assert "grads['c'] has no parameter" in message
    message = break_update(lambda a: a.update(grads=optree.tree_map(lambda g: [g], a["grads"])))
    assert "params['b'] has no gradient" in message and "grads['b'][0] has no parameter" in message
    message = break_update(lambda a: a["grads"].update(b=torch.ones(2)))
    assert "grads['b'] is a torch.float32 tensor of shape (2,) on cpu, but the parameter is" in message
    message = break_update(lambda a: a["grads"].update(b=torch.ones(3).double()))
    assert "grads['b'] is a torch.float64 tensor" in message
    message = break_update(lambda a: a["grads"].update(b=torch.ones(3).to_sparse()))
    assert "torch.sparse_coo" in message
    message = break_update(lambda a: (a["params"].update(b=torch.tensor(1)), a["grads"].update(b=torch.ones(()))))
    assert "for a parameter that is a torch.int64 tensor" in message and "use None" in message


def test_update_refuses_a_state_that_it_did_not_make() -> None:
    message = break_update(lambda a: a["opt_state"]["state"].pop("b"))
    assert "opt_state['state'] does not mirror params" in message and "make opt_state with init" in message
    message = break_update(lambda a: a["opt_state"]["state"]["b"].clear())
    assert "opt_state['state']['b'] has the entries [], but AdamW keeps ['exp_avg'," in message
    message = break_update(lambda a: a["opt_state"]["state"]["b"].pop("exp_avg"))
    assert "opt_state['state']['b'] has the entries ['exp_avg_sq', 'step'], but AdamW asks for 'exp_av" in message
    message = break_update(lambda a: a["opt_state"]["state"]["b"].update(exp_avg=torch.ones(9)))
    assert "opt_state['state']['b']['exp_avg'] is a torch.float32 tensor of shape (9,)" in message
    message = break_update(lambda a: a["opt_state"]["state"]["b"].update(exp_avg=torch.ones(3).half()))
    assert "opt_state['state']['b']['exp_avg'] is a torch.float16 tensor" in message
    message = break_update(lambda a: a.update(opt_state=a["opt_state"]["state"]))
    assert "opt_state must have the keys ['lr', 'state'], but is ['b', 'w']" in message
    message = break_update(lambda a: a["opt_state"]["state"].update(b=3))
    assert "opt_state['state']['b'] is the int 3" in message


def test_update_refuses_a_hyperparameter_that_is_not_a_scalar_tensor() -> None:
    message = break_update(lambda a: a["opt_state"].update(lr=0.1))
    assert "opt_state['lr'] is the float 0.1, not a tensor" in message
    assert message.endswith("Remedy: opt_state['lr'] = torch.tensor(0.1, dtype=torch.float64)")
    message = break_update(lambda a: a["opt_state"].update(lr=torch.ones(1)))
    assert "opt_state['lr'] must be a 0-dim floating point tensor on the CPU" in message
    optimizer = from_torch(torch.optim.AdamW, betas=(tensor(0.9), tensor(0.99)))
    opt_state = optimizer.init(torch.ones(2))
    opt_state["betas"] = (opt_state["betas"][0], 0.95)
    with pytest.raises(ArgumentError, match=r"opt_state\['betas'\]\[1\] is the float 0.95"):
        optimizer.update(torch.ones(2), opt_state, torch.ones(2))
    opt_state["betas"] = opt_state["betas"][0]
    with pytest.raises(ArgumentError, match=r"opt_state\['betas'\] no longer has the structure of \(0.9, 0.99\)"):
        optimizer.update(torch.ones(2), opt_state, torch.ones(2))
