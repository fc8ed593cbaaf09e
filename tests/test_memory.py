"""Limits and cores from fake machines; the memory log with injected readings: nothing here depends on an allocator."""

import errno
import gc
import os
import tracemalloc

import numpy as np
import pytest

from dqn import memory
from dqn.csvlog import CsvLog, cut_csv
from dqn.memory import GIB, MIB, GrowthDetector, MemoryLog, core_limits, limits

UNLIMITED_V1 = "9223372036854771712"


def machine(root, files):
    for name, text in {"proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def smallest(root, environ=None, limit_gib=None, address_space=0):
    return limits(limit_gib, root=root, environ=environ or {}, address_space=address_space)[0]


def test_available_memory_bounds_a_machine_without_other_limits(tmp_path):
    assert smallest(machine(tmp_path, {})) == ("memory available", 32 * GIB)


@pytest.mark.parametrize(
    ("files", "group"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "2147483648\n"}, "cgroup/memory.max"),
        (  # the limit is on a parent; the process's own group says max
            {
                "proc/self/cgroup": "0::/job/step/task\n",
                "sys/fs/cgroup/job/step/task/memory.max": "max\n",
                "sys/fs/cgroup/job/memory.max": "2147483648\n",
                "sys/fs/cgroup/memory.max": "4294967296\n",
            },
            "cgroup/job/memory.max",
        ),
        (  # inside a container the path is the host's, and only the top is visible
            {"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/memory.max": "2147483648\n"},
            "cgroup/memory.max",
        ),
        (
            {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.high": "2147483648\n"},
            "a/memory.high",
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/slurm/uid/job\n0::/\n",
                "sys/fs/cgroup/memory/slurm/uid/job/memory.limit_in_bytes": UNLIMITED_V1,
                "sys/fs/cgroup/memory/slurm/uid/memory.limit_in_bytes": "2147483648",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
            },
            "slurm/uid/memory.limit_in_bytes",
        ),
        (  # hybrid: version 2 under its own mount
            {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/unified/a/memory.max": "2147483648\n"},
            "unified/a/memory.max",
        ),
    ],
)
def test_a_control_group_of_2_gib_wins_wherever_it_stands(tmp_path, files, group):
    limit = smallest(machine(tmp_path, files))
    assert limit.value == 2 * GIB
    assert limit.name.endswith(group)


def test_garbage_limits_nothing(tmp_path):
    files = {"proc/self/cgroup": "junk\n0:\n::\n", "sys/fs/cgroup/memory.max": "lots", "sys/fs/cgroup/cpu.max": "x y"}
    root = machine(tmp_path, files)
    assert smallest(root, {"SLURM_MEM_PER_NODE": "all", "SLURM_MEM_PER_CPU": ""}).name == "memory available"
    assert [limit.name for limit in core_limits(root=root, environ={"SLURM_CPUS_PER_TASK": "two"})] == ["affinity"]


def test_slurm_address_space_and_the_users_word(tmp_path):
    root = machine(tmp_path, {})
    assert smallest(root, {"SLURM_MEM_PER_NODE": "4096"}) == ("SLURM_MEM_PER_NODE", 4 * GIB)
    assert smallest(root, {"SLURM_MEM_PER_NODE": "0"}).name == "memory available"  # --mem=0 asks for the whole node
    per_cpu = {"SLURM_MEM_PER_CPU": "1024", "SLURM_CPUS_ON_NODE": "6"}
    assert smallest(root, per_cpu) == ("SLURM_MEM_PER_CPU", 6 * GIB)
    assert smallest(root, address_space=3 * GIB) == ("RLIMIT_AS (ulimit -v)", 3 * GIB)
    assert smallest(root, limit_gib=1.5) == ("memory.limit_gib", 1.5 * GIB)


def test_the_users_limit_cannot_raise_the_machines(tmp_path):
    assert smallest(machine(tmp_path, {}), limit_gib=64).name == "memory available"


def test_limits_are_sorted_and_named_on_the_real_machine():
    found = limits()
    assert found
    assert [limit.value for limit in found] == sorted(limit.value for limit in found)
    assert all(limit.name and 0 < limit.value < memory.UNLIMITED for limit in found)


def test_cores_from_quota_and_slurm(tmp_path):
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/job\n0::/job\n",
        "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
    }
    found = core_limits(root=machine(tmp_path, files), environ={"SLURM_CPUS_PER_TASK": "1"})
    assert [limit.value for limit in found][:3] == [0.5, 1, 1.5]
    assert found[0].name.endswith("cpu.cfs_quota_us")


