"""The run's folder and everything that a person reads while it runs: log, dashboard, games, progress.

A resumed run goes on in the same files. What an earlier process wrote beyond the checkpoint is cut off first, so every
curve's x axis (agent steps) rises strictly and no game is counted twice.
"""

import fcntl
import importlib.metadata
import os
import platform
import shutil
import struct
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
from dqn.csvlog import CsvLog

if TYPE_CHECKING:
    from dqn.atari import TimeStep

RUNS = Path("runs")
WRITTEN = (
    *("config.yaml", "train.log", "events.out.tfevents.*", "episodes.csv", "memory.csv", "ram_steps.f32"),
    *("checkpoint", "replay", "model.pt", "best.pt", "eval.json", "report.*"),
)
"""What a run writes in its folder: all that `--fresh` deletes."""
EVENTS = "events.out.tfevents.*"
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
        fresh: delete what a run wrote there, and only that.

    Raises:
        UsageError: on entry, if the folder cannot be used; nothing was written or deleted then.
    """

    def __init__(self, name: str, *, fresh: bool = False):
        self.path = run_path(name)
        self.fresh = fresh
        self._lock = -1

    def __enter__(self) -> "RunFolder":
        begun = (self.path / STARTED).exists()
        try:
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
        if self.fresh or (begun and not self.has_checkpoint):
            self._delete()
        if not self.has_checkpoint:
            (self.path / STARTED).touch()
        return self

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
        """Whether a run could go on from here."""
        return bool(generations(self.path / "checkpoint"))

    def read_config(self) -> dict[str, Any]:
        """The values of the config that the run was started with.

        Raises:
            UsageError: there is no config, or it cannot be read.
        """
        return config.flat(config.from_flat(config.read_yaml(self.path / "config.yaml")))

    def write_config(self, chosen: Config) -> None:
        """Writes the resolved config, headed by the versions and the commit that ran it."""
        head = "".join(f"# {name}: {version}\n" for name, version in versions().items())
        temporary = self.path / "config.yaml.tmp"
        temporary.write_text(head + config.write_yaml(chosen), encoding="utf-8")
        os.replace(temporary, self.path / "config.yaml")


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
        learning_steps_per_s: a guess for the time to the end until learning has been timed; None: none.
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
        learning_steps_per_s: float | None = None,
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
        self.pace = Pace(chosen, start_step, learning_steps_per_s, clock)
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
        score = f"return {np.mean(self.returns):.1f} ({len(self.returns)} games)" if self.returns else "no game yet"
        hours = self._config.budget.max_hours
        limit = "" if hours is None else f", limit in {duration(3600 * (hours - self._process_hours()))}"
        ram = f"RAM {rss_mib / 1024:.2f}/{self._limit_mib / 1024:.1f} GiB"
        return f"{self.pace.speed:,.0f} steps/s · {score} · {ram} · ε {epsilon:.3f} · {self.pace.text_to_end()}{limit}"

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


class Pace:
    """Where the time goes: the phase, the speed, the time to the end."""

    def __init__(self, chosen: Config, start_step: int, learning_steps_per_s: float | None, clock: Callable[[], float]):
        self._starts, self._max_steps = chosen.learner.learning_starts_steps, chosen.budget.max_steps
        self._guess, self._clock = learning_steps_per_s, clock
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
        filling = min(left, max(0, self._starts - self.step)) if self.phase == "fill" else 0
        later = self._guess if filling and self._guess else speed
        others = (self._since - self._began) / self.active_s if self.active_s > 60 else 1.0
        return (filling / speed + (left - filling) / later) * others

    def text_to_end(self) -> str:
        """The time to the end in words."""
        left = self.seconds_to_end()
        if left is None:
            return "time to the end unknown"
        return f"end in {'more than ' if self.phase == 'fill' and self._guess is None else ''}{duration(left)}"


def duration(seconds: float) -> str:
    """A duration as people say it."""
    minutes = round(max(0.0, seconds) / 60)
    if minutes < 2:
        return f"{max(0.0, seconds):.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


COLOURS = {"fill": "yellow", "learn": "green", "evaluate": "cyan", "save": "blue"}


class Console:
    """A progress bar on a terminal, short lines elsewhere; a console that has gone away is no reason to stop."""

    def __init__(self, stream: TextIO, max_steps: int, start_step: int):
        self._stream, self._bar = stream, None
        if stream.isatty():
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no thread of its own
            shape = "{desc}{percentage:5.1f}% |{bar:16}| {n_fmt}/{total_fmt} {unit}"
            options: dict[str, Any] = {"dynamic_ncols": True, "unit_scale": True, "bar_format": shape}
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
                self._bar.set_description_str(f"{phase:8}", refresh=False)
                self._bar.refresh()

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self._bar is not None:
            with suppress(OSError, ValueError):
                self._bar.close()


LAYOUT_TAG = "custom_scalars__config__"
LAYOUT = {
    "Learning": ("learn/loss", "learn/q_mean", "learn/td_error_abs", "learn/grad_norm", "policy/epsilon"),
    "Returns": ("eval/return_mean", "episode/return", "episode/length_steps"),
    "Memory by part": (
        "memory/rss_mib_mean memory/rss_mib_min memory/rss_mib_max",
        "memory/replay_mib memory/model_mib memory/children_mib memory/unaccounted_mib",
        "memory/cuda_mib",
        "memory/limit_mib",
    ),
    "Speed": ("speed/steps_per_s", "speed/updates_per_s"),
}
"""Groups of charts; a chart is the tags that it draws together."""


class Board:
    """TensorBoard's event file of this process: written at once, by no thread, and sorted after the earlier ones."""

    def __init__(self, folder: Path, start_step: int):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self._event, self._summary = Event, summary
        self._last = cut_events(folder, start_step)
        self._text_step = start_step + 1
        # Readers go by the seconds in the name: another node's clock, or a resume within one, must not mix the order.
        seconds = [int(path.name.split(".")[3]) for path in folder.glob(EVENTS)]
        second = max([int(time.time()), *(other + 1 for other in seconds)])
        name = EVENTS.replace("*", f"{second:010d}.{platform.node()}.{os.getpid()}")
        self._file: Any = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._write(Event(file_version="brain.Event:2"))
        if start_step:  # for a dashboard that is open and has seen what was cut
            self._write(Event(step=start_step + 1, session_log=SessionLog(status=SessionLog.START)))
        if LAYOUT_TAG not in self._last:
            charts = {group: {c.split()[0]: ["Multiline", c.split()] for c in tags} for group, tags in LAYOUT.items()}
            self._write(Event(summary=summary.custom_scalars(charts)))

    def scalars(self, step: int, values: dict[str, float]) -> str | None:
        """Adds points; returns a line for the user if the disk refuses, after which nothing is written."""
        new = {tag: float(value) for tag, value in values.items() if step > self._last.get(tag, -1)}
        self._last.update(dict.fromkeys(new, step))
        event = self._event(step=step)
        for tag, value in new.items():
            event.summary.value.add(tag=tag, simple_value=value)
        return self._write(event) if new else None

    def text(self, tag: str, markdown: str) -> str | None:
        """Adds a text."""
        return self._write(self._event(step=self._text_step, summary=self._summary.text(tag, markdown)))

    def sync(self) -> None:
        """Sees the file onto the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file; what comes later is dropped."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _write(self, event: Any) -> str | None:
        if self._file is None:
            return None
        event.wall_time = time.time()
        try:
            self._records.write(event.SerializeToString())
            self._file.flush()
        except OSError as error:
            self.close()
            return f"the dashboard's file: {error.strerror}; the dashboard ends here, training goes on"
        return None


def cut_events(folder: Path, step: int) -> dict[str, int]:
    """Cuts every event file at its first event beyond `step`, or at a torn one; returns each tag's last step.

    A record is its length (8 bytes), a checksum (4), the event, a checksum (4); within a process steps rise.
    """
    from tensorboard.compat.proto.event_pb2 import Event

    last: dict[str, int] = {}
    for path in sorted(folder.glob(EVENTS)):
        end = 0
        with path.open("rb") as file:
            while len(head := file.read(12)) == 12:
                size = struct.unpack("<Q", head[:8])[0]
                data = file.read(size + 4) if end + size + 16 <= path.stat().st_size else b""
                if len(data) < size + 4:
                    break
                event = Event.FromString(data[:size])
                if event.step > step:
                    break
                last.update({value.tag: max(event.step, last.get(value.tag, 0)) for value in event.summary.value})
                end = file.tell()
        if end < path.stat().st_size:
            os.truncate(path, end)
    return last
