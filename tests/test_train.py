"""The loop: exact steps of every update and target copy, Catch solved, determinism, resuming."""

import csv
import json

import numpy as np
import pytest
import torch

from catch import CatchEnvs, evaluate_catch, use_catch
from dqn import budget as exits
from dqn import checkpoint, config
from dqn import run as run_module
from dqn.config import LearnerConfig, UsageError
from dqn.train import train, updates_due

pytestmark = pytest.mark.usefixtures("restore_signals")

SMALL = {
    "seed": 3,
    "env.screen_size": 36,
    "env.num_envs": 2,
    "env.fire_on_life": False,
    "replay.capacity": 500,
    "learner.learning_starts_steps": 100,
    "learner.target_period_steps": 40,
    "learner.precision": "fp32",
    "learner.device": "cpu",
    "learner.num_threads": 1,
    "policy.epsilon_decay_steps": 400,
    "budget.max_steps": 600,
    "budget.max_hours": None,
    "checkpoint.period_steps": 200,
    "evaluation.period_steps": 10_000,
    "memory.window_steps": 100,
}


def make(**changes):
    return config.from_flat({**SMALL, **{name.replace("__", "."): value for name, value in changes.items()}})


def final_state(folder):
    state, notes = checkpoint.load_newest(folder / "checkpoint")
    assert notes == []
    return state


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_updates_and_target_copies_at_exact_steps(lanes):
    learner = LearnerConfig(learning_starts_steps=50, update_period_steps=4, target_period_steps=20)
    due = [now for begin in range(0, 240, lanes) for now in updates_due(begin, begin + lanes, learner)]
    assert due == [now for now in range(54, 241, 4) if now <= 240 // lanes * lanes]
    copies = [now for now in due if (now - 50) % 20 == 0]
    assert copies == [70, 90, 110, 130, 150, 170, 190, 210, 230]


def test_updates_missed_by_a_refill_are_dropped():
    learner = LearnerConfig(learning_starts_steps=50, update_period_steps=4)
    due = [now for begin in range(100, 200, 8) for now in updates_due(begin, begin + 8, learner, 150)]
    assert due == list(range(154, 205, 4))


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_the_loop_counts_exactly_whatever_the_lanes(lanes, tmp_path, monkeypatch):
    use_catch(monkeypatch)
    copies = []
    update_target = run_module.Learner.update_target
    monkeypatch.setattr(run_module.Learner, "update_target", lambda self: (copies.append(1), update_target(self))[1])
    wanted = make(env__num_envs=lanes, budget__max_steps=480)
    assert run_module.start(wanted, f"{tmp_path}/a", train) == exits.FINISHED
    state = final_state(tmp_path / "a")
    assert state["step"] == 480 and state["updates"] == (480 - 100) // 4
    assert len(copies) == (480 - 100) // 40


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_catch_is_solved(precision, tmp_path, monkeypatch):
    use_catch(monkeypatch)
    wanted = make(
        env__screen_size=84,
        env__num_envs=8,
        replay__capacity=4_000,
        learner__learning_starts_steps=400,
        learner__target_period_steps=100,
        learner__learning_rate=5e-4,
        learner__gamma=0.9,
        learner__precision=precision,
        policy__epsilon_decay_steps=1_500,
        policy__epsilon_final=0.05,
        budget__max_steps=4_400,
        evaluation__period_steps=400,
        checkpoint__period_steps=100_000,
    )
    assert run_module.start(wanted, f"{tmp_path}/catch", train) == exits.FINISHED
    assert final_state(tmp_path / "catch")["best_return"] >= 0.9  # 1 is to catch each ball
    assert json.loads((tmp_path / "catch" / "eval.json").read_text())["return_mean"] > 0.7


def test_one_seed_one_result_and_evaluating_changes_nothing(tmp_path, monkeypatch):
    use_catch(monkeypatch)
    for name, period in (("a", 10_000), ("b", 100)):
        assert run_module.start(make(evaluation__period_steps=period), f"{tmp_path}/{name}", train) == exits.FINISHED
    assert run_module.start(make(seed=4), f"{tmp_path}/c", train) == exits.FINISHED
    a, b, c = (final_state(tmp_path / name) for name in "abc")
    assert same(a["learner"], b["learner"]) and same(a["policy_rng"], b["policy_rng"])
    assert not same(a["learner"], c["learner"])


class Scripted(CatchEnvs):
    """Two lanes whose games last 3 and 5 steps; a frame tells its row."""

    def __init__(self, env, seed):
        super().__init__(env, seed)
        self.age, self.rows = np.zeros(2, np.int64), 0

    def recv(self):
        timestep = super().recv()
        self.rows += 1
        self.age = np.where(self.over_before, 0, self.age + 1)
        ended = self.age == np.array([3, 5])
        first, self.over_before = self.over_before, ended
        return timestep._replace(terminal=ended, ended=ended, first=first, frame=timestep.frame * 0 + self.rows)

    over_before = np.zeros(2, bool)


def test_real_steps_are_stored_and_reset_rows_never(tmp_path, monkeypatch):
    """40 iterations: 3 of 4 rows of the one lane and 5 of 6 of the other are transitions."""
    use_catch(monkeypatch)
    monkeypatch.setattr(run_module, "make_envs", Scripted)
    seen = {}

    def loop(run):
        train(run)
        seen["sources"] = run.replay.num_sources

    wanted = make(learner__learning_starts_steps=1_000, budget__max_steps=80)
    assert run_module.start(wanted, f"{tmp_path}/a", loop) == exits.FINISHED
    rows = np.arange(40)
    real = (rows % 4 != 3).sum() + (rows % 6 != 5).sum()
    assert seen["sources"] == real - 1  # lane 1's newest has no successor yet; lane 0 has just reset


def stopping_at(step):
    def loop(run):
        goes_on = run.goes_on

        def stop_there():
            if run.step >= step:
                run.budget.stop_reason = "the test"
            return goes_on()

        run.goes_on = stop_there
        train(run)

    return loop


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("prioritized", [False, True])
def test_a_resumed_run_equals_the_uninterrupted_one(codec, prioritized, tmp_path, monkeypatch):
    use_catch(monkeypatch, exact=True)
    wanted = make(replay__codec=codec, replay__prioritized=prioritized, learner__n_steps=2)
    whole, parts = f"{tmp_path}/whole", f"{tmp_path}/parts"
    assert run_module.start(wanted, whole, train) == exits.FINISHED
    for step in (60, 200, 314, 314, 500):
        assert run_module.start(wanted, parts, stopping_at(step)) == exits.STOPPED_EARLY
    assert run_module.start(wanted, parts, train) == exits.FINISHED
    left, right = final_state(tmp_path / "whole"), final_state(tmp_path / "parts")
    for name in ("step", "updates", "learner", "policy_rng", "envs", "frames", "timestep", "games"):
        assert same(left[name], right[name]), name
    rows = [list(csv.reader((tmp_path / name / "episodes.csv").open())) for name in ("whole", "parts")]
    assert [row[:5] for row in rows[0]] == [row[:5] for row in rows[1]] and len(rows[0]) > 50
    sizes = [(tmp_path / name / "ram_steps.f32").stat().st_size for name in ("whole", "parts")]
    assert sizes[0] == sizes[1] == 4 * 300


def test_games_in_flight_are_cut_where_they_cannot_be_saved(tmp_path, monkeypatch):
    use_catch(monkeypatch, exact=False)
    wanted, name = make(), f"{tmp_path}/a"
    assert run_module.start(wanted, name, stopping_at(302)) == exits.STOPPED_EARLY
    assert run_module.start(wanted, name, train) == exits.FINISHED
    rows = list(csv.DictReader((tmp_path / "a" / "episodes.csv").open()))
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(set(steps)) and {row["length_steps"] for row in rows} == {"6"}
    assert "games in flight were cut" in (tmp_path / "a" / "train.log").read_text()


def test_another_config_is_refused_and_harmless_changes_are_named(tmp_path, monkeypatch):
    use_catch(monkeypatch)
    name = f"{tmp_path}/a"
    assert run_module.start(make(), name, train) == exits.FINISHED
    with pytest.raises(UsageError, match=r"learner.gamma is 0.5 and was 0.99"):
        run_module.start(make(learner__gamma=0.5), name, train)
    assert run_module.start(make(), name, train) == exits.FINISHED  # says that it is finished
    assert run_module.start(make(budget__max_steps=700), name, train) == exits.FINISHED
    log = (tmp_path / "a" / "train.log").read_text()
    assert "finished at step 600" in log and "budget.max_steps is now 700, was 600" in log
    assert final_state(tmp_path / "a")["step"] == 700
    assert run_module.start(make(learner__gamma=0.5), name, train, fresh=True) == exits.FINISHED


def test_a_lost_replay_refills_before_updates_go_on(tmp_path, monkeypatch):
    use_catch(monkeypatch)
    wanted, name = make(), f"{tmp_path}/a"
    assert run_module.start(wanted, name, stopping_at(400)) == exits.STOPPED_EARLY
    for path in (tmp_path / "a" / "replay").iterdir():
        path.unlink()
    assert run_module.start(wanted, name, train) == exits.FINISHED
    log = (tmp_path / "a" / "train.log").read_text()
    assert "replay slots are lost" in log and "until step 500" in log
    assert final_state(tmp_path / "a")["updates"] == (400 - 100) // 4 + (600 - 500) // 4


def test_a_replay_lost_before_learning_began_refills_too(tmp_path, monkeypatch):
    use_catch(monkeypatch)
    wanted, name = make(), f"{tmp_path}/a"
    assert run_module.start(wanted, name, stopping_at(90)) == exits.STOPPED_EARLY
    for path in (tmp_path / "a" / "replay").iterdir():
        path.unlink()
    assert run_module.start(wanted, name, train) == exits.FINISHED
    assert "until step 190" in (tmp_path / "a" / "train.log").read_text()
    assert final_state(tmp_path / "a")["updates"] == (600 - 190 + 2) // 4  # at 192, 196 …


def test_a_final_evaluation_that_was_interrupted_is_made_up_for(tmp_path, monkeypatch):
    use_catch(monkeypatch)
    evaluate, calls = run_module.evaluate, []

    def once_interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 1:
            raise exits.StopEarly("SIGTERM")
        return evaluate(*arguments, **options)

    monkeypatch.setattr(run_module, "evaluate", once_interrupted)
    assert run_module.start(make(), f"{tmp_path}/a", train) == exits.STOPPED_EARLY
    assert not (tmp_path / "a" / "eval.json").exists()
    assert run_module.start(make(), f"{tmp_path}/a", train) == exits.FINISHED
    assert (tmp_path / "a" / "eval.json").exists() and (tmp_path / "a" / "best.pt").exists()
    assert run_module.start(make(), f"{tmp_path}/a", train) == exits.FINISHED
    assert len(calls) == 2


def test_games_that_begin_after_a_resume_are_others_than_those_of_the_start(tmp_path, monkeypatch):
    use_catch(monkeypatch, exact=False)
    seeds, make_envs = [], run_module.make_envs
    monkeypatch.setattr(
        run_module,
        "make_envs",
        lambda env, seed: (seeds.append(tuple(seed.generate_state(2))), make_envs(env, seed))[1],
    )
    for step in (100, 200, 300):
        assert run_module.start(make(), f"{tmp_path}/a", stopping_at(step)) == exits.STOPPED_EARLY
    assert len(set(seeds)) == 3


def test_a_machine_that_would_decide_otherwise_is_named(tmp_path, monkeypatch):
    use_catch(monkeypatch)
    wanted, name = make(learner__num_threads=0), f"{tmp_path}/a"
    monkeypatch.setattr("dqn.learner.cores", lambda: 1)
    assert run_module.start(wanted, name, stopping_at(100)) == exits.STOPPED_EARLY
    monkeypatch.setattr("dqn.learner.cores", lambda: 2)
    assert run_module.start(wanted, name, stopping_at(200)) == exits.STOPPED_EARLY
    said = "num_threads was 1 before, this machine alone would take 2: it is 1"
    assert said in (tmp_path / "a" / "train.log").read_text()
    torch.set_num_threads(1)


def test_a_loss_found_bad_by_the_last_save_ends_in_good_order(tmp_path, monkeypatch):
    use_catch(monkeypatch)

    def loop(run):
        stopping_at(300)(run)
        run.metrics = run.metrics._replace(loss=torch.tensor(float("nan")))

    assert run_module.start(make(), f"{tmp_path}/a", loop) == exits.FAILED
    assert "the last good checkpoint stays" in (tmp_path / "a" / "train.log").read_text()
    assert final_state(tmp_path / "a")["step"] == 200


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"replay__ram_budget_mib": 0.01, "memory__on_excess": "warn"}, "replay.ram_budget_mib"),
        ({"replay__spill_dir": "/proc/none", "replay__ram_budget_mib": 64}, "replay.spill_dir"),
    ],
)
def test_a_refused_fresh_start_deletes_nothing(changes, words, tmp_path, monkeypatch):
    use_catch(monkeypatch)
    assert run_module.start(make(), f"{tmp_path}/a", train) == exits.FINISHED
    before = sorted(path.name for path in (tmp_path / "a").rglob("*"))
    for name in ("a", "b"):
        with pytest.raises(UsageError, match=words):
            run_module.start(make(**changes), f"{tmp_path}/{name}", train, fresh=True)
    assert sorted(path.name for path in (tmp_path / "a").rglob("*")) == before
    assert not (tmp_path / "b").exists()


