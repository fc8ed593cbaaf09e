"""The replay memory: a log of segments, R rows of N lanes each.

    evicted |  sealed, in a file  |  sealed, in memory  | being sealed |  open  |
                                                           raw buffer    raw buffer   <- append

Rows are appended to the open segment. A full one is sealed (compressed, losslessly) by a thread, and never changes
again. Capacity drops whole segments; so does a RAM budget, or it moves them to files. What slot t of a lane holds:

    frame_t, first_t   the newest picture of the state that acting saw at t; whether it begins a game
    action_t           chosen there
    reward_t, terminal_t, truncated_t    what that action brought

    t           5        6        7        8                 9
    frame       f5       f6       f7 last  f0 of a new game  f1
    action      a5       a6       ignored  a0                a1
    terminal    no       yes      -        no                no
    source      yes      yes      never    yes               yes

What `samples` returns depends on the rows appended and on the generators alone: indices are drawn where it is called,
and how far sealing, spilling or copying ahead is makes no difference to what is read.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dqn.config import ReplayConfig, UsageError
from dqn.memory import cores, return_freed
from dqn.replay import segment as segments
from dqn.replay.priorities import SumTree
from dqn.replay.segment import GROUP_ROWS, Dictionary, Metadata, Segment
from dqn.replay.sources import Sources, find_sources

FIRST, TERMINAL, TRUNCATED = 1, 2, 4
MAX_SEGMENT_SLOTS = 8_192
SLOT_BYTES = 6
"""Metadata of a slot: action, reward, flags."""
PRIORITY_FLOOR = 1e-6
MOST_DRAWS = 1_000


class Transitions(NamedTuple):
    """A batch of B transitions; the arrays are used again by the next sample.

    Attributes:
        window: u8[B, S + n, H, W]; the state is `window[:, :S]`, the next one `window[b, k:k + S]`.
        action: i64[B].
        reward: f32[B], the k rewards summed with their discounts.
        bootstrap_steps: i64[B], k ≤ n.
        discount: f32[B], γ^k, or 0 after a terminal.
        weight: f32[B], importance weights; None without priorities.
        index: i64[B], where to `update_priorities`; None without priorities.
    """

    window: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    bootstrap_steps: np.ndarray
    discount: np.ndarray
    weight: np.ndarray | None
    index: np.ndarray | None  # type: ignore[assignment]  # hides tuple.index


class Draw(NamedTuple):
    """A batch but for its frames: what `gather` copies, in any thread, whatever is appended or evicted meanwhile.

    Attributes:
        values: the fields of `Transitions` after `window`.
        shown: bool[B, S + n]; the other frames are black.
        runs: frames that lie together: batch row, columns from and to, segment, its row and lane.
    """

    values: tuple[Any, ...]
    shown: np.ndarray
    runs: list[tuple[int, int, int, Segment, int, int]]


class Windows(NamedTuple):
    """The slots around K drawn ones: place (−1 where there is none) and row, [K, S + n], and what the rule says."""

    places: np.ndarray
    rows: np.ndarray
    sources: Sources


def segment_rows(config: ReplayConfig, num_envs: int, window: int, frame_bytes: int) -> int:
    """Rows of a segment: a multiple of the group, of the capacity where that is near, and small beside a budget."""
    slots = config.segment_slots or min(MAX_SEGMENT_SLOTS, config.capacity // 8)
    if config.ram_budget_mib is not None and not config.segment_slots:  # three raw ones may take half of it
        slots = min(slots, int(config.ram_budget_mib * 2**20 / 6 / frame_bytes))
    least = -(-window // GROUP_ROWS) * GROUP_ROWS
    rows = max(least, slots // num_envs // GROUP_ROWS * GROUP_ROWS)
    for fewer in range(rows, max(least, rows // 2) - 1, -GROUP_ROWS):
        if not config.segment_slots and config.capacity % (fewer * num_envs) == 0:
            return fewer
    return rows


class Need(NamedTuple):
    """What a replay takes, in bytes, for `slots` slots: see `fixed_bytes` and `Replay.memory_bytes`."""

    slots: int
    segment_slots: int
    fixed: int
    table: int


def needs(config: ReplayConfig, num_envs: int, window: int, frame_bytes: int) -> Need:
    """The arithmetic of a replay's RAM, before there is one.

    `fixed` is the metadata, the priorities, two raw buffers and room for a third; `table` the dictionaries and the
    offsets of the groups.
    """
    segment = segment_rows(config, num_envs, window, frame_bytes) * num_envs
    places = -(-config.capacity // segment) + 1
    per_slot = SLOT_BYTES + (16 if config.prioritized else 0)
    dictionary = segments.DICTIONARY_MEMORY if config.codec == "zstd" else 0
    groups = segment // GROUP_ROWS if config.codec == "zstd" else 0
    making = dictionary + groups * segments.GROUP_BYTES  # noise grows a little when it is compressed
    fixed = 3 * segment * frame_bytes + making + places * segment * per_slot
    table = places * (8 * groups + dictionary // segments.DICTIONARY_SEGMENTS)
    return Need(min(config.capacity + segment, places * segment), segment, fixed, table)


class Replay:
    """The replay memory of N lanes.

    Args:
        config: capacity, codec, budget, eviction, priorities.
        num_envs: N.
        frame_shape: (H, W).
        stack_size: S, pictures in a state.
        n_steps: n, rewards summed.
        gamma: discount per step.
        rng: draws the samples, and which segment a random eviction drops.
        folder: where segment files lie; None: nothing spills.
    """

    def __init__(
        self,
        config: ReplayConfig,
        *,
        num_envs: int,
        frame_shape: tuple[int, int],
        stack_size: int,
        n_steps: int,
        gamma: float,
        rng: np.random.Generator,
        folder: Path | None = None,
    ):
        self.config, self.folder = config, folder
        self.stack_size, self.n_steps, self.gamma = stack_size, n_steps, gamma
        self.rng = rng
        self._need = needs(config, num_envs, stack_size + n_steps, frame_shape[0] * frame_shape[1])
        self.rows = self._need.segment_slots // num_envs
        self.shape = (self.rows, num_envs, *frame_shape)
        self.num_envs, self.segment_slots = num_envs, self.rows * num_envs
        self._places = -(-config.capacity // self.segment_slots) + 1
        self._check_budget()
        metadata = (self._places, self.rows, num_envs)
        self._action, self._flags = (np.zeros(metadata, np.uint8) for _ in range(2))
        self._reward = np.zeros(metadata, np.float32)
        self._number, self._before, self._after = (np.full(self._places, -1) for _ in range(3))
        self._num_leaves = self._places * self.segment_slots
        self._tree = SumTree(self._num_leaves) if config.prioritized else None
        self.max_priority = 1.0
        self.sealed: dict[int, Segment] = {}
        """Complete segments by number, the oldest first; those being sealed too."""
        self._free = list(range(1, self._places))
        self._at: list[Segment | None] = [None] * self._places
        self._gone: dict[str, tuple[weakref.ref[Segment], bool]] = {}
        self._evicted, self._shrunk, self._waited, self._disk_fails = 0, False, False, False
        self._buffers: list[np.ndarray] = []
        self._frames = self._next_buffer()
        self._begin(0, 0)
        self._order = np.array([0])
        self._trained: deque[tuple[int, Dictionary]] = deque(maxlen=3)
        """The newest dictionaries, each with the segment that it was trained on; a save may still need an older one."""
        self._notes: list[str] = []
        self._failure: BaseException | None = None
        self._tasks: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._done = threading.Event()
        """Whether the thread has done all that the last closing asked for."""
        self._done.set()
        self._thread = threading.Thread(target=self._work, name="replay", daemon=True)
        self._thread.start()
        self._columns = np.arange(1 - stack_size, n_steps + 1)
        self._powers = gamma ** np.arange(n_steps + 1)
        self._batches: list[np.ndarray] = []
        threads = min(4, cores() // 4) if config.sampler_threads is None else config.sampler_threads
        self._samplers = ThreadPoolExecutor(threads, "sampler") if threads else None

    # -- writing ------------------------------------------------------------------------------------------------------

    def append(
        self,
        frame: np.ndarray,
        first: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        terminal: np.ndarray,
        truncated: np.ndarray,
    ) -> None:
        """Appends a row: frame u8[N, H, W], the others [N].

        Raises:
            ValueError: the frames are not `uint8` of the right shape.
        """
        if frame.dtype != np.uint8 or frame.shape != self.shape[1:]:
            raise ValueError(
                f"frame is {frame.dtype}{list(frame.shape)}; the replay stores uint8{list(self.shape[1:])} pictures of"
                " 0 to 255 as the emulator gives them"
            )
        place, row = self.place, self.open_rows
        self._frames[row] = frame
        self._action[place, row], self._reward[place, row] = action, reward
        self._flags[place, row] = first * FIRST + terminal * TERMINAL + truncated * TRUNCATED
        self.open_rows += 1
        if self._tree is not None:
            self._enter_new_sources()
        if self.open_rows == self.rows:
            self._close_segment()
        while self.num_slots - self.segment_slots >= self.config.capacity:
            self._evict(self._choose_victim())
        if self._disk_fails:
            self._keep_budget()

    def _begin(self, number: int, place: int) -> None:
        """Opens a segment on the raw buffer."""
        self.open_number, self.place, self.open_rows = number, place, 0
        self._number[place], self._before[place], self._after[place] = number, -1, -1
        self._flags[place] = 0
        self._at[place] = Segment(number, place, self.shape, self._frames)

    def _close_segment(self) -> None:
        closed = self._at[self.place]
        assert closed is not None
        self._wait_for_thread()
        self._make_room()
        self.sealed[closed.number] = closed
        if self.config.codec == "raw":
            closed.seal(None)
        else:
            self._tasks.put(partial(self._seal, closed))
        self._remove_files()
        self._done = threading.Event()
        self._tasks.put(self._done.set)
        while len(self._free) == 0:
            self._evict(self._choose_victim())
        self._frames = self._next_buffer()
        self._begin(closed.number + 1, self._free.pop(0))
        if self._at[closed.place] is closed:  # a random eviction may have dropped it at once
            self._before[self.place], self._after[closed.place] = closed.place, self.place
        self._order = np.array([*(kept.place for kept in self.sealed.values()), self.place])

    def _wait_for_thread(self) -> None:
        """One segment at most is on its way: RAM stays bounded, and what is decided here knows all sizes."""
        if not self._done.is_set() and not self._waited:
            self._waited = True
            self._notes.append(
                f"the loop waits for replay segment {self.open_number - 1} to be compressed or written; this is said"
                " once: it lasts as long as the processor or the disk is behind"
            )
        self._done.wait()
        self._check_thread()

    def _next_buffer(self) -> np.ndarray:
        """The raw buffer to go on in: the other one, which nothing reads any more.

        A new one is filled, so that its pages are there at once and RSS does not climb with every row.
        """
        if len(self._buffers) == 2:
            return self._buffers[1] if self._frames is self._buffers[0] else self._buffers[0]
        new = np.full(self.shape, 0, np.uint8)
        if self.config.codec == "zstd":  # raw segments keep theirs
            self._buffers.append(new)
        return new

    def _seal(self, closed: Segment) -> None:
        """In the thread: compresses; every eighth segment trains a dictionary for itself and those after it."""
        try:
            if not self._trained or closed.number % segments.DICTIONARY_SEGMENTS == 0:
                assert closed._raw is not None
                self._trained.append((closed.number, segments.train(closed._raw)))
            closed.seal(self._trained[-1][1])
        finally:
            closed.sealed.set()  # a save that waits for it ends, whatever happened
            return_freed()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException as error:
                self._failure = error

    def _check_thread(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the replay's thread failed") from self._failure

    # -- eviction and the RAM budget ----------------------------------------------------------------------------------

    def _choose_victim(self) -> int:
        numbers = list(self.sealed)
        if self.config.eviction == "random":
            return numbers[self.rng.integers(len(numbers))]
        return numbers[0]

    def _evict(self, number: int) -> None:
        victim = self.sealed.pop(number)
        place = victim.place
        before, after = self._before[place], self._after[place]
        for neighbour, link in ((before, self._after), (after, self._before)):
            if neighbour >= 0:
                link[neighbour] = -1
        self._number[place] = self._before[place] = self._after[place] = -1
        self._order = self._order[self._order != place]
        self._free.append(place)
        self._at[place] = None
        self._evicted += 1
        if victim.file is not None or victim.leaving:
            self._gone[victim.name] = weakref.ref(victim), victim.saved
        if self._tree is not None:
            self._forget(place, int(before), int(after))

    def _remove_files(self) -> None:
        """Deletes evicted files that no checkpoint names, once no drawn batch reads them."""
        for name, (segment, saved) in list(self._gone.items()):
            if segment() is None:
                del self._gone[name]
                if not saved and self.folder is not None:
                    self._tasks.put(partial(segments.remove_file, self.folder / name))

    def _check_budget(self) -> None:
        budget = self.config.ram_budget_mib
        if budget is None:
            return
        floor = self._need.fixed / 2**20
        if budget < floor:
            raise UsageError(
                f"replay.ram_budget_mib is {budget:g}; three raw segments of {self.segment_slots} slots with the"
                f" metadata take {floor:.3g}: raise it, or take fewer replay.segment_slots"
            )

    def _make_room(self) -> None:
        """When a segment closes: spills or drops the oldest until the others fit the budget beside it.

        All before it are sealed by now, so their sizes are known whatever the thread does meanwhile; it counts as raw.
        The thread spills before it seals, and the loop waits for both, so the budget holds at each moment.
        """
        if self.config.ram_budget_mib is None:
            return
        room = int(self.config.ram_budget_mib * 2**20) - self._need.fixed
        while self.sealed:
            kept = [part for part in self.sealed.values() if part.in_memory and not part.leaving]
            if sum(part.memory_bytes for part in kept) + sum(self._tables().values()) <= room:
                return
            if self.config.spill_dir is None or not kept:  # files have tables in RAM too
                self._shrink(self._choose_victim())
                continue
            kept[0].leaving = True
            self._tasks.put(partial(self._spill, kept[0], self._metadata(kept[0].place)))
            if self._disk_fails:  # one is tried; `_keep_budget` sees to the rest
                return

    def _keep_budget(self) -> None:
        """While the disk refuses segments: drops the oldest in RAM, with as old ones in files, if it must be."""
        assert self.config.ram_budget_mib is not None
        while self.memory_bytes()["replay"] > self.config.ram_budget_mib * 2**20:
            in_memory = [part.number for part in self.sealed.values() if part.in_memory]
            if not in_memory:
                return
            oldest = next(iter(self.sealed))
            self._shrink(in_memory[0])
            if oldest != in_memory[0]:
                self._shrink(oldest)

    def _shrink(self, number: int) -> None:
        """Evicts for the budget's sake; the first time, a line says so."""
        if not self._shrunk:
            self._shrunk = True
            self._notes.append(
                f"replay.ram_budget_mib {self.config.ram_budget_mib:g} holds {self.num_slots:,} of"
                f" {self.config.capacity:,} slots: segments are dropped"
                + ("" if self.config.spill_dir else "; replay.spill_dir would keep them on disk")
            )
        self._evict(number)

    def _spill(self, part: Segment, metadata: Metadata) -> None:
        """In the thread: moves a segment to its file. What the disk refuses stays in RAM, to be tried again."""
        assert self.folder is not None
        if self.sealed.get(part.number) is not part:
            return
        try:
            part.to_file(self.folder, metadata)
            part.spill(self.folder)
        except OSError as error:
            part.leaving = False
            if not self._disk_fails:
                self._notes.append(
                    f"spilling replay segment {part.number} to {self.folder} failed: {error.strerror}; it is tried"
                    " again, and what replay.ram_budget_mib cannot hold meanwhile is dropped, the oldest first"
                )
            self._disk_fails = True
        else:
            if self._disk_fails:
                self._notes.append(f"spilling to {self.folder} works again")
            self._disk_fails = False

    def _metadata(self, place: int) -> Metadata:
        return Metadata(self._action[place].copy(), self._reward[place].copy(), self._flags[place].copy())

    # -- sampling -----------------------------------------------------------------------------------------------------

    def sample(self, batch_size: int, beta: float = 1.0) -> Transitions:
        """Draws a batch: uniformly, or in proportion to priority with importance weights to the power β.

        Raises:
            ValueError: there is nothing to draw from yet.
        """
        [batch] = self.samples(1, batch_size, beta)
        return batch

    def samples(self, count: int, batch_size: int, beta: float = 1.0) -> Iterable[Transitions]:
        """Draws `count` batches, which hold until the next call.

        All are drawn now, in order. Their frames are copied ahead by the sampler threads; where there are none, they
        are copied now, while the emulators play: on two cores that is faster than between the updates.

        Raises:
            ValueError: there is nothing to draw from yet.
        """
        draws = [self.draw(batch_size, beta) for _ in range(count)]
        shape = (batch_size, len(self._columns), *self.shape[2:])
        if count and (len(self._batches) < count or self._batches[0].shape != shape):
            self._batches = [np.empty(shape, np.uint8) for _ in range(count)]
        if self._samplers is None:
            return [self.gather(draw, out) for draw, out in zip(draws, self._batches, strict=False)]
        return self._samplers.map(self.gather, draws, self._batches)

    def draw(self, batch_size: int, beta: float = 1.0) -> Draw:
        """The part of `sample` that belongs to the loop's thread: which transitions, and all of them but the frames.

        Raises:
            ValueError: there is nothing to draw from yet.
        """
        draw = self._draw_uniform if self._tree is None else self._draw_prioritized
        place, row, lane, windows = draw(batch_size)
        sources = windows.sources
        weight = index = None
        if self._tree is not None:
            leaf = (place * self.rows + row) * self.num_envs + lane
            index = self._number[place] * self._num_leaves + leaf
            weight = self._tree.get(leaf) ** -beta  # (1 / (N·p))^β up to a factor that the maximum takes away
            weight = (weight / weight.max()).astype(np.float32)
        discount = np.where(sources.ends, 0.0, self._powers[sources.bootstrap_steps]).astype(np.float32)
        action = self._action[place, row, lane].astype(np.int64)
        rewards = self._reward_sums(windows, lane)
        values = (action, rewards, sources.bootstrap_steps, discount, weight, index)
        return Draw(values, sources.shown, self._runs(windows, lane))

    def gather(self, draw: Draw, out: np.ndarray) -> Transitions:
        """The part of `sample` that any thread may do: copies the frames to `out`, u8[B, S + n, H, W]."""
        if not draw.shown.all():
            out[~draw.shown] = 0
        for b, begin, end, segment, row, lane in draw.runs:
            segment.read(row, lane, out[b, begin:end])
        return Transitions(out, *draw.values)

    def _reward_sums(self, windows: "Windows", lane: np.ndarray) -> np.ndarray:
        now = self.stack_size - 1
        rewards = self._reward[windows.places[:, now:-1], windows.rows[:, now:-1], lane[:, None]]
        counts = np.arange(self.n_steps) < windows.sources.bootstrap_steps[:, None]
        return (rewards * counts * self._powers[:-1]).sum(axis=1).astype(np.float32)

    def _draw_uniform(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, "Windows"]:
        """Draws slots, and draws those again that are no sources."""
        place, row, lane = (np.empty(count, np.int64) for _ in range(3))
        bad = np.arange(count)
        for _ in range(MOST_DRAWS if self.num_slots else 0):
            at, rest = np.divmod(self.rng.integers(self.num_slots, size=len(bad)), self.segment_slots)
            place[bad] = self._order[at]
            row[bad], lane[bad] = np.divmod(rest, self.num_envs)
            windows = self._windows(place, row, lane)
            bad = np.flatnonzero(~windows.sources.valid)
            if len(bad) == 0:
                return place, row, lane, windows
        raise ValueError(f"too few transitions: hardly any of {self.num_slots} slots is a source yet")

    def _draw_prioritized(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, "Windows"]:
        """Draws one slot in each of `count` equal parts of the sum (Schaul et al. 2016, appendix B.2.1)."""
        assert self._tree is not None
        if self._tree.total <= 0:
            raise ValueError(f"too few transitions: none of {self.num_slots} slots is a source yet")
        leaves = self._tree.find((np.arange(count) + self.rng.random(count)) / count * self._tree.total)
        place, rest = np.divmod(leaves, self.segment_slots)
        row, lane = np.divmod(rest, self.num_envs)
        return place, row, lane, self._windows(place, row, lane)

    def _windows(self, place: np.ndarray, row: np.ndarray, lane: np.ndarray) -> "Windows":
        """The windows of slots, [K], with what the source rule says of them."""
        rows = row[:, None] + self._columns
        places = np.empty_like(rows)
        places[:] = place[:, None]
        outside = np.flatnonzero((rows[:, 0] < 0) | (rows[:, -1] >= self.rows))
        if len(outside):  # few: the windows that two segments share
            some, at = rows[outside], place[outside]
            places[outside] = np.where(some < 0, self._before[at][:, None], places[outside])
            places[outside] = np.where(some >= self.rows, self._after[at][:, None], places[outside])
            rows %= self.rows
        live = (places >= 0) & ((places != self.place) | (rows < self.open_rows))
        flags = np.where(live, self._flags[places, rows, lane[:, None]], 0)
        first, terminal, truncated = ((flags & bit).astype(bool) for bit in (FIRST, TERMINAL, TRUNCATED))
        return Windows(places, rows, find_sources(live, first, terminal, truncated, self.stack_size))

    def _runs(self, windows: "Windows", lane: np.ndarray) -> list[tuple[int, int, int, Segment, int, int]]:
        """Where the frames that are shown lie: a window has one run of rows, or two segments'."""
        shown, places, rows = windows.sources.shown, windows.places, windows.rows
        begins = shown.argmax(axis=1)
        ends = (shown.shape[1] - shown[:, ::-1].argmax(axis=1)).tolist()
        every = np.arange(len(shown))
        first, last = (places[every, column].tolist() for column in (begins, np.array(ends) - 1))
        runs: list[Any] = []
        for b, (begin, end, row, i) in enumerate(
            zip(begins.tolist(), ends, rows[every, begins].tolist(), lane.tolist())
        ):
            middle = min(end, begin + self.rows - row)  # where the segment ends, if the window goes on in the next
            runs.append((b, begin, middle, self._at[first[b]], row, i))
            if middle < end:
                runs.append((b, middle, end, self._at[last[b]], 0, i))
        return runs

    # -- priorities ---------------------------------------------------------------------------------------------------

    def update_priorities(self, index: np.ndarray, td_errors_abs: np.ndarray) -> None:
        """Sets priorities (|δ| + 1e-6)^α; slots that are no sources any more, or no finite error, are left out."""
        assert self._tree is not None
        number, leaf = np.divmod(index, self._num_leaves)
        priority = (td_errors_abs.astype(np.float64) + PRIORITY_FLOOR) ** self.config.priority_alpha
        alive = (self._number[leaf // self.segment_slots] == number) & (self._tree.get(leaf) > 0)
        alive &= np.isfinite(priority)
        self._tree.set(leaf[alive], priority[alive])
        self.max_priority = float(priority[alive].max(initial=self.max_priority))

    def _enter_new_sources(self) -> None:
        """The row just appended is the k-th successor of some slots: they enter at the highest priority so far."""
        assert self._tree is not None
        back = np.repeat(np.arange(1, self.n_steps + 1), self.num_envs)
        lane = np.tile(np.arange(self.num_envs), self.n_steps)
        row = self.open_rows - 1 - back
        place = np.where(row < 0, self._before[self.place], self.place)
        there = place >= 0
        place, row, lane, back = place[there], row[there] % self.rows, lane[there], back[there]
        sources = self._windows(place, row, lane).sources
        new = sources.valid & (sources.bootstrap_steps == back)
        leaves = (place * self.rows + row) * self.num_envs + lane
        self._tree.set(leaves[new], self.max_priority)

    def _forget(self, place: int, before: int, after: int) -> None:
        """Zeroes an evicted segment's priorities, and those of its neighbours' slots that have lost their window."""
        assert self._tree is not None
        whole = np.arange(self.segment_slots)
        self._tree.set(place * self.segment_slots + whole, 0.0)
        border = [(before, np.arange(self.rows - self.n_steps, self.rows)), (after, np.arange(self.stack_size - 1))]
        for neighbour, rows in border:
            if neighbour >= 0 and len(rows):
                row, lane = (part.ravel() for part in np.meshgrid(rows, np.arange(self.num_envs), indexing="ij"))
                leaves = (neighbour * self.rows + row) * self.num_envs + lane
                gone = ~self._windows(np.full(len(row), neighbour), row, lane).sources.valid
                self._tree.set(leaves[gone], 0.0)

    # -- what is there ------------------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Slots in the log."""
        return len(self.sealed) * self.segment_slots + self.open_rows * self.num_envs

    @property
    def num_sources(self) -> int:
        """Slots that can be sampled; counts all of them, so not for each step."""
        slots = np.arange(self.num_slots)
        at, rest = np.divmod(slots, self.segment_slots)
        row, lane = np.divmod(rest, self.num_envs)
        return int(self._windows(self._order[at], row, lane).sources.valid.sum())

    @property
    def is_full(self) -> bool:
        """Whether it has reached its capacity, or its budget."""
        return self._evicted > 0 or self.num_slots >= self.config.capacity

    def memory_bytes(self) -> dict[str, int]:
        """Bytes by part; `replay` is their sum."""
        buffers = sum(buffer.nbytes for buffer in self._buffers)
        found = {
            "frames": sum(part.memory_bytes for part in self.sealed.values()),
            "buffers": buffers if self.config.codec == "zstd" else self._frames.nbytes,
            "metadata": self._action.nbytes + self._flags.nbytes + self._reward.nbytes,
            **self._tables(),
            "priorities": 0 if self._tree is None else self._tree.nodes.nbytes,
        }
        return {**found, "replay": sum(found.values())}

    def _tables(self) -> dict[str, int]:
        """Bytes of what leads to the compressed frames, in files or not."""
        parts = [part for part in self.sealed.values() if part.dictionary is not None]
        known = {id(part.dictionary) for part in parts} - {id(segments.NO_DICTIONARY)}
        offsets = sum(8 * len(part._offsets) for part in parts)
        return {"offsets": offsets, "dictionaries": len(known) * segments.DICTIONARY_MEMORY}

    def notes(self) -> list[str]:
        """Lines for the user that are new since the last call."""
        new, self._notes = self._notes, []
        return new

    def wait(self) -> None:
        """Waits until all that is closed is sealed."""
        done = threading.Event()
        self._tasks.put(done.set)
        done.wait()
        self._check_thread()

    def close(self) -> None:
        """Ends the threads and closes the files."""
        if self._samplers is not None:
            self._samplers.shutdown()
        self._tasks.put(None)
        self._thread.join()
        for part in self.sealed.values():
            if not part.in_memory and self.folder is not None and part.file is not None:
                segments.forget_file(self.folder / part.file)

    # -- saving -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Any:
        """What `saving` writes in another thread: references to what never changes, copies of what does."""
        from dqn.replay.saving import Snapshot

        return Snapshot(self)

    def load(self, manifest: dict[str, Any], folder: Path) -> list[str]:
        """Goes on from a manifest; returns a line for each file that is missing or damaged, whose slots are a gap."""
        from dqn.replay.saving import load

        return load(self, manifest, folder)

    def collect(self, manifests: list[dict[str, Any]]) -> None:
        """Deletes the segment files that no manifest and no live segment names."""
        from dqn.replay.saving import collect

        collect(self, manifests)
