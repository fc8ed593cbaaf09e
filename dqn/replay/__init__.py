"""The replay memory: a log of sealed segments. `log` has the picture."""

from dqn.replay.log import Replay, Transitions

__all__ = ["Replay", "Transitions"]
