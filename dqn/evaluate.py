"""Evaluation: whole games, raw scores, the protocol printed beside them.

The Nature protocol by default (Mnih et al. 2015, Methods, "Evaluation procedure"): 30 games, ε 0.05, no-op starts, at
most five minutes of play (18,000 frames). Games are shared out over the lanes beforehand: were the first 30 that end
taken, short games would be favoured.
"""

import csv
import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dqn.atari import PythonEnvs
from dqn.config import EnvConfig, EvaluationConfig
from dqn.policy import epsilon_greedy, force_fire
from dqn.preprocessing import FrameStack

PROTOCOLS: dict[str, dict[str, Any]] = {
    "nature": {
        "evaluation.epsilon": 0.05,
        "evaluation.max_frames": 18_000,
        "env.sticky_probability": 0.0,
        "env.noop_max_frames": 30,
    },
    "machado": {
        "evaluation.epsilon": 0.01,
        "evaluation.max_frames": 108_000,
        "env.sticky_probability": 0.25,
        "env.noop_min_frames": 0,
        "env.noop_max_frames": 0,
    },
    "greedy": {"evaluation.epsilon": 0.0, "evaluation.max_frames": 108_000},
}
"""What each protocol sets; `config` leaves all as the run has it."""

SCORES = Path(__file__).parents[1] / "benchmarks" / "reference" / "random_and_human.csv"


class Film(Protocol):
    """What can film a game: see `video.Video`."""

    def add(self, screen: np.ndarray, score: float, lives: int, q_values: np.ndarray) -> None:
        """Takes a picture u8[210, 160, 3] with what stands beside it."""


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """The games of an evaluation.

    Attributes:
        game: the ROM's name.
        step: the step of the weights.
        returns: raw score of each game.
        lengths_steps: decisions in each game.
        capped: how many games ended at `max_frames`: their scores are lower bounds.
        epsilon: chance of a random action.
        protocol: all of it in one line.
    """

    game: str
    step: int
    returns: list[float]
    lengths_steps: list[int]
    capped: int
    epsilon: float
    protocol: str

    @property
    def return_mean(self) -> float:
        """The figure that papers report."""
        return float(np.mean(self.returns))

    def statistics(self) -> dict[str, float]:
        """Mean, standard deviation, median, best; the interquartile mean with its 95 % bootstrap interval."""
        returns = np.sort(self.returns)
        rng = np.random.default_rng(0)
        resampled = np.sort(rng.choice(returns, (2_000, len(returns))), axis=1)
        low, high = np.percentile(_interquartile_mean(resampled), [2.5, 97.5])
        found = {
            "return_mean": self.return_mean,
            "return_std": float(np.std(returns)),
            "return_median": float(np.median(returns)),
            "return_best": float(returns[-1]),
            "return_iqm": float(_interquartile_mean(returns[None])[0]),
            "return_iqm_low": float(low),
            "return_iqm_high": float(high),
        }
        human = human_normalised(self.game, self.return_mean)
        return found if human is None else {**found, "human_normalised": human}

    def to_json(self) -> str:
        """The content of `eval.json`."""
        values = {**dataclasses.asdict(self), **self.statistics(), "episodes": len(self.returns), "steps": self.step}
        return json.dumps(values, indent=1) + "\n"

    def summary(self) -> str:
        """One line for the log."""
        capped = f", {self.capped} capped at the longest" if self.capped else ""
        statistics = self.statistics()
        spread, median = statistics["return_std"], statistics["return_median"]
        return f"return {self.return_mean:.1f} ± {spread:.1f}, median {median:.1f}, {len(self.returns)} games{capped}"

    def table(self) -> str:
        """All of it for the console."""
        rows = [f"{self.game} at step {self.step:,}: {self.protocol}"]
        rows += [f"  {name:<18}{value:>10.2f}" for name, value in self.statistics().items()]
        rows.append(f"  {'games':<18}{len(self.returns):>10}")
        rows.append(f"  {'capped':<18}{self.capped:>10}" + ("  their scores are lower bounds" if self.capped else ""))
        return "\n".join(rows)


