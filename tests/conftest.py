"""Session-wide set-up: one thread per process, the same random numbers in every run, ranks taken down."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator

import pytest
import ranks
import torch

# What fails there says what was compared, as in a test file.
pytest.register_assert_rewrite("eager_draws", "emitted_calls", "memory_changes", "optimizer_classes", "refusal_texts")


# pytest gives its handlers to loggers that do not propagate; torch would put down every trace for them.
logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(scope="module", autouse=True)
def _collections_are_short() -> None:
    """What is there before a file's tests stays, and no search for garbage looks at it, for a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _nothing_compiled_before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of compiled programs of this run's own, for all its workers; ranks start later and inherit it."""
    base = tmp_path_factory.getbasetemp()
    # The compiler's headers are compiled once there, which takes longer than most programs.
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "inductor"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        yield


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session() -> Iterator[None]:
    # One thread: results do not depend on the machine, and ranks do not fight over its cores.
    torch.set_num_threads(1)
    yield
    ranks.close_pools()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
