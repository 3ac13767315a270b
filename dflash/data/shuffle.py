"""Random orders that depend on nothing but numbers: the same on every machine and numpy version."""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64, Steele et al. 2014
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))


def random_keys(count: int, *, seed: int, stream: int) -> NDArray[np.uint64]:
    """Return *count* pseudo-random uint64, one for each of 0..count-1, of (seed, stream)."""
    key = np.array([seed % 2**64], dtype=np.uint64)
    key = _mixed(_mixed(key) ^ np.array([stream % 2**64], dtype=np.uint64))
    return _mixed(key ^ _mixed(np.arange(count, dtype=np.uint64)))


def random_order(count: int, *, seed: int, stream: int) -> NDArray[np.int64]:
    """Return a permutation of 0..count-1 decided by (seed, stream)."""
    order = np.argsort(random_keys(count, seed=seed, stream=stream), kind="stable")
    return order.astype(np.int64, copy=False)
