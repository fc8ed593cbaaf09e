"""The real emulator: both backends, the protocol's rules, saving and restoring."""

import dataclasses
import multiprocessing
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from ale_py import Action

from dqn.atari import EXACT_GAMES, AtariEnv, PythonEnvs, VectorEnvs, game_names, make_envs, resolve_game
from dqn.checkpoint import to_arrays, to_tensors
from dqn.config import EnvConfig, UsageError

ROOT = Path(__file__).parent.parent


def seed(number=3):
    return np.random.SeedSequence(number)


def env(game="breakout", **values):
    return EnvConfig(**{"game": game, "num_envs": 2, "noop_max_frames": 0, **values})


@pytest.mark.parametrize("game", ["breakout", "pong", "seaquest", "space_invaders", "enduro"])
def test_backends_are_equal_frame_by_frame(game):
    """Random play over 2,000 rows, with lost lives and ends; a game over shows the picture before in ale-py."""
    chosen = env(game, max_frames=3_001)
    vector = make_envs(chosen, seed())
    python = make_envs(dataclasses.replace(chosen, backend="python"), seed())
    assert (vector.num_actions, vector.fire_action) == (python.num_actions, python.fire_action)
    assert vector.action_meanings == python.action_meanings
    rng = np.random.default_rng(0)
    left, right = vector.reset(), python.reset()
    ends = lost = truncations = 0
    for _ in range(2_000):
        over = left.ended & ~left.truncated
        assert np.array_equal(left.frame[~over], right.frame[~over])
        for name in ("reward", "terminal", "truncated", "ended", "lives", "first", "lost_life"):
            a, b = getattr(left, name), getattr(right, name)
            assert np.array_equal(a, b) and a.dtype == b.dtype, name
        assert not (left.terminal & left.truncated).any()
        ends, lost = ends + left.ended.sum(), lost + left.lost_life.sum()
        truncations += left.truncated.sum()
        actions = rng.integers(vector.num_actions, size=2)
        vector.send(actions)
        python.send(actions)
        left, right = vector.recv(), python.recv()
    vector.close()
    assert ends >= 4 and (lost > 10 or game in ("pong", "enduro"))
    assert truncations > 0 or game in ("breakout", "seaquest")


@pytest.mark.parametrize("backend", ["vector", "python"])
def test_a_lost_life_goes_on_with_the_same_game(backend):
    """Four lives are left, the return that is learnt ends, the picture is a fresh one of the game that goes on."""
    envs = make_envs(env(backend=backend, num_envs=1), seed())
    timestep, rows = envs.reset(), []
    rng = np.random.default_rng(1)
    for _ in range(400):
        envs.send(rng.integers(envs.num_actions, size=1))
        before, timestep = timestep, envs.recv()
        rows.append((before, timestep))
        if timestep.ended[0]:
            break
    losses = [(before, after) for before, after in rows if after.lost_life[0]]
    assert [after.lives[0] for _, after in losses] == [4, 3, 2, 1, 0]
    for before, after in losses[:-1]:
        assert after.terminal[0] and not after.ended[0] and not after.first[0]
        assert not np.array_equal(before.frame, after.frame)
    assert losses[-1][1].ended[0]
    envs.send(np.zeros(1, np.int64))
    again = envs.recv()
    assert again.first[0] and again.lives[0] == 5 and again.reward[0] == 0 and not again.ended[0]


def test_without_life_loss_terminals_only_the_games_end_counts():
    envs = make_envs(env(life_loss_terminal=False, backend="python"), seed())
    envs.reset()
    rng = np.random.default_rng(1)
    for _ in range(600):
        envs.send(rng.integers(envs.num_actions, size=2))
        timestep = envs.recv()
        assert np.array_equal(timestep.terminal, timestep.ended)


def test_the_true_last_picture_of_a_game():
    """At a game's end the python backend shows what the emulator shows then."""
    envs = PythonEnvs(env(num_envs=1), seed())
    envs.reset()
    rng = np.random.default_rng(1)
    timestep = None
    while timestep is None or not timestep.ended[0]:
        envs.send(rng.integers(4, size=1))
        timestep = envs.recv()
    lane = envs.lanes[0]
    now = lane.ale.getScreenGrayscale()
    assert (lane.picture >= now).all() and (lane.picture == now).mean() > 0.99


