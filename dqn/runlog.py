"""The run's folder and everything that a person reads while it runs: log, dashboard, games, progress.

A resumed run goes on in the same files. What an earlier process wrote beyond the checkpoint is cut off first, so every
curve's x axis (agent steps) rises strictly and no game is counted twice.
"""

import fcntl
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from dqn import config
from dqn.checkpoint import generations
from dqn.config import Config, UsageError
from dqn.csvlog import CsvLog, replace_text
from dqn.dashboard import EVENTS, Board
from dqn.progress import Console, Pace, duration

if TYPE_CHECKING:
    from dqn.atari import TimeStep

RUNS = Path("runs")
WRITTEN = (
    *("config.yaml", "train.log", EVENTS, "episodes.csv", "memory.csv", "ram_steps.f32"),
    *("checkpoint", "replay", "model.pt", "best.pt", "eval.json", "report.png", "report.md"),
)
"""What a run writes in its folder: all that `--fresh` deletes."""
LOCK = ".lock"
STARTED = ".started"
"""Marks a folder that was empty when a run began in it and that holds no checkpoint yet: the run may begin again."""
EPISODES_HEADER = "step,lane,return,length_steps,lives_lost,wall_s"
RECENT_GAMES = 100


def run_path(name: str) -> Path:
    """The folder of a run: a name under `runs/`, or a path.

    Raises:
        UsageError: the name is empty.
    """
    if not name.strip("."):
        raise UsageError(f"run '{name}' is no name; take a word such as breakout, or a path")
    return Path(name) if os.sep in name else RUNS / name


def existing_run(name: str) -> Path:
    """The folder of a run that is there.

    Raises:
        UsageError: there is none; the nearest names are listed.
    """
    path = run_path(name)
    if not path.is_dir():
        others = [folder.name for folder in RUNS.glob("*") if folder.is_dir()]
        raise UsageError(f"no run '{name}': {path} is not a folder{config.nearest(name, others)}")
    return path


class RunFolder:
    """A run's folder, locked while the `with` block lasts.

    Args:
        name: a name under `runs/`, or a path.
        fresh: `clear` deletes what a run wrote there, and only that.

    Raises:
        UsageError: on entry, if the folder cannot be used.
    """

    def __init__(self, name: str, *, fresh: bool = False):
        self.path = run_path(name)
        self.fresh = fresh
        self._lock = -1

    def __enter__(self) -> "RunFolder":
        try:
            begun = (self.path / STARTED).exists()
            if not self.fresh and not self.has_checkpoint and self._content() and not begun:
                raise UsageError(
                    f"{self.path} is not empty ({', '.join(self._content()[:3])}) and holds no checkpoint to go on"
                    " from; take another --run, or --fresh to delete what a run wrote there"
                )
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            os.close(self._lock)
            raise UsageError(f"{self.path} is in use by process {pid}; wait for it, or take another --run") from None
        except OSError as error:
            raise UsageError(f"{self.path} cannot be used: {error.strerror}; take another --run") from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        return self

    def clear(self) -> None:
        """Makes way for a run that begins here: deletes what another wrote, if there is no checkpoint to go on from."""
        if not self.has_checkpoint:
            self._delete()
            (self.path / STARTED).touch()

    def __exit__(self, *_: object) -> None:
        if not self._content():  # nothing came of it
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def has_begun(self) -> None:
        """Notes that the first checkpoint is there."""
        (self.path / STARTED).unlink(missing_ok=True)

    def _content(self) -> list[str]:
        names = [path.name for path in self.path.iterdir()] if self.path.exists() else []
        return sorted(set(names) - {LOCK, STARTED})

    def _delete(self) -> None:
        for pattern in WRITTEN:
            for path in [*self.path.glob(pattern), *self.path.glob(f"{pattern}.tmp")]:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    @property
    def has_checkpoint(self) -> bool:
        """Whether this run goes on from here."""
        return not self.fresh and bool(generations(self.path / "checkpoint"))

    def read_config(self) -> dict[str, Any]:
        """The values of the config that the run was started with.

        Raises:
            UsageError: there is no config, or it cannot be read.
        """
        return config.flat(config.from_flat(config.read_yaml(self.path / "config.yaml")))

    def write_config(self, chosen: Config) -> None:
        """Writes the resolved config, headed by the versions and the commit that ran it."""
        head = "".join(f"# {name}: {version}\n" for name, version in versions().items())
        replace_text(self.path / "config.yaml", head + config.write_yaml(chosen))


