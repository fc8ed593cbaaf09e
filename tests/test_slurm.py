"""`scripts/train.slurm` with a Python and an scontrol that only pretend: what it does with each exit code."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "train.slurm"
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$@" > arguments
stop() {{ echo "$1" > signalled; sleep 0.3; {save}; exit 75; }}
trap 'stop USR1' USR1
trap 'stop TERM' TERM
touch started
{body}
"""
SAVE = "mkdir -p runs/{run}/checkpoint && touch runs/{run}/checkpoint/{step:012d}-abc.pt"
WAIT = "for i in $(seq 600); do sleep 0.1; done; exit 9"


def start(folder: Path, body: str, *arguments: str, save: str = ":", requeue_code: int = 0, **env: str):
    tools = folder / "tools"
    tools.mkdir()
    fakes = {
        "python": FAKE_PYTHON.format(body=body, save=save),
        "scontrol": '#!/bin/sh\necho "$@" >> requeued\nexit CODE\n',
    }
    for name, text in fakes.items():
        (tools / name).write_text(text.replace("CODE", str(requeue_code)))
        (tools / name).chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key not in ("CONFIG", "RUN")}
    environment |= {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": str(tools / "python"), "SLURM_JOB_ID": "41"}
    environment |= {"SLURM_SUBMIT_DIR": str(folder), **env}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen) -> tuple[int, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out + err


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not path.exists():
        assert process.poll() is None, "the script ended before its Python began"


def test_the_script_parses():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    text = SCRIPT.read_text()
    assert "#SBATCH --time=48:00:00\n" in text and "#SBATCH --signal=B:USR1@300\n" in text


@pytest.mark.parametrize("code", [0, 1, 2, 3, 130])
def test_other_exit_codes_pass_through_and_nothing_is_requeued(tmp_path, code):
    body = f"{SAVE.format(run='breakout', step=500)}; exit {code}"
    assert finish(start(tmp_path, body))[0] == code
    assert not (tmp_path / "requeued").exists()


def test_75_with_a_newer_step_goes_back_to_the_queue(tmp_path):
    checkpoints = tmp_path / "runs" / "breakout" / "checkpoint"
    checkpoints.mkdir(parents=True)
    (checkpoints / "000000099000-abc.pt").touch()  # 99,000 is the greater text of the two without its zeros
    code, text = finish(start(tmp_path, f"{SAVE.format(run='breakout', step=100_000)}; exit 75"))
    assert code == 0 and "step 99000 -> 100000" in text
    assert (tmp_path / "requeued").read_text() == "requeue 41\n"


@pytest.mark.parametrize("before", [None, 100_000])
def test_75_without_a_newer_step_does_not(tmp_path, before):
    if before is not None:
        checkpoints = tmp_path / "runs" / "breakout" / "checkpoint"
        checkpoints.mkdir(parents=True)
        (checkpoints / f"{before:012d}-abc.pt").touch()
    code, text = finish(start(tmp_path, "exit 75"))
    assert code == 75 and "no step was gained" in text
    assert not (tmp_path / "requeued").exists()


def test_a_queue_that_refuses_is_told(tmp_path):
    body = f"{SAVE.format(run='breakout', step=8)}; exit 75"
    code, text = finish(start(tmp_path, body, requeue_code=1))
    assert code == 75 and "submit it again" in text


def test_the_warning_before_the_limit_reaches_the_run_and_its_save_is_waited_for(tmp_path):
    process = start(tmp_path, WAIT, save=SAVE.format(run="breakout", step=7))
    wait_for(tmp_path / "started", process)
    process.send_signal(signal.SIGUSR1)
    code, text = finish(process)
    assert (tmp_path / "signalled").read_text() == "USR1\n"
    assert code == 0 and "step 0 -> 7" in text
    assert (tmp_path / "requeued").read_text() == "requeue 41\n"


def test_a_cancelled_job_saves_and_stays_away(tmp_path):
    process = start(tmp_path, WAIT, save=SAVE.format(run="breakout", step=7))
    wait_for(tmp_path / "started", process)
    process.send_signal(signal.SIGTERM)
    code, _ = finish(process)
    assert code == 75 and (tmp_path / "signalled").read_text() == "TERM\n"
    assert not (tmp_path / "requeued").exists()


def test_config_run_and_arguments_are_passed_on(tmp_path):
    body = f"{SAVE.format(run='mine', step=5)}; exit 75"
    process = start(tmp_path, body, "--seed", "2", CONFIG="configs/pong.yaml", RUN="mine")
    assert finish(process)[0] == 0
    assert (tmp_path / "arguments").read_text() == "-m dqn train --config configs/pong.yaml --run mine --seed 2\n"
    (tmp_path / "again").mkdir()
    assert finish(start(tmp_path / "again", "exit 0", CONFIG="configs/pong.yaml"))[0] == 0
    assert "--run pong\n" in (tmp_path / "again" / "arguments").read_text()
