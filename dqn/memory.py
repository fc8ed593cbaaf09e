"""What memory this process may use, and a log of what it does use, at every iteration of the loop.

A shared machine has several limits, and the smallest wins: what is free, the container's cgroup, `ulimit`, the SLURM
job, and the user's own word. Cores are limited by the same places.

`MemoryLog` measures the resident set (RSS) at each iteration (one `pread` of `/proc/self/statm`, 2 µs) and everything
dearer once a window. After the replay is full nothing should grow: a robust slope over the windows' lowest values says
whether something does, and which part. Units: bytes inside, MiB in files and tags.
"""

import contextlib
import ctypes
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from dqn.csvlog import CsvLog

MIB = 1 << 20
GIB = 1 << 30
UNLIMITED = 1 << 60
"""cgroup v1 and `ulimit` say "no limit" by a number near 2**63."""


class Limit(NamedTuple):
    """A limit and where it comes from: bytes for memory, cores for processors."""

    name: str
    value: float


def limits(
    limit_gib: float | None = None,
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    address_space: int | None = None,
) -> list[Limit]:
    """Every memory limit of this process, in bytes, the smallest first.

    Args:
        limit_gib: the user's own limit, which can only lower the machine's.
        root: where `/proc` and `/sys` are.
        environ: the environment, for SLURM's variables.
        address_space: `RLIMIT_AS` in bytes; None asks the system.
    """
    found = [Limit("memory available", _available(root))]
    group_files = (("memory.max", "memory"), ("memory.high", "memory"), ("memory.limit_in_bytes", "memory"))
    for name, controller in group_files:
        found += [Limit(f"cgroup {path}", _number(path)) for path in _group_files(root, controller, name)]
    found.append(Limit("RLIMIT_AS (ulimit -v)", _address_space() if address_space is None else address_space))
    per_node = _integer(environ.get("SLURM_MEM_PER_NODE"))
    per_cpu = _integer(environ.get("SLURM_MEM_PER_CPU"))
    cpus = _integer(environ.get("SLURM_CPUS_ON_NODE")) or _integer(environ.get("SLURM_CPUS_PER_TASK")) or 1
    found.append(Limit("SLURM_MEM_PER_NODE", per_node * MIB))
    found.append(Limit("SLURM_MEM_PER_CPU", per_cpu * cpus * MIB))
    if limit_gib is not None:
        found.append(Limit("memory.limit_gib", limit_gib * GIB))
    return sorted((limit for limit in found if 0 < limit.value < UNLIMITED), key=lambda limit: limit.value)