def versions() -> dict[str, str]:
    """The versions of what a run's numbers depend on, and the commit of this source."""
    found = {"python": platform.python_version(), "commit": "unknown"}
    found |= {name: importlib.metadata.version(name) for name in ("torch", "numpy", "ale-py")}
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
        found["commit"] = result.stdout.strip() or "unknown"
    return found


class Games:
    """Raw return, length in steps and lost lives of the games in flight, a value a lane."""

    def __init__(self, num_envs: int):
        self.returns = np.zeros(num_envs)
        self.lengths, self.lives_lost, self.lives = (np.zeros(num_envs, np.int64) for _ in range(3))

    def advance(self, timestep: "TimeStep") -> np.ndarray:
        """Takes what the last actions brought; returns the lanes whose games are over, their sums still there."""
        lost = np.maximum(self.lives - timestep.lives, 0)
        self.returns = np.where(timestep.first, 0, self.returns + timestep.reward)
        self.lengths = np.where(timestep.first, 0, self.lengths + 1)
        self.lives_lost = np.where(timestep.first, 0, self.lives_lost + lost)
        self.lives = timestep.lives.astype(np.int64)
        return np.flatnonzero(timestep.ended)

    def state_dict(self) -> dict[str, list[float]]:
        """The sums as plain lists."""
        return {name: values.tolist() for name, values in vars(self).items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Goes on with stored sums; a lane whose next row begins a game starts at 0 by itself."""
        for name, values in state.items():
            getattr(self, name)[:] = values


class RunLog:
    """Log, dashboard, games and progress of one process of a run.

    Args:
        folder: the run's folder.
        chosen: the run's config.
        start_step: the step of the checkpoint that the run goes on from, or 0.
        process_hours: hours since this process began, which `budget.max_hours` limits.
        limit_mib: the limit or budget that RAM is shown against.
        wall_s_before: running time of the processes before this one.
        stream: the console; None: standard output.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        folder: Path,
        chosen: Config,
        *,
        start_step: int,
        process_hours: Callable[[], float],
        limit_mib: float,
        wall_s_before: float = 0.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._config, self._clock, self._process_hours = chosen, clock, process_hours
        self._limit_mib, self._began = limit_mib, clock() - wall_s_before
        self._log = os.open(folder / "train.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._console = Console(stream or sys.stdout, chosen.budget.max_steps, start_step)
        self._board = Board(folder, start_step)
        self._episodes = CsvLog(folder / "episodes.csv", EPISODES_HEADER, start_step)
        rows = self._episodes.rows_before
        self.num_games = len(rows)
        """Games finished, earlier processes' included."""
        self.returns = deque((float(row.split(",")[2]) for row in rows[-RECENT_GAMES:]), maxlen=RECENT_GAMES)
        """Returns of the last 100 of them."""
        self.games = Games(chosen.env.num_envs)
        self.pace = Pace(chosen, start_step, clock)
        self._then: tuple[int, int, float] | None = None
        self._start_step, self._lines = start_step, 0
        self._next_line_s, self._next_bar_s, self._next_line_step = clock(), clock(), 0
        self._warned_of_time = False

    @property
    def wall_s(self) -> float:
        """Running time, earlier processes' included."""
        return self._clock() - self._began

    def say(self, text: str, *, progress: bool = False) -> None:
        """A line for the log and the console; where there is a bar, it shows the progress instead."""
        with suppress(OSError):  # a full disk costs lines of the log; the console still has them
            os.write(self._log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())
        self._console.line(text, progress=progress)

    def describe(self, reference: Config) -> None:
        """Puts the config and its difference from a reference (Nature's) onto the dashboard."""
        mine, theirs = config.flat(self._config), config.flat(reference)
        table = "".join(f"|{name}|{value}|\n" for name, value in {**mine, **versions()}.items())
        rows = "".join(f"|{n}|{new}|{old}|\n" for n, (new, old) in config.difference(mine, theirs).items())
        self._warn(self._board.text("config", f"|value|here|\n|---|---|\n{table}"))
        self._warn(self._board.text("difference_from_nature", f"|value|here|nature.yaml|\n|---|---|---|\n{rows}"))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Points of curves; a curve that already has a point at this step or later keeps it."""
        self._warn(self._board.scalars(step, values))

    def speeds(self, step: int, updates: int) -> dict[str, float]:
        """Steps and updates per second since the last call, evaluating and saving left out; the first call has none."""
        then, self._then = self._then, (step, updates, self.pace.active_s)
        if then is None:
            return {}
        seconds = max(self._then[2] - then[2], 1e-9)
        return {"speed/steps_per_s": (step - then[0]) / seconds, "speed/updates_per_s": (updates - then[1]) / seconds}

    def advance(self, step: int, timestep: "TimeStep") -> None:
        """Counts what the iteration that ended at `step` brought; lane i's part of it is step - N + i + 1."""
        lanes = self.games.advance(timestep)
        if not len(lanes):
            return
        steps, games = (step - len(timestep.ended) + lanes + 1).tolist(), self.games
        columns = zip(steps, lanes, games.returns[lanes].tolist(), games.lengths[lanes], games.lives_lost[lanes])
        rows = [(at, lane, f"{score:g}", *counts, f"{self.wall_s:.1f}") for at, lane, score, *counts in columns]
        self._warn(self._episodes.append(rows))
        for at, lane in zip(steps, lanes):
            values = {"episode/return": games.returns[lane], "episode/length_steps": games.lengths[lane]}
            self.scalars(at, values)
        self.returns.extend(games.returns[lanes].tolist())
        self.num_games += len(lanes)

    def progress(self, step: int, epsilon: float, rss_mib: float) -> None:
        """Shows where the run is, if it is time to; call at every iteration."""
        if self.pace.advance(step):
            steps, seconds = step - self._start_step, self.pace.active_s
            self.say(
                f"learning begins at step {step:,}: filling {steps:,} steps took {duration(seconds)},"
                f" {steps / max(seconds, 1e-9):,.0f} steps/s"
            )
        now = self._clock()
        if now >= self._next_bar_s:
            self._next_bar_s = now + 0.3
            self._console.bar(step, self.pace.phase, lambda: self._status(epsilon, rss_mib))
        if now >= self._next_line_s and step >= self._next_line_step:
            self._lines += 1
            self._next_line_s, self._next_line_step = now + (10 if self._lines < 30 else 60), step + 500
            share = f"{self.pace.phase:5} {step:,} of {self._config.budget.max_steps:,}"
            self.say(f"{share} · {self._status(epsilon, rss_mib)}", progress=True)
            self._warn_of_time(step)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Marks the time inside the block as `evaluate` or `save`, which steps/s leaves out."""
        before = self.pace.phase
        self.pace.book(phase)
        self._console.bar(self.pace.step, phase, lambda: "")
        try:
            yield
        finally:
            self.pace.book(before)

    def flush(self) -> None:
        """Sees points and games onto the disk: a checkpoint, which is there to the last byte, covers them."""
        with suppress(OSError):
            self._board.sync()
            self._episodes.sync()

    def close(self) -> None:
        """Closes all files and the progress bar."""
        self._console.close()
        self._board.close()
        self._episodes.close()
        os.close(self._log)

    def _warn(self, problem: str | None) -> None:
        if problem is not None:
            self.say(f"warning: {problem}")

    def _status(self, epsilon: float, rss_mib: float) -> str:
        few = f" ({len(self.returns)} games)" if len(self.returns) < RECENT_GAMES else ""
        score = f"return {np.mean(self.returns):.1f}{few}" if self.returns else "no game yet"
        hours = self._config.budget.max_hours
        limit = "" if hours is None else f", limit in {duration(3600 * (hours - self._process_hours()))}"
        ram = f"RAM {rss_mib / 1024:.2f}/{self._limit_mib / 1024:.1f} GiB"
        return f"{self.pace.speed:,.0f} steps/s · {score} · {ram} · {self.pace.text_to_end()}{limit} · ε {epsilon:.3f}"

    def _warn_of_time(self, step: int) -> None:
        hours, left = self._config.budget.max_hours, self.pace.seconds_to_end()
        if self._warned_of_time or hours is None or left is None or step < 20_000 or not self.pace.settled:
            return
        room = 3600 * (hours - self._process_hours())
        if left > room:
            self._warned_of_time = True
            self._warn(
                f"at this speed the end is {duration(left)} away and budget.max_hours {hours:g} leaves"
                f" {duration(room)}: the run will stop with a checkpoint, and the same command goes on from it"
            )
