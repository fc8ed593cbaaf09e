"""Choosing actions: the ε schedule, ε-greedy over all lanes at once, and the FIRE rule."""

import numpy as np

from dqn.config import PolicyConfig


def linear_epsilon(step: int, config: PolicyConfig, learning_starts_steps: int) -> float:
    """ε at a step: `epsilon_start` (1 in the paper) during the fill, then linear to `epsilon_final`.

    The decay counts from step 0, or from the start of learning as Mnih et al. 2015 do.
    """
    if step < learning_starts_steps:
        return config.epsilon_start
    begin = learning_starts_steps if config.epsilon_decay_from == "learning" else 0
    share = min(1.0, (step - begin) / config.epsilon_decay_steps)
    return config.epsilon_start + share * (config.epsilon_final - config.epsilon_start)


def epsilon_greedy(q_values: np.ndarray, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """Actions i64[N] from q_values f32[N, A]: random with chance ε, else the best (the first of equals).

    The same random numbers are drawn whatever ε is.
    """
    lanes, num_actions = q_values.shape
    explore = rng.random(lanes) < epsilon
    return np.where(explore, rng.integers(num_actions, size=lanes), q_values.argmax(axis=1))


def force_fire(actions: np.ndarray, fire_action: int | None, where: np.ndarray) -> np.ndarray:
    """The actions with FIRE in the lanes `where` bool[N]; unchanged if the game has no FIRE or the rule is off."""
    return actions if fire_action is None else np.where(where, fire_action, actions)
