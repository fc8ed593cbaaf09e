"""Stable-Baselines3's DQN at our settings, in its own environment: prints one JSON line. Run by `benchmarks.bench`.

Equal to ours: Breakout, 8 games, 84×84 gray, stack of 4, batch 32, one update per 4 steps, the same buffer and start.
"""

import argparse
import json
import time

import ale_py
import gymnasium
import psutil
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack

LANES = 8


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--learning-starts", type=int, required=True)
    parser.add_argument("--capacity", type=int, required=True)
    options = parser.parse_args()
    gymnasium.register_envs(ale_py)
    envs = VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", n_envs=LANES, seed=1), 4)
    model = DQN(
        "CnnPolicy",
        envs,
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
    print(
        json.dumps(
            {
                "steps_per_s": (model.num_timesteps - clock.begun_steps) / seconds,
                "updates_per_s": (model._n_updates - clock.begun_updates) / seconds,
                "rss_mib": psutil.Process().memory_info().rss / 2**20,
            }
        )
    )


if __name__ == "__main__":
    main()
