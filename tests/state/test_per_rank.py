"""State that is each rank's own: labelled outside of steps, and varying inside."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict, namedtuple
from typing import Any

import optree
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.utils._pytree as torch_pytree
from fake_ranks import fake_group
from samples import exhaustive, some
from ways import WAYS, ways

import fdp
from fdp import pytree
from fdp.state.containers import LABELS, PLAIN, bare, bare_spec, places_in, with_containers
from fdp.trace.calls.structure import Structure

Tree = Any
Pair = namedtuple("Pair", ["first", "second"])


def own(*values: float) -> fdp.PerRank:
    return fdp.per_rank(torch.tensor(values))


# --- the label itself --------------------------------------------------------------------------------


def test_a_tree_is_labelled_leaf_by_leaf_and_only_once() -> None:
    tree = {"a": torch.ones(2), "b": [own(3.0), None, ()], "n": 4, "flag": True}
    found = fdp.per_rank(tree)
    assert found["a"] == fdp.PerRank(tree["a"]) and found["b"][0] == tree["b"][0]
    assert found["a"].value is not tree["a"] and found["b"][0].value is not tree["b"][0].value
    assert found["b"][1:] == [None, ()] and found["n"].value.item() == 4 and found["flag"].value.dtype == torch.bool
    assert repr(fdp.per_rank(found)) == repr(found) and "PerRank(PerRank" not in repr(found)
    assert fdp.per_rank({}) == {} and fdp.per_rank(None) is None
    with pytest.raises(fdp.ArgumentError, match=r"fdp.per_rank was given str at \['x'\]"):
        fdp.per_rank({"x": "text"})
    for wrong in (own(1.0), 3.0, {"a": torch.ones(1)}):
        with pytest.raises(fdp.ArgumentError, match="labels one tensor"):
            fdp.PerRank(wrong)


def test_a_label_is_equal_copied_pickled_and_mapped_over_like_its_tensor() -> None:
    leaf = own(1.0, 2.0)
    assert leaf == own(1.0, 2.0) and leaf != own(1.0, 3.0) and leaf != own(1.0) and leaf != torch.ones(2)
    assert leaf != fdp.PerRank(leaf.value.double()) and repr(leaf) == "PerRank(tensor([1., 2.]))"
    deep = copy.deepcopy({"x": leaf})["x"]
    assert deep == leaf and deep.value is not leaf.value and copy.copy(leaf).value is leaf.value
    assert pickle.loads(pickle.dumps(leaf)) == leaf
    file = io.BytesIO()
    torch.save({"x": leaf}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == {"x": leaf}
    for mapped in (optree.tree_map, torch_pytree.tree_map):
        assert mapped(lambda x: x + 1, {"x": leaf}) == {"x": own(2.0, 3.0)}
    with pytest.raises(AttributeError):
        leaf.value = torch.ones(1)  # type: ignore[misc]
    with pytest.raises(TypeError):
        hash(leaf)


def test_labels_are_in_the_structure_and_not_in_key_paths() -> None:
    tree = {"a": own(1.0), "b": Pair(torch.ones(1), [own(2.0)]), "c": None}
    plain = {"a": torch.ones(1), "b": Pair(torch.ones(1), [torch.ones(1)]), "c": None}
    for none_is_leaf in (False, True):
        spec, other = (pytree.structure_of(t, none_is_leaf) for t in (tree, plain))
        places = places_in(spec)
        assert spec != other and [place.container for place in places[:3]] == [LABELS, PLAIN, LABELS]
        assert all(place.container is PLAIN for place in places_in(other))
        assert with_containers(other, [place.around for place in places]) == spec
        assert bare_spec(spec) == other == bare_spec(other)
        assert pytree.structure_of(bare(tree), none_is_leaf) == other and bare(plain) is plain
        assert pytree.names_in(spec, "state") == pytree.names_in(other, "state")


def test_trees_with_labels_are_recognised_without_working_out_their_structure() -> None:
    tree = {"a": own(1.0), "b": [torch.ones(1), OrderedDict(x=own(2.0))], "c": own(3.0)}
    known = Structure(pytree.structure_of((tree, torch.ones(1))))
    assert known._known is not None  # taken apart along what is known
    leaves = known.flatten((tree, torch.ones(1)))
    assert leaves is not None and [x.item() for x in leaves] == [1.0, 1.0, 2.0, 3.0, 1.0]
    for other in (
        {**tree, "a": torch.ones(1)},
        {**tree, "a": [torch.ones(1)]},
        {**tree, "b": [own(1.0), tree["b"][1]]},
        {**tree, "b": [torch.ones(1), OrderedDict(x=torch.ones(1))]},
    ):
        found = known.flatten((other, torch.ones(1)))
        assert found is None or not all(isinstance(leaf, torch.Tensor) for leaf in found)
    alone = Structure(pytree.structure_of((own(1.0),)))
    assert alone.flatten((own(5.0),)) == [torch.tensor([5.0])] and alone.flatten((torch.ones(1),)) is None


# --- in a step ---------------------------------------------------------------------------------------


def residual_step(state: Tree, batch: torch.Tensor) -> tuple[Tree, torch.Tensor]:
    """A gradient is sent in halves, and what is left out is added the next time: SGD with error feedback."""
    assert isinstance(state["residual"]["w"], torch.Tensor)  # no label in here
    with torch.enable_grad():
        w = state["w"].detach().requires_grad_()
        (grad,) = torch.autograd.grad((batch @ w).square().mean(), w)
    total = grad + state["residual"]["w"]
    sent = (total * 2).round() / 2
    new = {"w": state["w"] - 0.1 * fdp.pmean(sent), "residual": {"w": total - sent}, "seen": state["seen"] + 1}
    return {**new, "fixed": state["fixed"]}, fdp.pmean(batch.mean())


def residual_state(rank: int) -> Tree:
    return {
        "w": torch.tensor([1.0, -2.0, 0.5]),
        "residual": fdp.per_rank({"w": torch.zeros(3)}),
        "seen": own(10.0 * rank),
        "fixed": own(float(rank)),
    }


def batch_of(rank: int, i: int) -> torch.Tensor:
    return torch.arange(6.0).view(2, 3).sub(2).mul(0.3 + 0.2 * rank).add(0.1 * i)


def by_hand(world: int, steps: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The same in one process, in a loop over shards."""
    w, residuals = torch.tensor([1.0, -2.0, 0.5]), [torch.zeros(3) for _ in range(world)]
    for i in range(steps):
        parts = []
        for rank in range(world):
            x = batch_of(rank, i)
            total = 2 * x.t() @ (x @ w) / len(x) + residuals[rank]
            parts.append((total * 2).round() / 2)
            residuals[rank] = total - parts[-1]
        w = w - 0.1 * sum(parts) / world
    return w, residuals


