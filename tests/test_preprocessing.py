"""Pictures: golden values of the pipeline, and the stack."""

import hashlib

import numpy as np
import pytest

from dqn.preprocessing import FrameStack, max_pool, resize


def pictures():
    y, x = np.mgrid[0:210, 0:160]
    first = ((x * 7 + y * 13) % 256).astype(np.uint8)
    second = ((x * y + 31 * x) % 256).astype(np.uint8)
    return first, second


def digest(array):
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def test_golden_preprocessing():
    """The input's hash is checked first: a failure below it is the pipeline's."""
    first, second = pictures()
    assert (digest(first), digest(second)) == ("72c1dd747e8d5657", "44fd96d214b64bbe")
    pooled = max_pool(first, second, np.empty_like(first))
    assert digest(pooled) == "dab4d91553378974"
    small = resize(pooled, np.empty((84, 84), np.uint8))
    assert digest(small) == "9077090e7eed77b0"


def test_resize_is_the_average_over_areas():
    picture = np.zeros((210, 160), np.uint8)
    picture[:5, :40] = 200  # 210/84 = 2.5 rows, 160/84 = 1.905 columns a pixel
    small = resize(picture, np.empty((84, 84), np.uint8))
    assert (small[:2, :21] == 200).all() and (small[2:] == 0).all() and (small[:, 21:] == 0).all()


def test_the_stack_shifts_and_is_cut_only_at_a_games_start():
    frames = FrameStack(2, 4, (3, 3))
    picture = lambda value: np.full((2, 3, 3), value, np.uint8)  # noqa: E731
    never, both = np.zeros(2, bool), np.ones(2, bool)
    frames.push(picture(1), both)
    for value in (2, 3, 4, 5):
        state = frames.push(picture(value), never)
    assert state[0, :, 0, 0].tolist() == [2, 3, 4, 5]
    state = frames.push(picture(6), np.array([False, True]))
    assert state[0, :, 0, 0].tolist() == [3, 4, 5, 6]
    assert state[1, :, 0, 0].tolist() == [0, 0, 0, 6]


@pytest.mark.parametrize("size", [36, 42, 84, 105])
def test_any_screen_size(size):
    assert resize(pictures()[0], np.empty((size, size), np.uint8)).shape == (size, size)
