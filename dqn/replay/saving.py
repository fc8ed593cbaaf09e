"""Saving and loading a replay: each sealed segment is written once, whoever needs its file first.

A manifest names the files of one checkpoint with size and CRC-32, and holds what is in none of them. It is plain
containers and tensors, so default `torch.load` takes it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dqn.replay import segment as segments
from dqn.replay.segment import NO_DICTIONARY, Dictionary, Metadata, Segment

if TYPE_CHECKING:
    from dqn.replay.log import Replay


class Snapshot:
    """A replay at one moment, taken on the loop's thread, to be written by another.

    Rows never change once they are appended, so it refers to the open segment too, wherever its frames go meanwhile.
    """

    def __init__(self, replay: "Replay"):
        self._parts = [(part, None if part.file else replay._metadata(part.place)) for part in replay.sealed.values()]
        rows = replay.open_rows
        for part, _ in self._parts:
            part.saved = True
        self._open, self._open_rows = replay._at[replay.place], rows
        self._open_metadata = Metadata(*(part[:rows] for part in replay._metadata(replay.place)))
        self._row_count = replay.open_number * replay.rows + rows
        self._state: dict[str, Any] = {
            "shape": list(replay.shape),
            "open_number": replay.open_number,
            "open_place": replay.place,
            "open_rows": rows,
            "free_places": list(replay._free),
            "evicted": replay._evicted,
            "rng": replay.rng.bit_generator.state,
            "max_priority": replay.max_priority,
        }
        self._priorities = None if replay._tree is None else replay._tree.nodes[replay._tree._size :].copy()
        self._trained, self._done = replay._trained, replay._done

    def write(self, folder: Path) -> dict[str, Any]:
        """Writes the files that are not there yet; returns the manifest.

        Raises:
            OSError: the disk does not take one; those that it took are found again at the next try.
        """
        entries = []
        for part, metadata in self._parts:
            part.sealed.wait()
            if metadata is not None:
                part.to_file(folder, metadata)
            assert part.file is not None
            entries.append(_entry(part.file, part.checksum, part.file_bytes, part.number, part.place))
        trained = self._newest_dictionary()
        manifest = {**self._state, "segments": entries, "open": self._write_open(folder, trained), "dictionary": None}
        if trained is not None:
            content = torch.tensor(list(trained[1].content), dtype=torch.uint8)
            manifest["dictionary"] = {"number": trained[0], "content": content}
        if self._priorities is not None:
            manifest["priorities"] = torch.from_numpy(self._priorities)
        return manifest

    def _newest_dictionary(self) -> tuple[int, Dictionary] | None:
        """The one that segments are compressed with at this moment, though all that it served may be evicted."""
        self._done.wait()
        known = [trained for trained in list(self._trained) if trained[0] < self._state["open_number"]]
        return known[-1] if known else None

    def _write_open(self, folder: Path, trained: tuple[int, Dictionary] | None) -> dict[str, Any] | None:
        if self._open_rows == 0:
            return None
        dictionary = NO_DICTIONARY if trained is None else trained[1]
        blob, offsets = segments.compress(self._open_groups(), dictionary)
        name, number = f"open-{self._row_count:012d}.npy", self._state["open_number"]
        shape = (self._open_rows, *self._state["shape"][1:])
        content = segments.pack(number, shape, dictionary, offsets, self._open_metadata, blob)
        checksum, size = segments.write_file(folder / name, content)
        return _entry(name, checksum, size, number, self._state["open_place"])

    def _open_groups(self) -> Iterator[np.ndarray]:
        assert self._open is not None
        _, lanes, height, width = self._open.shape
        for lane in range(lanes):
            for row in range(0, self._open_rows, segments.GROUP_ROWS):
                group = np.empty((min(segments.GROUP_ROWS, self._open_rows - row), height, width), np.uint8)
                self._open.read(row, lane, group)
                yield group


def _entry(name: str, checksum: int, size: int, number: int, place: int) -> dict[str, Any]:
    return {"file": name, "crc32": checksum, "bytes": size, "number": number, "place": int(place)}


def load(replay: "Replay", manifest: dict[str, Any], folder: Path) -> list[str]:
    """Fills a new replay from a manifest, bit for bit; a file that is missing or damaged leaves a gap and a line."""
    if manifest["shape"] != list(replay.shape):
        raise ValueError(f"the saved replay has segments of {manifest['shape']}, this one of {list(replay.shape)}")
    notes: list[str] = []
    dictionaries: dict[bytes, Dictionary] = {}
    replay._free, replay._evicted = list(manifest["free_places"]), manifest["evicted"]
    replay._at[replay.place] = None
    replay._number[replay.place] = -1
    for entry in manifest["segments"]:
        loaded = _load_one(replay, entry, folder, dictionaries, notes)
        if loaded is None:
            replay._free.append(entry["place"])
            continue
        part, metadata = loaded
        part.saved = True
        replay.sealed[part.number] = replay._at[part.place] = part
        replay._number[part.place] = part.number
        _put(replay, part.place, metadata)
    if (trained := manifest["dictionary"]) is not None:
        content = trained["content"].numpy().tobytes()
        known = dictionaries.setdefault(content, Dictionary(content) if content else NO_DICTIONARY)
        replay._trained.append((trained["number"], known))
    replay._begin(manifest["open_number"], manifest["open_place"])
    if manifest["open"] is not None:
        _load_open(replay, manifest, folder, dictionaries, notes)
    _link(replay)
    replay.rng.bit_generator.state = manifest["rng"]
    replay.max_priority = manifest["max_priority"]
    if replay._tree is not None:
        _load_priorities(replay, manifest["priorities"].numpy())
    return notes


def _load_one(
    replay: "Replay", entry: dict[str, Any], folder: Path, dictionaries: dict[bytes, Dictionary], notes: list[str]
) -> tuple[Segment, Metadata] | None:
    name = entry["file"]
    if Path(name).name != name or not 0 <= entry["place"] < replay._places:
        notes.append(f"replay segment {name!r}: the checkpoint names it wrongly; its slots are gone")
        return None
    try:
        part, metadata = segments.unpack(folder / name, entry["crc32"], entry["bytes"], entry["place"], dictionaries)
    except ValueError as error:
        notes.append(f"{error}; its slots are gone")
        return None
    rows, *rest = part.shape
    if rest != list(replay.shape[1:]) or part.number != entry["number"] or not _rows_fit(replay, rows, name):
        notes.append(f"replay segment {name} holds number {part.number} of {list(part.shape)}; its slots are gone")
        return None
    spills = replay.config.spill_dir is not None and replay.config.ram_budget_mib is not None
    if spills and name.startswith("segment-"):
        part.spill(folder)  # what fits is read from the page cache; RAM stays within the budget
    return part, metadata


def _rows_fit(replay: "Replay", rows: int, name: str) -> bool:
    return rows < replay.rows if name.startswith("open-") else rows == replay.rows


def _load_open(
    replay: "Replay", manifest: dict[str, Any], folder: Path, dictionaries: dict[bytes, Dictionary], notes: list[str]
) -> None:
    loaded = _load_one(replay, manifest["open"], folder, dictionaries, notes)
    if loaded is None:  # the segment begins again, under a number of its own: nothing runs across the gap
        replay._begin(replay.open_number + 1, replay.place)
        return
    part, metadata = loaded
    rows = replay.open_rows = part.shape[0]
    for lane in range(replay.num_envs):
        frames = np.empty((rows, *replay.shape[2:]), np.uint8)
        part.read(0, lane, frames)
        replay._frames[:rows, lane] = frames
    _put(replay, replay.place, metadata)


def _put(replay: "Replay", place: int, metadata: Metadata) -> None:
    rows = len(metadata.action)
    replay._action[place, :rows], replay._reward[place, :rows] = metadata.action, metadata.reward
    replay._flags[place, :rows] = metadata.flags


def _link(replay: "Replay") -> None:
    """Neighbours are segments of successive numbers."""
    at = {part.number: part.place for part in replay.sealed.values()} | {replay.open_number: replay.place}
    for number, place in at.items():
        if number + 1 in at:
            replay._after[place], replay._before[at[number + 1]] = at[number + 1], place
    replay._order = np.array([*(part.place for part in replay.sealed.values()), replay.place])


def _load_priorities(replay: "Replay", weights: np.ndarray) -> None:
    """Takes the saved priorities; slots that a lost file left without their window get none."""
    tree = replay._tree
    assert tree is not None
    leaves = np.flatnonzero(weights[: replay._places * replay.segment_slots])
    place, rest = np.divmod(leaves, replay.segment_slots)
    row, lane = np.divmod(rest, replay.num_envs)
    held = np.isin(place, replay._order)
    leaves, place, row, lane = leaves[held], place[held], row[held], lane[held]
    good = np.empty(0, bool)
    for begin in range(0, len(leaves), 65_536):
        part = slice(begin, begin + 65_536)
        good = np.append(good, replay._windows(place[part], row[part], lane[part]).sources.valid)
    tree.set(leaves[good], weights[leaves[good]])


def collect(replay: "Replay", manifests: list[dict[str, Any]]) -> None:
    """Deletes the files in the replay's folder that neither a manifest nor a live segment names."""
    folder = replay.folder
    if folder is None or not folder.is_dir():
        return
    named = {entry["file"] for manifest in manifests for entry in manifest["segments"]}
    named |= {manifest["open"]["file"] for manifest in manifests if manifest["open"] is not None}
    named |= {part.name for part in replay.sealed.values()}
    named |= {name for name, (segment, _) in replay._gone.items() if segment() is not None}
    for path in folder.iterdir():
        ours = path.name.startswith(("segment-", "open-")) and path.name.endswith((".npy", ".npy.tmp"))
        if ours and path.name.removesuffix(".tmp") not in named:
            segments.remove_file(path)
