"""From the emulator's pictures to the network's states (Mnih et al. 2015, Methods, "Preprocessing").

Two raw gray pictures -> their maximum (the console draws some sprites only every other frame) -> 84×84 -> a stack of
four. All `uint8`, all into memory that is there already.
"""

import cv2
import numpy as np


def max_pool(first: np.ndarray, second: np.ndarray, out: np.ndarray) -> np.ndarray:
    """The brighter of two pictures u8[H, W], pixel by pixel, into `out`."""
    return np.maximum(first, second, out=out)


def resize(picture: np.ndarray, out: np.ndarray) -> np.ndarray:
    """The picture u8[H, W] averaged over areas to the size of `out`, into `out`."""
    return cv2.resize(picture, (out.shape[1], out.shape[0]), dst=out, interpolation=cv2.INTER_AREA)


class FrameStack:
    """The states of N games: the newest S pictures of each, zeros before a game's first.

    The stack is cut only where a game begins, never at a lost life.

    Attributes:
        state: u8[N, S, H, W], the oldest picture first; its memory is used again by each push.
    """

    def __init__(self, num_envs: int, stack_size: int, frame_shape: tuple[int, int]):
        self.state = np.zeros((num_envs, stack_size, *frame_shape), np.uint8)

    def push(self, frame: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Takes the pictures u8[N, H, W]; `first` bool[N] says which begin a game. Returns `state`."""
        self.state[:, :-1] = self.state[:, 1:]
        if first.any():
            self.state[first] = 0
        self.state[:, -1] = frame
        return self.state
