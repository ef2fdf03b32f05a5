"""Saving and loading a state: bit for bit, on other numbers of ranks, with the structure checked."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from checkpoints import flip_a_bit

import fdp


def make_state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "params": {"w": torch.randn(3, 4), "half": torch.randn(5).bfloat16(), "empty": torch.zeros(0, 2)},
        "opt": [torch.tensor(7), torch.randn(4, 3).t(), torch.tensor([float("nan"), -0.0])],
        "epoch": seed,
    }


def assert_same_bits(one: dict[str, Any], two: dict[str, Any]) -> None:
    from fdp.distributed.fingerprint import fingerprint

    assert one["epoch"] == two["epoch"]
    flat = [*one["params"].values(), *one["opt"]], [*two["params"].values(), *two["opt"]]
    for a, b in zip(*flat, strict=True):
        assert fingerprint(a) == fingerprint(b)


def test_round_trip_in_a_world_of_one(tmp_path: Path) -> None:
    state, like = make_state(1), make_state(2)
    fdp.save(tmp_path / "a", state)
    loaded = fdp.load(tmp_path / "a", like)
    assert_same_bits(loaded, make_state(1))
    assert_same_bits(like, make_state(2))  # not changed
    fdp.save(tmp_path / "a", make_state(3))  # a later save replaces an earlier one
    assert_same_bits(fdp.load(tmp_path / "a", like), make_state(3))


def save_on_ranks(path: str) -> None:
    fdp.save(path, make_state(5))


def load_on_ranks(path: str) -> None:
    loaded = fdp.load(path, make_state(100 + dist.get_rank()))
    assert_same_bits(loaded, make_state(5))
    fdp.assert_replicated(loaded)


def test_another_number_of_ranks_loads_what_two_saved(tmp_path: Path) -> None:
    ranks.run(2, save_on_ranks, str(tmp_path / "a"))
    ranks.run(2, load_on_ranks, str(tmp_path / "a"))
    assert_same_bits(fdp.load(tmp_path / "a", make_state(2)), make_state(5))


def test_another_structure_is_refused_and_every_difference_named(tmp_path: Path) -> None:
    fdp.save(tmp_path / "a", {"w": torch.ones(2), "b": torch.ones(3), "n": 1, "old": torch.ones(1)})
    with pytest.raises(fdp.ArgumentError) as caught:
        fdp.load(tmp_path / "a", {"w": torch.ones(3), "b": torch.ones(3).double(), "n": torch.ones(1), "new": 1})
    assert str(caught.value).splitlines()[1:-1] == [
        "  state['new']: not in the checkpoint",
        "  state['old']: in the checkpoint only",
        "  state['b']: [3] torch.float32 in the checkpoint, [3] torch.float64 in `like`",
        "  state['n']: a Python value in the checkpoint, [1] torch.float32 in `like`",
        "  state['w']: [2] torch.float32 in the checkpoint, [3] torch.float32 in `like`",
    ]
    assert str(caught.value).splitlines()[-1].startswith("Remedy: ")


def load_from_own_folder(folder: str) -> str:
    with pytest.raises((fdp.ArgumentError, fdp.AgreementError)) as caught:
        fdp.load(f"{folder}/{dist.get_rank()}", {"w": torch.ones(2)})
    fdp.assert_replicated({"w": torch.ones(2)})  # the ranks are still in step
    return f"{caught.type.__name__}: {caught.value}"


def test_a_rank_that_has_no_checkpoint_keeps_no_other_waiting(tmp_path: Path) -> None:
    fdp.save(tmp_path / "0", {"w": torch.ones(2)})
    first, second = ranks.run(2, load_from_own_folder, str(tmp_path))
    assert second.startswith("ArgumentError: fdp.load found no checkpoint in")
    assert first.splitlines() == [
        "AgreementError: fdp.load was called on rank 0, and other ranks are about to do something else, or failed.",
        *("  rank 1: " + second.replace("\n", "\n    ")).splitlines(),
        "Remedy: call the same functions in the same order on every rank.",
    ]


def save_what_rank_0_cannot(path: str) -> str:
    what = print if dist.get_rank() == 0 else 0
    with pytest.raises((fdp.ArgumentError, fdp.AgreementError)) as caught:
        fdp.save(path, {"w": torch.ones(2), "what": what})
    fdp.assert_replicated({"w": torch.ones(2)})
    return f"{caught.type.__name__}: {caught.value}"


def test_a_rank_that_cannot_save_keeps_no_other_waiting(tmp_path: Path) -> None:
    first, second = ranks.run(2, save_what_rank_0_cannot, str(tmp_path / "a"))
    assert first.startswith("ArgumentError: state['what'] cannot be read")
    assert second.startswith("AgreementError: fdp.save was called on rank 1,") and first.splitlines()[0] in second


def save_where_there_is_a_file(path: str) -> str:
    with pytest.raises(fdp.FdpError) as caught:
        fdp.save(path, {"w": torch.ones(2)})
    fdp.assert_replicated({"w": torch.ones(2)})
    return str(caught.value)


def test_a_file_in_the_place_of_the_directory_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("no directory")
    first, second = ranks.run(2, save_where_there_is_a_file, str(tmp_path / "a"))
    assert first == second and first.startswith("fdp.save could not write") and "FileExistsError" in first


def save_where_the_index_may_not_be_written(path: str) -> str:
    (Path(path) / ".metadata").mkdir(parents=True, exist_ok=True)  # no file can take its place
    with pytest.raises(fdp.FdpError) as caught:
        fdp.save(path, {"w": torch.ones(2)})
    fdp.assert_replicated({"w": torch.ones(2)})
    return str(caught.value)


def test_what_one_rank_cannot_write_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = ranks.run(2, save_where_the_index_may_not_be_written, str(tmp_path / "a"))
    assert first == second and "stay.\n  rank 0: IsADirectoryError" in first
    assert [path.name for path in (tmp_path / "a").glob("*.distcp")] == []


def test_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fdp.ArgumentError, match="found no checkpoint in"):
        fdp.load(tmp_path, {"w": torch.ones(2)})


# --- what differs between ranks ----------------------------------------------------------------------


def mixed_state(rank: int) -> dict[str, Any]:
    """Replicated leaves, and each rank's own."""
    own = {"residual": torch.tensor([rank + 0.5, float("nan")]), "seen": torch.tensor(7 * rank)}
    return {"w": torch.arange(3.0), "own": fdp.per_rank(own), "epoch": 4}


