"""The replay against a naive oracle: a list of rows, and the rules of a transition written out slot by slot."""

import threading
import weakref
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dqn.config import ReplayConfig, UsageError
from dqn.preprocessing import FrameStack
from dqn.replay import Replay
from dqn.replay import segment as segments
from dqn.replay.priorities import SumTree
from dqn.replay.sources import find_sources

SHAPE = (6, 5)
GAMMA = 0.9


def make(folder=None, lanes=2, n_steps=1, stack=4, shape=SHAPE, seed=0, **config):
    config = {"capacity": 128, "segment_slots": 32, **config}
    return Replay(
        ReplayConfig(**config),
        num_envs=lanes,
        frame_shape=shape,
        stack_size=stack,
        n_steps=n_steps,
        gamma=GAMMA,
        rng=np.random.default_rng(seed),
        folder=folder,
    )


def tight(lanes=2, n_steps=1, **config):
    """A budget in MiB that holds little more than the smallest."""
    replay = make(lanes=lanes, n_steps=n_steps, **config)
    replay.close()
    return (replay._need.fixed + 700) / 2**20


def index_of(replay, leaves):
    """What `sample` calls the leaves of the tree now."""
    leaves = leaves[leaves < replay._num_leaves]
    return replay._number[leaves // replay.segment_slots] * replay._num_leaves + leaves


class Games:
    """Random games on N lanes, row by row as the loop appends them; every frame is unlike any other."""

    def __init__(self, lanes, seed, mean_length=7, shape=SHAPE, noise=False, stack=4):
        self.rng = np.random.default_rng(seed)
        self.lanes, self.mean, self.shape, self.noise = lanes, mean_length, shape, noise
        self.count = 0
        self.ended = np.ones(lanes, bool)
        self.frames = FrameStack(lanes, stack, shape)
        self.states = []
        self.next = self._frame(), np.ones(lanes, bool)
        self.ended[:] = False

    def _frame(self):
        self.count += 1
        if self.noise:
            return self.rng.integers(0, 256, (self.lanes, *self.shape), dtype=np.uint8)
        frame = np.zeros((self.lanes, *self.shape), np.uint8)
        frame.reshape(self.lanes, -1)[:, :4] = np.frombuffer(np.uint32(self.count).tobytes(), np.uint8)
        frame.reshape(self.lanes, -1)[:, 4] = np.arange(self.lanes)
        return frame

    def row(self):
        frame, first = self.next
        self.states.append(self.frames.push(frame, first).copy())
        ends = ~self.ended & (self.rng.random(self.lanes) < 1 / self.mean)
        truncated = ends & (self.rng.random(self.lanes) < 0.4)
        life = ~self.ended & ~ends & (self.rng.random(self.lanes) < 0.1)
        reward = self.rng.integers(-3, 4, self.lanes).astype(np.float32)
        action = self.rng.integers(0, 18, self.lanes)
        row = (frame, first, action, reward, (ends & ~truncated) | life, truncated)
        self.next = self._frame(), self.ended.copy()
        self.ended = ends
        return row


def oracle(rows, states, live, lane, t, n_steps):
    """The transition of slot t, or None if it is no source, by walking over the list of rows."""
    if not live(t):
        return None
    back = t
    while not rows[back][1][lane] and t - back < 3:
        back -= 1
        if not live(back):
            return None
    reward, discount = 0.0, 1.0
    for k in range(1, n_steps + 1):
        _, _, _, rewards, terminal, truncated = rows[t + k - 1]
        reward += discount * rewards[lane]
        discount *= GAMMA
        if not live(t + k) or rows[t + k][1][lane]:
            return None
        if terminal[lane] or truncated[lane]:
            break
    return {
        "state": states[t][lane],
        "next": states[t + k][lane],
        "action": rows[t][2][lane],
        "reward": np.float32(reward),
        "discount": np.float32(0.0 if terminal[lane] else discount),
        "k": k,
    }


def check_against_oracle(replay, rows, states, live, batches=6):
    """Every sampled transition is the oracle's for the slot that its state names; returns the slots seen."""
    seen = set()
    for _ in range(batches):
        batch = replay.sample(16)
        for b in range(16):
            newest = batch.window[b, 3].reshape(-1)
            t, lane = int(np.frombuffer(newest[:4].tobytes(), np.uint32)[0]) - 1, int(newest[4])
            expected = oracle(rows, states, live, lane, t, replay.n_steps)
            assert expected is not None, (t, lane)
            k = int(batch.bootstrap_steps[b])
            assert k == expected["k"] and batch.action[b] == expected["action"]
            assert np.array_equal(batch.window[b, :4], expected["state"])
            assert np.isclose(batch.reward[b], expected["reward"], atol=1e-5)
            assert np.isclose(batch.discount[b], expected["discount"])
            if expected["discount"]:
                assert np.array_equal(batch.window[b, k : k + 4], expected["next"])
            seen.add((t, lane))
    return seen


def live_rows(replay):
    """Which row numbers the log holds, told from its segments."""
    numbers = {*replay.sealed, replay.open_number}
    end = replay.open_number * replay.rows + replay.open_rows
    return lambda t: 0 <= t < end and t // replay.rows in numbers


ways = st.fixed_dictionaries(
    {
        "codec": st.sampled_from(["raw", "zstd"]),
        "eviction": st.sampled_from(["fifo", "random"]),
        "prioritized": st.booleans(),
        "spill": st.booleans(),
        "lanes": st.sampled_from([1, 2, 3]),
        "n_steps": st.sampled_from([1, 2, 3]),
        "mean_length": st.sampled_from([2, 5, 30]),
        "count": st.integers(20, 150),
        "seed": st.integers(0, 2**20),
    }
)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(ways)
def test_every_sample_is_the_oracles(tmp_path_factory, way):
    """All rules at once, over codecs, evictions, priorities, spilling, lanes and n-step sums, threads running."""
    folder = tmp_path_factory.mktemp("replay") if way["spill"] else None
    config = {name: way[name] for name in ("codec", "eviction", "prioritized")}
    if way["spill"]:
        config |= {"ram_budget_mib": tight(way["lanes"], way["n_steps"], **config), "spill_dir": str(folder)}
    replay = make(folder, way["lanes"], way["n_steps"], seed=way["seed"], **config)
    games, rows = Games(way["lanes"], way["seed"], way["mean_length"]), []
    for number in range(way["count"]):
        rows.append(games.row())
        replay.append(*rows[-1])
        if number % 40 == 39 or number == way["count"] - 1:
            live = live_rows(replay)
            count = sum(
                oracle(rows, games.states, live, lane, t, way["n_steps"]) is not None
                for t in range(len(rows))
                for lane in range(way["lanes"])
            )
            assert replay.num_sources == count
            assert replay.num_slots == sum(live(t) for t in range(len(rows))) * way["lanes"]
            if replay._tree is not None:
                assert np.count_nonzero(replay._tree.nodes[replay._tree._size :]) == count
            if count:
                check_against_oracle(replay, rows, games.states, live, batches=2)
    replay.close()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_every_state_that_acting_saw_comes_back(codec):
    """The headline rule: drawn often enough, all of them are, bit for bit, last states included as next ones."""
    replay, games, rows = make(codec=codec), Games(2, 1), []
    for _ in range(64):
        rows.append(games.row())
        replay.append(*rows[-1])
    seen = check_against_oracle(replay, rows, games.states, live_rows(replay), batches=100)
    assert len(seen) == replay.num_sources
    replay.close()


def test_capacity_holds_between_itself_and_one_segment_more():
    for lanes, capacity, slots in ((1, 100, 16), (2, 128, 32), (3, 1_000, 48), (8, 10_000, 0)):
        replay = make(lanes=lanes, capacity=capacity, segment_slots=slots, shape=(2, 3))
        row = Games(lanes, 0, shape=(2, 3)).row()
        sizes = []
        for _ in range(3 * capacity // lanes):
            replay.append(*row)
            sizes.append(replay.num_slots)
        full = sizes[capacity // lanes :]
        assert min(full) >= capacity - lanes and max(full) <= capacity + replay.segment_slots and replay.is_full
        replay.close()


def test_a_million_slots_is_a_multiple_of_its_segments():
    from dqn.replay.log import segment_rows

    assert 1_000_000 % (8 * segment_rows(ReplayConfig(), 8, 5, 7_056)) == 0


def test_capacity_100_truncated_every_7(tmp_path):
    """Truncated samples keep their discount and their true next frame."""
    replay = make(lanes=1, capacity=100, segment_slots=16)
    zeros = np.zeros(1, bool)
    frames = FrameStack(1, 4, SHAPE)
    states, t, first = [], 0, np.ones(1, bool)
    for step in range(250):
        frame = np.zeros((1, *SHAPE), np.uint8)
        frame[0, 0, 0], frame[0, 0, 1] = step % 256, step // 256
        states.append(frames.push(frame, first).copy())
        ends = t == 6
        replay.append(frame, first, np.zeros(1, int), np.ones(1, np.float32), zeros, np.array([ends]))
        first, t = (np.ones(1, bool), 0) if t == 7 else (zeros, t + 1)
    found = 0
    for _ in range(50):
        batch = replay.sample(16)
        for b in range(16):
            step = int(batch.window[b, 3, 0, 0]) + 256 * int(batch.window[b, 3, 0, 1])
            assert batch.discount[b] == np.float32(GAMMA) and step % 8 != 7
            assert np.array_equal(batch.window[b, 1:], states[step + 1][0])
            found += step % 8 == 6
    assert found > 20
    replay.close()


def test_a_game_of_8_steps_is_8_transitions_and_one_terminal():
    replay = make(lanes=1)
    for t in range(9):
        frame = np.full((1, *SHAPE), t, np.uint8)
        flag = np.zeros(1, bool)
        replay.append(frame, flag | (t == 0), np.zeros(1, int), np.zeros(1), flag | (t == 7), flag)
    assert replay.num_sources == 8
    batch = replay.sample(200)
    assert set(batch.window[:, 3, 0, 0]) == set(range(8))
    assert set(batch.window[batch.discount == 0, 3, 0, 0]) == {7}
    replay.close()


def test_a_cut_is_no_source():
    """New games begin after a resume: what was in flight has no next state."""
    replay = make(lanes=1)
    for t in range(12):
        first = np.array([t in (0, 6)])
        replay.append(
            np.full((1, *SHAPE), t, np.uint8), first, np.zeros(1, int), np.zeros(1), ~first & False, ~first & False
        )
    batch = replay.sample(200)
    assert set(batch.window[:, 3, 0, 0]) == {0, 1, 2, 3, 4, 6, 7, 8, 9, 10}
    assert (batch.window[batch.window[:, 3, 0, 0] == 7][:, :2] == 0).all()
    replay.close()


@pytest.mark.parametrize(
    "frame",
    [
        np.zeros((2, *SHAPE), np.float32),
        np.zeros((2, *SHAPE), np.float64),
        np.zeros((2, *SHAPE, 1), np.uint8),
        np.zeros((1, *SHAPE), np.uint8),
        np.zeros((2, *SHAPE), np.int64),
    ],
)
def test_other_frames_are_refused_by_name(frame):
    replay, row = make(), Games(2, 0).row()
    with pytest.raises(ValueError, match=r"frame is (u?int|float)\d+\["):
        replay.append(frame, *row[1:])
    replay.close()


def test_too_few_transitions_is_a_clear_error():
    for prioritized in (False, True):
        replay, games = make(prioritized=prioritized), Games(2, 0)
        with pytest.raises(ValueError, match="too few transitions"):
            replay.sample(4)
        replay.append(*games.row())
        with pytest.raises(ValueError, match="too few transitions"):
            replay.sample(4)
        replay.close()


def test_what_is_sampled_does_not_depend_on_how_far_the_thread_is(tmp_path):
    """Slow compression and slow disks change nothing but the waiting."""

    def run(slow):
        config = {"ram_budget_mib": tight(), "spill_dir": str(tmp_path), "eviction": "random"}
        replay, games, checksum = make(tmp_path / str(slow), **config), Games(2, 3), 0
        if slow:
            replay._tasks.put(lambda: threading.Event().wait(0.3))
        for number in range(200):
            replay.append(*games.row())
            if not slow:
                replay.wait()
            if number > 20:
                batch = replay.sample(8)
                checksum = zlib.crc32(batch.window.tobytes() + batch.reward.tobytes(), checksum)
        replay.close()
        return checksum

    assert run(False) == run(True)


def test_noise_obeys_the_budget():
    """Frames that do not compress: fewer are kept, and a line says so."""
    replay = make(shape=(32, 32), capacity=4_000, segment_slots=128, ram_budget_mib=1.0)
    games = Games(2, 0, shape=(32, 32), noise=True)
    for _ in range(1_500):
        replay.append(*games.row())
        assert replay.memory_bytes()["replay"] <= 2**20
    replay.wait()
    assert replay.memory_bytes()["replay"] <= 2**20
    assert 128 < replay.num_slots < 1_000 and replay.is_full
    assert [note for note in replay.notes() if "ram_budget_mib" in note and "spill_dir" in note]
    replay.sample(32)
    replay.close()


def test_noise_beyond_the_budget_spills(tmp_path):
    replay = make(tmp_path, shape=(32, 32), capacity=2_000, segment_slots=128, ram_budget_mib=1.5, spill_dir="x")
    games = Games(2, 0, shape=(32, 32), noise=True)
    for _ in range(1_500):
        replay.append(*games.row())
        assert replay.memory_bytes()["replay"] <= 1.5 * 2**20
    assert replay.num_slots >= 2_000 and len(list(tmp_path.glob("segment-*.npy"))) > 10
    replay.sample(64)
    replay.collect([])
    replay.wait()
    assert len(list(tmp_path.glob("segment-*.npy"))) <= len(replay.sealed)
    replay.close()


def test_a_budget_below_the_smallest_is_refused():
    with pytest.raises(UsageError, match=r"ram_budget_mib is 0\.001; three raw segments .* raise it"):
        make(ram_budget_mib=0.001)


def test_a_full_disk_is_named_and_nothing_is_lost_at_once(tmp_path, monkeypatch):
    def full(path, parts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segments, "write_file", full)
    replay = make(tmp_path, shape=(32, 32), capacity=2_000, segment_slots=128, ram_budget_mib=1.0, spill_dir="x")
    games = Games(2, 0, shape=(32, 32), noise=True)
    for _ in range(1_500):
        replay.append(*games.row())
    replay.wait()
    notes = replay.notes()
    assert len([note for note in notes if "No space left" in note]) == 1
    assert replay.memory_bytes()["replay"] <= 2**20 + 2 * 128 * 1024  # two segments wait for another try
    replay.sample(32)
    replay.close()


def test_after_the_fill_sampling_and_appending_add_nothing():
    replay, games = make(shape=(32, 32)), Games(2, 0, shape=(32, 32))
    for _ in range(300):
        replay.append(*games.row())
    replay.wait()
    before = replay.memory_bytes()
    for _ in range(200):
        replay.sample(32)
    assert replay.memory_bytes() == before
    replay.close()


def test_one_lane_takes_what_eight_take():
    sizes = []
    for lanes in (1, 8):
        replay = make(lanes=lanes, capacity=4_096, segment_slots=512, shape=(16, 16))
        row = Games(lanes, 0, shape=(16, 16)).row()
        for _ in range(6_000 // lanes):
            replay.append(*row)
        replay.wait()
        parts = replay.memory_bytes()
        sizes.append(parts["metadata"] + parts["buffers"])
        replay.close()
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("eviction", ["fifo", "random"])
@pytest.mark.parametrize("count", [3, 16, 75, 160, 203])
def test_a_loaded_replay_goes_on_bit_for_bit(tmp_path, codec, prioritized, eviction, count):
    config = {"codec": codec, "prioritized": prioritized, "eviction": eviction, "n_steps": 2}
    whole, games = make(tmp_path / "a", **config), Games(2, 5)
    for _ in range(count):
        whole.append(*games.row())
    if count > 3:
        batch = whole.sample(8)
        if prioritized:
            whole.update_priorities(batch.index, np.arange(8.0))
    manifest = whole.snapshot().write(tmp_path / "files")
    torch.save(manifest, tmp_path / "manifest.pt")
    for path in (tmp_path / "files").iterdir():
        assert np.load(path, allow_pickle=False).dtype == np.uint8
    resumed = make(tmp_path / "files", seed=99, **config)
    assert resumed.load(torch.load(tmp_path / "manifest.pt"), tmp_path / "files") == []
    assert resumed.num_slots == whole.num_slots
    for _ in range(120):
        row = games.row()
        batches = []
        for replay in (whole, resumed):
            replay.append(*row)
            batches.append(replay.sample(8, 0.5))
            if prioritized:
                replay.update_priorities(batches[-1].index, batches[-1].reward.astype(np.float64) ** 2)
        for a, b in zip(*batches):
            assert (a is None and b is None) or np.array_equal(a, b)
    for replay in (whole, resumed):
        replay.close()


def test_a_dictionary_goes_on_though_all_that_it_served_is_evicted(tmp_path):
    config = {"shape": (32, 32), "capacity": 4_096, "segment_slots": 512, "eviction": "random"}
    whole, games = make(tmp_path / "a", **config), Games(2, 5, shape=(32, 32))
    for _ in range(2_400):
        whole.append(*games.row())
    whole.wait()
    number, newest = whole._trained[-1]
    assert number == 8 and newest.content and len({part.dictionary for part in whole.sealed.values()}) > 1
    for number in [part.number for part in whole.sealed.values() if part.dictionary is newest]:
        whole._evict(number)
    manifest = whole.snapshot().write(tmp_path / "files")
    resumed = make(tmp_path / "files", **config)
    assert resumed.load(manifest, tmp_path / "files") == []
    for _ in range(300):
        row = games.row()
        whole.append(*row), resumed.append(*row)
    for replay in (whole, resumed):
        replay.wait()
    assert resumed.memory_bytes()["frames"] == whole.memory_bytes()["frames"]
    whole.close(), resumed.close()


def test_a_raw_segment_that_is_dropped_or_spilled_leaves_nothing_in_memory(tmp_path):
    budget = tight(codec="raw", shape=(32, 32))
    for config in ({}, {"ram_budget_mib": budget, "spill_dir": str(tmp_path)}):
        replay, games = make(tmp_path, codec="raw", shape=(32, 32), **config), Games(2, 0, shape=(32, 32))
        buffers = [weakref.ref(replay._frames)]
        for _ in range(300):
            replay.append(*games.row())
            if replay._frames is not buffers[-1]():
                buffers.append(weakref.ref(replay._frames))
        replay.wait()
        held = sum(part.in_memory for part in replay.sealed.values()) + 1
        assert len(buffers) > 10 and sum(buffer() is not None for buffer in buffers) == held
        replay.close()


def test_a_file_that_cannot_be_deleted_costs_space_and_not_the_run(tmp_path, monkeypatch):
    replay, games = make(tmp_path), Games(2, 5)
    for _ in range(60):
        replay.append(*games.row())
    replay.collect([replay.snapshot().write(tmp_path)])
    left = sorted(tmp_path.iterdir())

    def refuse(path, missing_ok=False):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    for _ in range(200):
        replay.append(*games.row())
    replay.collect([])
    replay.wait()
    monkeypatch.undo()
    assert left and set(left) <= set(tmp_path.iterdir())
    replay.collect([])
    assert not set(left) & set(tmp_path.iterdir())
    replay.close()


def test_segments_are_written_once_and_collected(tmp_path):
    replay, games, manifests = make(tmp_path), Games(2, 5), []
    for _ in range(3):
        for _ in range(60):
            replay.append(*games.row())
        times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("segment-*")}
        manifests = [*manifests, replay.snapshot().write(tmp_path)][-2:]
        assert {path: path.stat().st_mtime_ns for path in times} == times
        replay.collect(manifests)
        named = {entry["file"] for part in manifests for entry in [*part["segments"], part["open"]]}
        assert {path.name for path in tmp_path.iterdir()} >= named
    live = {f"segment-{number:08d}.npy" for number in replay.sealed}
    assert {path.name for path in tmp_path.iterdir()} <= named | live
    replay.close()


@pytest.mark.parametrize("harm", ["missing", "flipped", "truncated", "outside"])
@pytest.mark.parametrize("prioritized", [False, True])
def test_a_lost_segment_is_named_and_its_slots_are_a_gap(tmp_path, harm, prioritized):
    replay, games, rows = make(tmp_path, prioritized=prioritized), Games(2, 5), []
    for _ in range(75):
        rows.append(games.row())
        replay.append(*rows[-1])
    manifest = replay.snapshot().write(tmp_path)
    replay.close()
    entry = manifest["segments"][1]
    path = tmp_path / entry["file"]
    content = bytearray(path.read_bytes())
    if harm == "missing":
        path.unlink()
    elif harm == "flipped":
        content[-3] ^= 4
        path.write_bytes(content)
    elif harm == "truncated":
        path.write_bytes(content[:100])
    else:
        entry["file"] = "../" + entry["file"]
    resumed = make(tmp_path, prioritized=prioritized)
    notes = resumed.load(manifest, tmp_path)
    assert len(notes) == 1 and "segment" in notes[0] and "its slots are gone" in notes[0]
    assert resumed.num_slots == 75 * 2 - 32
    seen = check_against_oracle(resumed, rows, games.states, live_rows(resumed), batches=30)
    assert not [t for t, _ in seen if 16 <= t < 32]
    for _ in range(100):
        rows.append(games.row())
        resumed.append(*rows[-1])
    check_against_oracle(resumed, rows, games.states, live_rows(resumed))
    resumed.close()


def test_a_replay_of_another_shape_is_refused(tmp_path):
    replay = make(tmp_path)
    manifest = replay.snapshot().write(tmp_path)
    other = make(tmp_path, lanes=1)
    with pytest.raises(ValueError, match="segments of"):
        other.load(manifest, tmp_path)
    replay.close()
    other.close()


def test_a_snapshot_does_not_change_while_the_log_goes_on(tmp_path):
    replay, games = make(tmp_path), Games(2, 5)
    for _ in range(100):
        replay.append(*games.row())
    snapshot, again = replay.snapshot(), replay.snapshot()
    first = again.write(tmp_path / "first")
    for _ in range(300):
        replay.append(*games.row())
    second = snapshot.write(tmp_path / "first")
    assert [entry["crc32"] for entry in first["segments"]] == [entry["crc32"] for entry in second["segments"]]
    assert first["open"]["crc32"] == second["open"]["crc32"]
    replay.close()


def test_the_tree_draws_in_proportion():
    """Chi-square over 20 leaves, zeros among them; zeros are never drawn."""
    rng = np.random.default_rng(0)
    weights = rng.random(20)
    weights[[3, 7, 19]] = 0
    tree = SumTree(20)
    tree.set(np.arange(20), weights)
    assert tree.total == pytest.approx(weights.sum())
    draws = 40_000
    counts = np.bincount(tree.find(rng.random(draws) * tree.total), minlength=20)
    expected = draws * weights / weights.sum()
    chosen = expected > 0
    assert counts[~chosen].sum() == 0
    assert ((counts[chosen] - expected[chosen]) ** 2 / expected[chosen]).sum() < 39.3  # p = 0.001 at 16 degrees


def test_prioritized_samples_match_their_distribution_and_weights():
    replay, games = make(prioritized=True, priority_alpha=1.0), Games(2, 5, mean_length=30)
    for _ in range(60):
        replay.append(*games.row())
    tree = replay._tree
    leaves = np.flatnonzero(tree.nodes[tree._size :])
    errors = np.linspace(0, 3, len(leaves))
    replay.update_priorities(index_of(replay, leaves), errors)
    assert tree.get(leaves) == pytest.approx(errors + 1e-6)
    counts = np.zeros(len(tree.nodes))
    for _ in range(1_000):
        batch = replay.sample(32, beta=0.5)
        leaf = batch.index % replay._num_leaves
        counts[leaf] += 1
        weight = tree.get(leaf) ** -0.5
        assert batch.weight == pytest.approx(weight / weight.max(), rel=1e-5)
    expected = 32_000 * (errors + 1e-6) / (errors + 1e-6).sum()
    chosen = expected > 5
    chi_square = ((counts[leaves][chosen] - expected[chosen]) ** 2 / expected[chosen]).sum()
    assert chi_square < chosen.sum() + 4 * np.sqrt(2 * chosen.sum())
    replay.close()


def test_updates_of_evicted_slots_are_ignored_and_new_ones_enter_at_the_top():
    replay, games = make(prioritized=True), Games(2, 5)
    for _ in range(40):
        replay.append(*games.row())
    index = replay.sample(16).index.copy()
    replay.update_priorities(index, np.full(16, 9.0))
    assert replay.max_priority == pytest.approx(9.000001**0.6)
    for _ in range(60):
        replay.append(*games.row())
    newest = (replay.place * replay.rows + np.arange(replay.open_rows)) * 2
    assert set(np.round(replay._tree.get(newest), 6)) <= {0, round(replay.max_priority, 6)}
    for _ in range(100):
        replay.append(*games.row())
    gone = np.flatnonzero(replay._tree.nodes[replay._tree._size :] == 0)
    before = replay._tree.total
    replay.update_priorities(index_of(replay, gone), 5.0 + 0 * gone[gone < replay._num_leaves])
    replay.update_priorities(index, np.full(16, 5.0))  # drawn long ago: other segments have taken their places
    assert replay._tree.total == before
    replay.close()


def test_the_rule_by_hand():
    """S = 4, n = 2. Columns are slots t−3 … t+2; what is not said is live, no first, no end."""

    def ask(live="111111", first="000000", terminal="000000", truncated="000000"):
        columns = [np.array([[c == "1" for c in text]]) for text in (live, first, terminal, truncated)]
        found = find_sources(*columns, 4)
        return bool(found.valid[0]), int(found.bootstrap_steps[0]), bool(found.ends[0]), found.shown[0].tolist()

    assert ask() == (True, 2, False, [True] * 6)
    assert ask(live="011111")[0] is False
    assert ask(live="001111", first="001000") == (True, 2, False, [False, False, True, True, True, True])
    assert ask(live="111101")[0] is False and ask(live="111110")[0] is False
    assert ask(terminal="000100") == (True, 1, True, [True] * 5 + [False])
    assert ask(truncated="000100") == (True, 1, False, [True] * 5 + [False])
    assert ask(live="111110", terminal="000100")[0] is True
    assert ask(first="000010")[0] is False  # slot t holds a game's last frame, or a cut follows
    assert ask(first="000001")[0] is False
    assert ask(first="000001", terminal="000100")[0] is True
    assert ask(terminal="000010") == (True, 2, True, [True] * 6)


@pytest.mark.slow
def test_100k_checksummed_batches_with_threads(tmp_path):
    """Sealing and spilling while sampling: no frame of another moment, none torn."""
    replay = make(tmp_path, shape=(24, 24), capacity=4_000, segment_slots=256, ram_budget_mib=1.0, spill_dir="x")
    rng = np.random.default_rng(0)
    flag = np.zeros(2, bool)
    for number in range(100_000):
        frame = rng.integers(0, 256, (2, 24, 24), dtype=np.uint8)
        for lane in range(2):
            checksum = zlib.crc32(frame[lane].reshape(-1)[4:])
            frame[lane].reshape(-1)[:4] = np.frombuffer(np.uint32(checksum).tobytes(), np.uint8)
        replay.append(frame, flag | (number == 0), np.zeros(2, int), np.zeros(2), flag, flag)
        if number > 10:
            for window in replay.sample(2).window:
                for picture in window.reshape(5, -1):
                    stored = np.frombuffer(picture[:4].tobytes(), np.uint32)[0]
                    assert stored == zlib.crc32(picture[4:]) or not picture.any()
    replay.close()
