"""Sealed segments: immutable, compressed or raw, in memory or in a file, all read the same way.

Frames are compressed in groups of 8 successive rows of one lane: neighbours in time differ by a ball and a paddle, and
a window of 5 frames touches two groups at most. A dictionary of the game's pictures, trained on one segment and used
for 8, stands in for what a group would have to say first.

A file is one `.npy` array of bytes, so `np.load(allow_pickle=False)` reads it: header, dictionary, offsets, metadata,
frames.
"""

import contextlib
import io
import os
import struct
import threading
import zlib
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard

GROUP_ROWS = 8
LEVEL = 7
DICTIONARY_BYTES = 32 << 10
DICTIONARY_SEGMENTS = 8
"""Segments that share a dictionary: training one takes a core 0.5 s."""
SAMPLES = 256
"""Groups that a dictionary is trained on: 14 MB for a moment."""
DICTIONARY_MEMORY = 3 * DICTIONARY_BYTES + (123 << 10)
"""What a dictionary takes in RAM: three copies of it, zstd's tables and working state."""
GROUP_BYTES = 40
"""At most, what a group takes beside its pictures' bytes: its offset, and zstd's frame around noise."""
_HEADER = struct.Struct("<8s8Q")
_MAGIC = b"DQNSEG01"
_MAX_OPEN_FILES = 256


class Dictionary:
    """What the compressor knows beforehand; `content` may be empty."""

    def __init__(self, content: bytes):
        self.content = content
        self._zstd = zstandard.ZstdCompressionDict(content) if content else None
        self._decompressor = zstandard.ZstdDecompressor(dict_data=self._zstd)
        self._lock = threading.Lock()

    def decompress(self, data: Any) -> bytes:
        """A group's bytes; a decompressor that two threads use at once crashes the process."""
        with self._lock:
            return self._decompressor.decompress(data)

    def compressor(self) -> zstandard.ZstdCompressor:
        """A compressor for one thread; it writes each group's size, without which reading is several times slower."""
        return zstandard.ZstdCompressor(level=LEVEL, dict_data=self._zstd, write_content_size=True)


NO_DICTIONARY = Dictionary(b"")