def test_cores_is_at_least_one_and_at_most_the_affinity(monkeypatch):
    assert 1 <= memory.cores() <= os.cpu_count()
    monkeypatch.setattr(memory, "core_limits", lambda: [memory.Limit("quota", 0.5)])
    assert memory.cores() == 1


class World:
    """RSS, children, parts and time that a test sets."""

    def __init__(self):
        self.rss_mib, self.children, self.time = 500.0, 0, 0.0
        self.parts = {"replay": 100 * MIB, "model": 30 * MIB}

    def log(self, folder, **options):
        values = {"window_steps": 1_000, "limit_bytes": 2 * GIB, "budget_bytes": None, "growth_warning_mib": 1.0}
        values |= {"start_step": 0, "num_envs": 8, **options}
        return MemoryLog(
            folder,
            parts=lambda: dict(self.parts),
            clock=lambda: self.time,
            rss=lambda: int(self.rss_mib * MIB),
            children=lambda: self.children,
            **values,
        )


def rows(folder):
    header, *lines = (folder / "memory.csv").read_text().splitlines()
    return [dict(zip(header.split(","), map(float, line.split(",")))) for line in lines]


def test_every_iteration_is_recorded_and_no_spike_is_lost(tmp_path):
    world, spikes = World(), []
    log = world.log(tmp_path)
    for iteration in range(1, 301):
        world.time += 0.5
        world.rss_mib = 900.0 if iteration == 130 else 500.0 + iteration / 10
        spikes.append(world.rss_mib)
        closed = log.record(8 * iteration, full=False)
        assert closed == (iteration in (125, 250))
    log.close()
    np.testing.assert_allclose(np.fromfile(tmp_path / "ram_steps.f32", np.float32), spikes, rtol=1e-6)
    first, second = rows(tmp_path)
    assert (first["step"], second["step"], second["wall_s"]) == (1_000, 2_000, 125)
    assert first["rss_mib_max"] == pytest.approx(512.5)
    assert second["rss_mib_max"] == 900
    assert second["rss_mib_min"] == pytest.approx(512.6)
    assert set(log.scalars()) == {f"memory/{name}" for name in second if name not in ("step", "wall_s")}
    header = (tmp_path / "memory.csv").read_text().splitlines()[0]
    assert header == (
        "step,wall_s,rss_mib_min,rss_mib_mean,rss_mib_max,children_mib,replay_mib,model_mib,cuda_mib,"
        "unaccounted_mib,limit_mib"
    )


def test_unaccounted_is_what_grew_beyond_the_known_parts(tmp_path):
    world = World()
    log = world.log(tmp_path)
    world.parts["replay"] += 40 * MIB
    world.rss_mib += 47
    world.children = 12 * MIB
    for iteration in range(1, 126):
        log.record(8 * iteration, full=False)
    log.close()
    (row,) = rows(tmp_path)
    assert row["unaccounted_mib"] == pytest.approx(7)
    assert (row["replay_mib"], row["model_mib"], row["children_mib"], row["limit_mib"]) == (140, 30, 12, 2048)


def test_resuming_cuts_both_files_to_the_checkpoint(tmp_path):
    world = World()
    log = world.log(tmp_path)
    for iteration in range(1, 401):
        world.rss_mib = 500 + iteration
        log.record(8 * iteration, full=False)
    log.close()
    resumed = world.log(tmp_path, start_step=1_600, wall_s_before=10.0)
    assert (tmp_path / "ram_steps.f32").stat().st_size == 4 * 200
    assert [row["step"] for row in rows(tmp_path)] == [1_000]
    world.rss_mib, world.time = 111, 1.0
    for iteration in range(201, 326):
        resumed.record(8 * iteration, full=False)
    resumed.close()
    values = np.fromfile(tmp_path / "ram_steps.f32", np.float32)
    assert values[199] == 700
    assert values[200] == 111
    assert len(values) == 325
    assert [row["step"] for row in rows(tmp_path)] == [1_000, 2_600]
    assert rows(tmp_path)[-1]["wall_s"] == 11


def test_iterations_that_a_killed_process_did_not_write_read_zero(tmp_path):
    (tmp_path / "ram_steps.f32").write_bytes(np.float32([1, 2, 3]).tobytes())
    World().log(tmp_path, start_step=40).close()
    np.testing.assert_array_equal(np.fromfile(tmp_path / "ram_steps.f32", np.float32), [1, 2, 3, 0, 0])


