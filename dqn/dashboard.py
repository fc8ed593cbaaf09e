"""TensorBoard's event files: written in order, cut at a resume, laid out in groups."""

import os
import platform
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

EVENTS = "events.out.tfevents.*"
LAYOUT_TAG = "custom_scalars__config__"
LAYOUT = {
    "Learning": ("learn/loss", "learn/q_mean", "learn/td_error_abs", "learn/grad_norm", "policy/epsilon"),
    "Returns": ("eval/return_mean", "episode/return", "episode/length_steps"),
    "Memory by part": (
        "RSS of the process, MiB: memory/rss_mib_mean memory/rss_mib_min memory/rss_mib_max",
        "parts of it, MiB: memory/replay_mib memory/model_mib memory/children_mib memory/unaccounted_mib",
        "memory/cuda_mib",
        "memory/limit_mib",
    ),
    "Speed": ("speed/steps_per_s", "speed/updates_per_s"),
}
"""Groups of charts; a chart is the tags that it draws together, with a title if they are several."""


class Board:
    """TensorBoard's event file of this process: written at once, by no thread, and sorted after the earlier ones."""

    def __init__(self, folder: Path, start_step: int):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self._event, self._summary = Event, summary
        self._last = cut_events(folder, start_step)
        self._text_step = start_step + 1
        # Readers go by the seconds in the name: another node's clock, or a resume within one, must not mix the order.
        seconds = [int(path.name.split(".")[3]) for path in folder.glob(EVENTS)]
        second = max([int(time.time()), *(other + 1 for other in seconds)])
        name = EVENTS.replace("*", f"{second:010d}.{platform.node()}.{os.getpid()}")
        self._file: Any = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._write(Event(file_version="brain.Event:2"))
        if start_step:  # for a dashboard that is open and has seen what was cut
            self._write(Event(step=start_step + 1, session_log=SessionLog(status=SessionLog.START)))
        if LAYOUT_TAG not in self._last:
            self._write(Event(summary=summary.custom_scalars({group: _charts(c) for group, c in LAYOUT.items()})))

    def scalars(self, step: int, values: dict[str, float]) -> str | None:
        """Adds points; returns a line for the user if the disk refuses, after which nothing is written."""
        new = {tag: float(value) for tag, value in values.items() if step > self._last.get(tag, -1)}
        self._last.update(dict.fromkeys(new, step))
        event = self._event(step=step)
        for tag, value in new.items():
            event.summary.value.add(tag=tag, simple_value=value)
        return self._write(event) if new else None

    def text(self, tag: str, markdown: str) -> str | None:
        """Adds a text."""
        return self._write(self._event(step=self._text_step, summary=self._summary.text(tag, markdown)))

    def sync(self) -> None:
        """Sees the file onto the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file; what comes later is dropped."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _write(self, event: Any) -> str | None:
        if self._file is None:
            return None
        event.wall_time = time.time()
        try:
            self._records.write(event.SerializeToString())
            self._file.flush()
        except OSError as error:
            self.close()
            return f"the dashboard's file: {error.strerror}; the dashboard ends here, training goes on"
        return None


def _charts(charts: tuple[str, ...]) -> dict[str, list[Any]]:
    parts = [chart.rpartition(": ") for chart in charts]
    return {title or tags: ["Multiline", tags.split()] for title, _, tags in parts}


def cut_events(folder: Path, step: int) -> dict[str, int]:
    """Cuts every event file at its first event beyond `step`, or at a torn one; returns each tag's last step.

    A record is its length (8 bytes), a checksum (4), the event, a checksum (4); within a process steps rise.
    """
    from tensorboard.compat.proto.event_pb2 import Event

    last: dict[str, int] = {}
    for path in sorted(folder.glob(EVENTS)):
        end = 0
        with path.open("rb") as file:
            while len(head := file.read(12)) == 12:
                size = struct.unpack("<Q", head[:8])[0]
                data = file.read(size + 4) if end + size + 16 <= path.stat().st_size else b""
                if len(data) < size + 4:
                    break
                event = Event.FromString(data[:size])
                if event.step > step:
                    break
                last.update({value.tag: max(event.step, last.get(value.tag, 0)) for value in event.summary.value})
                end = file.tell()
        if end < path.stat().st_size:
            os.truncate(path, end)
    return last
