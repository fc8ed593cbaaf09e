"""When a run ends: its budget of steps, hours and games, and the signals that a server sends.

Signals only raise a flag, which the loop polls wherever a second can pass; the run then saves and leaves with exit
code 75, and the same command goes on. A second Ctrl-C leaves at once: a checkpoint in the writing has a temporary
name until it is whole, so the one before it stays good.
"""

import os
import signal
import time
from types import FrameType

import psutil

from dqn.config import BudgetConfig

FINISHED, FAILED, USAGE, DOES_NOT_FIT, STOPPED_EARLY, INTERRUPTED_TWICE = 0, 1, 2, 3, 75, 130
"""Exit codes. 75 is EX_TEMPFAIL: the same command resumes, which a job script can act on."""


class StopEarly(Exception):
    """Raised out of an evaluation or a video when the run has to save and leave."""


class Budget:
    """What is left of the steps, the hours and the games.

    Hours count from the start of this process, as a job's limit does; steps and games are totals of the run.
    """

    def __init__(self, config: BudgetConfig):
        self.config = config
        self.stop_reason: str | None = None
        self.save_seconds = 5.0
        """How long a save took when it was last measured: the deadline leaves room for it."""
        self._started = time.monotonic() - max(0.0, time.time() - psutil.Process().create_time())
        self._interrupts = 0

    def listen(self) -> None:
        """Takes over SIGTERM, SIGINT and SIGUSR1 (SLURM's warning before its limit)."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            os.write(2, b"interrupted twice: leaving at once, the last good checkpoint stays\n")
            os._exit(INTERRUPTED_TWICE)
        self.stop_reason = signal.Signals(number).name

    @property
    def process_hours(self) -> float:
        """Hours since this process began."""
        return (time.monotonic() - self._started) / 3600

    def poll(self) -> None:
        """Raises StopEarly if a signal or the deadline asks the run to leave; cheap enough for every step."""
        if self.must_stop():
            raise StopEarly(self.stop_reason)

    def must_stop(self) -> bool:
        """Whether to save and leave before the end, with `stop_reason` saying why."""
        if self.stop_reason is None and self.config.max_hours is not None:
            room_hours = (1.5 * self.save_seconds + 2) / 3600
            if self.process_hours > self.config.max_hours - min(room_hours, self.config.max_hours / 2):
                self.stop_reason = f"budget.max_hours {self.config.max_hours:g}"
        return self.stop_reason is not None

    def finished(self, step: int, episodes: int) -> bool:
        """Whether the run has reached its steps or its games."""
        games = self.config.max_episodes
        return step >= self.config.max_steps or (games is not None and episodes >= games)
