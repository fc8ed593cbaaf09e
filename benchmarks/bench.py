"""`python -m dqn bench`: speed of whole trainings, bytes and sample time of the replay; with `--peers` beside others.

Trainings alternate, so that a machine that slows down slows all of them; medians and ratios of neighbours are printed.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.replay_memory import games_table, ram_picture

ROOT = Path(__file__).parent.parent
CAPACITY, LEARNING_STARTS = 20_000, 2_000
LEAST_STEPS = LEARNING_STARTS + 3_000
PEER_PACKAGES = (
    "torch==2.13.0",
    "stable-baselines3==2.9.2",
    "gymnasium[atari]==1.4.0",
    "ale-py==0.12.1",
    "opencv-python-headless",
    "psutil",
)


def train_ours(steps: int, **options: Any) -> dict[str, float]:
    """Trains with the defaults of `breakout.yaml`; speed from its own memory.csv, after learning has begun."""
    with tempfile.TemporaryDirectory() as folder:
        values = {
            "replay.capacity": CAPACITY,
            "learner.learning_starts_steps": LEARNING_STARTS,
            "budget.max_steps": steps,
            "evaluation.episodes": 1,
            "evaluation.max_frames": 40,
            **options,
        }
        command = [sys.executable, "-m", "dqn", "train", "--config", "configs/breakout.yaml", "--run", f"{folder}/run"]
        command += [word for name, value in values.items() for word in (f"--{name}", str(value))]
        _, rss = run(command)
        rows = list(csv.DictReader(Path(folder, "run", "memory.csv").read_text().splitlines()))
    learning = [row for row in rows if int(row["step"]) >= LEARNING_STARTS + 1_000]
    seconds = float(learning[-1]["wall_s"]) - float(learning[0]["wall_s"])
    speed = (int(learning[-1]["step"]) - int(learning[0]["step"])) / seconds
    return {"steps_per_s": speed, "updates_per_s": speed / 4, "rss_mib": rss}


def train_sb3(steps: int, python: Path) -> dict[str, float]:
    """Trains Stable-Baselines3's DQN at equal settings."""
    options = ["--steps", str(steps), "--capacity", str(CAPACITY), "--learning-starts", str(LEARNING_STARTS)]
    output, _ = run([str(python), "benchmarks/peer_sb3.py", *options])
    return json.loads(output.splitlines()[-1])


def run(command: list[str]) -> tuple[str, float]:
    """Runs a command; its output, and the highest RSS seen in MiB."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True)
        peak, watched = 0, psutil.Process(process.pid)
        while process.poll() is None:
            try:
                peak = max(peak, watched.memory_info().rss)
            except psutil.Error:
                break
            time.sleep(0.2)
        process.wait()
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{text}")
    return text, peak / 2**20


def peer_python() -> Path:
    """The interpreter of the peers' environment, made at the first call."""
    folder = ROOT / ".venv-peers"
    if not (folder / ".ready").exists():
        print("making .venv-peers for Stable-Baselines3 ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin/python", "-m", "pip", "install", "-q", *PEER_PACKAGES], check=True)
        (folder / ".ready").touch()
    return folder / "bin/python"


def speed_table(steps: int, rounds: int, peers: bool) -> str:
    """Whole trainings, alternating."""
    kinds: dict[str, Any] = {
        "this, raw replay": lambda: train_ours(steps, **{"replay.codec": "raw"}),
        "this, breakout.yaml": lambda: train_ours(steps),
    }
    if peers:
        python = peer_python()
        kinds["Stable-Baselines3"] = lambda: train_sb3(steps, python)  # next to those that it is compared with
    kinds["this, fp32"] = lambda: train_ours(steps, **{"learner.precision": "fp32"})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, train in kinds.items():
            found[name].append(train())
            print(f"  {name}: {found[name][-1]['steps_per_s']:.0f} steps/s", flush=True)
    base = "Stable-Baselines3" if peers else "this, breakout.yaml"
    lines = ["| training | steps/s | each | updates/s | RSS MiB | ratio |", "| --- | --- | --- | --- | --- | --- |"]
    for name, results in found.items():
        speeds = [result["steps_per_s"] for result in results]
        ratio = statistics.median(a / b["steps_per_s"] for a, b in zip(speeds, found[base]))
        each = ", ".join(f"{speed:.0f}" for speed in speeds)
        updates, rss = (statistics.median(result[key] for result in results) for key in ("updates_per_s", "rss_mib"))
        lines.append(f"| {name} | {statistics.median(speeds):.0f} | {each} | {updates:.0f} | {rss:.0f} | {ratio:.2f} |")
    return "\n".join(lines)


def bench(options: argparse.Namespace) -> int:
    """Prints the tables; `--out` keeps them and draws the picture of RAM over steps."""
    speeds = speed_table(options.steps, 3, options.peers)
    print(speeds, flush=True)
    games = games_table(20_000, sb3_python=peer_python() if options.peers else None)
    print(games, flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "bench.md").write_text(f"{speeds}\n\n{games}\n", encoding="utf-8")
        ram_picture(options.out / "ram.png")
    return 0