class Fake:
    """An emulator whose game is over after `alive` frames."""

    def __init__(self, alive):
        self.alive, self.frames, self.resets = alive, 0, 0

    def setInt(self, *_): ...
    def setFloat(self, *_): ...
    def loadROM(self, *_): ...

    def getMinimalActionSet(self):
        return [0, 1]

    def getScreenDims(self):
        return (210, 160)

    def reset_game(self):
        self.frames, self.resets = 0, self.resets + 1

    def act(self, action):
        self.frames += 1
        return 0

    def game_over(self):
        return self.frames >= self.alive

    def getScreenGrayscale(self, out):
        out[:] = self.frames


def test_no_ops_are_no_ops_where_the_game_has_no_such_action():
    """The first action of backgammon is FIRE."""
    fake, acted = Fake(100), []
    fake.act = lambda action: acted.append(action) or 0
    AtariEnv(env("backgammon", noop_min_frames=5, noop_max_frames=5), seed(), ale=fake).reset()
    assert acted == [Action.NOOP] * 5
    envs = PythonEnvs(env("backgammon"), seed())
    assert envs.action_meanings[0] == "FIRE" and envs.fire_action == 0


@pytest.mark.parametrize("game, action", [("breakout", 1), ("video_checkers", 0), ("freeway", None)])
def test_fire_is_found_by_its_meaning(game, action):
    assert PythonEnvs(env(game, num_envs=1), seed()).fire_action == action


@pytest.mark.parametrize("rows_short", [0, 1])
def test_a_cut_just_before_the_games_end(rows_short):
    """The vector lane that is cut plays one row more by itself; that the game ends in it must not be seen."""
    rng = np.random.default_rng(1)
    actions = [np.repeat(rng.integers(4), 2) for _ in range(400)]
    envs = make_envs(env(backend="python"), seed())
    envs.reset()
    for rows, action in enumerate(actions, 1):  # noqa: B007
        envs.send(action)
        if envs.recv().ended[0]:
            break
    both = [make_envs(env(backend=name, max_frames=4 * (rows - rows_short)), seed()) for name in ("vector", "python")]
    left, right = (envs.reset() for envs in both)
    ends = []
    for action in actions:
        ends.append((bool(left.ended[0]), bool(left.truncated[0])))
        over = left.ended & ~left.truncated
        assert np.array_equal(left.frame[~over], right.frame[~over])
        for name in ("reward", "terminal", "truncated", "ended", "lives", "first", "lost_life"):
            assert np.array_equal(getattr(left, name), getattr(right, name)), name
        for envs in both:
            envs.send(action)
        left, right = (envs.recv() for envs in both)
    both[0].close()
    assert ends[rows - rows_short] == (True, rows_short == 1)


def test_an_idle_lane_stands_still():
    envs = PythonEnvs(env(), seed())
    envs.reset()
    envs.idle[1] = True
    frames = [lane.ale.getFrameNumber() for lane in envs.lanes]
    for _ in range(5):
        envs.send(np.ones(2, np.int64))
        envs.recv()
    assert [lane.ale.getFrameNumber() - before for lane, before in zip(envs.lanes, frames)] == [20, 0]


@pytest.mark.parametrize("alive", range(1, 33))
def test_the_first_state_comes_from_a_live_game(alive):
    fake = Fake(alive)
    lane = AtariEnv(env(noop_min_frames=30, noop_max_frames=30), seed(), ale=fake)
    lane.reset()
    assert not fake.game_over() and lane.picture[0, 0] == fake.frames
    assert fake.resets == 1 + 30 // alive


@pytest.mark.parametrize("name", ["ALE/Breakout-v5", "Breakout-v4", "BreakoutNoFrameskip-v4", "breakout"])
def test_four_ways_to_name_a_game_and_one_frame_skip(name):
    chosen = env(resolve_game(name), backend="python", num_envs=1)
    envs = make_envs(chosen, seed())
    envs.reset()
    begun = envs.lanes[0].ale.getFrameNumber()
    rows = 0
    while rows < 1_000:
        envs.send(np.ones(1, np.int64))
        rows += not envs.recv().first[0]
    assert envs.lanes[0].ale.getFrameNumber() - begun <= 4_000
    assert envs.lanes[0].frames % 4 == 0 or envs._ended[0]


@pytest.mark.parametrize("name", ["brekout", "ALE/Nothing-v5", "Breakout-ram-v4", "combat", ""])
def test_unknown_games_are_answered_with_the_nearest(name):
    with pytest.raises(UsageError, match="unknown game"):
        resolve_game(name)
    assert "ms_pacman" in game_names() and resolve_game("ALE/MsPacman-v5") == "ms_pacman"


