"""The replay beside other threads, slow and full disks, and files that lie about themselves.

Nothing here depends on how fast a thread is: what is asserted holds at every moment, or after a wait.
"""

import struct
import threading
import time
import zlib

import numpy as np
import pytest

from dqn.config import ReplayConfig
from dqn.replay import Replay
from dqn.replay import segment as segments

SHAPE = (32, 32)
LANES, ROWS = 2, 64
"""Segments of 64 rows: 128 KiB raw."""


def make(folder=None, seed=0, **config):
    config = {"capacity": 2_000, "segment_slots": LANES * ROWS, **config}
    return Replay(
        ReplayConfig(**config),
        num_envs=LANES,
        frame_shape=SHAPE,
        stack_size=4,
        n_steps=1,
        gamma=0.9,
        rng=np.random.default_rng(seed),
        folder=folder,
    )


def budget(segments_kept, **config):
    """A budget in MiB that holds so many raw segments beside what it cannot do without."""
    replay = make(**config)
    replay.close()
    return (replay._need.fixed + replay._need.table + segments_kept * replay.segment_slots * 1024) / 2**20


def fill(replay, rows, seed=0, after=lambda: None):
    """Appends rows of noise whose first four bytes are the checksum of the others."""
    rng, none = np.random.default_rng(seed), np.zeros(LANES, bool)
    for row in range(rows):
        frame = rng.integers(0, 256, (LANES, *SHAPE), dtype=np.uint8)
        for picture in frame.reshape(LANES, -1):
            picture[:4] = np.frombuffer(np.uint32(zlib.crc32(picture[4:])).tobytes(), np.uint8)
        replay.append(frame, none | (row == 0), np.zeros(LANES, int), np.zeros(LANES), none, none)
        after()


def num_torn(window):
    """Pictures that are neither black nor whole."""
    stored = window.reshape(-1, SHAPE[0] * SHAPE[1])
    return sum(
        picture.any() and np.frombuffer(picture[:4].tobytes(), np.uint32)[0] != zlib.crc32(picture[4:])
        for picture in stored
    )