def test_flush_writes_the_open_window_once(tmp_path):
    world = World()
    log = world.log(tmp_path)
    for iteration in range(1, 127):
        log.record(8 * iteration, full=False)
        if iteration % 50 == 0:
            log.flush()
            assert (tmp_path / "ram_steps.f32").stat().st_size == 4 * iteration
    log.close()
    np.testing.assert_array_equal(np.fromfile(tmp_path / "ram_steps.f32", np.float32), np.full(126, 500))


def test_the_budget_counts_children_and_one_spike_is_enough(tmp_path):
    world = World()
    log = world.log(tmp_path, budget_bytes=600 * MIB)
    log.record(8, full=False)
    assert not log.over_budget
    world.rss_mib = 601
    log.record(16, full=False)
    world.rss_mib = 500
    log.record(24, full=False)
    assert log.over_budget
    log.close()
    world.children = 101 * MIB
    log = world.log(tmp_path, budget_bytes=600 * MIB)
    log.record(8, full=False)
    assert log.over_budget
    log.close()


def test_without_a_budget_the_run_stops_just_under_the_limit(tmp_path):
    world = World()
    log = world.log(tmp_path, limit_bytes=1_000 * MIB)
    world.rss_mib = 979
    log.record(8, full=False)
    assert not log.over_budget
    world.rss_mib = 990
    log.record(16, full=False)
    assert log.over_budget
    log.close()


def test_a_full_disk_costs_rows_and_says_so(tmp_path, monkeypatch):
    world = World()
    log = world.log(tmp_path)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        patch.setattr(os, "pwrite", refuse)
        for iteration in range(1, 126):
            log.record(8 * iteration, full=False)
    warnings = log.warnings()
    assert any("memory.csv: No space left" in warning for warning in warnings)
    assert any("ram_steps.f32: No space left" in warning for warning in warnings)
    assert log.warnings() == []
    world.rss_mib = 777
    for iteration in range(126, 251):
        log.record(8 * iteration, full=False)
    log.close()
    values = np.fromfile(tmp_path / "ram_steps.f32", np.float32)
    np.testing.assert_array_equal(values, [0] * 125 + [777] * 125)
    assert [row["step"] for row in rows(tmp_path)] == [2_000]


def noise(kind, rng, count):
    """RSS beside a leak, per window: what allocators, checkpoints and background threads do."""
    time = np.arange(count)
    if kind == "flat":
        return np.zeros(count)
    if kind == "scatter":
        return rng.normal(0, 0.7, count)
    if kind == "warming up":
        return np.cumsum(rng.exponential(0.8, count) * np.exp(-time / 8)) + rng.normal(0, 0.3, count)
    if kind == "stairs":
        return sum(rng.uniform(2, 40) * (time >= at) for at in (3, 60, 120)) + rng.normal(0, 0.3, count)
    if kind == "first checkpoints":
        return sum(12 * 0.5**k * (time >= 10 * k + 5) for k in range(12)) + rng.normal(0, 0.3, count)
    assert kind == "sealing"
    return 5 * ((time * 1000 / 8192) % 1) + rng.normal(0, 0.3, count)


KINDS = ["flat", "scatter", "warming up", "stairs", "first checkpoints", "sealing"]


def alarms(values, parts=None):
    detector = GrowthDetector(1.0, 1_000)
    found = []
    for window, value in enumerate(values):
        mib = {"replay": 100.0} if parts is None else {name: series[window] for name, series in parts.items()}
        warning = detector.add(1_000 * (window + 1), 500 + value, mib)
        found += [(window + 1, warning)] if warning else []
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_200k_clean_steps_raise_no_alarm(kind):
    assert [alarms(noise(kind, np.random.default_rng(seed), 200)) for seed in range(10)] == [[]] * 10


@pytest.mark.parametrize("kind", ["flat", "scatter", "warming up", "stairs", "sealing"])
def test_a_leak_of_1_kib_per_step_is_found_within_20k_steps(kind):
    leak = np.arange(20) * 1_000 * 1_024 / MIB
    for seed in range(10):
        found = alarms(noise(kind, np.random.default_rng(seed), 20) + leak)
        assert found, f"seed {seed}"
        assert found[0][1].endswith("unaccounted growth: not in any known part")


def test_a_part_that_grows_is_named():
    leak = np.arange(20) * 1.0
    found = alarms(leak, {"model": np.full(20, 30.0), "replay": 100 + leak})
    assert "replay grows by 10.0" in found[0][1]


