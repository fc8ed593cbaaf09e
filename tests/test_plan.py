"""The forecast: its arithmetic, whose limit wins, refusals, and remedies that hold when applied."""

import csv
import dataclasses
import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dqn import budget, config
from dqn import plan as plan_module
from dqn.__main__ import main
from dqn.memory import GIB, MIB
from dqn.plan import plan


def machine(root, available_gib=32.0, **files):
    texts = {"proc/meminfo": f"MemAvailable: {int(available_gib * 1024**2)} kB\n"}
    texts |= {name.replace("__", "/"): text for name, text in files.items()}
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def make(**values):
    return config.from_flat({name.replace("__", "."): value for name, value in values.items()})


def part(forecast, name):
    (found,) = [part.bytes for part in forecast.parts if part.name == name]
    return found


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)


def test_raw_frames_are_reckoned_to_the_slot(tmp_path):
    root = machine(tmp_path)
    small, large = (plan(make(replay__codec="raw", replay__capacity=c), root=root) for c in (100_000, 1_000_000))
    slots = 1_000_000 + 8_192 - (100_000 + 8_192)
    assert part(large, "replay") - part(small, "replay") == pytest.approx(slots * 84 * 84, rel=0.01)
    assert large.fits
    assert large.total == sum(p.bytes for p in large.parts)


def test_the_forum_scripts_size_in_compressed_form(tmp_path):
    forecast = plan(make(), root=machine(tmp_path))
    assert forecast.total < 0.9 * GIB
    assert part(forecast, "replay") < 260 * MIB


def test_parameters_are_the_networks():
    torch = pytest.importorskip("torch")
    from dqn.networks import QNetwork

    for stack, side in ((4, 84), (2, 64), (3, 36)):
        network = QNetwork(18, stack, side)
        counted = sum(p.numel() for p in network.parameters() if isinstance(p, torch.nn.Parameter))
        (row, _) = plan_module.model_parts(make(env__stack_size=stack, env__screen_size=side))
        assert row.note.startswith(f"{counted:,} parameters")


def test_a_control_group_of_2_gib_is_the_limit_that_is_shown(tmp_path):
    files = {"proc__self__cgroup": "0::/job\n", "sys__fs__cgroup__job__memory.max": str(2 * GIB)}
    forecast = plan(make(replay__codec="raw"), root=machine(tmp_path, **files))
    assert forecast.limit.value == 2 * GIB
    assert not forecast.fits
    assert "limit 2.00 GiB" in forecast.table()
    assert "job/memory.max" in forecast.table()
    assert plan(make(), root=machine(tmp_path, **files)).fits


def test_a_limit_above_the_machines_does_not_win(tmp_path):
    root = machine(tmp_path, available_gib=4)
    forecast = plan(make(replay__codec="raw", memory__limit_gib=64.0), root=root)
    assert forecast.limit.name == "memory available"
    assert not forecast.fits
    assert plan(make(replay__codec="raw", memory__limit_gib=1.0), root=root).limit.name == "memory.limit_gib"


def test_12_tenths_of_the_memory_are_refused_and_9_tenths_are_not(tmp_path):
    root = machine(tmp_path, available_gib=20)
    for share, fits in ((1.2, False), (0.9, True)):
        capacity = int(share * 20 * GIB / 84**2)
        forecast = plan(make(replay__codec="raw", replay__capacity=capacity), root=root)
        assert forecast.fits == fits
    assert "GiB, limit 20.00 GiB" in plan(make(replay__codec="raw", replay__capacity=4_000_000), root=root).table()


CASES = {
    "raw": {"replay.codec": "raw", "memory.limit_gib": 1.0},
    "raw, tight": {"replay.codec": "raw", "memory.limit_gib": 0.55},
    "zstd, tight": {"memory.limit_gib": 0.5},
    "huge": {"replay.capacity": 50_000_000, "memory.limit_gib": 2.0},
    "budget below three segments": {"replay.ram_budget_mib": 30.0, "replay.segment_slots": 8_192},
    "budget with spilling": {
        "replay.ram_budget_mib": 30.0,
        "replay.segment_slots": 8_192,
        "replay.spill_dir": "/tmp",
        "replay.codec": "raw",
    },
}


@pytest.mark.parametrize("case", CASES)
def test_every_remedy_fits_when_it_is_applied(case, tmp_path):
    values = CASES[case]
    root = machine(tmp_path)
    forecast = plan(config.from_flat(values), root=root)
    assert not forecast.fits
    assert 1 <= len(forecast.remedies) <= 3
    for remedy in forecast.remedies:
        words = shlex.split(remedy.options)
        options = dict(zip(words[::2], words[1::2]))
        changes = {name.removeprefix("--"): plan_value(text) for name, text in options.items()}
        better = plan(config.from_flat({**values, **changes}), root=root)
        assert better.fits, remedy
        assert better.total == pytest.approx(remedy.bytes)
        assert remedy.options in forecast.table()


def plan_value(text):
    try:
        return float(text)
    except ValueError:
        return text


def test_when_nothing_helps_it_says_so(tmp_path):
    forecast = plan(make(memory__limit_gib=0.2), root=machine(tmp_path))
    assert forecast.remedies == []
    assert "raise the limit" in forecast.table()


def test_a_budget_below_three_raw_segments_is_a_problem_whatever_the_limit(tmp_path):
    forecast = plan(make(replay__ram_budget_mib=100.0, replay__segment_slots=8_192), root=machine(tmp_path))
    assert "replay.ram_budget_mib is 100" in forecast.problem
    assert not forecast.fits
    assert plan(make(replay__ram_budget_mib=100.0, replay__segment_slots=2_048), root=machine(tmp_path)).problem is None