@pytest.mark.parametrize("spill", [False, True])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_drawn_batch_is_the_same_whenever_it_is_gathered(tmp_path, codec, spill):
    """Open, sealed, in a file, evicted, its file not needed any more: a draw holds on to what it will read."""
    config = {"codec": codec}
    if spill:
        config |= {"ram_budget_mib": budget(1, **config), "spill_dir": "x"}
    replay = make(tmp_path if spill else None, **config)
    fill(replay, 150)
    draws = [replay.draw(16) for _ in range(8)]
    at_once = [replay.gather(draw, np.empty((16, 5, *SHAPE), np.uint8)).window for draw in draws]
    for turn in range(12):
        fill(replay, 150, seed=turn)
        replay.wait()
        for draw, window in zip(draws, at_once):
            out = np.full_like(window, 7)
            assert np.array_equal(replay.gather(draw, out).window, window)
        replay.collect([])
    replay.close()


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("threads", [0, 3])
def test_several_batches_at_once_are_the_batches_one_by_one(threads, prioritized):
    """Whoever copies them; all hold until the next call, whatever is appended meanwhile."""
    one, many = (make(sampler_threads=n, prioritized=prioritized) for n in (0, threads))
    for replay in (one, many):
        fill(replay, 150)
    for turn in range(5):
        windows = [one.sample(8, 0.5).window.copy() for _ in range(3)]
        batches = list(many.samples(3, 8, 0.5))
        for replay in (one, many):
            fill(replay, 20, seed=turn)
        assert all(np.array_equal(batch.window, window) for batch, window in zip(batches, windows, strict=True))
        assert not num_torn(np.concatenate(windows)) and len({window.tobytes() for window in windows}) == 3
    one.close()
    many.close()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_threads_that_gather_while_the_loop_appends_tear_nothing(tmp_path, codec):
    config = {"codec": codec}
    replay = make(tmp_path, ram_budget_mib=budget(2, **config), spill_dir="x", **config)
    fill(replay, 100)
    draws, torn, stop = [replay.draw(8)], [], threading.Event()

    def prefetch():
        out = np.empty((8, 5, *SHAPE), np.uint8)
        while not stop.is_set():
            try:
                torn.append(num_torn(replay.gather(draws[-1], out).window))
            except BaseException as error:
                torn.append(error)
                return

    threads = [threading.Thread(target=prefetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    fill(replay, 1_500, after=lambda: draws.append(replay.draw(8)) or draws.pop(0))
    stop.set()
    for thread in threads:
        thread.join()
    assert torn and not any(torn)
    replay.close()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_slow_disk_makes_the_loop_wait_and_ram_no_larger(tmp_path, monkeypatch, codec):
    write = segments.write_file

    def slow(path, parts):
        time.sleep(0.01)
        return write(path, parts)

    monkeypatch.setattr(segments, "write_file", slow)
    limit = budget(2, codec=codec)
    replay = make(tmp_path, codec=codec, ram_budget_mib=limit, spill_dir="x")

    def check():
        held = [part for part in list(replay.sealed.values()) if part.in_memory]
        raw = {id(part._raw) for part in held if part._raw is not None} | {id(part) for part in replay._buffers}
        assert len(raw) * replay.segment_slots * 1024 <= limit * 2**20
        assert replay.memory_bytes()["replay"] <= limit * 2**20

    fill(replay, 1_200, after=check)
    replay.wait()
    assert replay.num_slots >= 2_000
    assert len([note for note in replay.notes() if "the loop waits" in note]) <= 1
    replay.close()


def test_files_of_evicted_segments_go_though_no_checkpoint_is_ever_made(tmp_path):
    replay = make(tmp_path, codec="raw", ram_budget_mib=budget(1, codec="raw"), spill_dir="x")
    fill(replay, 6_000)
    replay.wait()
    live = {part.name for part in replay.sealed.values()}
    assert len({path.name for path in tmp_path.iterdir()} - live) <= 2 and len(live) > 10
    replay.close()


def test_files_that_a_checkpoint_names_stay_until_it_goes(tmp_path):
    replay = make(tmp_path, codec="raw", ram_budget_mib=budget(1, codec="raw"), spill_dir="x")
    fill(replay, 1_000)
    manifest = replay.snapshot().write(tmp_path)
    fill(replay, 3_000)
    replay.wait()
    named = {entry["file"] for entry in [*manifest["segments"], manifest["open"]]}
    replay.collect([manifest])
    assert named <= {path.name for path in tmp_path.iterdir()}
    again = make(tmp_path, codec="raw")
    assert again.load(manifest, tmp_path) == [] and num_torn(again.sample(64).window) == 0
    replay.collect([])
    assert {path.name for path in tmp_path.iterdir()} <= {part.name for part in replay.sealed.values()}
    for part in (replay, again):
        part.close()


def test_a_disk_that_is_full_for_a_while_costs_the_oldest_and_is_tried_again(tmp_path, monkeypatch):
    write, full = segments.write_file, threading.Event()

    def may_fail(path, parts):
        if full.is_set():
            raise OSError(28, "No space left on device")
        return write(path, parts)

    monkeypatch.setattr(segments, "write_file", may_fail)
    limit = budget(4) * 2**20
    replay = make(tmp_path, ram_budget_mib=limit / 2**20, spill_dir="x")
    fill(replay, 700)
    full.set()
    most = []
    fill(replay, 500, seed=1, after=lambda: most.append(replay.memory_bytes()["replay"]))
    replay.wait()
    one = replay.segment_slots * 1024 + segments.DICTIONARY_MEMORY + 4_096
    assert max(most) <= limit + one  # until the next row is appended
    newest = replay.open_number - 1
    assert {newest, newest - 1, newest - 2} <= set(replay.sealed) and replay.num_slots < 2_000
    full.clear()
    fill(replay, 1_500, seed=2)
    replay.wait()
    notes = replay.notes()
    assert [note for note in notes if "No space left on device" in note and str(tmp_path) in note]
    assert [note for note in notes if "works again" in note]
    assert replay.num_slots >= 2_000 and num_torn(replay.sample(64).window) == 0
    assert sorted(replay.sealed) == list(range(min(replay.sealed), replay.open_number))
    replay.close()


def test_a_budget_without_a_spill_folder_drops_by_the_eviction_that_was_chosen():
    for eviction in ("fifo", "random"):
        replay = make(ram_budget_mib=budget(4), eviction=eviction)
        fill(replay, 1_500)
        numbers = list(replay.sealed)
        assert (numbers == list(range(numbers[0], replay.open_number))) == (eviction == "fifo")
        replay.close()


def test_a_thread_that_fails_stops_the_loop_by_name_and_blocks_no_save(tmp_path, monkeypatch):
    def broken(groups, dictionary):
        raise MemoryError("no memory to compress in")

    monkeypatch.setattr(segments, "compress", broken)
    replay = make(tmp_path)
    fill(replay, ROWS)
    snapshot = replay.snapshot()
    with pytest.raises(RuntimeError, match="replay's thread failed") as caught:
        fill(replay, 2 * ROWS)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert len(snapshot.write(tmp_path)["segments"]) == 1
    replay.close()


def test_errors_that_are_no_numbers_leave_the_priorities_alone():
    replay = make(prioritized=True)
    fill(replay, 100)
    index, before = replay.sample(8).index, replay._tree.nodes.copy()
    replay.update_priorities(index, np.array([np.nan, np.inf] * 4))
    assert np.array_equal(replay._tree.nodes, before) and replay.max_priority == 1.0
    replay.close()


HEADER = 128
"""Bytes of a `.npy` header; ours follows: magic, number, rows, lanes, height, width, zstd, dictionary, frame bytes."""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, value) for field in range(1, 9) for value in (0, 3, 2**40, 2**64 - 1)),
        (0, int.from_bytes(b"GARBAGE!", "little")),
    ],
)
def test_a_file_with_a_good_checksum_and_false_sizes_is_a_gap(tmp_path, field, value):
    replay = make(tmp_path)
    fill(replay, 200)
    manifest = replay.snapshot().write(tmp_path)
    replay.close()
    entry = manifest["segments"][1]
    content = bytearray((tmp_path / entry["file"]).read_bytes())
    assert content[HEADER : HEADER + 8] == b"DQNSEG01"
    before = struct.unpack_from("<Q", content, HEADER + 8 * field)[0]
    struct.pack_into("<Q", content, HEADER + 8 * field, value)
    (tmp_path / entry["file"]).write_bytes(content)
    entry["crc32"] = zlib.crc32(content)
    resumed = make(tmp_path)
    notes = resumed.load(manifest, tmp_path)
    if value == before:
        assert notes == []
    else:
        assert len(notes) == 1 and entry["file"] in notes[0] and "its slots are gone" in notes[0]
        assert resumed.num_slots == (200 - ROWS) * LANES
    assert num_torn(resumed.sample(32).window) == 0
    resumed.close()


