"""Bytes per transition and sample time of the replay on real frames: `python -m benchmarks.replay_memory --game pong`.

Breakout is played by a policy that tracks the ball, since random play hardly ever breaks the wall; other games are
played at random. Bytes count frames, metadata, offsets and dictionaries; the two raw buffers stand apart.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ale_py import ALEInterface

from dqn.atari import VectorEnvs, rom_path
from dqn.config import EnvConfig, ReplayConfig
from dqn.memory import rss_reader
from dqn.policy import force_fire
from dqn.replay import Replay

GAMES = ("breakout", "pong", "qbert", "seaquest", "ms_pacman", "space_invaders", "enduro", "battle_zone")
FORUM_BYTES = 34_270
"""A transition of the forum's script, whose small view pins the whole frame; `forum_deque` measures it."""
SB3_BYTES = {"Stable-Baselines3": 2 * 4 * 84 * 84, "Stable-Baselines3, optimize_memory_usage": 4 * 84 * 84}
"""Pictures of a transition in Stable-Baselines3's buffer; `benchmarks/peer_sb3.py --buffer` measures it."""
LANES, SAMPLES = 8, 1_000


class Player:
    """Plays real games: tracks the ball in Breakout two times out of three, else acts at random."""

    def __init__(self, game: str, seed: int = 1):
        self.envs = VectorEnvs(EnvConfig(game, num_envs=LANES), np.random.SeedSequence(seed))
        self.rng = np.random.default_rng(seed)
        self.tracks = game == "breakout"
        self.timestep = self.envs.reset()

    def play(self, replay: Replay, slots: int) -> None:
        """Appends rows until so many slots have been added."""
        for _ in range(slots // LANES):
            before, actions = self.timestep, self.actions()
            self.envs.send(actions)
            after = self.timestep = self.envs.recv()
            reward = np.sign(after.reward)
            replay.append(before.frame, before.first, actions, reward, after.terminal, after.truncated)

    def actions(self) -> np.ndarray:
        """One row of decisions."""
        actions = self.rng.integers(self.envs.num_actions, size=LANES)
        if self.tracks:
            frame = self.timestep.frame
            ball = np.any(frame[:, 40:74, 4:80] > 0, axis=1)
            paddle = frame[:, 76, 4:80] > 0
            columns = np.arange(76)
            seen = ball.any(axis=1) & paddle.any(axis=1)
            gap = (ball * columns).sum(1) / np.maximum(ball.sum(1), 1) - (paddle * columns).sum(1) / np.maximum(
                paddle.sum(1), 1
            )
            chase = np.where(gap > 1, 2, np.where(gap < -1, 3, 0))
            actions = np.where(seen & (self.rng.random(LANES) < 0.67), chase, actions)
        return force_fire(actions, self.envs.fire_action, self.timestep.first | self.timestep.lost_life)


def make_replay(capacity: int, codec: str, prioritized: bool = False) -> Replay:
    """A replay of 84×84 pictures on 8 lanes."""
    return Replay(
        ReplayConfig(capacity=capacity, codec=codec, prioritized=prioritized),  # type: ignore[arg-type]
        num_envs=LANES,
        frame_shape=(84, 84),
        stack_size=4,
        n_steps=1,
        gamma=0.99,
        rng=np.random.default_rng(0),
    )


def sample_ms(sample: Callable[[int], object]) -> tuple[float, float]:
    """Median and 99th percentile of a sample of 32, in ms."""
    times = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        sample(32)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3, float(np.percentile(times, 99)) * 1e3


def bytes_per_slot(replay: Replay) -> float:
    """Bytes per transition without the raw buffers."""
    replay.wait()
    parts = replay.memory_bytes()
    sealed = len(replay.sealed) * replay.segment_slots
    return (parts["replay"] - parts["buffers"] - parts["priorities"] - parts["metadata"]) / sealed + 6


def forum_deque(slots: int) -> tuple[float, float, float]:
    """The forum's script's replay at random play: growth of RSS per transition, ms of drawing 32 (median, p99)."""
    ale = ALEInterface()
    ale.loadROM(rom_path("breakout"))
    memory: deque[list[Any]] = deque(maxlen=slots)
    actions, rng, rss = ale.getMinimalActionSet(), random.Random(1), rss_reader()
    before, state = rss(), ale.getScreenGrayscale()[::2, ::2]
    for _ in range(slots):
        action = rng.randrange(len(actions))
        reward = sum(ale.act(actions[action]) for _ in range(4))
        following, ended = ale.getScreenGrayscale()[::2, ::2], ale.game_over()
        memory.append([state, action, reward, following, ended])
        state = following
        if ended:
            ale.reset_game()
    return (rss() - before) / slots, *sample_ms(lambda size: rng.sample(memory, size))


def peer_rows(slots: int, sb3_python: Path | None) -> list[str]:
    """What others keep: measured where they are at hand, else by arithmetic."""
    measured = {"the forum's deque": forum_deque(slots)}
    if sb3_python is not None:
        script = str(Path(__file__).with_name("peer_sb3.py"))
        command = [str(sb3_python), script, "--buffer", "--capacity", str(slots)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for name, found in zip(SB3_BYTES, json.loads(output.splitlines()[-1])):
            measured[name] = (found["bytes"], found["median_ms"], found["p99_ms"])
    rows = [f"| breakout | {name} | {b:,.0f} | {ms:.3f} (p99 {p99:.3f}) |" for name, (b, ms, p99) in measured.items()]
    return rows + [
        f"| any | {name} (arithmetic) | {size:,} | |" for name, size in SB3_BYTES.items() if name not in measured
    ]


def games_table(slots: int, games: tuple[str, ...] = GAMES, sb3_python: Path | None = None) -> str:
    """Bytes and sample times per game and codec, beside what others keep."""
    lines = [f"| game, {slots:,} slots | codec | B per transition | sample of 32, ms |", "| --- | --- | --- | --- |"]
    for game in games:
        for codec in ("zstd", "raw"):
            replay = make_replay(slots, codec)
            Player(game).play(replay, slots)
            size = bytes_per_slot(replay)
            median, worst = sample_ms(replay.sample)
            lines.append(f"| {game} | {codec} | {size:,.1f} | {median:.3f} (p99 {worst:.3f}) |")
            replay.close()
    return "\n".join(lines + peer_rows(slots, sb3_python))


def fill(game: str, slots: int, codec: str) -> None:
    """Fills a replay and prints all that matters on the way."""
    rss = rss_reader()
    player = Player(game)
    warm = make_replay(10_000, codec)
    player.play(warm, 16_000)
    small = sample_ms(warm.sample)
    warm.close()
    del warm
    before = rss()
    replay, appends, begin = make_replay(slots, codec), [], time.perf_counter()
    append = replay.append

    def timed(*row: np.ndarray) -> None:
        start = time.perf_counter()
        append(*row)
        appends.append(time.perf_counter() - start)

    replay.append = timed  # type: ignore[method-assign,assignment]
    player.play(replay, slots + replay.segment_slots)
    seconds = time.perf_counter() - begin
    replay.wait()
    large, grown = sample_ms(replay.sample), (rss() - before) / 2**20
    print(f"{game}: {replay.num_slots:,} slots in {seconds:.0f} s, {bytes_per_slot(replay):.1f} B per transition")
    print(
        f"  RSS growth {grown:.0f} MiB; parts { ({k: round(v / 2**20, 1) for k, v in replay.memory_bytes().items()}) }"
    )
    print(f"  sample of 32: {large[0]:.3f} ms (p99 {large[1]:.3f}); at 10,000 slots {small[0]:.3f} ms")
    print(f"  append: p99 {np.percentile(appends, 99) * 1e3:.3f} ms, longest {max(appends) * 1e3:.1f} ms")
    print(f"  notes: {replay.notes() or 'none'}", flush=True)
    replay.close()


def ram_picture(path: Path) -> None:
    """Draws RAM over steps: this replay as it fills, and what others keep."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rss, player = rss_reader(), Player("breakout")
    before, replay, points = rss(), make_replay(200_000, "zstd"), [(0.0, 1.0)]
    for _ in range(50):
        player.play(replay, 4_000)
        points.append((points[-1][0] + 4_000, max(1.0, (rss() - before) / 2**20)))
    replay.close()
    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=130)
    steps = np.array([point[0] for point in points])
    for (name, size), colour in zip(
        {"the forum's deque": FORUM_BYTES, **SB3_BYTES, "raw frames, each once": 7_056}.items(),
        ("#b71c1c", "#e08214", "#f0b060", "#888888"),
    ):
        axes.plot(steps / 1e3, np.maximum(1, steps * size / 2**20), color=colour, label=name, lw=1.6)
    axes.plot(steps / 1e3, [point[1] for point in points], color="#0b5fa5", lw=2.6, label="this replay, measured")
    axes.set_yscale("log")
    axes.set_ylim(10, 20_000)
    axes.set_xlim(0, steps[-1] / 1e3)
    axes.set_yticks([10, 100, 1_000, 10_000], ["10 MiB", "100 MiB", "1 GiB", "10 GiB"])
    axes.set_xlabel("thousand transitions of Breakout")
    axes.set_title("RAM of the replay as it fills", loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Measures one game, or draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", nargs="+", default=["breakout"], help="games to measure")
    parser.add_argument("--slots", type=int, default=100_000, help="capacity to fill")
    parser.add_argument("--codec", default="zstd", help="zstd or raw")
    parser.add_argument("--picture", type=Path, help="draw RAM over steps into this file instead")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.picture is not None:
        ram_picture(options.picture)
        return
    for game in options.game:
        fill(game, options.slots, options.codec)


if __name__ == "__main__":
    main()
