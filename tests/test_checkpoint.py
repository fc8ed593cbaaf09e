"""Checkpoint files: whole or absent, verified, never able to run code."""

import errno
import os
import pickle

import pytest
import torch

from dqn import checkpoint


class NoReplay:
    def write(self, folder):
        return {"segments": []}


def state(step):
    return {"step": step, "weights": torch.arange(1000) + step}


def test_two_generations_newest_first(tmp_path):
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, step, state(step))
    assert [g.step for g in checkpoint.generations(tmp_path)] == [30, 20]
    loaded, notes = checkpoint.load_newest(tmp_path)
    assert loaded["step"] == 30 and notes == [] and torch.equal(loaded["weights"], state(30)["weights"])


def test_saving_the_same_step_again_keeps_one_of_it(tmp_path):
    checkpoint.save(tmp_path, 10, state(10))
    checkpoint.save(tmp_path, 20, state(20))
    checkpoint.save(tmp_path, 20, {**state(20), "more": 1})
    assert [g.step for g in checkpoint.generations(tmp_path)] == [20, 10]
    assert checkpoint.load_newest(tmp_path)[0]["more"] == 1


def test_every_flipped_byte_is_seen(tmp_path):
    checkpoint.save(tmp_path, 1, state(1))
    path = checkpoint.save(tmp_path, 2, state(2))
    good = path.read_bytes()
    for position in range(0, len(good), max(1, len(good) // 97)):
        bad = bytearray(good)
        bad[position] ^= 1
        path.write_bytes(bad)
        loaded, notes = checkpoint.load_newest(tmp_path)
        assert loaded["step"] == 1 and len(notes) == 1 and path.name in notes[0]


def test_a_damaged_generation_does_not_push_out_a_good_one(tmp_path):
    for step in (10, 20):
        path = checkpoint.save(tmp_path, step, state(step))
    os.truncate(path, 100)
    (tmp_path / "000000000015.pt").touch()  # left by a kill between writing and renaming
    (tmp_path / "000000000016.pt.tmp").touch()
    loaded, _ = checkpoint.load_newest(tmp_path)
    checkpoint.tidy(tmp_path, loaded["step"])
    checkpoint.save(tmp_path, 15, state(15))
    assert [g.step for g in checkpoint.generations(tmp_path)] == [15, 10]
    assert {file.suffix for file in tmp_path.iterdir()} == {".pt", ".damaged"} and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("length", [0, 1, 100, 5000])
def test_a_truncated_file_falls_back(tmp_path, length):
    checkpoint.save(tmp_path, 1, state(1))
    path = checkpoint.save(tmp_path, 2, state(2))
    os.truncate(path, length)
    loaded, notes = checkpoint.load_newest(tmp_path)
    assert loaded["step"] == 1 and "damaged" in notes[0]


def test_a_hostile_file_runs_nothing(tmp_path):
    marker = tmp_path / "ran"

    class Hostile:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    path = tmp_path / "model.pt"
    path.write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(ValueError, match=r"model\.pt cannot be loaded"):
        checkpoint.read_file(path)
    torch.save({"x": Hostile()}, path)
    with pytest.raises(ValueError, match=r"model\.pt cannot be loaded"):
        checkpoint.read_file(path)
    assert not marker.exists()


def test_a_failing_disk_keeps_what_was_there(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, state(1))

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "_to_disk", full)
    saver = checkpoint.Saver(tmp_path, tmp_path, [])
    saver.start(2, state(2), NoReplay(), lambda: None)
    result = saver.wait()
    assert "No space left" in result.error and not saver.busy
    monkeypatch.undo()
    assert checkpoint.load_newest(tmp_path)[0]["step"] == 1
    assert not list(tmp_path.glob("*.tmp"))
    saver.start(3, state(3), NoReplay(), lambda: None)
    assert saver.wait().error is None
    assert checkpoint.load_newest(tmp_path)[0]["step"] == 3


def test_the_saver_keeps_the_manifests_of_two_generations(tmp_path):
    saver = checkpoint.Saver(tmp_path, tmp_path, [{"segments": ["old"]}])
    for step in (1, 2):
        saver.start(step, state(step), NoReplay(), lambda: None)
        result = saver.wait()
    assert result.manifests == [{"segments": []}, {"segments": []}]
    assert saver.finished() is None
