"""The ε schedule at named steps, ε-greedy's chances, the FIRE rule."""

import numpy as np
import pytest

from dqn.config import PolicyConfig
from dqn.policy import epsilon_greedy, force_fire, linear_epsilon


@pytest.mark.parametrize(
    ("step", "epsilon"),
    [(0, 1.0), (49_999, 1.0), (50_000, 1.0), (50_001, 0.9999991), (550_000, 0.55), (1_050_000, 0.1), (10**7, 0.1)],
)
def test_epsilon_of_the_paper(step, epsilon):
    config = PolicyConfig(epsilon_final=0.1, epsilon_decay_steps=1_000_000, epsilon_decay_from="learning")
    assert linear_epsilon(step, config, 50_000) == pytest.approx(epsilon, abs=1e-12)


@pytest.mark.parametrize(
    ("step", "epsilon"), [(0, 1.0), (49_999, 1.0), (50_000, 0.9505), (500_000, 0.505), (10**6, 0.01)]
)
def test_epsilon_counted_from_the_start(step, epsilon):
    assert linear_epsilon(step, PolicyConfig(), 50_000) == pytest.approx(epsilon, abs=1e-12)


def test_a_start_of_its_own():
    config = PolicyConfig(epsilon_start=0.5, epsilon_final=0.5)
    assert {linear_epsilon(step, config, 100) for step in (0, 100, 10**6, 10**8)} == {0.5}


def test_greedy_takes_the_best_and_of_equals_the_first():
    q = np.array([[1.0, 3.0, 2.0], [2.0, 2.0, 1.0], [0.0, 0.0, 0.0]], np.float32)
    actions = epsilon_greedy(q, 0.0, np.random.default_rng(1))
    assert actions.tolist() == [1, 0, 0] and actions.dtype == np.int64


def test_chances():
    """ε = 0.3 over 4 actions: the best one 0.7 + 0.3/4, each other 0.3/4; 20,000 draws, 5 standard errors."""
    q = np.tile(np.array([[0.0, 1.0, 0.0, 0.0]], np.float32), (20_000, 1))
    share = np.bincount(epsilon_greedy(q, 0.3, np.random.default_rng(2)), minlength=4) / 20_000
    assert share == pytest.approx([0.075, 0.775, 0.075, 0.075], abs=0.015)
    share = np.bincount(epsilon_greedy(q, 1.0, np.random.default_rng(3)), minlength=4) / 20_000
    assert share == pytest.approx([0.25] * 4, abs=0.016)


def test_the_same_numbers_are_drawn_whatever_epsilon_is():
    left, right = np.random.default_rng(4), np.random.default_rng(4)
    epsilon_greedy(np.zeros((8, 6), np.float32), 0.0, left)
    epsilon_greedy(np.ones((8, 6), np.float32), 1.0, right)
    assert left.random() == right.random()


def test_fire():
    actions, where = np.array([2, 3, 0]), np.array([True, False, True])
    assert force_fire(actions, 1, where).tolist() == [1, 3, 1]
    assert force_fire(actions, 5, where).tolist() == [5, 3, 5]
    assert force_fire(actions, None, where).tolist() == [2, 3, 0]
    assert actions.tolist() == [2, 3, 0]
