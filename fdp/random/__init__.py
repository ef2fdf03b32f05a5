"""Random numbers as pure functions of a key, in the way of JAX (keys); draws without a key (generators)."""

from fdp.random.keys import bernoulli, fold_in, key, normal, permutation, randint, split, uniform

__all__ = ["bernoulli", "fold_in", "key", "normal", "permutation", "randint", "split", "uniform"]


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]
