"""How fast a run goes, when it will end, and the console that shows it."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from dqn.config import Config


class Pace:
    """Where the time goes: the phase, the speed, the time to the end."""

    def __init__(self, chosen: Config, start_step: int, clock: Callable[[], float]):
        self._starts, self._max_steps = chosen.learner.learning_starts_steps, chosen.budget.max_steps
        self._clock = clock
        self.step, self.phase = start_step, "fill" if start_step < self._starts else "learn"
        self.active_s = 0.0
        """Seconds of filling and learning, evaluating and saving left out."""
        self._began = self._since = clock()
        self._samples: deque[tuple[float, int]] = deque([(0.0, start_step)], maxlen=90)

    def book(self, phase: str) -> None:
        """Counts the time so far for its phase, and changes the phase."""
        now = self._clock()
        self.active_s += now - self._since if self.phase in ("fill", "learn") else 0.0
        self._since, self.phase = now, phase

    def advance(self, step: int) -> bool:
        """Goes on to a step; returns whether learning begins with it."""
        begins = self.phase == "fill" and step >= self._starts
        self.book("learn" if begins else self.phase)
        self.step = step
        if begins:
            self._samples.clear()
        if begins or self.active_s >= self._samples[-1][0] + 10:
            self._samples.append((self.active_s, step))
        return begins

    @property
    def speed(self) -> float:
        """Steps per second of this phase over the last quarter of an hour."""
        active_s, step = self._samples[0]
        return (self.step - step) / max(self.active_s - active_s, 1e-9)

    @property
    def settled(self) -> bool:
        """Whether the speed is that of more than a moment."""
        return self.step - self._samples[0][1] >= 1_000

    def seconds_to_end(self) -> float | None:
        """An estimate of the time to the last step, evaluations at their share so far; None while nothing is known."""
        speed, left = self.speed, self._max_steps - self.step
        if speed <= 0:
            return None
        others = (self._since - self._began) / self.active_s if self.active_s > 60 else 1.0
        return left / speed * others

    def text_to_end(self) -> str:
        """The time to the end in words."""
        left = self.seconds_to_end()
        if left is None:
            return "time to the end unknown"
        return f"end in {'more than ' if self.phase == 'fill' else ''}{duration(left)}"


def duration(seconds: float) -> str:
    """A duration as people say it."""
    minutes = round(max(0.0, seconds) / 60)
    if minutes < 2:
        return f"{max(0.0, seconds):.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60}h{minutes % 60:02}"


COLOURS = {"fill": "yellow", "learn": "green", "evaluate": "cyan", "save": "blue"}


class Console:
    """A progress bar on a terminal, short lines elsewhere; a console that has gone away is no reason to stop."""

    def __init__(self, stream: TextIO, max_steps: int, start_step: int):
        self._stream, self._bar = stream, None
        if stream.isatty():
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no thread of its own
            shape = "{desc} {percentage:.1f}% |{bar}| {n_fmt}/{total_fmt} {unit}"
            options: dict[str, Any] = {"dynamic_ncols": True, "unit_scale": True, "unit": "", "bar_format": shape}
            self._bar = tqdm(total=max_steps, initial=start_step, file=stream, **options)

    def line(self, text: str, *, progress: bool = False) -> None:
        """Prints a line; a progress line only where there is no bar."""
        encoding = self._stream.encoding or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        with suppress(OSError, ValueError):
            if self._bar is None:
                print(text, file=self._stream, flush=True)
            elif not progress:
                self._bar.write(text, file=self._stream)

    def bar(self, step: int, phase: str, status: Callable[[], str]) -> None:
        """Moves the bar."""
        if self._bar is not None:
            with suppress(OSError, ValueError):
                self._bar.n, self._bar.unit, self._bar.colour = step, f"· {status()}", COLOURS[phase]
                self._bar.set_description_str(phase, refresh=False)
                self._bar.refresh()

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self._bar is not None:
            with suppress(OSError, ValueError):
                self._bar.close()