def labels_in_a_step(way: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    step = fdp.data_parallel(residual_step, **WAYS[way])
    state = residual_state(rank)
    given = state["residual"]["w"].value
    for i in range(5):
        state, _ = step(state, batch_of(rank, i))
    w, residuals = by_hand(world, 5)
    torch.testing.assert_close(state["w"], w)
    assert isinstance(state["residual"]["w"], fdp.PerRank)
    torch.testing.assert_close(state["residual"]["w"].value, residuals[rank])
    assert state["seen"] == own(10.0 * rank + 5) and state["fixed"] == own(float(rank))
    assert not torch.equal(residuals[0], residuals[-1]) or world == 1  # or it would show nothing
    assert step.traces == 1
    if "donated" in way:
        assert state["residual"]["w"].value is given
    else:
        assert not given.any()
    fdp.assert_replicated(state)  # looks at what is not labelled


@ways
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=exhaustive)])
def test_what_is_returned_in_the_place_of_a_labelled_leaf_is_labelled(way: str, world: int) -> None:
    ranks.run(world, labels_in_a_step, way)


@pytest.mark.parametrize("way", [pytest.param(way, marks=exhaustive if way != "kept" else ()) for way in WAYS])
def test_labels_in_a_world_of_one(way: str) -> None:
    step = fdp.data_parallel(residual_step, **WAYS[way])
    state = residual_state(0)
    for i in range(5):
        state, _ = step(state, batch_of(0, i))
    w, residuals = by_hand(1, 5)
    torch.testing.assert_close(state["w"], w)
    torch.testing.assert_close(state["residual"]["w"].value, residuals[0])
    # With a label and without it are two signatures, and the second is refused: what is returned varies.
    with pytest.raises(fdp.ReplicationError, match=r"output\[0\]\['residual'\]\['w'\]"):
        step({**state, "residual": {"w": torch.zeros(3)}}, batch_of(0, 0))


