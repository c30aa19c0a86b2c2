"""Where a trajectory is cut: one short function a strategy, behind one interface.

A strategy gets the entropies of a trajectory's assistant tokens and returns turns, best first. A
cut after ``k`` turns leaves ``k`` turns in the prefix. The final turn is removed before ranking:
behind it the episode is over.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from agentbench_prefix.files import sha256_text


class ScoredCut(NamedTuple):
    """A cut and what it was ranked by.

    Attributes:
        turns: Teacher turns before the cut, at least 1.
        score: Nats for entropies, the ratio for a fixed one, else the share of turns.
    """

    turns: int
    score: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """What strategies see of a trajectory.

    Attributes:
        trajectory_id: Its id, which seeds what is random.
        n_turns: Number of assistant turns, the final one included.
        entropies: Teacher-forcing entropy in nats at each assistant token (content and end-of-turn
            token), turns in order, ``[tokens]``; empty where no model was asked.
        turn_of: Turn of each of these tokens, from 0, ``[tokens]``.
    """

    trajectory_id: str
    n_turns: int
    entropies: NDArray[np.float64]
    turn_of: NDArray[np.int64]


def smooth(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Centred moving average of odd width, truncated at the edges.

    ``H^_j = mean(H_i : |i - j| <= (w - 1) / 2)``
    """
    half = window // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    means: NDArray[np.float64] = (sums[high] - sums[low]) / (high - low)
    return means


def entropy_change(entropies: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Prefix-GRPO eq. 8: ``s_j = |H^_j - H^_{j-1}|``, ``s_0 = 0``, in nats.

    Args:
        entropies: ``[tokens]``, over the assistant tokens of a whole trajectory, in order.
        window: Width of the moving average, odd.
    """
    smoothed = smooth(entropies, window)
    return np.abs(np.diff(smoothed, prepend=smoothed[:1]))


_DIGITS = 9
"""Decimals of a score: far below what single precision resolves, and above the rounding of sums, so
that scores which are equal stay so."""


def _top_turns(trace: Trace, scores: NDArray[np.float64], k: int) -> list[ScoredCut]:
    """The ``k`` best distinct turns by their best token, ties to the earlier token."""
    found: dict[int, ScoredCut] = {}
    scores = np.round(scores, _DIGITS)
    # A stable sort of the negated scores puts the earlier of two equal tokens first.
    for token in np.argsort(-scores, kind="stable"):
        turn = int(trace.turn_of[token])
        if turn < trace.n_turns - 1 and turn not in found:
            found[turn] = ScoredCut(turn + 1, float(scores[token]))
            if len(found) == k:
                break
    return list(found.values())


def _odd(window: int) -> int:
    if window % 2 == 0:
        raise ValueError("the window of a centred average must be odd")
    return window


class _Strategy(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def needs_entropies(self) -> bool:
        """Whether a model has to score the trajectory."""
        return False


class EntropyChange(_Strategy):
    """The ``k`` turns with the largest change of smoothed entropy (Prefix-GRPO section 6.2).

    Attributes:
        kind: ``"entropy_change"``.
        w: Width of the moving average in tokens, odd.
        k: Most turns chosen.
    """

    kind: Literal["entropy_change"] = "entropy_change"
    w: Annotated[int, Field(ge=1), AfterValidator(_odd)] = 11
    k: Annotated[int, Field(ge=1)] = 3

    @property
    def needs_entropies(self) -> bool:
        """It does."""
        return True

    def choose(self, trace: Trace) -> list[ScoredCut]:
        """Cuts of a trajectory, best first."""
        return _top_turns(trace, entropy_change(trace.entropies, self.w), self.k)


class RawEntropy(_Strategy):
    """The ``k`` turns that hold the tokens of largest entropy, unsmoothed.

    Attributes:
        kind: ``"raw_entropy"``.
        k: Most turns chosen.
    """

    kind: Literal["raw_entropy"] = "raw_entropy"
    k: Annotated[int, Field(ge=1)] = 3

    @property
    def needs_entropies(self) -> bool:
        """It does."""
        return True

    def choose(self, trace: Trace) -> list[ScoredCut]:
        """Cuts of a trajectory, best first."""
        return _top_turns(trace, trace.entropies, self.k)


class FixedRatio(_Strategy):
    """For each ratio the first turn with ``index / (n - 1) >= ratio``.

    ``n`` counts all turns; a ratio that falls on the final turn, or on a turn already chosen, gives
    no cut.

    Attributes:
        kind: ``"fixed_ratio"``.
        ratios: Shares of the trajectory in (0, 1).
    """

    kind: Literal["fixed_ratio"] = "fixed_ratio"
    ratios: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(min_length=1)

    def choose(self, trace: Trace) -> list[ScoredCut]:
        """Cuts of a trajectory, in the order of the ratios."""
        found: dict[int, ScoredCut] = {}
        last = trace.n_turns - 1
        for ratio in self.ratios:
            turn = next((i for i in range(last) if i / last >= ratio), last)
            if turn < last:
                found.setdefault(turn, ScoredCut(turn + 1, ratio))
        return list(found.values())


class EveryTurn(_Strategy):
    """Every turn but the final one.

    Attributes:
        kind: ``"every_turn"``.
    """

    kind: Literal["every_turn"] = "every_turn"

    def choose(self, trace: Trace) -> list[ScoredCut]:
        """Cuts of a trajectory, in their order."""
        return [ScoredCut(k, k / trace.n_turns) for k in range(1, trace.n_turns)]


class RandomTurns(_Strategy):
    """``k`` distinct turns drawn uniformly.

    Attributes:
        kind: ``"random"``.
        k: Most turns drawn.
        seed: Seed; the draw depends on it and on the trajectory's id alone.
    """

    kind: Literal["random"] = "random"
    k: Annotated[int, Field(ge=1)] = 3
    seed: Annotated[int, Field(ge=0)] = 0

    def choose(self, trace: Trace) -> list[ScoredCut]:
        """Cuts of a trajectory, in the order drawn."""
        digest = sha256_text(f"{self.seed}\n{trace.trajectory_id}")
        rng = np.random.Generator(np.random.Philox(key=int(digest[:16], 16)))
        turns = rng.permutation(trace.n_turns - 1)[: self.k] + 1
        return [ScoredCut(int(turn), float(turn) / trace.n_turns) for turn in turns]


Strategy = Annotated[
    EntropyChange | RawEntropy | FixedRatio | EveryTurn | RandomTurns,
    Field(discriminator="kind"),
]