def test_fresh_removes_what_the_former_run_had_spilled_elsewhere(tmp_path, monkeypatch):
    use_catch(monkeypatch)
    spill = str(tmp_path / "spill")
    assert run_module.start(make(replay__spill_dir=spill), f"{tmp_path}/a", train) == exits.FINISHED
    assert list((tmp_path / "spill" / "a").glob("*.npy"))
    assert run_module.start(make(), f"{tmp_path}/a", train, fresh=True) == exits.FINISHED
    assert not (tmp_path / "spill" / "a").exists()


def test_a_loss_that_is_no_number_keeps_the_checkpoint(tmp_path, monkeypatch):
    use_catch(monkeypatch)

    class Poisoned(CatchEnvs):
        def recv(self):
            timestep = super().recv()
            return timestep._replace(reward=np.where(timestep.ended, np.nan, timestep.reward).astype(np.float32))

    monkeypatch.setattr(run_module, "make_envs", lambda env, seed: Poisoned(env, seed))
    assert run_module.start(make(checkpoint__period_steps=50), f"{tmp_path}/a", train) == exits.FAILED
    state = final_state(tmp_path / "a")
    assert state["step"] <= 104
    assert "the last good checkpoint stays" in (tmp_path / "a" / "train.log").read_text()


def test_memory_beyond_the_budget_saves_and_stops(tmp_path, monkeypatch):
    use_catch(monkeypatch)
    assert run_module.start(make(memory__budget_gib=0.01), f"{tmp_path}/a", train) == exits.STOPPED_EARLY
    assert "beyond the budget" in (tmp_path / "a" / "train.log").read_text()
    assert run_module.start(make(), f"{tmp_path}/a", train) == exits.FINISHED