def test_a_group_that_would_grow_huge_is_never_decompressed(tmp_path):
    """The sizes that zstd's frames announce are compared with the pictures' before anything is allocated."""
    replay = make(tmp_path)
    fill(replay, 100)
    replay.wait()
    part = replay.sealed[0]
    bomb, _ = segments.compress([np.zeros((1 << 22,), np.uint8)], part.dictionary)
    begin, end = part._offsets[3], part._offsets[4]
    blob = np.concatenate([part._blob[:begin], bomb, part._blob[end:]])
    part._blob, shift = blob, len(bomb) - (end - begin)
    for group in range(4, len(part._offsets)):
        part._offsets[group] += shift
    manifest = replay.snapshot().write(tmp_path)
    replay.close()
    resumed = make(tmp_path)
    notes = resumed.load(manifest, tmp_path)
    assert len(notes) == 1 and "group 3 is not of 8 pictures" in notes[0]
    resumed.close()


def test_a_spilled_replay_opens_a_bounded_number_of_files(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "_MAX_OPEN_FILES", 4)
    replay = make(tmp_path, ram_budget_mib=budget(1), spill_dir="x")
    counts = []

    def look():
        if replay.open_rows == 40:
            assert num_torn(replay.sample(32).window) == 0
            counts.append(len([path for path in segments._open_files if path.parent == tmp_path]))

    fill(replay, 2_500, after=look)
    assert max(counts) <= 4 and counts[-1] > 0
    replay.close()
    assert not [path for path in segments._open_files if path.parent == tmp_path]


@pytest.mark.slow
def test_100k_prefetched_batches_none_torn(tmp_path):
    """Three threads gather what the loop draws while it appends, seals, spills and evicts."""
    replay = make(tmp_path, ram_budget_mib=budget(2), spill_dir="x")
    fill(replay, 100)
    batches, torn, draws = [0, 0, 0], [], [replay.draw(4)]

    def prefetch(which):
        out = np.empty((4, 5, *SHAPE), np.uint8)
        while batches[which] < 33_400 and not torn:
            if num_torn(replay.gather(draws[-1], out).window):
                torn.append(which)
            batches[which] += 1

    threads = [threading.Thread(target=prefetch, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        fill(replay, 50, after=lambda: draws.append(replay.draw(4)) or draws.pop(0))
    assert not torn and sum(batches) >= 100_000
    replay.close()


@pytest.mark.slow
def test_priorities_are_updated_in_a_third_of_a_millisecond_at_a_million():
    """Median of 32 updates at a time in a full tree; on a quiet machine."""
    replay = Replay(
        ReplayConfig(capacity=1_000_000, prioritized=True),
        num_envs=8,
        frame_shape=(2, 2),
        stack_size=4,
        n_steps=1,
        gamma=0.99,
        rng=np.random.default_rng(0),
    )
    row = np.zeros((8, 2, 2), np.uint8), np.zeros(8, bool), np.zeros(8, int), np.zeros(8)
    for _ in range(130_000):
        replay.append(*row, np.zeros(8, bool), np.zeros(8, bool))
    seconds = []
    for _ in range(500):
        batch = replay.sample(32)
        begin = time.perf_counter()
        replay.update_priorities(batch.index, np.abs(batch.reward) + 0.5)
        seconds.append(time.perf_counter() - begin)
    replay.close()
    assert replay.num_slots >= 1_000_000 and np.median(seconds) <= 0.3e-3
