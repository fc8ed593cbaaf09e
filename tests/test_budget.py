"""Budgets, deadlines and signals (the processes that are really signalled are in test_crash.py)."""

import os
import signal
import time

import pytest

from dqn.budget import Budget, StopEarly
from dqn.config import BudgetConfig


def test_steps_and_games_whichever_comes_first():
    budget = Budget(BudgetConfig(max_steps=100, max_episodes=5, max_hours=None))
    assert not budget.finished(99, 4)
    assert budget.finished(100, 0) and budget.finished(0, 5)
    assert not Budget(BudgetConfig(max_steps=100, max_episodes=None)).finished(99, 10**9)


def test_the_deadline_leaves_room_for_a_save():
    budget = Budget(BudgetConfig(max_hours=1.0))
    budget._started = time.monotonic() - 3600 + 60  # a minute is left
    budget.save_seconds = 5
    assert not budget.must_stop()
    budget.save_seconds = 50
    assert budget.must_stop() and "max_hours 1" in budget.stop_reason
    with pytest.raises(StopEarly):
        budget.poll()


def test_no_hours_no_deadline():
    budget = Budget(BudgetConfig(max_hours=None))
    budget._started -= 1e9
    assert not budget.must_stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_stops_by_name(restore_signals, number):
    budget = Budget(BudgetConfig(max_hours=None))
    budget.listen()
    assert not budget.must_stop()
    os.kill(os.getpid(), number)
    assert budget.must_stop() and budget.stop_reason == signal.Signals(number).name
