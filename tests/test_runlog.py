"""The run's folder, its lock, the dashboard's axes through a resume, games, and what the console shows."""

import errno
import fcntl
import io
import os
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dqn import config, runlog
from dqn.config import Config, UsageError
from dqn.dashboard import LAYOUT, LAYOUT_TAG, cut_events
from dqn.progress import duration
from dqn.runlog import RunFolder, RunLog, existing_run, run_path

CHECKPOINT = f"checkpoint/{100:012d}-{'a' * 64}.pt"


def fill(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")


def everything(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_run_is_a_name_under_runs_or_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_path("pong").parts == ("runs", "pong")
    assert str(run_path("./elsewhere/pong")) == "elsewhere/pong"
    assert run_path(str(tmp_path)) == tmp_path
    for name in ("", ".", ".."):
        with pytest.raises(UsageError):
            run_path(name)
    (tmp_path / "runs/breakout").mkdir(parents=True)
    assert existing_run("breakout").name == "breakout"
    with pytest.raises(UsageError, match="did you mean breakout"):
        existing_run("braekout")


def test_a_new_folder_is_made_and_an_unused_one_goes_again(tmp_path):
    path = tmp_path / "deep/run"
    with RunFolder(str(path)) as folder:
        assert path.is_dir()
        assert not folder.has_checkpoint
        with pytest.raises(UsageError, match=f"in use by process {os.getpid()}"), RunFolder(str(path)):
            pass
    assert not path.exists()


def test_a_folder_with_a_checkpoint_is_opened_as_it_is(tmp_path):
    fill(tmp_path, CHECKPOINT, "train.log", "notes.txt")
    with RunFolder(str(tmp_path)) as folder:
        assert folder.has_checkpoint
    assert {CHECKPOINT, "train.log", "notes.txt"} <= set(everything(tmp_path))


def test_someone_elses_folder_is_refused_untouched(tmp_path):
    fill(tmp_path, "thesis.tex", "train.log")
    with pytest.raises(UsageError, match=r"not empty \(thesis.tex, train.log\).*--fresh"), RunFolder(str(tmp_path)):
        pass
    assert everything(tmp_path) == ["thesis.tex", "train.log"]


def test_fresh_deletes_what_a_run_writes_and_nothing_else(tmp_path):
    ours = [CHECKPOINT, "config.yaml", "train.log", "events.out.tfevents.17.host.1.0", "episodes.csv", "memory.csv"]
    ours += ["ram_steps.f32", "replay/000001.seg", "model.pt", "model.pt.tmp", "best.pt", "eval.json", "report.md"]
    theirs = ["thesis.tex", "report.tex", "video.mp4", "checkpoints/x.pt", "my.yaml", "other/train.log"]
    fill(tmp_path, *ours, *theirs)
    with RunFolder(str(tmp_path), fresh=True) as folder:
        assert not folder.has_checkpoint
        folder.clear()
        assert [name for name in everything(tmp_path) if not name.startswith(".")] == sorted(theirs)


def test_fresh_does_not_follow_a_link_out_of_the_folder(tmp_path):
    fill(tmp_path / "big", "precious")
    run = tmp_path / "run"
    fill(run, CHECKPOINT)
    (run / "replay").symlink_to(tmp_path / "big")
    with RunFolder(str(run), fresh=True) as folder:
        folder.clear()
        assert not (run / "replay").exists()
    assert (tmp_path / "big/precious").exists()


def test_fresh_waits_for_no_one_either(tmp_path):
    fill(tmp_path, CHECKPOINT)
    with RunFolder(str(tmp_path)):
        with pytest.raises(UsageError, match="in use by process"), RunFolder(str(tmp_path), fresh=True):
            pass
        assert (tmp_path / CHECKPOINT).exists()


def test_a_lock_left_by_a_dead_process_holds_nobody(tmp_path):
    fill(tmp_path, CHECKPOINT)
    (tmp_path / runlog.LOCK).write_text("99999999\n")
    with RunFolder(str(tmp_path)):
        assert (tmp_path / runlog.LOCK).read_text() == f"{os.getpid()}\n"


def test_a_folder_that_cannot_be_is_refused_by_name(tmp_path):
    fill(tmp_path, "file")
    for name in (tmp_path / "file", tmp_path / "file/run"):
        with pytest.raises(UsageError, match="file"), RunFolder(str(name)):
            pass
    assert everything(tmp_path) == ["file"]


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UsageError, match="No locks available"), RunFolder(str(tmp_path / "run")):
        pass


def test_the_stored_config_is_read_back_and_names_the_versions(tmp_path):
    chosen = config.from_flat({"env.game": "pong", "learner.learning_rate": 3e-4})
    with RunFolder(str(tmp_path / "run")) as folder:
        folder.write_config(chosen)
        assert folder.read_config() == config.flat(chosen)
        text = (folder.path / "config.yaml").read_text()
    for name in ("# python: 3.", "# torch: ", "# numpy: ", "# ale-py: ", "# commit: "):
        assert name in text


class Clock:
    def __init__(self):
        self.now = 1_000.0

    def __call__(self):
        return self.now


def small(**values):
    defaults = {"env.num_envs": 4, "learner.learning_starts_steps": 1_000, "budget.max_steps": 100_000}
    return config.from_flat({**defaults, **{name.replace("__", "."): value for name, value in values.items()}})


def open_log(folder, chosen=None, clock=None, stream=None, **options):
    clock = clock or Clock()
    began = clock.now
    values = {"start_step": 0, "limit_mib": 2_048.0, "process_hours": lambda: (clock.now - began) / 3600, **options}
    return RunLog(folder, chosen or small(), stream=stream or io.StringIO(), clock=clock, **values)


def timestep(reward=0.0, ended=(), first=(), lives=5, num_envs=4):
    lanes = np.arange(num_envs)
    return SimpleNamespace(
        reward=np.full(num_envs, reward, np.float32),
        ended=np.isin(lanes, ended),
        first=np.isin(lanes, first),
        lives=np.full(num_envs, lives, np.int32),
    )


def curves(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def assert_rising(points):
    steps = [step for step, _ in points]
    assert steps == sorted(set(steps))


def test_games_are_counted_raw_and_stand_at_their_lanes_step(tmp_path):
    log = open_log(tmp_path)
    log.advance(4, timestep(reward=7, first=(0, 1, 2, 3)))  # reset rows count for nothing
    log.advance(8, timestep(reward=2))
    log.advance(12, timestep(reward=1.5, lives=4))
    log.advance(16, timestep(ended=(1, 3), lives=0))
    log.advance(20, timestep(reward=9, first=(1, 3), lives=5))
    log.advance(24, timestep(ended=(1,)))
    log.close()
    assert (tmp_path / "episodes.csv").read_text().splitlines() == [
        "step,lane,return,length_steps,lives_lost,wall_s",
        "14,1,3.5,3,5,0.0",
        "16,3,3.5,3,5,0.0",
        "22,1,0,1,0,0.0",
    ]
    assert curves(tmp_path)["episode/return"] == [(14, 3.5), (16, 3.5), (22, 0.0)]
    assert curves(tmp_path)["episode/length_steps"] == [(14, 3), (16, 3), (22, 1)]
    assert log.num_games == 3
    assert list(log.returns) == [3.5, 3.5, 0.0]


def test_games_in_flight_go_on_from_a_checkpoint(tmp_path):
    log = open_log(tmp_path)
    log.advance(4, timestep(first=(0, 1, 2, 3)))
    log.advance(8, timestep(reward=2, lives=3))
    state = log.games.state_dict()
    log.close()
    resumed = open_log(tmp_path, start_step=8)
    resumed.games.load_state_dict(state)
    resumed.advance(12, timestep(reward=1, ended=(0,), first=(2,), lives=1))
    resumed.close()
    assert (tmp_path / "episodes.csv").read_text().splitlines()[1] == "9,0,3,2,4,0.0"
    assert resumed.games.returns.tolist() == [3, 3, 0, 3]


def play(log, begin, end, value):
    for step in range(begin + 4, end + 1, 4):
        log.advance(step, timestep(reward=value, ended=(0, 1, 2, 3) if step % 8 == 0 else ()))
        if step % 20 == 0:
            log.scalars(step, {"learn/loss": value, "policy/epsilon": 0.5, "memory/rss_mib_mean": 500.0})


def test_a_resumed_run_has_rising_axes_and_nothing_twice(tmp_path):
    log = open_log(tmp_path)
    log.describe(Config())
    play(log, 0, 100, 1.0)
    log.scalars(100, {"eval/return_mean": 1.0})
    play(log, 100, 152, 2.0)  # lost: the checkpoint is of step 100
    log.close()
    log = open_log(tmp_path, start_step=100)
    log.describe(Config())
    log.scalars(100, {"eval/return_mean": 9.0})  # evaluated again: the first result stands
    play(log, 100, 132, 3.0)
    log.close()
    log = open_log(tmp_path, start_step=120)
    play(log, 120, 200, 4.0)
    assert log.num_games == 4 * 200 // 8
    log.close()
    found = curves(tmp_path)
    for points in found.values():
        assert_rising(points)
    assert found["learn/loss"] == [(20 * i, 1.0) for i in range(1, 6)] + [(120, 3.0)] + [
        (20 * i, 4.0) for i in range(7, 11)
    ]
    assert found["eval/return_mean"] == [(100, 1.0)]
    assert [step for step, _ in found["episode/return"]] == [
        step - 4 + lane + 1 for step in range(8, 201, 8) for lane in range(4)
    ]
    lines = (tmp_path / "episodes.csv").read_text().splitlines()[1:]
    assert [int(line.split(",")[0]) for line in lines] == [step for step, _ in found["episode/return"]]


def test_an_open_dashboard_drops_what_was_cut(tmp_path):
    log = open_log(tmp_path)
    play(log, 0, 160, 1.0)
    log.close()
    dashboard = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    dashboard.Reload()
    log = open_log(tmp_path, start_step=100)
    play(log, 100, 200, 2.0)
    log.close()
    dashboard.Reload()
    points = [(e.step, e.value) for e in dashboard.Scalars("learn/loss")]
    assert_rising(points)
    assert dict(points)[140] == 2.0


def test_a_torn_event_file_is_cut_at_its_last_whole_event(tmp_path):
    log = open_log(tmp_path)
    play(log, 0, 100, 1.0)
    log.close()
    (path,) = tmp_path.glob("events.*")
    whole = path.read_bytes()
    for loss in (1, 5, 17, 40):
        path.write_bytes(whole[:-loss])
        cut_events(tmp_path, 1_000)
        assert len(path.read_bytes()) <= len(whole) - loss
        again = path.read_bytes()
        assert cut_events(tmp_path, 1_000)["learn/loss"] in (80, 100)
        assert path.read_bytes() == again == whole[: len(again)]
    path.write_bytes(whole)
    cut_events(tmp_path, 1_000)
    assert path.read_bytes() == whole
    path.write_bytes(b"")
    assert cut_events(tmp_path, 1_000) == {}


def test_the_dashboard_is_laid_out_once_and_holds_the_config(tmp_path):
    chosen = small(env__game="pong")
    for start in (0, 100):
        log = open_log(tmp_path, chosen, start_step=start)
        log.describe(Config())
        log.scalars(start + 4, {"learn/loss": 1.0})
        log.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert len(events.Tensors(LAYOUT_TAG)) == 1
    layout = events.Tensors(LAYOUT_TAG)[0].tensor_proto.string_val[0]
    for name in (b"Learning", b"Returns", b"Memory by part", b"Speed", b"memory/unaccounted_mib"):
        assert name in layout
    texts = events.Tensors("config/text_summary")
    assert [event.step for event in texts] == [1, 101]
    assert b"|env.game|pong|" in texts[0].tensor_proto.string_val[0]
    difference = events.Tensors("difference_from_nature/text_summary")[0].tensor_proto.string_val[0]
    assert b"|env.game|pong|breakout|" in difference
    assert b"learner.gamma" not in difference


def test_every_chart_of_the_layout_draws_tags_that_a_run_writes():
    tags = {tag for charts in LAYOUT.values() for chart in charts for tag in chart.rpartition(": ")[2].split()}
    from dqn.memory import HEADER

    memory = {f"memory/{name}" for name in HEADER.split(",")[2:]}
    learn = {f"learn/{name}" for name in ("loss", "q_mean", "td_error_abs", "grad_norm")}
    others = {"policy/epsilon", "eval/return_mean", "episode/return", "episode/length_steps"}
    assert tags == memory | learn | others | {"speed/steps_per_s", "speed/updates_per_s"}


def run_to(log, clock, begin, end, speed, num_envs=4):
    for step in range(begin + num_envs, end + 1, num_envs):
        clock.now += num_envs / speed
        log.progress(step, 0.5, 1_024.0)


def test_redirected_output_of_100k_steps_is_short_and_tells_the_time_to_the_end(tmp_path):
    for speed in (2, 200, 5_000):
        clock, stream = Clock(), io.StringIO()
        folder = tmp_path / str(speed)
        folder.mkdir()
        log = open_log(folder, small(budget__max_steps=110_000), clock, stream)
        run_to(log, clock, 0, 100_000, speed)
        log.close()
        lines = stream.getvalue().splitlines()
        assert len(stream.getvalue()) < 60_000
        assert len(lines) >= 3
        progress = [line for line in lines if " of 110,000" in line]
        assert all("end in" in line and "limit in" in line for line in progress)
        assert "RAM 1.00/2.0 GiB" in lines[-1]
        assert "ε 0.500" in lines[-1]
        assert f"{speed:,} steps/s" in lines[-1]
        logged = (folder / "train.log").read_text().splitlines()
        assert [line[20:] for line in logged] == lines


def test_filling_and_learning_are_told_apart(tmp_path):
    clock, stream = Clock(), io.StringIO()
    log = open_log(tmp_path, small(learner__learning_starts_steps=20_000), clock, stream)
    run_to(log, clock, 0, 20_000, 2_000)
    run_to(log, clock, 20_000, 40_000, 100)
    log.close()
    text = stream.getvalue()
    assert "learning begins at step 20,000: filling 20,000 steps took 10 s, 2,000 steps/s" in text
    assert text.count("learning begins") == 1
    last = text.splitlines()[-1]
    assert last.startswith("learn 39,")
    assert " of 100,000 · 100 steps/s" in last
    assert "end in 10 min" in last


def test_a_run_that_resumes_in_the_middle_does_not_begin_to_learn_again(tmp_path):
    clock, stream = Clock(), io.StringIO()
    log = open_log(tmp_path, small(), clock, stream, start_step=50_000)
    run_to(log, clock, 50_000, 54_000, 100)
    assert "learning begins" not in stream.getvalue()
    assert stream.getvalue().splitlines()[-1].startswith("learn")
    log.close()


def test_the_speed_of_filling_bounds_the_time_to_the_end_from_below(tmp_path):
    clock, stream = Clock(), io.StringIO()
    log = open_log(tmp_path, small(learner__learning_starts_steps=10_000), clock, stream)
    run_to(log, clock, 0, 9_000, 500)
    assert "end in more than" in stream.getvalue().splitlines()[-1]
    log.close()


@pytest.mark.parametrize(("hours", "warned"), [(0.1, True), (10.0, False), (None, False)])
def test_a_warning_when_the_end_lies_beyond_the_limit(tmp_path, hours, warned):
    clock, stream = Clock(), io.StringIO()
    log = open_log(tmp_path, small(budget__max_hours=hours), clock, stream)
    run_to(log, clock, 0, 19_000, 100)
    assert "warning" not in stream.getvalue()  # not before 20k steps
    run_to(log, clock, 19_000, 40_000, 100)
    log.close()
    assert stream.getvalue().count("warning: at this speed the end is") == int(warned)


def test_speed_leaves_evaluations_out_and_the_time_to_the_end_does_not(tmp_path):
    clock, stream = Clock(), io.StringIO()
    log = open_log(tmp_path, small(), clock, stream)
    assert log.speeds(0, 0) == {}
    run_to(log, clock, 0, 20_000, 100)
    with log.during("evaluate"):
        clock.now += 200.0
    run_to(log, clock, 20_000, 40_000, 100)
    speeds = log.speeds(40_000, 10_000)
    assert speeds["speed/steps_per_s"] == pytest.approx(100)
    assert speeds["speed/updates_per_s"] == pytest.approx(25)
    assert "100 steps/s" in stream.getvalue().splitlines()[-1]
    assert "end in 17 min" in stream.getvalue().splitlines()[-1]  # 650 s of learning, and at 350 s the wall says 550
    log.close()


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True

    def fileno(self):
        raise OSError("no screen size")


def test_on_a_terminal_a_bar_shows_the_phase_and_messages_stay(tmp_path):
    clock, screen = Clock(), Terminal()
    log = open_log(tmp_path, small(), clock, screen)
    run_to(log, clock, 0, 5_000, 100)
    with log.during("evaluate"):
        log.say("evaluation: 42")
    log.close()
    text = screen.getvalue()
    for word in ("fill", "learn", "evaluate", "steps/s", "RAM 1.00/2.0 GiB", "ε 0.500", "end in", "limit in", "5.0%"):
        assert word in text
    assert "evaluation: 42" in text
    assert "of 100,000" not in text  # progress lines are for files: they stand in the log
    assert "of 100,000" in (tmp_path / "train.log").read_text()


def test_a_console_that_goes_away_or_knows_only_ascii_stops_nothing(tmp_path):
    class Gone(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    log = open_log(tmp_path, stream=Gone())
    log.say("still here")
    log.close()
    assert "still here" in (tmp_path / "train.log").read_text()
    raw = io.BytesIO()
    log = open_log(tmp_path, stream=io.TextIOWrapper(raw, encoding="ascii"))
    log.say("ε 0.5")
    log.close()
    assert raw.getvalue() == b"? 0.5\n"


def test_a_full_disk_ends_the_dashboard_not_the_run(tmp_path, monkeypatch):
    stream = io.StringIO()
    log = open_log(tmp_path, stream=stream)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(log._board._records, "write", refuse)
    log.scalars(4, {"learn/loss": 1.0})
    log.scalars(8, {"learn/loss": 1.0})
    log.flush()
    log.close()
    assert stream.getvalue().count("warning: the dashboard's file: No space left on device") == 1


def test_wall_time_is_summed_over_processes(tmp_path):
    clock = Clock()
    log = open_log(tmp_path, clock=clock, wall_s_before=100.0)
    clock.now += 5
    assert log.wall_s == 105
    log.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (-3, "0 s"),
        (59.6, "60 s"),
        (120, "2 min"),
        (7_140, "119 min"),
        (7_200, "2h00"),
        (1e5, "27h47"),
    ],
)
def test_durations_read_as_people_say_them(seconds, text):
    assert duration(seconds) == text