def test_every_stage_takes_labels() -> None:
    step = fdp.data_parallel(residual_step)
    state, batch = residual_state(0), batch_of(0, 0)
    trace = step.trace(state, batch)
    assert {i.name: i.role for i in trace.inputs} == {
        "state['w']": "state", "state['residual']['w']": "per rank", "state['seen']": "per rank",
        "state['fixed']": "per rank", "batch": "batch",
    }  # fmt: skip
    assert [o.name for o in trace.outputs if o.labelled] == [
        "output[0]['fixed']", "output[0]['residual']['w']", "output[0]['seen']"
    ]  # fmt: skip
    assert "labelled" in str(trace) and "per rank" in str(trace)
    new, _ = step.plan(state, batch).emit()(state, batch)
    assert repr(new) == repr(step(state, batch)[0])
    assert len(step.profile(state, batch, repeats=1).intervals) > 0
    assert step.traces == 3 and repr(copy.copy(step)(state, batch)[0]) == repr(new)

    @torch.compile(backend="eager")
    def around(state: Tree, batch: torch.Tensor) -> Tree:
        new, loss = step(state, batch * 1)
        return new, loss + 1

    assert repr(around(state, batch)[0]) == repr(new)


def test_a_place_is_found_at_the_root_of_what_is_returned_or_one_below() -> None:
    r, w, batch = own(1.0, 2.0), torch.zeros(2), torch.ones(2)

    def labels_of(fn: Any, *args: Any, **options: Any) -> list[str]:
        return [o.name for o in fdp.data_parallel(fn, **options).trace(*args).outputs if o.labelled]

    assert labels_of(lambda r, b: r + b, r, batch) == ["output"]
    assert labels_of(lambda r, b: (fdp.pmean(b.sum()), r + b), r, batch) == ["output[1]"]
    # Two arguments that look alike: the one that varies is the labelled one, in whichever order they come.
    for order in ((0, 1), (1, 0)):

        def swapped(one: torch.Tensor, two: torch.Tensor, b: torch.Tensor, order: Any = order) -> Any:
            mine, shared = (one, two) if order == (0, 1) else (two, one)
            return shared + fdp.pmean(b), mine + b

        assert labels_of(swapped, *((r, w) if order == (0, 1) else (w, r)), batch) == ["output[1]"]
    # Another shape under the same key, and a batch that is labelled.
    assert labels_of(lambda s, b: {"r": torch.cat([s["r"], b])}, {"r": r}, batch) == ["output['r']"]
    assert labels_of(lambda s, b: (s, b), {"w": w}, {"own": r}) == ["output[1]['own']"]
    # What is reduced stays labelled, and what the step declares as well does, too; so does what it labels itself.
    assert labels_of(lambda s, b: {"r": fdp.pmean(s["r"])}, {"r": r}, batch) == ["output['r']"]
    assert labels_of(lambda s, b: {"r": fdp.per_rank(s["r"])}, {"r": r}, batch) == ["output['r']"]
    assert labels_of(lambda s, b: {"new": fdp.PerRank(b), "x": s}, w, batch) == ["output['new']"]
    assert labels_of(lambda s, b: fdp.pmean(b), {"r": None}, batch) == []


