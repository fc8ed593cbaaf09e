"""Rows appended to a CSV file whose first column is the step, and the cut of what a resumed run has not lived yet.

Each row goes to the system as one write as soon as it is known, so a killed process leaves whole rows behind. A disk
that is full costs rows and a warning, never the run.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Writes a text file that is whole, or as it was."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def cut_csv(path: Path, header: str, step: int) -> list[str]:
    """Cuts a file back to its rows up to `step`, whole and in order; returns them without the header.

    The file is replaced only if something has to go, and atomically. A file of another header is begun anew.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        text = ""
    lines = text.splitlines()
    columns = header.count(",")
    rows = [line for line in lines[1:] if line.count(",") == columns and _step(line) <= step]
    if lines[:1] != [header]:
        rows = []
    kept = "\n".join([header, *rows]) + "\n"
    if kept != text:
        replace_text(path, kept)
    return rows


def _step(line: str) -> float:
    step = line.partition(",")[0]
    return int(step) if step.isdigit() else float("inf")


class CsvLog:
    """A CSV file open for appending, cut back to `step` at first."""

    def __init__(self, path: Path, header: str, step: int):
        self.path = path
        self.rows_before = cut_csv(path, header, step)
        """The rows that an earlier process wrote and this one goes on from."""
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._failed = False

    def append(self, rows: Iterable[Sequence[object]]) -> str | None:
        """Writes rows; returns a line for the user the first time that the disk refuses."""
        text = "".join(",".join(map(str, row)) + "\n" for row in rows)
        try:
            os.write(self._fd, text.encode())
        except OSError as error:
            first, self._failed = not self._failed, True
            return f"{self.path.name}: {error.strerror}; its rows are lost until the disk takes them" if first else None
        return None

    def sync(self) -> None:
        """Sees the rows onto the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)
