"""Catch: a ball falls, a paddle must be under it. A pixel game for the real loop, replay and network."""

import dataclasses
import json

import numpy as np

from dqn.atari import TimeStep

CELLS = 7


class CatchEnvs:
    """Catch on N lanes behind the interface of `dqn.atari`: 84×84 pictures, games of six steps, return +1 or −1."""

    fire_action = None
    num_actions = 3
    action_meanings = ("NOOP", "RIGHT", "LEFT")

    def __init__(self, env, seed, exact=False):
        self.num_envs, self.size = env.num_envs, env.screen_size
        self.frame_shape = (env.screen_size, env.screen_size)
        self.rng = np.random.default_rng(seed)
        self.exact = exact
        lanes = np.zeros(self.num_envs, np.int64)
        self.row, self.ball, self.paddle = lanes.copy(), lanes.copy(), lanes.copy()
        self.over = np.zeros(self.num_envs, bool)

    def reset(self):
        self._begin(np.ones(self.num_envs, bool))
        return self._timestep(np.zeros(self.num_envs), np.zeros(self.num_envs, bool), np.ones(self.num_envs, bool))

    def send(self, actions):
        self.actions = np.array(actions)

    def recv(self):
        first = self.over.copy()
        move = np.array([0, 1, -1])[self.actions]
        self.paddle = np.where(first, self.paddle, np.clip(self.paddle + move, 0, CELLS - 1))
        self.row = np.where(first, self.row, self.row + 1)
        self._begin(first)
        self.over = ~first & (self.row == CELLS - 1)
        reward = np.where(self.over, np.where(self.ball == self.paddle, 1.0, -1.0), 0.0)
        return self._timestep(reward, self.over.copy(), first)

    def _begin(self, lanes):
        count = int(lanes.sum())
        self.row[lanes] = 0
        self.ball[lanes] = self.rng.integers(CELLS, size=count)
        self.paddle[lanes] = self.rng.integers(CELLS, size=count)

    def _timestep(self, reward, over, first):
        frame = np.zeros((self.num_envs, CELLS, CELLS), np.uint8)
        lanes = np.arange(self.num_envs)
        frame[lanes, CELLS - 1, self.paddle] = 120
        frame[lanes, self.row, self.ball] = 255
        scale = self.size // CELLS
        pad = self.size - scale * CELLS
        frame = np.pad(frame.repeat(scale, 1).repeat(scale, 2), ((0, 0), (0, pad), (0, pad)))
        none = np.zeros(self.num_envs, bool)
        return TimeStep(
            frame=frame,
            reward=reward.astype(np.float32),
            terminal=over,
            truncated=none,
            ended=over,
            lives=np.zeros(self.num_envs, np.int32),
            first=first,
            lost_life=none,
        )

    def state_dict(self):
        if not self.exact:
            return None
        arrays = {"row": self.row, "ball": self.ball, "paddle": self.paddle, "over": self.over}
        return {**{name: value.copy() for name, value in arrays.items()}, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state):
        for name in ("row", "ball", "paddle", "over"):
            setattr(self, name, np.array(state[name]))
        self.rng.bit_generator.state = state["rng"]

    def close(self):
        pass


@dataclasses.dataclass
class Score:
    return_mean: float

    def summary(self):
        return f"return {self.return_mean:.2f}"

    def to_json(self):
        return json.dumps({"return_mean": self.return_mean})


def evaluate_catch(q_values, env, evaluation, seed, *, step, poll):
    """Greedy play of 100 rows."""
    envs = CatchEnvs(env, seed)
    timestep = envs.reset()
    states = np.zeros((envs.num_envs, env.stack_size, *envs.frame_shape), np.uint8)
    returns = []
    for _ in range(200):
        states = np.roll(states, -1, axis=1)
        states[timestep.first] = 0
        states[:, -1] = timestep.frame
        envs.send(q_values(states).argmax(1))
        timestep = envs.recv()
        returns += list(timestep.reward[timestep.ended])
    return Score(float(np.mean(returns)))


def use_catch(monkeypatch, exact=False):
    """Puts Catch where the run makes its games and evaluates."""
    from dqn import run

    monkeypatch.setattr(run, "make_envs", lambda env, seed: CatchEnvs(env, seed, exact))
    monkeypatch.setattr(run, "evaluate", evaluate_catch)