@pytest.mark.parametrize("backend", ["vector", "python"])
def test_noops_are_0_to_30(backend):
    envs = make_envs(env(noop_max_frames=30, num_envs=24, backend=backend, num_threads=2), seed())
    if backend == "python":
        envs.reset()
        counts = np.array([lane.ale.getEpisodeFrameNumber() for lane in envs.lanes])
    else:
        counts = envs._envs.reset(seed=envs._seeds)[1]["episode_frame_number"]
        envs.close()
    assert counts.min() <= 4 and 26 <= counts.max() <= 30


def test_sticky_actions_repeat_at_the_stated_rate():
    chosen = env(backend="python", num_envs=1, sticky_probability=0.25, frame_skip_frames=1)
    lane = AtariEnv(chosen, seed())
    lane.reset()
    repeats = 0
    for i in range(4_000):
        action = 2 + i % 2
        lane.step(action)
        repeats += lane._last_action != lane.actions[action]
        if lane.ale.game_over():
            lane.reset()
    assert 0.18 < repeats / 4_000 < 0.22  # of alternating actions p/(1 + p) differ: two repeats in a row meet again


@pytest.mark.parametrize("backend", ["vector", "python"])
def test_one_seed_one_game(backend):
    def play(number):
        envs = make_envs(env(noop_max_frames=30, backend=backend, sticky_probability=0.25), seed(number))
        checksum = zlib.crc32(envs.reset().frame.tobytes())
        rng = np.random.default_rng(0)
        for _ in range(200):
            envs.send(rng.integers(4, size=2))
            checksum = zlib.crc32(envs.recv().frame.tobytes(), checksum)
        envs.close()
        return checksum

    assert play(1) == play(1) != play(2)


CONTINUE = """
import sys, zlib, numpy as np, torch
from dqn.atari import make_envs
from dqn.checkpoint import to_arrays
from dqn.config import EnvConfig
config = EnvConfig(game=sys.argv[1], num_envs=2, backend="python", sticky_probability=0.25)
envs = make_envs(config, np.random.SeedSequence(9))
envs.load_state_dict(to_arrays(torch.load(sys.argv[2])))
rng, checksum = np.random.default_rng(5), 0
for _ in range(300):
    envs.send(rng.integers(envs.num_actions, size=2))
    row = envs.recv()
    checksum = zlib.crc32(row.frame.tobytes() + row.reward.tobytes() + row.lives.tobytes(), checksum)
print(checksum)
"""


@pytest.mark.parametrize("game", sorted(EXACT_GAMES))
def test_a_saved_game_goes_on_bit_for_bit_in_another_process(game, tmp_path):
    import torch

    envs = make_envs(EnvConfig(game=game, num_envs=2, backend="python", sticky_probability=0.25), seed())
    envs.reset()
    rng = np.random.default_rng(0)
    for _ in range(150):
        envs.send(rng.integers(envs.num_actions, size=2))
        envs.recv()
    torch.save(to_tensors(envs.state_dict()), tmp_path / "games.pt")
    rng, checksum = np.random.default_rng(5), 0
    for _ in range(300):
        envs.send(rng.integers(envs.num_actions, size=2))
        row = envs.recv()
        checksum = zlib.crc32(row.frame.tobytes() + row.reward.tobytes() + row.lives.tobytes(), checksum)
    other = subprocess.run(
        [sys.executable, "-c", CONTINUE, game, str(tmp_path / "games.pt")], cwd=ROOT, capture_output=True, text=True
    )
    assert other.stdout.strip() == str(checksum), other.stderr
    assert to_arrays(to_tensors(envs.state_dict()))["lanes"][0]["emulator"] == envs.state_dict()["lanes"][0]["emulator"]


def test_games_that_cannot_go_on_exactly_say_so():
    assert PythonEnvs(env("qbert"), seed()).state_dict() is None
    vector = VectorEnvs(env(), seed())
    assert vector.state_dict() is None
    vector.close()


def _play_in_a_spawned_process(queue):
    envs = make_envs(env(), seed())
    queue.put(envs.reset().frame.shape)
    envs.close()


def test_the_spawn_start_method_works():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_play_in_a_spawned_process, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == (2, 84, 84)
    process.join(60)
    assert process.exitcode == 0
