"""What the tests share."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers on two cores: more threads would only wait for each other

import pytest


@pytest.fixture
def restore_signals():
    """A run takes the process's signals over; the test process gets them back."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before):
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """`learner.num_threads 0` means one here, for the same reason."""
    monkeypatch.setattr("dqn.learner.cores", lambda: 1)