def test_a_labelled_leaf_that_is_returned_elsewhere_is_refused() -> None:
    step = fdp.data_parallel(lambda state, batch: {"other": state["mine"], "x": batch.sum() * 0 + state["mine"]})
    with pytest.raises(fdp.ReplicationError) as caught:
        step({"mine": own(1.0)}, torch.ones(1))
    assert str(caught.value).splitlines()[1] == (
        "  output['other']: [1] torch.float32, is the labelled argument state['mine'] itself"
    )


def test_labels_under_accumulate_and_in_a_step_within_a_step() -> None:
    inner = fdp.data_parallel(lambda mine, batch: mine + batch.sum())

    def step_fn(state: Tree, batch: torch.Tensor) -> Tree:
        grads = fdp.accumulate(fdp.grad(lambda w, x: (x * w + state["mine"]).square().mean()), 2)(state["w"], batch)
        return {"w": state["w"] - grads, "mine": inner(state["mine"], batch)}

    state = {"w": torch.ones(()), "mine": fdp.per_rank(torch.tensor(0.5))}
    batch = torch.arange(4.0)
    new = fdp.data_parallel(step_fn)(state, batch)
    w = torch.ones((), requires_grad=True)
    (grad,) = torch.autograd.grad((batch * w + 0.5).square().mean(), w)
    torch.testing.assert_close(new["w"], 1 - grad)
    assert new["mine"] == fdp.per_rank(torch.tensor(6.5))


def test_collectives_outside_of_a_step_give_what_is_not_labelled() -> None:
    assert fdp.pmean({"x": own(1.0)}) == {"x": torch.tensor([1.0])}
    assert isinstance(fdp.all_gather(own(1.0)), torch.Tensor)


OPTIMIZERS = {
    "from_torch": lambda inner: inner,
    "averaged": lambda inner: fdp.optim.averaged(inner, decay=0.5),
    "clipped": lambda inner: fdp.optim.clipped(inner, 0.1),
    "skipping": fdp.optim.skip_nonfinite,
    "scaled": fdp.optim.loss_scaled,
    "scheduled": lambda inner: fdp.optim.scheduled(inner, lambda n: 0.1 / (n + 1)),
    "partition by path": lambda inner: fdp.optim.partition(lambda path, leaf: path, {"w": inner, "b": inner}),
    "partition by tree": lambda inner: fdp.optim.partition({"w": 0, "b": 1}, {0: inner, 1: inner}),
}


@pytest.mark.parametrize("wrapper", some(OPTIMIZERS))
def test_the_state_of_an_optimizer_for_labelled_parameters_is_labelled_and_computes_the_same(wrapper: str) -> None:
    optimizer = OPTIMIZERS[wrapper](fdp.optim.from_torch(torch.optim.AdamW, lr=0.1))

    def step_fn(state: Tree, batch: torch.Tensor) -> Tree:
        grads = fdp.pmean(torch.func.grad(lambda p: (batch @ p["w"] + p["b"]).square().mean())(state["params"]))
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}

    params = {"w": torch.ones(2), "b": torch.zeros(1)}
    step = fdp.data_parallel(step_fn)
    states = [{"params": p, "opt": optimizer.init(p)} for p in (params, fdp.per_rank(params))]
    for i in range(3):
        states = [step(state, torch.ones(3, 2) * i) for state in states]
    plain, marked = states
    assert step.traces == 2
    assert repr(bare(marked)) == repr(plain) and marked["params"]["w"] != params["w"]
    moments = [x for x in optree.tree_leaves(marked["opt"], is_leaf=lambda x: type(x) is fdp.PerRank)
               if isinstance(x, fdp.PerRank)]  # fmt: skip
    assert len(moments) >= 6