def test_a_failing_save_is_named_and_training_goes_on(tmp_path, monkeypatch):
    use_catch(monkeypatch)
    saves = []
    original = checkpoint.save

    def failing(folder, step, state):
        saves.append(step)
        if 0 < step < 600:
            raise OSError(28, "No space left on device")
        return original(folder, step, state)

    monkeypatch.setattr(checkpoint, "save", failing)
    monkeypatch.setattr(run_module, "RETRY_SAVE_S", 0.0)
    assert run_module.start(make(), f"{tmp_path}/a", train) == exits.FINISHED
    log = (tmp_path / "a" / "train.log").read_text()
    assert "saving at step 200 failed" in log and "the checkpoint of step 0 stays" in log
    assert len(saves) > 3 and final_state(tmp_path / "a")["step"] == 600


def test_max_episodes_and_a_run_that_only_fills(tmp_path, monkeypatch):
    use_catch(monkeypatch)
    assert run_module.start(make(budget__max_episodes=20), f"{tmp_path}/a", train) == exits.FINISHED
    assert 20 <= len((tmp_path / "a" / "episodes.csv").read_text().splitlines()) - 1 <= 21
    wanted = make(learner__learning_starts_steps=1_000)
    assert run_module.start(wanted, f"{tmp_path}/b", train) == exits.FINISHED
    assert final_state(tmp_path / "b")["updates"] == 0


def test_the_policy_without_the_loop_gets_about_nothing():
    """The bar of Catch means something: random play is far below it."""
    env = make(env__screen_size=84).env
    rng = np.random.default_rng(0)
    score = evaluate_catch(lambda s: rng.random((len(s), 3)), env, None, np.random.SeedSequence(0), step=0, poll=None)
    assert score.return_mean < 0
