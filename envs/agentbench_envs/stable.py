"""Choices that are the same on every machine and in every Python version.

``random.Random.random`` is documented to keep its sequence for a seed; ``shuffle``, ``sample`` and
NumPy's generators are not. Everything that shapes a task is drawn through this class.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class StableRandom:
    """A generator seeded by text, built on ``random.Random.random`` alone.

    Args:
        key: Any text, e.g. ``"world/7/3"``.
    """

    def __init__(self, key: str) -> None:
        digest = hashlib.sha256(key.encode()).digest()
        self._random = random.Random(int.from_bytes(digest[:8], "big")).random  # noqa: S311

    def uniform(self) -> float:
        """A float in [0, 1)."""
        return self._random()

    def below(self, n: int) -> int:
        """An integer in [0, n)."""
        return int(self._random() * n)

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return low + self.below(high - low + 1)

    def pick(self, options: Sequence[T]) -> T:
        """One element."""
        return options[self.below(len(options))]

    def weighted(self, options: Sequence[T], weights: Sequence[float]) -> T:
        """One element, with probability in proportion to its weight."""
        mark = self._random() * sum(weights)
        for option, weight in zip(options, weights, strict=True):
            mark -= weight
            if mark < 0:
                return option
        return options[-1]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        """A permutation (Fisher-Yates)."""
        result = list(options)
        for i in range(len(result) - 1, 0, -1):
            j = self.below(i + 1)
            result[i], result[j] = result[j], result[i]
        return result


def hash_order(options: Sequence[str], salt: str) -> list[str]:
    """Sort texts by the hash of salt and text: a fixed shuffle that depends on nothing else."""
    return sorted(options, key=lambda text: hashlib.sha256(f"{salt}\n{text}".encode()).digest())