def core_limits(*, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> list[Limit]:
    """What bounds the processors of this process, the smallest first; a quota may be a fraction."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = [Limit("affinity", affinity), Limit("SLURM_CPUS_PER_TASK", _integer(environ.get("SLURM_CPUS_PER_TASK")))]
    for path in _group_files(root, "cpu", "cpu.max"):
        quota, _, period = _text(path).partition(" ")
        found.append(Limit(f"cgroup {path}", _integer(quota) / (_integer(period) or 100_000)))
    for path in _group_files(root, "cpu", "cpu.cfs_quota_us"):
        period = _text(path.with_name("cpu.cfs_period_us"))
        found.append(Limit(f"cgroup {path}", _integer(_text(path)) / (_integer(period) or 100_000)))
    return sorted((limit for limit in found if limit.value > 0), key=lambda limit: limit.value)


def cores() -> int:
    """The processors that this process may use, at least 1: not the host's."""
    return max(1, int(core_limits()[0].value))


def _group_files(root: Path, controller: str, name: str) -> list[Path]:
    """The files of that name from this process's cgroup up to the root, of version 1 and 2, those that exist."""
    found: list[Path] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number != "0" and controller not in controllers.split(","):
            continue
        mounts = ["", "unified"] if number == "0" else [controllers, controller]
        for mount in dict.fromkeys(mounts):
            base = root / "sys/fs/cgroup" / mount
            group = base / path.strip("/")
            # Inside a container the path may be the host's, of which only the mount's own top is visible.
            folders = [group, *group.parents]
            found += [folder / name for folder in folders[: folders.index(base) + 1]]
    return [path for path in dict.fromkeys(found) if path.is_file()]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _integer(text: str | None) -> int:
    """A number, or 0 for none: `max`, -1 and garbage limit nothing."""
    return int(text) if text is not None and text.strip().isdigit() else 0


def _number(path: Path) -> int:
    return _integer(_text(path))


def _available(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return _integer(line.split()[1]) * 1024
    return psutil.virtual_memory().available


def _address_space() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return 0 if soft == resource.RLIM_INFINITY else soft


def rss_reader() -> Callable[[], int]:
    """A function that reads this process's RSS in bytes: from /proc on Linux, from psutil elsewhere."""
    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        process = psutil.Process()
        return lambda: process.memory_info().rss
    page = os.sysconf("SC_PAGE_SIZE")
    return lambda: int(os.pread(statm, 96, 0).split()[1]) * page


def return_freed() -> None:
    """Gives freed heap pages back to the system: 1 to 5 ms, for threads whose work has left many holes behind.

    Without it glibc keeps what a checkpoint or the training of a dictionary needed for a moment: 100 MiB after a while.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def children_bytes() -> int:
    """RSS of this process's descendants, 1.5 ms."""
    total = 0
    for child in psutil.Process().children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.Error:  # it ended meanwhile
            continue
    return total


def cuda_peak_bytes() -> int:
    """The most that PyTorch had allocated on the GPU since the last call; 0 while no GPU is in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return int(peak)


HEADER = (
    "step,wall_s,rss_mib_min,rss_mib_mean,rss_mib_max,children_mib,replay_mib,model_mib,cuda_mib,unaccounted_mib,"
    "limit_mib"
)


class MemoryLog:
    """The memory of a run: `ram_steps.f32` at every iteration, `memory.csv` per window, and a warning when it grows.

    Args:
        folder: the run's folder; its two files are cut back to `start_step`.
        parts: bytes of the known parts, disjoint, by name; `replay` and `model` have columns of their own.
        window_steps: steps per row.
        limit_bytes: the smallest limit.
        budget_bytes: RSS, children included, at which `over_budget` becomes true; None is just under the limit.
        growth_warning_mib: growth per 10,000 steps after the fill that is worth a warning.
        start_step: the step of the checkpoint that the run goes on from, or 0.
        num_envs: steps per iteration: `ram_steps.f32` holds one value per iteration.
        wall_s_before: running time of the processes before this one.
        clock: seconds, for tests.
        rss: bytes, for tests.
        children: bytes, for tests.
    """

    def __init__(
        self,
        folder: Path,
        *,
        parts: Callable[[], dict[str, int]],
        window_steps: int,
        limit_bytes: float,
        budget_bytes: float | None,
        growth_warning_mib: float,
        start_step: int,
        num_envs: int,
        wall_s_before: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        rss: Callable[[], int] | None = None,
        children: Callable[[], int] = children_bytes,
    ):
        self.over_budget = False
        self._parts, self._children, self._clock = parts, children, clock
        self._rss = rss or rss_reader()
        self._window_steps = window_steps
        self._limit = limit_bytes
        self._budget = budget_bytes or 0.98 * limit_bytes
        self._began = clock() - wall_s_before
        self._window_end = start_step + window_steps
        self._values = np.empty(window_steps // num_envs + 2, np.float32)
        self._count, self._flushed = 0, 0
        self._record = start_step // num_envs
        self._csv = CsvLog(folder / "memory.csv", HEADER, start_step)
        self._file = os.open(folder / "ram_steps.f32", os.O_WRONLY | os.O_CREAT, 0o666)
        os.ftruncate(self._file, 4 * self._record)  # also lengthens: an iteration that was not recorded reads 0
        self._warnings: list[str] = []
        # Steady leaks show within 20,000 steps; those of a checkpoint or an evaluation only over a million.
        self._detectors = [GrowthDetector(growth_warning_mib, 1_000), GrowthDetector(growth_warning_mib, 50_000)]
        self._warned = False
        self._baseline, self._parts_then = self._rss(), parts()
        self._children_bytes = children()
        self._scalars: dict[str, float] = {}

    def record(self, step: int, full: bool) -> bool:
        """Measures once; call at every iteration.

        Args:
            step: steps done, this iteration's included.
            full: whether the replay is full, so that nothing should grow any more.

        Returns:
            Whether this closed a window, so that `scalars` is new.
        """
        rss = self._rss()
        self._values[self._count] = rss / MIB
        self._count += 1
        if rss + self._children_bytes > self._budget:
            self.over_budget = True
        if step < self._window_end and self._count < len(self._values):
            return False
        self._close_window(step, full)
        return True

    def scalars(self) -> dict[str, float]:
        """The last window's row as TensorBoard tags."""
        return self._scalars

    def warnings(self) -> list[str]:
        """One-line warnings that are new since the last call."""
        new, self._warnings = self._warnings, []
        return new

    @property
    def rss_mib(self) -> float:
        """RSS at the last iteration, with the children's of the last window."""
        return float(self._values[max(0, self._count - 1)]) + self._children_bytes / MIB

    @property
    def growth_mib_per_10k_steps(self) -> float | None:
        """The slope since the replay was full, over the last 200,000 steps; None before there is enough to say."""
        return self._detectors[0].slope

    def flush(self) -> None:
        """Writes the iterations of the open window: a checkpoint covers them."""
        try:
            values = self._values[self._flushed : self._count]
            os.pwrite(self._file, values.tobytes(), 4 * (self._record + self._flushed))
        except OSError as error:
            self._warnings.append(f"ram_steps.f32: {error.strerror}; some iterations are missing")
        self._flushed = self._count

    def close(self) -> None:
        """Writes what is open and closes the files."""
        self.flush()
        os.close(self._file)
        self._csv.close()

    def _close_window(self, step: int, full: bool) -> None:
        self.flush()
        values, parts = self._values[: self._count], self._parts()
        self._children_bytes = self._children()
        grown = sum(parts.values()) - sum(self._parts_then.values())
        low, mean, high = (float(f(values)) for f in (np.min, np.mean, np.max))
        row = {
            "rss_mib_min": low,
            "rss_mib_mean": mean,
            "rss_mib_max": high,
            "children_mib": self._children_bytes / MIB,
            "replay_mib": parts.get("replay", 0) / MIB,
            "model_mib": parts.get("model", 0) / MIB,
            "cuda_mib": cuda_peak_bytes() / MIB,
            "unaccounted_mib": mean - (self._baseline + grown) / MIB,
            "limit_mib": self._limit / MIB,
        }
        self._scalars = {f"memory/{name}": value for name, value in row.items()}
        times = [step, f"{self._clock() - self._began:.1f}"]
        problem = self._csv.append([[*times, *(f"{value:.2f}" for value in row.values())]])
        self._warnings += [problem] if problem else []
        if full:
            self._look_for_growth(step, low, {name: size / MIB for name, size in parts.items()})
        self._values[0] = values[-1]  # what rss_mib shows until the next record
        self._record += self._count
        self._count = self._flushed = 0
        self._window_end = step + self._window_steps

    def _look_for_growth(self, step: int, low_mib: float, parts_mib: dict[str, float]) -> None:
        found = [detector.add(step, low_mib, parts_mib) for detector in self._detectors]
        new = [warning for warning in found if warning]
        if new and not self._warned:
            self._warned = True
            self._warnings.append(new[0])


class GrowthDetector:
    """Tells a leak from noise, by the lowest RSS of each `point_steps` or more.

    An allocator keeps what a first checkpoint or evaluation needed: a stair, not a leak, and the largest is left out.
    A start warms up: steep, then flat. A thread that compresses comes and goes: spikes, which a window's lowest value
    leaves out. So growth must be steep enough, large enough, stand out of the scatter around its line, show in nearly
    each eighth of the time seen, and not slow down.
    """

    FEWEST_POINTS = 16
    MOST_POINTS = 200
    SMALLEST_GROWTH_MIB = 10.0

    def __init__(self, threshold_mib: float, point_steps: int):
        self.slope: float | None = None
        """MiB per 10,000 steps; None before there is enough to say."""
        self._threshold, self._point_steps = threshold_mib, point_steps
        self._points: deque[tuple[float, float, dict[str, float]]] = deque(maxlen=self.MOST_POINTS)
        self._low, self._point_end = np.inf, 0

    def add(self, step: int, rss_mib: float, parts_mib: dict[str, float]) -> str | None:
        """Takes a window's lowest RSS and its parts; returns a line that names the likely part if something leaks."""
        self._point_end = self._point_end or step
        self._low = min(self._low, rss_mib)
        if step < self._point_end:
            return None
        self._points.append((step / 10_000, self._low, parts_mib))
        self._low, self._point_end = np.inf, step + self._point_steps
        if len(self._points) < self.FEWEST_POINTS:
            return None
        times, values = np.array([point[0] for point in self._points]), np.array([point[1] for point in self._points])
        values = without_largest_stair(values)
        self.slope = theil_sen(times, values)
        if not self._is_leak(times, values, self.slope):
            return None
        return f"memory grows by {self.slope:.1f} MiB per 10,000 steps since the replay is full: {self._part(times)}"

    def _is_leak(self, times: np.ndarray, values: np.ndarray, slope: float) -> bool:
        growth = slope * (times[-1] - times[0])
        residuals = values - slope * times
        scatter = 1.4826 * float(np.median(np.abs(residuals - np.median(residuals))))
        if slope <= self._threshold or growth < max(self.SMALLEST_GROWTH_MIB, 4 * scatter):
            return False
        eighths = np.array([np.median(part) for part in np.array_split(values, 8)])
        rising = int(np.sum(np.diff(eighths) > 0.4 * growth / 8))
        earlier, later = eighths[3:5].mean() - eighths[:2].mean(), eighths[-2:].mean() - eighths[3:5].mean()
        return rising >= 6 and later > 0.6 * earlier

    def _part(self, times: np.ndarray) -> str:
        slopes = {}
        for name in self._points[-1][2]:
            slopes[name] = theil_sen(times, np.array([point[2].get(name, 0.0) for point in self._points]))
        name = max(slopes, key=lambda key: slopes[key], default="")
        if name and slopes[name] > 0.5 * (self.slope or 0.0):
            return f"{name} grows by {slopes[name]:.1f}"
        return "unaccounted growth: not in any known part"


def without_largest_stair(values: np.ndarray) -> np.ndarray:
    """A series whose steepest rise between neighbours is made an ordinary one; lone spikes go first."""
    smooth = np.median([values[:-2], values[1:-1], values[2:]], axis=0)
    rises = np.diff(smooth)
    rises[np.argmax(rises)] = np.median(rises)
    levels = smooth[0] + np.concatenate([[0.0], np.cumsum(rises)])
    return np.concatenate([levels[:1], levels, levels[-1:]])


def theil_sen(x: np.ndarray, y: np.ndarray) -> float:
    """The median slope over all pairs of points: a third of them may be wild."""
    later, earlier = np.triu_indices(len(x), 1)[::-1]
    return float(np.median((y[later] - y[earlier]) / (x[later] - x[earlier])))
