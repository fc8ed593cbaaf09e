"""Checkpoints: one file per generation, whole or absent, verified before it is believed.

A generation is `checkpoint/STEP-DIGEST.pt`: everything but the replay's frames, whose segments lie in `replay/`, each
written once and shared by the generations that name it. The digest in the name is the SHA-256 of the file, so a
flipped byte anywhere is seen before PyTorch parses a thing; PyTorch then loads tensors and plain containers only, so a
file cannot run code. A file gets its name after it is on the disk, so a kill at any moment leaves the last generation.
"""

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from dqn.memory import return_freed

GENERATIONS = 2


class ReplaySnapshot(Protocol):
    """What the saver needs of a replay: to be written from another thread."""

    def write(self, folder: Path) -> dict[str, Any]:
        """Writes the segments that are not yet in the folder; returns the names of all."""


class Generation(NamedTuple):
    """A checkpoint's file."""

    step: int
    path: Path


class SaveResult(NamedTuple):
    """How a save ended: `error` is one line, or None."""

    step: int
    seconds: float
    manifests: list[dict[str, Any]]
    error: str | None


def generations(folder: Path) -> list[Generation]:
    """The checkpoints of a folder, newest first, unverified."""
    found = []
    for path in folder.glob("*-*.pt"):
        step, _, digest = path.stem.partition("-")
        if step.isdigit() and len(digest) == 64:
            found.append(Generation(int(step), path))
    return sorted(found, reverse=True)


def write_file(path: Path, state: dict[str, Any]) -> None:
    """Saves a state under a name that appears only once the file is whole and on the disk.

    Raises:
        OSError: the disk is full, over quota, read-only or gone; what had the name before is untouched.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        torch.save(state, temporary)
        _to_disk(temporary)
        os.replace(temporary, path)
        _to_disk(path.parent)
    except RuntimeError as error:  # PyTorch's zip writer wraps the system's error
        temporary.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free / 2**20
        raise OSError(f"writing {path.name}, {free:,.0f} MiB free: {str(error).splitlines()[0]}") from error
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_file(path: Path) -> dict[str, Any]:
    """Loads a saved state onto the CPU; nothing in it can run code.

    Raises:
        ValueError: the file is damaged or is not a saved state; the text names it.
    """
    try:
        state = torch.load(path, map_location="cpu")
    except Exception as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise ValueError(f"{path} cannot be loaded: {reason}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds {type(state).__name__}, not a saved state")
    return state


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Writes a generation and deletes those beyond the two newest.

    Raises:
        OSError: as `write_file`; every earlier generation stays.
    """
    partial = folder / f"{step:012d}.pt"
    write_file(partial, state)
    path = folder / f"{step:012d}-{_digest(partial)}.pt"
    os.replace(partial, path)
    _to_disk(folder)
    others = [generation for generation in generations(folder) if generation.path != path]
    kept = [generation for generation in others if generation.step != step][: GENERATIONS - 1]
    for old in others:
        if old not in kept:
            old.path.unlink(missing_ok=True)
    return path


def load_newest(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest checkpoint that verifies, and a line for each that does not."""
    notes: list[str] = []
    for generation in generations(folder):
        try:
            return load(generation.path), notes
        except ValueError as error:
            notes.append(str(error))
    return None, notes


def tidy(folder: Path, step: int) -> None:
    """Clears away what killed saves left, and renames the generations after `step`, which did not verify.

    Renamed, they take no good generation's place when the next save keeps the two newest.
    """
    for path in folder.iterdir():
        if path.suffix == ".tmp" or (path.suffix == ".pt" and path.stem.isdigit()):
            path.unlink()
    for generation in generations(folder):
        if generation.step > step:
            generation.path.rename(generation.path.with_suffix(".damaged"))


def load(path: Path) -> dict[str, Any]:
    """Loads one generation.

    Raises:
        ValueError: the file differs from its checksum, or is no checkpoint.
    """
    if _digest(path) != path.stem.partition("-")[2]:
        raise ValueError(f"{path} is damaged: its content differs from the checksum in its name")
    return read_file(path)


def to_tensors(value: Any) -> Any:
    """The same plain containers, with copies of the NumPy arrays as tensors, which `torch.load` takes by default."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: to_tensors(item) for key, item in value.items()}
    return [to_tensors(item) for item in value] if isinstance(value, list | tuple) else value


def to_arrays(value: Any) -> Any:
    """The inverse of `to_tensors`."""
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {key: to_arrays(item) for key, item in value.items()}
    return [to_arrays(item) for item in value] if isinstance(value, list) else value


class Saver:
    """Writes checkpoints in a thread of its own, one at a time; the loop only copies the state."""

    def __init__(self, folder: Path, replay_folder: Path, manifests: list[dict[str, Any]]):
        self.folder, self.replay_folder = folder, replay_folder
        self._manifests = manifests
        self._thread: threading.Thread | None = None
        self._result: SaveResult | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is under way or its result not yet taken."""
        return self._thread is not None

    def start(self, step: int, state: dict[str, Any], snapshot: ReplaySnapshot, extra: Callable[[], None]) -> None:
        """Begins a save of a state that nothing else changes any more; `extra` writes what goes with it."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(step, state, snapshot, extra), name="saver")
        self._thread.start()

    def finished(self) -> SaveResult | None:
        """The result of a save that has ended since the last call."""
        if self._thread is None or self._thread.is_alive():
            return None
        return self.wait()

    def wait(self) -> SaveResult | None:
        """Waits for the save under way and returns its result."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        return_freed()
        return self._result

    def _write(self, step: int, state: dict[str, Any], snapshot: ReplaySnapshot, extra: Callable[[], None]) -> None:
        started, error = time.monotonic(), None
        try:
            manifest = snapshot.write(self.replay_folder)
            save(self.folder, step, {**state, "replay": manifest})
            self._manifests = [*self._manifests, manifest][-GENERATIONS:]
            extra()
        except Exception as problem:  # whatever it is, training must go on and say so
            error = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
        self._result = SaveResult(step, time.monotonic() - started, self._manifests, error)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
