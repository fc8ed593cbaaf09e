"""Stable-Baselines3 at our settings, in its own environment: prints one JSON line. Run by `benchmarks.bench`.

Equal to ours: Breakout, 8 games, 84×84 gray, stack of 4, batch 32, one update per 4 steps, the same buffer and start.
Trains its DQN, or with `--buffer` fills its replay buffer in both of its modes and draws from it.
"""

import argparse
import json
import time

import ale_py
import gymnasium
import numpy as np
import psutil
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack, VecTransposeImage

LANES, SAMPLES = 8, 1_000


class Clock(BaseCallback):
    """Times the steps after learning has begun and warmed up."""

    def __init__(self, begin_steps: int):
        super().__init__()
        self.begin_steps = begin_steps
        self.begun_s, self.begun_steps, self.begun_updates = 0.0, 0, 0

    def _on_step(self) -> bool:
        if not self.begun_s and self.num_timesteps >= self.begin_steps:
            self.begun_s, self.begun_steps, self.begun_updates = (
                time.perf_counter(),
                self.num_timesteps,
                self.model._n_updates,
            )
        return True


def make_envs() -> VecFrameStack:
    """Its own wrappers."""
    gymnasium.register_envs(ale_py)
    return VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", n_envs=LANES, seed=1), 4)


def train(options: argparse.Namespace) -> dict[str, float]:
    """Trains; the speed after learning has begun, and RSS."""
    model = DQN(
        "CnnPolicy",
        make_envs(),
        buffer_size=options.capacity,
        learning_starts=options.learning_starts,
        batch_size=32,
        train_freq=1,
        gradient_steps=LANES // 4,
        target_update_interval=1_000,
        learning_rate=1e-4,
        exploration_fraction=1.0,
        exploration_final_eps=0.01,
        seed=1,
    )
    clock = Clock(options.learning_starts + 1_000)
    model.learn(options.steps, callback=clock)
    seconds = time.perf_counter() - clock.begun_s
    return {
        "steps_per_s": (model.num_timesteps - clock.begun_steps) / seconds,
        "updates_per_s": (model._n_updates - clock.begun_updates) / seconds,
        "rss_mib": psutil.Process().memory_info().rss / 2**20,
    }


def fill_buffer(capacity: int, optimize_memory_usage: bool) -> dict[str, float]:
    """Fills the buffer with random play: growth of RSS per transition, and milliseconds of a sample of 32."""
    envs = VecTransposeImage(make_envs())
    state = envs.reset()
    before = psutil.Process().memory_info().rss
    buffer = ReplayBuffer(
        capacity,
        envs.observation_space,
        envs.action_space,
        "cpu",
        n_envs=LANES,
        optimize_memory_usage=optimize_memory_usage,
        handle_timeout_termination=not optimize_memory_usage,
    )
    for _ in range(capacity // LANES):
        actions = np.array([envs.action_space.sample() for _ in range(LANES)])
        following, reward, done, infos = envs.step(actions)
        buffer.add(state, following, actions, reward, done, infos)
        state = following
    grown, times = psutil.Process().memory_info().rss - before, []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        buffer.sample(32)
        times.append(time.perf_counter() - begin)
    median, worst = np.percentile(times, (50, 99)) * 1e3
    return {"bytes": grown / capacity, "median_ms": float(median), "p99_ms": float(worst)}


def main() -> None:
    """One training, or the buffer in both modes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--learning-starts", type=int, default=0)
    parser.add_argument("--capacity", type=int, required=True)
    parser.add_argument("--buffer", action="store_true")
    options = parser.parse_args()
    if options.buffer:
        print(json.dumps([fill_buffer(options.capacity, optimize) for optimize in (False, True)]))
    else:
        print(json.dumps(train(options)))


if __name__ == "__main__":
    main()
