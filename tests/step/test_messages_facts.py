"""What tests of refusals compare: the facts of a message, and not its prose."""

from __future__ import annotations

import pytest
from refusal_texts import check_facts, facts

TEXT = """
step 'train' changes tensors that it does not own.
  state['w']: aten.add_.Tensor at LINE in train
  batch['x'] (donated, but it shares memory): [3, 2] torch.float32
Remedy: compute a new value (x + 1, not x.add_(1)); or let the step have it with donate_argnums."""


def test_facts_are_what_looks_like_code() -> None:
    said = [sorted(facts(line)) for line in TEXT.strip().splitlines()]
    assert said == [
        ["'train'"],
        ["LINE", "aten.add_.Tensor", "state['w']"],
        ["2]", "[3", "batch['x']", "torch.float32"],
        ["1", "donate_argnums", "x.add_(1)"],
    ]


def test_prose_may_change() -> None:
    check_facts(
        "the step 'train' writes to what belongs to its caller.\n"
        "  state['w']: aten.add_.Tensor at LINE in train, in place\n"
        "  batch['x'], [3, 2] torch.float32: lies in memory of another leaf\n"
        "Remedy: donate it, with donate_argnums=0; or return a new value: x + 1 for x.add_(1), donate_argnums",
        TEXT,
    )


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("'train'", "'step'"),
        ("state['w']", "state"),
        ("aten.add_.Tensor", "an operator"),
        ("at LINE", "somewhere"),
        ("[3, 2]", "[3, 3]"),
        ("donate_argnums", "donation"),
        ("Remedy: ", ""),
        ("  batch['x'] (donated, but it shares memory): [3, 2] torch.float32\n", ""),
        ("  state['w']", "state['w']"),
    ],
)
def test_facts_may_not(was: str, now: str) -> None:
    with pytest.raises(AssertionError):
        check_facts(TEXT.strip().replace(was, now), TEXT)