def test_a_ram_budget_caps_the_replay_whatever_the_content(tmp_path):
    forecast = plan(make(replay__codec="raw", replay__ram_budget_mib=400.0), root=machine(tmp_path))
    assert part(forecast, "replay") <= 400 * MIB
    assert forecast.fits


def test_time_to_the_end_at_a_given_speed_against_the_hours(tmp_path):
    root = machine(tmp_path)
    forecast = plan(make(budget__max_steps=3_600_000, budget__max_hours=10.0), steps_per_s=50.0, root=root)
    assert "3,600,000 steps at 50 steps/s take 20.0 h, budget.max_hours 10: 2 jobs" in forecast.table()
    assert ": fits" in plan(make(budget__max_steps=3_600, budget__max_hours=10.0), steps_per_s=50.0, root=root).table()


def test_speed_is_guessed_higher_where_the_processor_knows_bf16(tmp_path):
    plain = plan(make(learner__precision="auto"), root=machine(tmp_path / "a"))
    fast = plan(make(), root=machine(tmp_path / "b", **{"proc__cpuinfo": "flags : avx2 avx512_bf16\n"}))
    assert fast.steps_per_s > 1.2 * plain.steps_per_s
    assert plan(make(learner__precision="fp32"), root=tmp_path / "b").steps_per_s == plain.steps_per_s


def test_on_a_gpu_the_model_leaves_the_ram(tmp_path):
    cpu = plan(make(learner__device="cpu"), root=machine(tmp_path))
    gpu = plan(make(learner__device="cuda"), root=machine(tmp_path))
    assert cpu.gpu == []
    assert "GPU memory: none" in cpu.table()
    assert {p.name for p in gpu.gpu} > {"networks and optimizer"}
    assert "networks and optimizer" not in {p.name for p in gpu.parts}


def test_disk_names_what_is_free_and_when_it_is_too_little(tmp_path):
    forecast = plan(make(replay__codec="raw"), root=machine(tmp_path))
    needed = sum(p.bytes for p in forecast.disk)
    assert needed > 7e9
    assert "TOO LITTLE" in dataclasses.replace(forecast, disk_free=needed - 1).table()
    assert "TOO LITTLE" not in dataclasses.replace(forecast, disk_free=needed).table()


def test_smaller_pictures_and_shallower_states_take_less(tmp_path):
    root = machine(tmp_path)
    large = plan(make(replay__codec="raw"), root=root)
    small = plan(make(replay__codec="raw", env__screen_size=42), root=root)
    assert part(small, "replay") < 0.27 * part(large, "replay")
    assert part(small, "networks and optimizer") < part(large, "networks and optimizer")


def test_every_number_of_the_table_is_finite_for_extreme_configs(tmp_path):
    extremes = [
        make(replay__capacity=1_000, env__num_envs=1),
        make(budget__max_hours=0.0),
        make(budget__max_hours=None, learner__update_period_steps=1_000, learner__target_period_steps=1_000),
        make(env__num_envs=512, replay__prioritized=True, learner__batch_size=512, learner__gradient_accumulation=4),
    ]
    for chosen in extremes:
        forecast = plan(chosen, root=machine(tmp_path))
        numbers = [p.bytes for p in forecast.parts + forecast.disk + forecast.gpu] + [forecast.steps_per_s]
        assert all(math.isfinite(number) and number >= 0 for number in numbers)
        assert "nan" not in forecast.table()


def test_the_command_prints_the_table_and_exits_3_when_it_does_not_fit(capsys):
    arguments = ["plan", "--config", "configs/breakout.yaml", "--replay.codec", "raw"]
    assert main([*arguments, "--memory.limit_gib", "1"]) == budget.DOES_NOT_FIT
    text = capsys.readouterr().out
    assert "DOES NOT FIT: " in text
    assert "fits with --replay.codec zstd" in text
    assert main(["plan", "--config", "configs/smoke.yaml"]) in (budget.FINISHED, budget.DOES_NOT_FIT)
    assert "networks and optimizer" in capsys.readouterr().out


REAL = {
    "zstd": {},
    "raw": {"replay.codec": "raw"},
    "spilled": {"replay.codec": "raw", "replay.ram_budget_mib": 300, "replay.spill_dir": "spill"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REAL)
def test_the_forecast_of_a_real_process_is_right_within_a_tenth(case, tmp_path):
    values = {
        **{"replay.capacity": 100_000, "learner.learning_starts_steps": 110_000, "budget.max_steps": 118_000},
        **{"evaluation.period_steps": 112_000, "evaluation.episodes": 8, "evaluation.max_frames": 4_000},
        **REAL[case],
    }
    if "replay.spill_dir" in values:
        values["replay.spill_dir"] = str(tmp_path / "spill")
    options = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    command = [
        sys.executable,
        "-m",
        "dqn",
        "train",
        "--config",
        "configs/breakout.yaml",
        "--run",
        str(tmp_path / "run"),
    ]
    result = subprocess.run([*command, *options], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    with (tmp_path / "run/memory.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["step"]) > 114_000]
    measured = max(float(row["rss_mib_mean"]) for row in rows)
    chosen = config.from_flat({**config.read_yaml("configs/breakout.yaml"), **values})
    assert plan(chosen).total / MIB == pytest.approx(measured, rel=0.1)
