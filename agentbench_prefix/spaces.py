"""A text space that holds whatever a game can echo back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gymnasium as gym
import numpy as np

_SAMPLE_ALPHABET = "abcdefghijklmnopqrstuvwxyz 0123456789"
_SAMPLE_MAX_LENGTH = 32


class UnicodeText(gym.Space[str]):
    """All Python strings, optionally up to a length.

    ``gymnasium.spaces.Text`` checks membership character by character against an explicit
    alphabet (alphanumeric by default) and so refuses what these environments print.
    Here ``contains`` is O(1): a type check and a length check.

    Args:
        max_length: Largest length in characters; ``None`` means no bound.
        seed: Seed of the sampler.
    """

    def __init__(
        self, max_length: int | None = None, *, seed: int | np.random.Generator | None = None
    ) -> None:
        if max_length is not None and max_length < 0:
            raise ValueError(f"max_length must be None or >= 0, got {max_length}")
        self.max_length = max_length
        super().__init__(dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Text of any length has no fixed-size array form."""
        return False

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a string within the length bound."""
        return isinstance(x, str) and (self.max_length is None or len(x) <= self.max_length)

    def sample(self, mask: None = None, probability: None = None) -> str:
        """Draw a short lower-case string (at most 32 characters)."""
        if mask is not None or probability is not None:
            raise ValueError("UnicodeText.sample takes neither a mask nor probabilities")
        longest = (
            _SAMPLE_MAX_LENGTH
            if self.max_length is None
            else min(self.max_length, _SAMPLE_MAX_LENGTH)
        )
        length = int(self.np_random.integers(0, longest + 1))
        picks = self.np_random.integers(0, len(_SAMPLE_ALPHABET), size=length)
        return "".join(_SAMPLE_ALPHABET[i] for i in picks)

    def to_jsonable(self, sample_n: Iterable[str]) -> list[Any]:
        """Strings are JSON already."""
        return list(sample_n)

    def from_jsonable(self, sample_n: list[Any]) -> list[str]:
        """Inverse of :meth:`to_jsonable`."""
        return [str(x) for x in sample_n]

    def __repr__(self) -> str:
        return f"UnicodeText(max_length={self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText) and self.max_length == other.max_length

    def __hash__(self) -> int:
        return hash(("UnicodeText", self.max_length))
