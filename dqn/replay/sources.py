"""Which slots are transitions: the one rule, used by uniform and prioritized sampling and by their tests.

A window is the S + n slots of one lane around slot t, which stands in column S − 1:

    column     0      1      2      3      4 …          S = 4, n = 1
    slot      t−3    t−2    t−1     t     t+1
    holds     frame, first of each; action_t, reward_t, terminal_t, truncated_t of what followed frame_t

Slot t is a source if

- its earlier slots, back to its game's first one and no further, are in the log next to each other;
- its k later ones are too, where k ≤ n is where the sum of rewards stops: at a terminal, a truncation, or n;
- none of those k begins a game: the slot of a game's last frame is followed by one that does, and so is the slot
  before a cut.
"""

from typing import NamedTuple

import numpy as np


class Sources(NamedTuple):
    """What the rule says of B windows.

    Attributes:
        valid: bool[B], whether slot t is a source.
        bootstrap_steps: i64[B], k.
        ends: bool[B], whether the k-th transition is terminal.
        shown: bool[B, S + n], which frames belong to the states; the others are black.
    """

    valid: np.ndarray
    bootstrap_steps: np.ndarray
    ends: np.ndarray
    shown: np.ndarray


def find_sources(
    live: np.ndarray, first: np.ndarray, terminal: np.ndarray, truncated: np.ndarray, stack_size: int
) -> Sources:
    """Applies the rule to windows bool[B, S + n] of what the slots hold; where `live` is false nothing is held."""
    batch, width = live.shape
    now, n_steps = stack_size - 1, width - stack_size
    shown = np.ones((batch, width), bool)
    for column in range(now - 1, -1, -1):  # backwards: shown until a game's first frame has been
        shown[:, column] = shown[:, column + 1] & ~first[:, column + 1]
    stops = (terminal | truncated)[:, now : now + n_steps]
    bootstrap_steps = np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, n_steps)
    later = np.arange(1, n_steps + 1) <= bootstrap_steps[:, None]
    shown[:, now + 1 :] = later
    valid = (live | ~shown).all(axis=1) & ~(first[:, now + 1 :] & later).any(axis=1)
    last = now + bootstrap_steps - 1
    return Sources(valid, bootstrap_steps, terminal[np.arange(batch), last], shown)