def train(frames: np.ndarray) -> Dictionary:
    """A dictionary from the frames u8[R, N, H, W] of a segment; an empty one if they are too few."""
    every = groups(frames)
    samples: list[Any] = [group.tobytes() for group in every[:: max(1, len(every) // SAMPLES)]]
    try:
        trained = zstandard.train_dictionary(DICTIONARY_BYTES, samples, level=LEVEL)
    except zstandard.ZstdError:
        return NO_DICTIONARY
    return Dictionary(trained.as_bytes())


def groups(frames: np.ndarray) -> list[np.ndarray]:
    """The groups of frames u8[R, N, H, W], lane after lane: u8[≤8, H, W] each."""
    rows, lanes = frames.shape[:2]
    return [frames[row : row + GROUP_ROWS, lane] for lane in range(lanes) for row in range(0, rows, GROUP_ROWS)]


def compress(frames: Iterable[np.ndarray], dictionary: Dictionary) -> tuple[np.ndarray, "array[int]"]:
    """The compressed bytes of groups one after the other, u8, and where each begins, and the end."""
    compressor, blob, offsets = dictionary.compressor(), bytearray(), array("Q", [0])
    for group in frames:  # one growing blob: a list to be joined would be in memory twice
        blob += compressor.compress(np.ascontiguousarray(group).data)
        offsets.append(len(blob))
    return np.frombuffer(blob, np.uint8), offsets


class Metadata(NamedTuple):
    """What slots hold besides frames, each [R, N]."""

    action: np.ndarray
    reward: np.ndarray
    flags: np.ndarray


class Segment:
    """R rows of N lanes, once they are complete.

    At first it reads from the raw buffer that it was written to; `seal` swaps that for the compressed bytes, `spill`
    those for a file. Each swap is one assignment, and what `read` returns is the same before and after.
    """

    def __init__(self, number: int, place: int, shape: tuple[int, ...], raw: np.ndarray | None):
        self.number, self.place, self.shape = number, place, shape
        self._groups_per_lane = -(-shape[0] // GROUP_ROWS)
        self.sealed = threading.Event()
        self.file: str | None = None
        self.checksum = self.file_bytes = 0
        self.leaving = self.saved = False
        """Whether it is on its way to its file; whether a checkpoint names that."""
        self._file_lock, self._raw_lock = threading.Lock(), threading.Lock()
        self._raw = raw
        self._blob: np.ndarray | None = None
        self._source: tuple[Path, int] | None = None
        self._offsets = array("Q")
        self.dictionary: Dictionary | None = None

    def seal(self, dictionary: Dictionary | None) -> None:
        """Compresses with a dictionary; None leaves the frames raw."""
        if dictionary is not None:
            assert self._raw is not None
            blob, self._offsets = compress(groups(self._raw), dictionary)
            self._blob = blob if 2 * blob.nbytes > self._raw.nbytes else blob.copy()  # without room to grow
            self.dictionary = dictionary
            with self._raw_lock:  # whoever reads the raw buffer has finished before it is written to again
                self._raw = None
        self.sealed.set()

    @property
    def memory_bytes(self) -> int:
        """Bytes of frames in memory, those of a raw buffer that will be used again left out."""
        if self._blob is not None:
            return self._blob.nbytes
        return self._raw.nbytes if self._raw is not None and self.sealed.is_set() else 0

    @property
    def in_memory(self) -> bool:
        """Whether the frames are in memory."""
        return self._source is None

    def read(self, row: int, lane: int, out: np.ndarray) -> None:
        """Copies a lane's frames from `row` on to out u8[K, H, W]; any thread may, at any time."""
        count = len(out)
        if self._raw is not None:
            with self._raw_lock:
                raw = self._raw
                if raw is not None:
                    out[:] = raw[row : row + count, lane]
                    return
        if self.dictionary is None:
            out[:] = self._read_raw_file(row, count, lane)
        else:
            group, inside = divmod(row, GROUP_ROWS)
            group += lane * self._groups_per_lane
            frames = self._decompress(group)
            if inside + count <= GROUP_ROWS:
                out[:] = frames[inside : inside + count]
                return
            done = GROUP_ROWS - inside
            out[:done] = frames[inside:]
            while done < count:
                group += 1
                taken = min(count - done, GROUP_ROWS)
                out[done : done + taken] = self._decompress(group)[:taken]
                done += taken

    def _decompress(self, group: int) -> np.ndarray:
        assert self.dictionary is not None
        data = np.frombuffer(self.dictionary.decompress(self._bytes(group)), np.uint8)
        return data.reshape(-1, self.shape[2], self.shape[3])

    def _bytes(self, group: int) -> Any:
        begin, end = self._offsets[group], self._offsets[group + 1]
        blob = self._blob
        if blob is not None:
            return blob[begin:end]
        assert self._source is not None
        path, base = self._source
        return _read_file(path, base + begin, end - begin)

    def _read_raw_file(self, row: int, count: int, lane: int) -> np.ndarray:
        assert self._source is not None
        path, base = self._source
        _, lanes, height, width = self.shape
        size = height * width
        parts = [_read_file(path, base + ((row + i) * lanes + lane) * size, size) for i in range(count)]
        return np.frombuffer(b"".join(parts), np.uint8).reshape(count, height, width)

    def to_file(self, folder: Path, metadata: Metadata) -> None:
        """Writes the segment's file, if that is not done: under a temporary name, to the disk, then renamed.

        Raises:
            OSError: the disk does not take it; nothing else has changed.
        """
        with self._file_lock:
            if self.file is None:
                frames = self._raw if self._raw is not None else self._blob
                assert frames is not None
                content = pack(self.number, self.shape, self.dictionary, self._offsets, metadata, frames)
                self.checksum, self.file_bytes = write_file(folder / self.name, content)
                self.file = self.name

    @property
    def name(self) -> str:
        """The name of its file, written or not."""
        return f"segment-{self.number:08d}.npy"

    def spill(self, folder: Path) -> None:
        """Reads from its file from now on, and frees the memory."""
        assert self.file is not None
        path = folder / self.file
        base = path.stat().st_size - self._frame_bytes()
        self._source = (path, base)
        self._blob = self._raw = None

    def _frame_bytes(self) -> int:
        return self._offsets[-1] if self.dictionary is not None else int(np.prod(self.shape))


def pack(
    number: int,
    shape: tuple[int, ...],
    dictionary: Dictionary | None,
    offsets: "array[int]",
    metadata: Metadata,
    frames: np.ndarray,
) -> list[Any]:
    """The parts of a segment's file, in their order."""
    known = b"" if dictionary is None else dictionary.content
    frames = frames.reshape(-1)
    header = _HEADER.pack(_MAGIC, number, *shape, dictionary is not None, len(known), frames.size)
    table = np.asarray(offsets, "<u8").tobytes()
    parts = [header, known, table, *(np.ascontiguousarray(part).tobytes() for part in metadata), frames]
    size = sum(len(part) for part in parts)
    return [_npy_header(size), *parts]


def _npy_header(size: int) -> bytes:
    top = io.BytesIO()
    np.lib.format.write_array_header_1_0(top, {"descr": "|u1", "fortran_order": False, "shape": (size,)})
    return top.getvalue()


def write_file(path: Path, parts: list[Any]) -> tuple[int, int]:
    """Writes a file that is whole or absent; returns its CRC-32 and size."""
    temporary = path.with_name(f"{path.name}.tmp")
    checksum = size = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
                checksum, size = zlib.crc32(part, checksum), size + len(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)  # the new name reaches the disk too
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return checksum, size


def unpack(
    path: Path, checksum: int, size: int, place: int, dictionaries: dict[bytes, Dictionary]
) -> tuple[Segment, Metadata]:
    """Reads a segment's file back; equal dictionaries are kept once.

    Raises:
        ValueError: the file is missing, damaged, or no segment; the text names it.
    """
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise ValueError(f"replay segment {path.name}: {error.strerror}") from None
    if content.size != size or zlib.crc32(content.data) != checksum:
        raise ValueError(f"replay segment {path.name} is damaged: it differs from its checksum")
    try:
        return _parse(path, content, place, dictionaries, checksum)
    except (ValueError, struct.error, zstandard.ZstdError) as error:
        raise ValueError(f"replay segment {path.name} is of another format: {error}") from None


def _parse(
    path: Path, content: np.ndarray, place: int, dictionaries: dict[bytes, Dictionary], checksum: int
) -> tuple[Segment, Metadata]:
    """The parts of a file whose bytes are what was written; every size in it is checked before it is used."""
    position = len(_npy_header(0))  # padded to the same length whatever the size

    def take(count: int, dtype: str) -> np.ndarray:
        nonlocal position
        if count > content.size:
            raise ValueError(f"{count} items do not fit in it")
        part = np.frombuffer(content, dtype, count, position)
        position += part.nbytes
        return part

    magic, number, *shape, zstd, known, frame_bytes = _HEADER.unpack(take(_HEADER.size, "u1").tobytes())
    if magic != _MAGIC or zstd > 1 or not all(0 < length < 1 << 20 for length in shape):
        raise ValueError(f"it begins with {magic!r} and the shape {shape}")
    rows, lanes, height, width = shape
    key = take(known, "u1").tobytes()
    num_groups = lanes * -(-rows // GROUP_ROWS)
    offsets = array("Q", take(num_groups + 1 if zstd else 0, "<u8").tolist())
    metadata = Metadata(*(take(rows * lanes, kind).reshape(rows, lanes) for kind in ("u1", "<f4", "u1")))
    frames = take(frame_bytes, "u1")
    segment = Segment(number, place, (rows, lanes, height, width), None if zstd else frames.reshape(shape))
    segment.file, segment.checksum, segment.file_bytes = path.name, checksum, content.size
    if zstd:
        if key not in dictionaries:
            dictionaries[key] = Dictionary(key) if key else NO_DICTIONARY
        segment.dictionary = dictionaries[key]
        segment._offsets, segment._blob = offsets, frames.copy()  # without the rest of the file
        _check_groups(segment)
    segment.sealed.set()
    return segment, metadata


def _check_groups(segment: Segment) -> None:
    """Each group decompresses to its own size and nothing else: reading never asks for more memory than that."""
    rows, _, height, width = segment.shape
    assert segment._blob is not None
    offsets = np.array(segment._offsets)
    if offsets[0] != 0 or offsets[-1] != segment._blob.size or (offsets[1:] <= offsets[:-1]).any():
        raise ValueError("its offsets do not follow each other")
    for group in range(len(offsets) - 1):
        here = min(GROUP_ROWS, rows - group % segment._groups_per_lane * GROUP_ROWS)
        if zstandard.frame_content_size(segment._bytes(group)) != here * height * width:
            raise ValueError(f"group {group} is not of {here} pictures")


_open_files: dict[Path, int] = {}
_open_files_lock = threading.Lock()


def _read_file(path: Path, offset: int, size: int) -> bytes:
    """Reads a part of a file; the newest few hundred files stay open."""
    with _open_files_lock:
        handle = _open_files.pop(path, None)
        if handle is None:
            while len(_open_files) >= _MAX_OPEN_FILES:
                os.close(_open_files.pop(next(iter(_open_files))))
            handle = os.open(path, os.O_RDONLY)
        _open_files[path] = handle
        data = os.pread(handle, size, offset)
    if len(data) != size:
        raise OSError(f"{path} is shorter than it was")
    return data


def remove_file(path: Path) -> None:
    """Deletes a file that nothing reads any more; one that the disk will not give up costs space, never the run."""
    forget_file(path)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def forget_file(path: Path) -> None:
    """Closes a file that is not read any more."""
    with _open_files_lock:
        handle = _open_files.pop(path, None)
        if handle is not None:
            os.close(handle)
