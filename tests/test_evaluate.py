"""Evaluation, its statistics, and video."""

import dataclasses
import json

import av
import numpy as np
import pytest

from dqn.atari import PythonEnvs, TimeStep, game_names
from dqn.budget import StopEarly
from dqn.config import EnvConfig, EvaluationConfig, UsageError
from dqn.evaluate import PROTOCOLS, EvalResult, evaluate, human_normalised, random_and_human
from dqn.video import BEST, FAINT, Video

SEED = np.random.SeedSequence(7)
SMALL = EvaluationConfig(episodes=3, num_envs=2, max_frames=400)


def always(action, num_actions=4):
    values = np.zeros(num_actions, np.float32)
    values[action] = 1
    return lambda states: np.tile(values, (len(states), 1))


def test_an_agent_that_does_nothing_ends_at_the_cap_and_is_flagged():
    env = EnvConfig(fire_on_life=False, screen_size=36)
    result = evaluate(always(0), env, dataclasses.replace(SMALL, epsilon=0.0), SEED)
    assert result.returns == [0.0, 0.0, 0.0] and result.capped == 3 and result.lengths_steps == [100] * 3
    values = json.loads(result.to_json())
    assert values["capped"] == 3 and values["return_mean"] == 0 and values["episodes"] == 3
    assert all(np.isfinite(value) for value in values.values() if isinstance(value, float))
    assert "3 capped" in result.summary() and "lower bounds" in result.table()


def test_whole_games_raw_scores_and_the_fire_rule():
    env = EnvConfig(screen_size=36, fire_on_life=True)
    evaluation = EvaluationConfig(episodes=5, num_envs=2, epsilon=0.5)
    result = evaluate(always(3), env, evaluation, SEED)
    assert len(result.returns) == 5 and result.capped == 0 and max(result.lengths_steps) > 100
    again = evaluate(always(3), env, evaluation, SEED)
    other = evaluate(always(3), env, evaluation, np.random.SeedSequence(8))
    assert result.returns == again.returns and result.lengths_steps == again.lengths_steps
    assert other.lengths_steps != result.lengths_steps
    assert "FIRE after a life loss by rule" in result.protocol and "ε 0.5" in result.protocol


def test_training_wrappers_give_another_number_and_the_protocol_says_so():
    """The same player with and without the FIRE rule: the report cannot be mistaken."""
    evaluation = EvaluationConfig(episodes=2, num_envs=2, epsilon=0.0, max_frames=2_000)
    with_rule = evaluate(always(3), EnvConfig(screen_size=36), evaluation, SEED)
    without = evaluate(always(3), EnvConfig(screen_size=36, fire_on_life=False), evaluation, SEED)
    assert with_rule.protocol != without.protocol
    assert with_rule.capped == 0 and without.capped == 2


class ShortAndLong:
    """Two lanes: games of 3 steps in one, of 50 in the other; each step is worth 1."""

    frame_shape, fire_action, longest = (36, 36), None, np.array([3, 50])

    def __init__(self, env, seed):
        self.idle, self.age, self.rows = np.zeros(2, bool), np.zeros(2, np.int64), 0
        self.lanes = [self, self]
        self.ale = self

    def game_over(self):
        return True

    def reset(self):
        return self.row(np.ones(2, bool))

    def send(self, actions):
        self.rows += 1

    def recv(self):
        first = self.age == self.longest
        self.age = np.where(first, 0, self.age + 1)
        return self.row(first)

    def row(self, first):
        ended, none = self.age == self.longest, np.zeros(2, bool)
        frame, lives = np.zeros((2, 36, 36), np.uint8), np.zeros(2, np.int32)
        return TimeStep(frame, (~first).astype(np.float32), ended, none, ended, lives, first, none)


def test_games_are_shared_out_beforehand(monkeypatch):
    """The first five games that end would all but one be short ones."""
    monkeypatch.setattr("dqn.evaluate.PythonEnvs", ShortAndLong)
    evaluation = EvaluationConfig(episodes=5, num_envs=2)
    result = evaluate(always(0), EnvConfig(screen_size=36), evaluation, SEED)
    assert sorted(result.lengths_steps) == [3, 3, 3, 50, 50]
    assert sorted(result.returns) == [3, 3, 3, 50, 50] and result.capped == 0


def test_lanes_that_are_through_stand_still():
    """Each emulator plays its own games and no frame more, whatever the other lanes do."""
    made = []

    class Seen(PythonEnvs):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dqn.evaluate.PythonEnvs", Seen)
        env = EnvConfig(screen_size=36, noop_max_frames=0)
        result = evaluate(always(1), env, EvaluationConfig(episodes=3, num_envs=2, epsilon=0.3), SEED)
    assert made[0].idle.all() and len(result.returns) == 3
    assert [lane.frames for lane in made[0].lanes] == [lane.ale.getEpisodeFrameNumber() for lane in made[0].lanes]
    assert all(lane.ale.game_over() for lane in made[0].lanes)


def test_evaluation_can_be_interrupted():
    def poll():
        raise StopEarly("a signal")

    with pytest.raises(StopEarly):
        evaluate(always(1), EnvConfig(screen_size=36), SMALL, SEED, poll=poll)


