"""The public names are the documented ones, and their docstrings say what they promise."""

from __future__ import annotations

import inspect

import pytest
from docstring_gaps import docstring_gaps

import fdp

# What other programs call, from the table of public names. A name leaves NOT_YET in the change that adds it.
PUBLIC_FUNCTIONS = {
    "accumulate", "all_gather", "all_to_all", "assert_replicated", "axis_index", "axis_size", "broadcast",
    "data_parallel", "from_module", "grad", "initialize", "join", "load", "per_rank", "pmax", "pmean", "pmean_scatter",
    "pmin", "ppermute", "psum", "psum_scatter", "replicate", "save", "scaling", "seed", "shard", "sync_batch_norm",
    "unshard", "value_and_grad",
}  # fmt: skip
PUBLIC_ERRORS = {
    "AgreementError", "ArgumentError", "CompileError", "FdpError", "NonFiniteError", "PeerError", "PurityError",
    "ReplicationError", "TraceError",
}  # fmt: skip
# Of `fdp.optim`, beside the class `Optimizer`.
PUBLIC_IN_OPTIM = {
    "apply_updates", "averaged", "chain", "clip_by_global_norm", "clipped", "ema", "from_torch", "from_transform",
    "global_norm", "loss_scaled", "partition", "schedule_from_torch", "scheduled", "skip_nonfinite",
}  # fmt: skip
PUBLIC_STAGES = {"Step", "Trace", "Plan"}
PUBLIC_VALUES = {"BatchSampler", "CheckpointManager", "Network", "PerRank", "Scaling", "Timeline"}
PUBLIC = PUBLIC_FUNCTIONS | PUBLIC_ERRORS | PUBLIC_STAGES | PUBLIC_VALUES | {"optim", "random"}
NOT_YET: set[str] = set()


def test_public_names_are_the_documented_ones() -> None:
    assert set(fdp.__all__) == PUBLIC - NOT_YET
    assert len(fdp.__all__) == len(set(fdp.__all__))
    assert [name for name in NOT_YET if hasattr(fdp, name)] == []


@pytest.mark.parametrize("name", sorted(PUBLIC_FUNCTIONS - NOT_YET))
def test_public_function_is_documented(name: str) -> None:
    assert docstring_gaps(name, getattr(fdp, name), needs_example=True) == []


@pytest.mark.parametrize("name", sorted(PUBLIC_STAGES | PUBLIC_VALUES))
def test_stage_and_its_methods_are_documented(name: str) -> None:
    stage = getattr(fdp, name)
    assert (stage.__doc__ or "").split("\n\n")[0].strip().endswith(".")
    methods = {key: value for key, value in vars(stage).items() if inspect.isfunction(value) and key[0] != "_"}
    assert [gap for key in methods for gap in docstring_gaps(f"{name}.{key}", methods[key], False)] == []


@pytest.mark.parametrize("name", sorted(PUBLIC_ERRORS))
def test_error_is_documented_and_a_refusal_of_fdp(name: str) -> None:
    error = getattr(fdp, name)
    assert issubclass(error, fdp.FdpError)
    assert (error.__doc__ or "").strip().endswith(".")


@pytest.mark.parametrize("name", sorted(PUBLIC_IN_OPTIM))
def test_public_function_of_optim_is_documented(name: str) -> None:
    assert docstring_gaps(f"optim.{name}", getattr(fdp.optim, name), needs_example=True) == []


def test_public_names_of_optim_are_the_documented_ones() -> None:
    assert set(fdp.optim.__all__) == PUBLIC_IN_OPTIM | {"GradientTransformation", "Optimizer", "Schedule"}
    assert docstring_gaps("optim.Schedule", fdp.optim.Schedule.__call__, needs_example=False) == []


@pytest.mark.parametrize("name", fdp.random.__all__)
def test_random_function_is_documented(name: str) -> None:
    assert docstring_gaps(name, getattr(fdp.random, name), needs_example=True) == []


def test_a_gap_in_a_docstring_is_seen() -> None:
    def bad(x: int, y: int) -> int:
        """No full stop

        Args:
            x: a number.
        """
        raise ValueError

    gaps = docstring_gaps("bad", bad, needs_example=True)
    assert [gap.removeprefix("bad: ") for gap in gaps] == [
        "a first sentence that says what it promises", "Args: y", "Returns", "Raises", "Example that runs",
    ]  # fmt: skip
