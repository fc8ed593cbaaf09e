"""Films a game as it is played: each picture goes to the encoder at once, so a long game takes no more memory.

The encoder comes with PyAV's wheel; neither a screen nor an ffmpeg of the system is needed.
"""

from fractions import Fraction
from pathlib import Path
from types import TracebackType

import av
import cv2
import numpy as np

from dqn.config import UsageError

FRAMES_PER_SECOND = 15
"""Decisions per second of the console: 60 frames, 4 a decision."""
SCALE, PANEL_WIDTH, HEIGHT = 3, 400, 640
INK, FAINT, BEST = (235, 235, 235), (140, 140, 150), (120, 220, 120)


class Video:
    """An mp4 file; a context manager.

    Args:
        path: the file to write.
        action_meanings: names of the actions, for the bars.

    Raises:
        UsageError: the file cannot be written or nothing here can encode it.
    """

    def __init__(self, path: Path, action_meanings: tuple[str, ...]):
        self.path, self._actions = path, action_meanings
        self._low = self._high = 0.0
        self._canvas = np.zeros((HEIGHT, 160 * SCALE + PANEL_WIDTH, 3), np.uint8)
        try:
            path.open("wb").close()  # PyAV would notice only when it writes
            self._file = av.open(str(path), "w")
            self._stream = self._file.add_stream("h264", rate=Fraction(FRAMES_PER_SECOND))
        except (OSError, ValueError) as error:
            raise UsageError(f"video {path} cannot be written: {error}") from None
        self._stream.height, self._stream.width = self._canvas.shape[:2]
        self._stream.pix_fmt = "yuv420p"
        self._stream.thread_count = 1

    def __enter__(self) -> "Video":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for packet in self._stream.encode():
            self._file.mux(packet)
        self._file.close()

    def add(self, screen: np.ndarray, score: float, lives: int, q_values: np.ndarray) -> None:
        """Takes a picture u8[210, 160, 3] with the score, the lives and the Q values f32[A] that chose the action."""
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
        frame = av.VideoFrame.from_ndarray(self._canvas, format="rgb24")
        for packet in self._stream.encode(frame):
            self._file.mux(packet)

    def _bars(self, q_values: np.ndarray, left: int, top: int) -> None:
        self._low = min(self._low, float(q_values.min()))
        self._high = max(self._high, float(q_values.max()), self._low + 1e-3)
        pitch = min(48, (HEIGHT - top - 20) // len(q_values))
        best = int(q_values.argmax())
        for i, (name, value) in enumerate(zip(self._actions, q_values)):
            y, colour = top + pitch * i, BEST if i == best else FAINT
            share = (float(value) - self._low) / (self._high - self._low)
            right = left + 130 + int(150 * share)
            self._text(name.lower(), left, y + pitch // 2 + 4, min(0.5, pitch / 60), colour)
            cv2.rectangle(self._canvas, (left + 130, y + pitch // 5), (right, y + pitch - pitch // 5), colour, -1)
            self._text(f"{value:.2f}", right + 8, y + pitch // 2 + 4, min(0.45, pitch / 60), INK)

    def _text(self, text: str, x: int, y: int, size: float, colour: tuple[int, int, int]) -> None:
        cv2.putText(self._canvas, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, size, colour, 1, cv2.LINE_AA)