def test_eval_json_holds_the_contract():
    result = EvalResult("breakout", 5_000, [1.0, 2.0, 3.0, 30.0], [10, 20, 30, 40], 1, 0.05, "how")
    values = json.loads(result.to_json())
    assert {"return_mean", "return_std", "return_median", "returns", "capped", "episodes"} <= set(values)
    assert {"epsilon", "protocol", "steps", "game"} <= set(values)
    assert (values["return_mean"], values["return_median"], values["return_iqm"]) == (9.0, 2.5, 2.5)
    assert values["return_best"] == 30 and values["return_iqm_low"] <= 2.5 <= values["return_iqm_high"]
    assert values["human_normalised"] == pytest.approx((9 - 1.7) / (30.5 - 1.7))


def test_human_normalised_scores():
    assert human_normalised("breakout", 1.7) == 0 and human_normalised("breakout", 30.5) == 1
    assert human_normalised("adventure", 5.0) is None
    assert len(random_and_human()) == 57 and set(random_and_human()) <= set(game_names())
    assert all(low < high for low, high in random_and_human().values())
    assert set(PROTOCOLS) == {"nature", "machado", "greedy"}


def test_video_films_the_first_game(tmp_path):
    path = tmp_path / "game.mp4"
    with Video(path, ("NOOP", "FIRE", "RIGHT", "LEFT")) as film:
        evaluate(always(2), EnvConfig(screen_size=36), SMALL, SEED, film=film)
    with av.open(str(path)) as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    assert len(frames) == 101 and frames[0].shape == (640, 880, 3)
    assert frames[50][:, :480].mean() > 5  # the game
    assert frames[50][190:, 500:].max() > 150  # bars and words


def test_a_video_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        Video(tmp_path / "none" / "game.mp4", ("NOOP",))


def test_a_name_that_no_format_has_is_one_line_and_writes_nothing(tmp_path):
    with pytest.raises(UsageError, match=r"end its name in \.mp4"):
        Video(tmp_path / "game.nothing", ("NOOP",))
    assert not list(tmp_path.iterdir())


def film(path):
    with Video(path, ("NOOP", "FIRE", "RIGHT", "LEFT")) as video:
        result = evaluate(always(2), EnvConfig(screen_size=36), SMALL, SEED, film=video)
    return video, result


def test_without_an_encoder_the_evaluation_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("dqn.video.ENCODERS", ("none_such",))
    with pytest.warns(UserWarning, match="no video, the evaluation goes on"):
        video, result = film(tmp_path / "game.mp4")
    assert "none_such" in video.problem and len(result.returns) == 3


def test_a_full_disk_ends_the_film_and_not_the_evaluation(tmp_path):
    full = tmp_path / "game.mp4"
    full.symlink_to("/dev/full")
    with pytest.warns(UserWarning, match="No space left") as warned:
        _, result = film(full)
    assert len(warned) == 1 and len(result.returns) == 3


def test_no_memory_for_the_film(tmp_path, monkeypatch):
    """The 50th picture finds none: one warning, the games are played to their ends, the beginning can be seen."""
    encode, pictures = Video._encode, []

    def greedy(self, frame):
        pictures.append(frame)
        if len(pictures) == 50:
            raise MemoryError("no memory")
        encode(self, frame)

    monkeypatch.setattr(Video, "_encode", greedy)
    with pytest.warns(UserWarning, match="MemoryError") as warned:
        video, result = film(tmp_path / "game.mp4")
    assert len(warned) == 1 and len(pictures) == 50 and len(result.returns) == 3 and video.problem
    assert result.returns == evaluate(always(2), EnvConfig(screen_size=36), SMALL, SEED).returns


def test_words_and_bars(tmp_path):
    """The best action is green; a bar below 0 grows to the left of where the others begin."""
    video = Video(tmp_path / "game.mp4", ("NOOP", "DOWNRIGHTFIRE"))
    assert video._actions == ["noop", "down right fire"]
    video._draw(np.zeros((210, 160, 3), np.uint8), 12, 3, np.array([-1.0, 1.0], np.float32))
    middle = [video._canvas[190 + 24 + 48 * row, 480 + 32 + 130 : 480 + 32 + 280] for row in (0, 1)]
    grey, green = (np.flatnonzero((line == colour).all(axis=1)) for line, colour in zip(middle, (FAINT, BEST)))
    assert grey[0] < 2 and green[-1] > 147 and abs(int(grey[-1]) - int(green[0])) <= 1
    with video:
        pass


@pytest.mark.slow
def test_filming_a_long_game_takes_no_memory(tmp_path):
    """27,000 steps of doing nothing: less than 100 MB."""
    import psutil

    process, peak = psutil.Process(), 0

    def poll():
        nonlocal peak
        peak = max(peak, process.memory_info().rss)

    evaluation = EvaluationConfig(episodes=1, num_envs=1, epsilon=0.0, max_frames=108_000)
    before = process.memory_info().rss
    with Video(tmp_path / "game.mp4", ("NOOP", "FIRE", "RIGHT", "LEFT")) as film:
        result = evaluate(always(0), EnvConfig(fire_on_life=False), evaluation, SEED, poll=poll, film=film)
    rise = (peak - before) / 1e6
    print(f"RSS rise while filming {result.lengths_steps[0]} steps: {rise:.1f} MB")
    assert result.lengths_steps == [27_000] and rise < 100
