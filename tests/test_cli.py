"""The command line: help, errors of one line, and exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest

from dqn import budget, config
from dqn.__main__ import config_of, main, parse

ROOT = Path(__file__).parent.parent


def test_help_shows_every_value_with_text_and_default(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, leaf in config.LEAVES.items():
        assert f"--{name}" in shown
        assert " ".join(leaf.metadata["text"].split()[:3]) in shown


def test_the_command_line_wins_over_the_file():
    options = parse(["train", "--config", str(ROOT / "configs/breakout.yaml"), "--env.game", "pong", "--seed", "7"])
    chosen = config_of(options)
    assert (chosen.env.game, chosen.seed, chosen.env.num_envs) == ("pong", 7, 8)
    options = parse(["plan", "--config", str(ROOT / "configs/breakout.yaml"), "--budget.max_hours", "null"])
    assert config_of(options).budget.max_hours is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["trian", "train"]),
        ([], ["train"]),
        (["train", "--config", "configs/none.yaml"], ["configs/none.yaml", "No such file"]),
        (["train", "--env.gam", "pong"], ["--env.gam", "--env.game"]),
        (["train", "--env.game", "brekout"], ["brekout", "breakout"]),
        (["train", "--env.game"], ["--env.game", "expected one argument"]),
        (["train", "--replay.capacity", "ten"], ["replay.capacity", "ten", "whole number"]),
        (["train", "--replay.capacity", "20"], ["replay.capacity", "20", "at least"]),
        (["train", "--policy.epsilon_final", "2"], ["policy.epsilon_final", "2", "between 0 and 1"]),
        (["train", "--replay.codec", "zst"], ["replay.codec", "zst", "zstd"]),
        (["train", "--learner.device", "cuda"], ["cuda"]),
        (["eval", "no-such-run"], ["no-such-run"]),
        (["report", "no-such-run"], ["no-such-run"]),
        (["plan", "--config", "configs/breakout.yaml", "--seed", "[1"], ["seed"]),
        (["plan", "--config", "configs/breakout.yaml", "--env.game", "brekout"], ["brekout", "breakout"]),
        (["plan", "--config", "configs/breakout.yaml", "--steps-per-s", "nan"], ["--steps-per-s", "above 0"]),
        (["train", "--learner.learning_starts_steps", "8"], ["learner.learning_starts_steps", "8", "16"]),
        (["eval", "x" * 300], ["no run"]),
        (["bench", "--steps", "2000"], ["--steps", "2000", "5000"]),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    if arguments[:1] == ["train"]:
        arguments = [*arguments, "--run", str(tmp_path / "run")] if arguments[-1] != "--env.game" else arguments
    assert main(arguments) == budget.USAGE
    output = capsys.readouterr()
    assert output.err.count("\n") == 1 and output.out == ""
    for word in words:
        assert word in output.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["configs"]


def test_a_plan_that_does_not_fit_exits_3_and_writes_nothing(capsys, tmp_path, monkeypatch):
    arguments = ["--config", str(ROOT / "configs/breakout.yaml"), "--replay.codec", "raw", "--memory.limit_gib", "2"]
    assert main(["plan", *arguments]) == budget.DOES_NOT_FIT
    assert main(["train", *arguments, "--run", str(tmp_path / "run")]) == budget.DOES_NOT_FIT
    assert "2.0" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_no_disk_takes_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", str(ROOT / "configs/smoke.yaml"), "--run", "x" * 300]) == budget.USAGE
    assert "File name too long" in capsys.readouterr().err


def test_a_path_on_the_command_line_is_taken_as_it_is():
    for path in ("my #1 disk", "a: b", "0"):
        assert config_of(parse(["train", "--replay.spill_dir", path])).replay.spill_dir == path
    assert config_of(parse(["train", "--replay.spill_dir", "null"])).replay.spill_dir is None


def test_a_plan_is_the_same_whatever_the_game_is_called(capsys):
    tables = []
    for name in ("breakout", "BreakoutNoFrameskip-v4"):
        assert main(["plan", "--env.game", name, "--memory.limit_gib", "4", "--steps-per-s", "250"]) == budget.FINISHED
        tables.append([line for line in capsys.readouterr().out.splitlines() if "available" not in line])
    assert [line for line in tables[0] if "free" not in line] == [line for line in tables[1] if "free" not in line]


def test_plan_answers_without_loading_pytorch():
    code = (
        "import sys; from dqn.__main__ import main;"
        "code = main(['plan', '--config', 'configs/breakout.yaml', '--memory.limit_gib', '4']);"
        "assert code in (0, 3), code; assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
