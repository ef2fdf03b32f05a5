"""Each recipe shows what its page says, on two ranks."""

from __future__ import annotations

from run_examples import numbers, on_two_ranks
from samples import exhaustive


@exhaustive
def test_local_sgd_and_diloco_send_a_twentieth() -> None:
    text = on_two_ranks("recipes/local_sgd", "--steps=60")
    accuracies = numbers("test accuracy @%", text)
    assert len(accuracies) == 3 and min(accuracies) > 80
    every_step, local_sgd, diloco = numbers("meetings, @ MB sent", text)
    assert local_sgd == diloco < every_step / 15


@exhaustive
def test_gossip_keeps_ranks_together() -> None:
    text = on_two_ranks("recipes/gossip", "--steps=80")
    alone, mixed = numbers("distance from the mean @,", text)
    assert mixed < alone / 10
    assert numbers("test accuracy of the mean @%", text)[1] > 80


def test_zero1_by_hand_equals_the_whole_optimizer() -> None:
    text = on_two_ranks("recipes/zero1")
    assert numbers("loss @, of the whole state @;", text)[0] < 0.5
    (apart,) = numbers("farthest parameter @ apart", text)
    assert apart < 1e-5
    own, whole = numbers("state: @ bytes on each of 2 ranks, @ undivided", text)
    assert own < 0.51 * whole


@exhaustive
def test_the_gradient_of_clip_is_that_of_the_global_batch() -> None:
    text = on_two_ranks("recipes/clip", "--steps=60")
    (apart,) = numbers("differ by @ of the largest", text)
    assert apart < 1e-5
    (found,) = numbers("halves, @% find", text)
    assert found > 15  # 0.5 by chance


@exhaustive
def test_error_feedback_makes_up_for_low_rank() -> None:
    text = on_two_ranks("recipes/power_sgd", "--steps=150")
    whole, low_rank, fed_back = numbers("test accuracy @%", text)
    assert low_rank < fed_back > whole - 3
    sent = numbers("%, @ bytes a step", text)
    assert sent[1] == sent[2] < sent[0] / 20


@exhaustive
def test_the_teacher_of_byol_learns_and_is_one() -> None:
    text = on_two_ranks("recipes/byol", "--steps=60", "--batch-size=128")
    (untrained, after) = numbers("@% right when untrained, @% after", text)
    assert after > untrained + 2
    assert "the teacher is equal on 2 ranks" in text


@exhaustive
def test_the_queue_of_moco_is_one() -> None:
    text = on_two_ranks("recipes/moco", "--steps=60", "--batch-size=128")
    (untrained, after) = numbers("@% right when untrained, @% after", text)
    assert after > untrained + 4
    assert "the queue of 1,024 keys is equal on 2 ranks" in text


@exhaustive
def test_ppo_keeps_the_pole_up() -> None:
    text = on_two_ranks("recipes/ppo", "--rounds=5", "--carts=128")
    before, *_, after = numbers("the mean return is @ of", text)
    assert before < 30 and after > 60