def test_a_slow_leak_is_found_in_the_end():
    leak = np.arange(200) * 0.15
    found = alarms(noise("scatter", np.random.default_rng(0), 200) + leak)
    assert 30 < found[0][0] < 120


def feed(world, log, iterations, *, leak_bytes_per_step=0, full_from=0, num_envs=8):
    warnings, rng = [], np.random.default_rng(3)
    for iteration in range(1, iterations + 1):
        step = num_envs * iteration
        leaked = max(0, step - full_from) * leak_bytes_per_step / MIB
        world.rss_mib = 500 + leaked + 25 * (iteration % 40 < 5) + rng.exponential(0.5)
        log.record(step, full=step >= full_from)
        warnings += log.warnings()
    return warnings


def test_the_log_warns_of_a_leak_once_and_says_where_it_is_not(tmp_path):
    world = World()
    log = world.log(tmp_path)
    warnings = feed(world, log, 5_000, leak_bytes_per_step=1_024, full_from=20_000)
    log.close()
    assert len(warnings) == 1
    assert "unaccounted growth: not in any known part" in warnings[0]
    assert log.growth_mib_per_10k_steps == pytest.approx(9.77, abs=0.5)
    world, folder = World(), tmp_path / "short"
    folder.mkdir()
    log = world.log(folder)
    assert len(feed(world, log, 5_000, leak_bytes_per_step=1_024, full_from=20_000)) == 1


def test_the_log_stays_silent_while_the_replay_fills_and_in_a_clean_run(tmp_path):
    world = World()
    log = world.log(tmp_path)
    assert feed(world, log, 5_000, leak_bytes_per_step=1_024, full_from=10**9) == [] or world.rss_mib > 2_000
    log.close()
    log = world.log(tmp_path)
    assert feed(world, log, 25_000, full_from=2_500) == []
    assert abs(log.growth_mib_per_10k_steps) < 0.1
    log.close()


def test_windows_shorter_and_longer_than_a_point_serve_as_well(tmp_path):
    for window_steps in (8, 100, 4_000):
        folder = tmp_path / str(window_steps)
        folder.mkdir()
        world = World()
        log = world.log(folder, window_steps=window_steps)
        assert len(feed(world, log, 10_000, leak_bytes_per_step=1_024)) == 1
        log.close()


def test_records_cost_four_bytes_on_disk_and_nothing_in_memory(tmp_path):
    world = World()
    log = world.log(tmp_path, num_envs=1)
    for step in range(1, 210_001):
        log.record(step, full=True)
        if step == 205_000:
            gc.collect()
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    log.close()
    assert (tmp_path / "ram_steps.f32").stat().st_size == 4 * 210_000
    assert grown < 20_000


def test_the_real_readings_are_of_this_process(tmp_path):
    log = MemoryLog(
        tmp_path,
        parts=dict,
        window_steps=100,
        limit_bytes=64 * GIB,
        budget_bytes=None,
        growth_warning_mib=1.0,
        start_step=0,
        num_envs=1,
    )
    for step in range(1, 201):
        log.record(step, full=False)
    log.close()
    assert 5 < log.rss_mib < 60_000
    assert [row["step"] for row in rows(tmp_path)] == [100, 200]
    assert all(row["rss_mib_min"] <= row["rss_mib_mean"] <= row["rss_mib_max"] for row in rows(tmp_path))


def test_psutil_serves_where_there_is_no_proc(monkeypatch):
    exact = memory.rss_reader()()

    def missing(*_):
        raise FileNotFoundError

    monkeypatch.setattr(os, "open", missing)
    assert memory.rss_reader()() == pytest.approx(exact, rel=0.5)


def test_cut_csv_keeps_whole_rows_up_to_the_step(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("step,a\n8,1\n16,2\n24,3\nbad\n16,2,2\n2")
    assert cut_csv(path, "step,a", 16) == ["8,1", "16,2"]
    assert path.read_text() == "step,a\n8,1\n16,2\n"
    assert not list(tmp_path.glob("*.tmp"))


def test_cut_csv_begins_a_missing_or_foreign_file_anew(tmp_path):
    for name, text in (("missing.csv", None), ("foreign.csv", "other\n1\n"), ("empty.csv", "")):
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        log = CsvLog(path, "step,a", 10)
        assert log.append([(16, 2), (17, 3)]) is None
        log.close()
        assert path.read_text() == "step,a\n16,2\n17,3\n"