# --- ranks that do not agree -------------------------------------------------------------------------


def other_shapes(what: str) -> str:
    rank = dist.get_rank()
    step = fdp.data_parallel(lambda s, b: {"w": s["w"] + fdp.pmean(b.sum()), "mine": s["mine"] * 2})
    leaf = torch.ones(2 + rank) if what == "shape" else torch.ones(2)
    mine = fdp.per_rank(leaf) if what == "shape" or rank == 0 else leaf
    state = {"w": torch.zeros(()), "mine": mine}
    texts = []
    for call in (
        lambda: step(state, torch.ones(2)),
        lambda: fdp.assert_replicated(state),
        lambda: fdp.replicate(state),
    ):
        with pytest.raises(fdp.AgreementError) as caught:
            call()
        texts.append(str(caught.value))
    return "\n".join(texts)


def test_a_labelled_leaf_of_another_shape_or_labelled_on_one_rank_only_is_named() -> None:
    for text in ranks.run(2, other_shapes, "shape"):
        assert "rank 0: labelled state s['mine'] [2] torch.float32" in text
        assert "rank 1: labelled state s['mine'] [3] torch.float32" in text
        assert text.count("rank 1: tree['mine']: labelled, [3] torch.float32") == 2
    for text in ranks.run(2, other_shapes, "label"):
        assert "rank 0: labelled state s['mine'] [2] torch.float32" in text
        assert "rank 1: state s['mine'] [2] torch.float32" in text
        assert text.count("rank 1: tree['mine']: [2] torch.float32") == 2


def replicated_with_labels() -> None:
    rank = dist.get_rank()
    state = {"w": torch.full((2,), float(rank)), "mine": own(float(rank))}
    new = fdp.replicate(state)
    assert new["w"].tolist() == [0.0, 0.0] and new["mine"] == own(float(rank))
    assert new["mine"].value is not state["mine"].value  # a donated copy leaves the argument as it is
    fdp.assert_replicated(new)
    with pytest.raises(fdp.ReplicationError) as caught:
        fdp.assert_replicated(state)
    assert "tree['w']: rank 1 of 2" in str(caught.value) and "mine" not in str(caught.value)


def test_replicate_and_assert_replicated_leave_labelled_leaves_alone() -> None:
    ranks.run(2, replicated_with_labels)


def test_the_trace_of_many_ranks_takes_labels() -> None:
    from fdp.trace import flatten_call, resolve_roles, trace_step

    state, batch = residual_state(0), batch_of(0, 0)
    roles = resolve_roles(residual_step, 2, -1, (), ())
    trace = trace_step(residual_step, flatten_call((state, batch), roles), roles, fake_group(8))
    assert [o.labelled for o in trace.outputs] == [True, True, True, False, False]


def test_a_label_that_is_taken_for_its_tensor_says_where_that_is() -> None:
    with pytest.raises(AttributeError, match="no attribute 'square': it is a label, and its tensor is its `value`"):
        own(1.0).square()
    assert not hasattr(own(1.0), "shape")


def test_state_that_differs_and_has_no_label_is_told_to_be_labelled() -> None:
    def step_fn(state: Tree, batch: torch.Tensor) -> Any:
        return {"own": state["own"] + batch.mean(), "w": state["w"]}, batch.sum()

    state = {"own": torch.zeros(2), "w": torch.zeros(2)}
    with pytest.raises(fdp.ReplicationError) as caught:
        fdp.data_parallel(step_fn)(state, torch.ones(3))
    assert "label state that is each rank's own" in str(caught.value).splitlines()[-1]
    with pytest.raises(fdp.ReplicationError) as caught:
        fdp.data_parallel(lambda state, batch: (state, batch.sum()))(state, torch.ones(3))
    assert "label state" not in str(caught.value)