def _interquartile_mean(rows: np.ndarray) -> np.ndarray:
    """Mean of the middle half of each sorted row; of all of it where a quarter is less than one."""
    cut = rows.shape[1] // 4
    return rows[:, cut : rows.shape[1] - cut].mean(axis=1)


@functools.cache
def random_and_human() -> dict[str, tuple[float, float]]:
    """Mean scores of random play and of a human tester by game (Wang et al. 2016, table 2)."""
    lines = SCORES.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {row["game"]: (float(row["random"]), float(row["human"])) for row in rows}


def human_normalised(game: str, score: float) -> float | None:
    """0 for random play, 1 for a human tester; None for a game whose scores are not known."""
    low, high = random_and_human().get(game, (math.nan, math.nan))
    return None if math.isnan(low) else (score - low) / (high - low)


def evaluate(
    q_values: Callable[[np.ndarray], np.ndarray],
    env: EnvConfig,
    evaluation: EvaluationConfig,
    seed: np.random.SeedSequence,
    *,
    step: int = 0,
    poll: Callable[[], None] = lambda: None,
    film: Film | None = None,
) -> EvalResult:
    """Plays whole games with generators of its own: training goes on as if nothing had been.

    Args:
        q_values: u8[N, S, H, W] states to f32[N, A] values.
        env: the run's games; its no-ops, stickiness and FIRE rule hold, its longest game does not.
        evaluation: how many games, how long, how random.
        seed: of the games and of the random actions.
        step: of the weights, for the record.
        poll: called at each row; may raise to end the evaluation.
        film: takes the first game.
    """
    lanes = min(evaluation.num_envs, evaluation.episodes)
    env = dataclasses.replace(env, num_envs=lanes, max_frames=evaluation.max_frames, backend="python")
    env_seed, policy_seed = (np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, i)) for i in (0, 1))
    envs, rng = PythonEnvs(env, env_seed), np.random.default_rng(policy_seed)
    frames = FrameStack(lanes, env.stack_size, envs.frame_shape)
    fire_action = envs.fire_action if env.fire_on_life else None
    quota = np.full(lanes, evaluation.episodes // lanes) + (np.arange(lanes) < evaluation.episodes % lanes)
    scores, lengths = np.zeros(lanes), np.zeros(lanes, np.int64)
    result = EvalResult(env.game, step, [], [], 0, evaluation.epsilon, describe(env, evaluation))
    capped = 0

    timestep = envs.reset()
    while quota.any():
        poll()
        values = q_values(frames.push(timestep.frame, timestep.first))
        if film is not None:
            film.add(envs.lanes[0].ale.getScreenRGB(), scores[0], int(timestep.lives[0]), values[0])
            film = None if timestep.ended[0] else film
        actions = epsilon_greedy(values, evaluation.epsilon, rng)
        envs.send(force_fire(actions, fire_action, timestep.first | timestep.lost_life))
        timestep = envs.recv()
        scores = np.where(timestep.first, 0, scores + timestep.reward)
        lengths = np.where(timestep.first, 0, lengths + 1)
        for lane in np.flatnonzero(timestep.ended & (quota > 0)):
            quota[lane] -= 1
            envs.idle[lane] = quota[lane] == 0
            result.returns.append(float(scores[lane]))
            result.lengths_steps.append(int(lengths[lane]))
            capped += int(not envs.lanes[lane].ale.game_over())
    return dataclasses.replace(result, capped=capped)


def describe(env: EnvConfig, evaluation: EvaluationConfig) -> str:
    """The protocol in one line."""
    sticky = f"sticky actions {env.sticky_probability:g}" if env.sticky_probability else "no sticky actions"
    fire = "FIRE after a life loss by rule" if env.fire_on_life else "no FIRE rule"
    return (
        f"{evaluation.episodes} whole games, raw scores, ε {evaluation.epsilon:g}, {env.noop_min_frames} to"
        f" {env.noop_max_frames} no-op frames, {sticky}, at most {evaluation.max_frames:,} frames, {fire},"
        f" {env.frame_skip_frames} frames a decision, minimal actions"
    )
