"""Films a game as it is played: each picture goes to the encoder at once, so a long game takes no more memory.

The encoder comes with PyAV's wheel; neither a screen nor an ffmpeg of the system is needed. Where the film fails all
the same (no encoder, no memory, a full disk), one warning says so and the evaluation goes on without it.
"""

import contextlib
import re
import warnings
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import cv2
import numpy as np

from dqn.config import UsageError

FRAMES_PER_SECOND = 15
"""Decisions per second of the console: 60 frames, 4 a decision."""
ENCODERS = ("h264", "mpeg4")
"""The first that PyAV holds is taken."""
SCALE, PANEL_WIDTH, HEIGHT = 3, 400, 640
INK, FAINT, BEST = (235, 235, 235), (140, 140, 150), (120, 220, 120)


class Video:
    """An mp4 file; a context manager.

    Args:
        path: the file to write.
        action_meanings: names of the actions, for the bars.

    Attributes:
        problem: why there is no film, or only its beginning; None while all is well.

    Raises:
        UsageError: the file cannot be written, or its ending names no format.
    """

    def __init__(self, path: Path, action_meanings: tuple[str, ...]):
        self.path = path
        self.problem: str | None = None
        self._actions = [_words(name) for name in action_meanings]
        self._low = self._high = 0.0
        self._file: Any = None
        self._canvas = np.zeros((HEIGHT, 160 * SCALE + PANEL_WIDTH, 3), np.uint8)
        with self._or_without():
            self._open()

    def __enter__(self) -> "Video":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._or_without():
            if self.problem is None:
                self._encode(None)
        with self._or_without():
            if self._file is not None:
                self._file.close()

    @contextlib.contextmanager
    def _or_without(self) -> Iterator[None]:
        """Whatever befalls the film must not cost the evaluation: the first problem is a warning, the rest silence."""
        try:
            yield
        except UsageError:
            raise
        except Exception as error:
            if self.problem is None:
                self.problem = f"{type(error).__name__}: {error}"
                warnings.warn(f"no video, the evaluation goes on: {self.path}: {self.problem}", stacklevel=4)

    def _open(self) -> None:
        import av  # only who films needs it

        try:
            self._file = av.open(str(self.path), "w")
            self.path.open("wb").close()  # PyAV would notice only when it writes
        except ValueError as error:
            raise UsageError(f"video {self.path}: {error}; end its name in .mp4") from None
        except OSError as error:
            raise UsageError(f"video {self.path} cannot be written: {error.strerror}") from None
        name = next((name for name in ENCODERS if name in av.codecs_available), ENCODERS[0])
        self._stream = self._file.add_stream(name, rate=Fraction(FRAMES_PER_SECOND))
        self._stream.height, self._stream.width = self._canvas.shape[:2]
        self._stream.pix_fmt = "yuv420p"
        self._stream.thread_count = 1
        if name == "h264":  # x264 else looks 40 pictures ahead, and keeps them: 165 MB instead of 57
            self._stream.options = {"preset": "veryfast", "tune": "zerolatency"}

    def _encode(self, frame: Any) -> None:
        for packet in self._stream.encode(frame):
            self._file.mux(packet)

    def add(self, screen: np.ndarray, score: float, lives: int, q_values: np.ndarray) -> None:
        """Takes a picture u8[210, 160, 3] with the score, the lives and the Q values f32[A] that chose the action."""
        if self.problem is None:
            with self._or_without():
                self._draw(screen, score, lives, q_values)
                self._encode(self._picture())

    def _picture(self) -> Any:
        import av

        return av.VideoFrame.from_ndarray(self._canvas, format="rgb24")

    def _draw(self, screen: np.ndarray, score: float, lives: int, q_values: np.ndarray) -> None:
        self._canvas[:] = (18, 18, 24)
        height = screen.shape[0] * SCALE
        picture = cv2.resize(screen, None, fx=SCALE, fy=SCALE, interpolation=cv2.INTER_NEAREST)
        top = (HEIGHT - height) // 2
        self._canvas[max(top, 0) : top + height, : 160 * SCALE] = picture[:HEIGHT]
        left = 160 * SCALE + 32
        self._text("score", left, 60, 0.6, FAINT)
        self._text(f"{score:g}", left, 110, 1.6, INK)
        self._text("lives", left + 200, 60, 0.6, FAINT)
        self._text(str(lives), left + 200, 110, 1.6, INK)
        self._text("Q values", left, 170, 0.6, FAINT)
        self._bars(q_values, left, 190)

    def _bars(self, q_values: np.ndarray, left: int, top: int) -> None:
        self._low = min(self._low, float(q_values.min()))
        self._high = max(self._high, float(q_values.max()), self._low + 1e-3)
        pitch = min(48, (HEIGHT - top - 20) // len(q_values))
        best = int(q_values.argmax())
        start, scale = left + 130, 150 / (self._high - self._low)
        zero = start - int(self._low * scale)
        for i, (name, value) in enumerate(zip(self._actions, q_values)):
            y, colour = top + pitch * i, BEST if i == best else FAINT
            end = zero + int(float(value) * scale)
            self._text(name, left, y + pitch // 2 + 4, min(0.5, pitch / 60), colour)
            cv2.rectangle(self._canvas, (zero, y + pitch // 5), (end, y + pitch - pitch // 5), colour, -1)
            self._text(f"{value:.2f}", start + 160, y + pitch // 2 + 4, min(0.45, pitch / 60), INK)

    def _text(self, text: str, x: int, y: int, size: float, colour: tuple[int, int, int]) -> None:
        cv2.putText(self._canvas, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, size, colour, 1, cv2.LINE_AA)


def _words(action: str) -> str:
    """`DOWNRIGHTFIRE` as `down right fire`."""
    return re.sub(r"(?<=.)(?=RIGHT|LEFT|FIRE)", " ", action).lower()
