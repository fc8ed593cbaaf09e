"""Real training in processes that are really killed, signalled and starved; and what is left afterwards.

The game is Breakout on the `python` backend with a small picture, so that a run of some seconds fills, learns,
evaluates and saves, and a resumed run must equal the uninterrupted one bit for bit.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dqn import checkpoint

ROOT = Path(__file__).parent.parent
OPTIONS = {
    "config": "configs/nature.yaml",
    "env.screen_size": 36,
    "replay.capacity": 1_500,
    "learner.learning_starts_steps": 400,
    "learner.target_period_steps": 100,
    "learner.num_threads": 1,
    "policy.epsilon_decay_steps": 1_000,
    "budget.max_steps": 3_000,
    "checkpoint.period_steps": 250,
    "evaluation.period_steps": 1_000,
    "evaluation.episodes": 1,
    "evaluation.max_frames": 200,
    "memory.window_steps": 250,
}


def command(folder, **options):
    values = {**OPTIONS, **{name.replace("__", "."): value for name, value in options.items()}}
    arguments = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-m", "dqn", "train", "--run", str(folder), *arguments]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def launch(folder, **options):
    return subprocess.Popen(
        command(folder, **options),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(folder, seconds=120, **options):
    result = subprocess.run(
        command(folder, **options), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=seconds
    )
    return result.returncode, result.stdout + result.stderr


def wait_for(condition, process, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"never came; the process said: {process.communicate()[0]}")


def log_has(folder, text):
    def found():
        with contextlib.suppress(FileNotFoundError):
            return text in (folder / "train.log").read_text()
        return False

    return found


def saved_at(folder, step):
    return lambda: any(g.step >= step for g in checkpoint.generations(folder / "checkpoint"))


def flat(state, prefix=""):
    items = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in items:
        if isinstance(value, dict | list | tuple):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def assert_equal_runs(left, right):
    """Parameters, optimizer, generators, emulator and every finished game, bit for bit."""
    states = [checkpoint.load_newest(folder / "checkpoint")[0] for folder in (left, right)]
    for name in ("step", "updates", "learner", "policy_rng", "envs", "frames", "games"):
        pairs = zip(*(list(flat({name: state[name]})) for state in states), strict=True)
        for (key, a), (_, b) in pairs:
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, key
    rows = [[line.rsplit(",", 1)[0] for line in (f / "episodes.csv").read_text().splitlines()] for f in (left, right)]
    assert rows[0] == rows[1] and len(rows[0]) > 5


def assert_curves_rise(folder):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    steps = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                steps.setdefault(value.tag, []).append(event.step)
    for tag, seen in steps.items():
        if "/" in tag and not tag.endswith("text_summary"):
            assert seen == sorted(set(seen)), tag
    assert len(steps["episode/return"]) == len((folder / "episodes.csv").read_text().splitlines()) - 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    code, output = finish(folder)
    assert code == 0, output
    return folder


def kill_and_resume(folder, kills, seed):
    rng = np.random.default_rng(seed)
    for _ in range(kills):
        process = launch(folder)
        try:
            process.wait(timeout=float(rng.uniform(1.0, 7.0)))
        except subprocess.TimeoutExpired:
            process.kill()
        output = process.communicate()[0]
        assert process.returncode in (0, -signal.SIGKILL), output
        if process.returncode == 0:
            return


def test_kill_9_at_random_moments_changes_nothing(whole, tmp_path):
    """Five here, and five more on the same run below: ten kills in all."""
    folder = tmp_path / "run"
    for round_ in range(2):
        kill_and_resume(folder, 5, round_)
    code, output = finish(folder)
    assert code == 0, output
    assert_equal_runs(whole, folder)
    assert_curves_rise(folder)


@pytest.mark.slow
def test_a_hundred_kills(whole, tmp_path):
    kills = 0
    for number in range(100):
        folder = tmp_path / f"run{number // 10}"
        kill_and_resume(folder, 1, 100 + number)
        kills += 1
        if number % 10 == 9:
            code, output = finish(folder)
            assert code == 0, output
            assert_equal_runs(whole, folder)
    assert kills == 100


PHASES = {
    "fill": {"learner__learning_starts_steps": 1_000_000, "replay__capacity": 100_000, "budget__max_steps": 10_000_000},
    "learn": {"budget__max_steps": 10_000_000, "evaluation__period_steps": 10_000_000},
    "evaluate": {"evaluation__episodes": 1_000, "evaluation__max_frames": 18_000},
    "save": {"budget__max_steps": 10_000_000, "checkpoint__period_steps": 4, "evaluation__period_steps": 10_000_000},
}


SIGNALS = [(phase, signal.SIGTERM) for phase in PHASES] + [("learn", signal.SIGUSR1)]


@pytest.mark.parametrize(("phase", "number"), SIGNALS)
def test_a_signal_in_each_phase_saves_and_exits_75(phase, number, tmp_path):
    folder, options = tmp_path / "run", PHASES[phase]
    process = launch(folder, **options)
    conditions = {
        "fill": log_has(folder, "fill "),
        "learn": saved_at(folder, 750),
        "evaluate": saved_at(folder, 750),
        "save": saved_at(folder, 500),
    }
    wait_for(conditions[phase], process)
    time.sleep(1.0 if phase == "evaluate" else 0.1)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 75, output
    assert f"({signal.Signals(number).name})" in output
    state, notes = checkpoint.load_newest(folder / "checkpoint")
    assert notes == [] and f"goes on from step {state['step']:,}" in output


def test_ctrl_c_twice_leaves_at_once_with_a_good_checkpoint(tmp_path):
    folder = tmp_path / "run"
    process = launch(folder, **PHASES["save"])
    wait_for(saved_at(folder, 500), process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=30)[0]
    assert process.returncode in (130, 75), output  # 75: it had left before the second one came
    state, notes = checkpoint.load_newest(folder / "checkpoint")
    assert state is not None and notes == []


def test_a_second_process_is_refused_with_the_pid(tmp_path):
    folder = tmp_path / "run"
    process = launch(folder, **PHASES["fill"])
    wait_for(log_has(folder, "fill "), process)
    code, output = finish(folder, **PHASES["fill"])
    assert code == 2 and str(process.pid) in output and output.count("\n") == 1, output
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75


def test_max_hours_stops_in_time_and_resumes(tmp_path):
    folder = tmp_path / "run"
    started = time.monotonic()
    code, output = finish(folder, **{**PHASES["learn"], "budget__max_hours": 0.005})
    assert code == 75 and "budget.max_hours" in output, output
    assert time.monotonic() - started < 0.005 * 3600 + 40  # the interpreter of a busy machine starts slowly
    step = checkpoint.generations(folder / "checkpoint")[0].step
    code, output = finish(folder, **{**PHASES["learn"], "budget__max_steps": step + 50})
    assert code == 0 and f"resumed at step {step:,}" in output, output


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def test_a_flipped_byte_in_each_file_is_named(tmp_path):
    folder = tmp_path / "run"
    code, output = finish(folder, budget__max_steps=1_210, evaluation__period_steps=1_000_000)
    assert code == 0, output
    newest = checkpoint.generations(folder / "checkpoint")[0].path
    flip(newest)
    code, output = finish(folder, budget__max_steps=1_260)
    assert code == 0 and f"warning: {newest}" in output, output

    def replay_files():
        manifest = checkpoint.load_newest(folder / "checkpoint")[0]["replay"]
        return [folder / "replay" / entry["file"] for entry in [*manifest["segments"], manifest["open"]] if entry]

    for number, position in enumerate([0, -2, -1]):
        path = replay_files()[position]
        flip(path)
        code, output = finish(folder, budget__max_steps=1_310 + 50 * number)
        assert code == 0 and f"{path.name} is damaged" in output, output
    path = replay_files()[-2]
    path.unlink()
    code, output = finish(folder, budget__max_steps=1_900)
    assert code == 0 and f"{path.name}: No such file" in output, output
    for path in (folder / "checkpoint").iterdir():
        path.write_bytes(b"")
    code, output = finish(folder, budget__max_steps=1_500)
    assert code == 2 and "no checkpoint" in output and "--fresh" in output, output


def test_a_disk_that_is_full_is_named_and_training_goes_on(tmp_path):
    """A real tmpfs, too small for the second checkpoint; with more room the same command goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        options = {"replay__codec": "raw", "replay__capacity": 3_000, "budget__max_steps": 2_500}
        code, output = finish(disk / "run", **options, evaluation__period_steps=1_000_000)
        assert code == 75 and "No space left on device" in output and "training goes on" in output, output
        state, notes = checkpoint.load_newest(disk / "run" / "checkpoint")
        assert notes == [] and 0 <= state["step"] < 2_500
        subprocess.run(["mount", "-o", "remount,size=60m", str(disk)], check=True)
        code, output = finish(disk / "run", **options, evaluation__period_steps=1_000_000)
        assert code == 0 and f"resumed at step {state['step']:,}" in output, output
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_another_runs_spill_files_are_never_mixed_in(tmp_path):
    spill, options = tmp_path / "spill", {"budget__max_steps": 600, "replay__spill_dir": tmp_path / "spill"}
    code, output = finish(tmp_path / "a" / "run", **options)
    assert code == 0 and list((spill / "run").glob("*.npy")), output
    files = sorted((spill / "run").glob("*.npy"))
    for extra in ([], ["--fresh"]):
        result = subprocess.run(
            [*command(tmp_path / "b" / "run", **options), *extra],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert result.returncode == 2 and f"holds the replay of {tmp_path / 'a' / 'run'}" in result.stderr
        assert not (tmp_path / "b" / "run").exists() and sorted((spill / "run").glob("*.npy")) == files
    code, output = finish(tmp_path / "a" / "run", **{**options, "budget__max_steps": 700})
    assert code == 0 and "resumed at step 600" in output and "gone" not in output, output
    (tmp_path / "a").rename(tmp_path / "c")  # a run that was moved takes its files with it
    code, output = finish(tmp_path / "c" / "run", **{**options, "budget__max_steps": 800})
    assert code == 0 and "resumed at step 700" in output and "gone" not in output, output


def test_every_file_loads_without_unpickling(whole):
    for path in [*whole.glob("*.pt"), *(whole / "checkpoint").iterdir()]:
        assert isinstance(torch.load(path), dict)
    for path in (whole / "replay").iterdir():
        assert np.load(path, allow_pickle=False).dtype == np.uint8
    assert not [path for path in whole.rglob("*") if path.suffix == ".tmp"]
    for name in (
        "config.yaml",
        "train.log",
        "episodes.csv",
        "memory.csv",
        "ram_steps.f32",
        "model.pt",
        "best.pt",
        "eval.json",
    ):
        assert (whole / name).stat().st_size > 0, name
    assert (whole / "ram_steps.f32").stat().st_size == 4 * 3_000