def save_mixed(path: str) -> None:
    state = mixed_state(dist.get_rank())
    fdp.save(path, state, random=True)
    like = fdp.per_rank({"residual": torch.zeros(2), "seen": torch.tensor(0)})
    loaded = fdp.load(path, {"w": torch.zeros(3), "own": like, "epoch": 0}, random=True)
    assert repr(loaded) == repr(state) and like["residual"].value.tolist() == [0.0, 0.0]
    assert loaded["own"]["residual"].value is not state["own"]["residual"].value


def load_on_another_number(path: str) -> str:
    fdp.seed(5)
    before = torch.get_rng_state()
    with pytest.raises(fdp.ArgumentError) as caught:
        fdp.load(path, mixed_state(0), random=True)
    assert torch.equal(torch.get_rng_state(), before)
    return str(caught.value)


def test_each_rank_gets_its_own_labelled_leaves_back(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    ranks.run(2, save_mixed, path)
    for text in [*ranks.run(3, load_on_another_number, path), load_on_another_number_alone(path)]:
        first, *leaves, remedy = text.splitlines()
        assert "holds labelled leaves of each of 2 ranks, and this is one of" in first
        assert leaves == ["  state['own']['residual']: saved by 2 ranks", "  state['own']['seen']: saved by 2 ranks"]
        assert remedy.startswith("Remedy: load it on 2 ranks.")


def load_on_another_number_alone(path: str) -> str:
    with pytest.raises(fdp.ArgumentError) as caught:
        fdp.load(path, mixed_state(0))
    return str(caught.value)


def test_labels_in_a_world_of_one_and_on_one_side_only(tmp_path: Path) -> None:
    fdp.save(tmp_path / "a", mixed_state(3))
    assert repr(fdp.load(tmp_path / "a", mixed_state(0))) == repr(mixed_state(3))
    other = mixed_state(0)
    other["own"]["residual"] = other["own"]["residual"].value
    other["w"] = fdp.per_rank(torch.zeros(4))
    with pytest.raises(fdp.ArgumentError) as caught:
        fdp.load(tmp_path / "a", other)
    assert str(caught.value).splitlines()[1:-1] == [
        "  state['own']['residual']: labelled in the checkpoint, not labelled in `like`",
        "  state['w']: not labelled in the checkpoint, labelled in `like`",
        "  state['w']: [3] torch.float32 in the checkpoint, [4] torch.float32 in `like`",
    ]


def save_differing(path: str, what: str) -> str:
    rank = dist.get_rank()
    state: dict[str, Any] = {"w": torch.arange(3.0), "m": torch.zeros(2), "n": 1, "table": {"b", "a", "c"}}
    if what == "tensors":
        state["m"] = torch.tensor([0.0, -0.0 if rank == 1 else 0.0])  # a bit is enough
    elif what == "numbers":
        state["n"] = rank
    elif what == "arrays":
        state["table"] = torch.arange(5000).eq(1000 + 1500 * rank).numpy()  # of which the text shows the ends
    elif what == "structure":
        state["extra" if rank == 1 else "more"] = torch.zeros(1)
    with pytest.raises((fdp.ReplicationError, fdp.AgreementError)) as caught:
        fdp.save(path, state)
    fdp.assert_replicated({"w": torch.ones(2)})  # the ranks are still in step
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize(
    "what, line",
    [
        ("tensors", "  state['m']: rank 1 of 2"),
        ("numbers", "  state['n']: rank 1 of 2"),
        ("arrays", "  state['table']: rank 1 of 2"),
        ("structure", "  rank 1: state['extra']: [1] torch.float32"),
    ],
)
def test_a_state_that_differs_between_ranks_is_not_saved(tmp_path: Path, what: str, line: str) -> None:
    path = tmp_path / "a"
    ranks.run(2, save_on_ranks, str(path))
    for text in ranks.run(2, save_differing, str(path), what):
        assert line in text.splitlines()
        assert text.startswith("AgreementError" if what == "structure" else "ReplicationError")
    assert_same_bits(fdp.load(path, make_state(2)), make_state(5))  # what was there is whole
    ranks.run(2, save_differing, str(tmp_path / "b"), what)
    assert not (tmp_path / "b").exists()


class Odd:
    """What has no text of its own."""

    def __init__(self, value: int) -> None:
        self.value = value


def save_objects(path: str) -> None:
    torch.manual_seed(dist.get_rank())
    state = {"names": {f"name {i}" for i in range(20)}, "odd": Odd(3), "w": torch.ones(2)}
    fdp.save(path, state)
    with pytest.raises(fdp.ReplicationError, match=r"state\['odd'\]: rank 1 of 2"):
        fdp.save(path, {**state, "odd": Odd(dist.get_rank())})


def test_objects_that_are_equal_are_saved(tmp_path: Path) -> None:
    ranks.run(2, save_objects, str(tmp_path / "a"))


def test_a_bit_that_changed_on_the_disk_is_an_error_that_names_the_leaf(tmp_path: Path) -> None:
    state = {"a": torch.full((50,), 3.5), "b": [torch.full((9,), 7.25), 3], "c": fdp.per_rank(torch.full((8,), 1.75))}
    for number, name in ((3.5, "state['a']"), (7.25, "state['b'][0]"), (1.75, "state['c']")):
        fdp.save(tmp_path, state)
        flip_a_bit(tmp_path, number)
        with pytest.raises(fdp.ArgumentError, match="has been changed since it was saved") as caught:
            fdp.load(tmp_path, state)
        assert str(caught.value).splitlines()[1:-1] == [f"  {name}: not the bits that were saved"]


def saved_by_torch(path: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.save(state, checkpoint_id=path, no_dist=True)


def test_a_checkpoint_without_fingerprints_can_be_read(tmp_path: Path) -> None:
    saved_by_torch(tmp_path, {"state['w']": torch.arange(3.0)})
    assert fdp.load(tmp_path, {"w": torch.zeros(3)})["w"].tolist() == [0.0, 1.0, 2.0]


def changed_on_one_rank(path: str) -> str:
    state = {"w": torch.ones(3), "own": fdp.per_rank(torch.full((8,), 1.75 + dist.get_rank()))}
    fdp.save(path, state)
    if dist.get_rank() == 0:
        flip_a_bit(Path(path), 2.75)
    dist.barrier()
    try:
        fdp.load(path, state)
    except fdp.FdpError as error:
        return str(error)
    return ""


def test_what_changed_of_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    for text in ranks.run(2, changed_on_one_rank, str(tmp_path)):
        assert "has been changed since it was saved" in text


class Tagged(torch.Tensor):
    pass


class TaggedParameter(torch.nn.Parameter):
    pass


def saved_and_loaded(path: str) -> list[Any]:
    plain = torch.arange(3.0)
    each = [plain, plain.as_subclass(Tagged), torch.nn.Parameter(plain), TaggedParameter(plain), torch.nn.Buffer(plain)]
    found = []
    for at, one in enumerate(each):
        fdp.save(f"{path}/{at}", {"a": one})
        found += [fdp.load(f"{path}/{at}", {"a": other})["a"].tolist() for other in each]
    return found


def test_tensors_of_a_users_own_class_hold_what_plain_ones_hold(tmp_path: Path) -> None:
    assert saved_and_loaded(str(tmp_path / "one")) == [[0.0, 1.0, 2.0]] * 25
    assert ranks.run(2, saved_and_loaded, str(tmp_path / "two")) == [[[0.0, 1.0, 2.0]] * 25] * 2


def unlike(kind: str) -> str:
    x = torch.eye(3) * (1 + dist.get_rank())
    made = {
        "a class": lambda: x.as_subclass(Tagged),
        "coo": x.to_sparse,
        "csr": x.to_sparse_csr,
        "csc": x.to_sparse_csc,
    }
    fdp.assert_replicated({"x": made[kind]() - made[kind]() if kind == "coo" else torch.eye(3).to_sparse()})
    with pytest.raises(fdp.ReplicationError, match=r"tree\['x'\]: rank 1 of 2") as caught:
        fdp.assert_replicated({"x": made[kind]()})
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:Sparse CS:UserWarning")
@pytest.mark.parametrize("kind", ["a class", "coo", "csr", "csc"])
def test_tensors_of_all_kinds_are_compared(kind: str) -> None:
    assert all(ranks.run(2, unlike, kind))


@pytest.mark.parametrize("leaf", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")])
def test_what_is_no_dense_tensor_is_refused(tmp_path: Path, leaf: torch.Tensor) -> None:
    with pytest.raises(fdp.ArgumentError, match=r"state\['x'\], which is no dense tensor"):
        fdp.save(tmp_path, {"x": leaf})


ONE = torch.ones(1)
ODD = [
    {"fingerprints": "x"},
    {"fingerprints": torch.zeros(5, dtype=torch.int64)},
    {"fingerprints": torch.tensor(3)},
    {"fingerprints": torch.zeros(1, 1, dtype=torch.int64)},
    {"fingerprints": torch.tensor([1.0], dtype=torch.float64)},
    {"fingerprints": torch.tensor([1.0]).to(torch.float8_e5m2)},
    {"generators of rank 0 of 1: cpu": "x"},
    {"generators of rank 0 of 1: cpu": ONE},
    {"generators of rank 0 of 1: cpu": torch.zeros(8, dtype=torch.uint8)},
    {"generators of rank 0 of 1: unknown": torch.zeros(8, dtype=torch.uint8)},
    {"generators of rank 0 of 2: cpu": "x"},
    {"generators of rank 0 of 2: unknown": torch.zeros(8, dtype=torch.uint8)},
    {"generators of rank 1 of 2: cpu": torch.zeros(8, dtype=torch.uint8)},
]


@pytest.mark.filterwarnings("ignore:the checkpoint in .* holds the generators of 2 ranks:UserWarning")
@pytest.mark.parametrize(
    "odd", ODD, ids=[f"{name} {getattr(x, 'shape', '')}" for each in ODD for name, x in each.items()]
)
def test_a_checkpoint_that_holds_something_odd_is_refused(tmp_path: Path, odd: dict[str, Any]) -> None:
    saved_by_torch(tmp_path / "1", {"state['w']": ONE, **odd})
    before = torch.get_rng_state()
    with pytest.raises(fdp.ArgumentError, match="checkpoint"):
        fdp.CheckpointManager(tmp_path).restore({"w": ONE})
    assert torch.equal(torch.get_rng_state(), before)


def test_changed_states_of_generators_are_an_error(tmp_path: Path) -> None:
    words = torch.tensor(random.getstate()[1][:2]).numpy().tobytes()
    fdp.save(tmp_path, {"w": ONE}, random=True)
    (path,) = (each for each in tmp_path.glob("*.distcp") if words in each.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(words)] ^= 1
    path.write_bytes(bytes(data))
    assert fdp.load(tmp_path, {"w": ONE})["w"].item() == 1.0
    with pytest.raises(fdp.ArgumentError, match="generators of rank 0 of 1: python: not the bits that were saved"):
        fdp.load(tmp_path, {"w": ONE}, random=True)
