"""Atari games, N at once, behind one interface with two backends.

`VectorEnvs` plays in C++ threads (ale-py's `AtariVectorEnv`); `PythonEnvs` is readable, films, and can be saved and
restored exactly. For the same actions from the same emulator state both give the same pictures, rewards, lives and
ends, but for one thing: where a game is over, ale-py shows the picture before the last decision, and `PythonEnvs` the
true last one. Learning never looks at it: a terminal's discount is 0.

A game that is over begins anew with the next row, whose action is ignored:

    row t     action_t -> reward, terminal or truncated, `ended`; frame is the game's last one
    row t+1   any action -> `first`; frame is the next game's first one, reward 0

A *frame* is one of the emulator's, a *step* one decision (four frames). No-op frames at a game's start count for
nothing. Protocol: Mnih et al. 2015; Machado et al. 2018 with sticky actions and without life-loss terminals.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from ale_py import Action, ALEInterface, ALEState, LoggerMode, roms

from dqn.config import EnvConfig, UsageError, nearest
from dqn.memory import cores
from dqn.preprocessing import max_pool, resize

TWO_PLAYERS = frozenset({"combat", "joust", "maze_craze", "warlords"})
"""ROMs that need a second player: the emulator ends the whole process when it loads one as a game for one."""
NEVER_FRAMES = 2**31 - 1
"""ale-py's own cut would show the picture before the last: `VectorEnvs` counts and cuts by itself."""
EXACT_GAMES = frozenset({"breakout", "pong", "seaquest", "space_invaders"})
"""Games whose saved emulator state was seen to go on bit for bit in a new process; qbert's was not."""

ALEInterface.setLoggerMode(LoggerMode.Error)
cv2.setNumThreads(1)  # an 84×84 picture is too small to share out


class TimeStep(NamedTuple):
    """What a row of N decisions brought; arrays of length N.

    Attributes:
        frame: u8[N, H, W], the picture after the decision.
        reward: f32, raw.
        terminal: the return that is learnt ends here: game over, or a life lost.
        truncated: the game was cut at its longest; never together with `terminal`.
        ended: the game is over or was cut; the next row begins another.
        lives: i32, lives left.
        first: `frame` is a game's first; the action was ignored.
        lost_life: a life was lost, the game's last one included.
    """

    frame: np.ndarray
    reward: np.ndarray
    terminal: np.ndarray
    truncated: np.ndarray
    ended: np.ndarray
    lives: np.ndarray
    first: np.ndarray
    lost_life: np.ndarray


def game_names() -> list[str]:
    """Every game that ALE can play, as its ROM is called."""
    return [name for name in roms.get_all_rom_ids() if name not in TWO_PLAYERS]


def resolve_game(name: str) -> str:
    """The ROM's name for any common spelling; frames are skipped by us alone, whatever the spelling promises.

    Raises:
        UsageError: no such game; the nearest names are listed.
    """
    match = re.fullmatch(r"(?:ALE/)?([A-Za-z0-9]+?)(?:NoFrameskip|Deterministic)?-v\d", name)
    word = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", match.group(1)) if match else name
    if word.lower() not in game_names():
        raise UsageError(f"unknown game '{name}' in env.game{nearest(word.lower(), game_names())}")
    return word.lower()


def rom_path(game: str) -> Path:
    """Where the ROM of a game lies.

    Raises:
        UsageError: this ale-py has none.
    """
    path = roms.get_rom_path(game)
    if path is None:
        raise UsageError(f"env.game {game}: this ale-py holds no ROM of it; take another game")
    return path


def make_envs(config: EnvConfig, seed: np.random.SeedSequence) -> "VectorEnvs | PythonEnvs":
    """N games of the config's backend, each lane with a seed of its own."""
    return (VectorEnvs if config.backend == "vector" else PythonEnvs)(config, seed)


class _Envs:
    """What the two backends share: actions by meaning, and the row that their raw results make."""

    def __init__(self, config: EnvConfig, actions: list[Any]):
        self.config = config
        self.num_envs = config.num_envs
        self.num_actions = len(actions)
        self.action_meanings = tuple(action.name for action in actions)
        self.fire_action = self.action_meanings.index("FIRE") if "FIRE" in self.action_meanings else None
        self.frame_shape = (config.screen_size, config.screen_size)
        self._lives = np.zeros(config.num_envs, np.int32)
        self._ended = np.zeros(config.num_envs, bool)

    def _row(self, frame: np.ndarray, reward: Any, over: Any, cut: Any, lives: np.ndarray) -> TimeStep:
        first = self._ended
        lost_life = ~first & (lives < self._lives)
        terminal = over | lost_life if self.config.life_loss_terminal else over.copy()
        self._ended, self._lives = over | cut, lives
        reward = reward.astype(np.float32)
        return TimeStep(frame, reward, terminal, cut & ~terminal, self._ended, lives, first, lost_life)


class VectorEnvs(_Envs):
    """Games in C++ threads; their states cannot be saved.

    The settings close ale-py 0.12.1's traps: `episodic_life` would fully reset the game at a lost life, rewards would
    be clipped, FIRE pressed before the no-ops, and `noop_max` is one more than the most no-ops.
    """

    def __init__(self, config: EnvConfig, seed: np.random.SeedSequence):
        from ale_py.vector_env import AtariVectorEnv

        rom = ALEInterface()
        rom.loadROM(rom_path(config.game))
        super().__init__(config, rom.getMinimalActionSet())
        self._envs = AtariVectorEnv(
            config.game,
            config.num_envs,
            num_threads=config.num_threads or max(1, min(cores() // 2, config.num_envs)),
            max_num_frames_per_episode=NEVER_FRAMES,
            repeat_action_probability=config.sticky_probability,
            img_height=config.screen_size,
            img_width=config.screen_size,
            stack_num=1,
            frameskip=config.frame_skip_frames,
            noop_max=config.noop_max_frames + 1,
            episodic_life=False,
            life_loss_info=False,
            reward_clipping=False,
            use_fire_reset=False,
        )
        seeds = [lane.generate_state(1)[0] & 0x7FFFFFFF for lane in seed.spawn(config.num_envs)]
        self._seeds: np.ndarray | None = np.array(seeds)
        self._frames = np.zeros(config.num_envs, np.int64)
        self._cut = np.zeros(config.num_envs, bool)

    def reset(self) -> TimeStep:
        """New games in all lanes. The first call seeds them, which loads the ROM: 93 ms, against 6 ms later."""
        frame, info = self._envs.reset(seed=self._seeds)
        self._seeds = None
        none = np.zeros(self.num_envs, bool)
        self._ended, self._frames[:] = ~none, 0
        return self._row(frame[:, 0], np.zeros(self.num_envs), none, none, info["lives"].copy())

    def send(self, actions: np.ndarray) -> None:
        """Starts a row of decisions i64[N]; returns at once."""
        self._envs.send(actions)

    def recv(self) -> TimeStep:
        """Waits for the row."""
        frame, reward, over, _, info = self._envs.recv()
        lives = info["lives"]
        if self._cut.any():  # these played on, since only a game that is over begins anew by itself
            again, info = self._envs.reset(options={"reset_mask": self._cut})
            frame[self._cut], lives[self._cut] = again[self._cut], info["lives"][self._cut]
            reward[self._cut], over[self._cut] = 0, False
        self._frames = np.where(self._ended, 0, self._frames + self.config.frame_skip_frames)
        self._cut = ~over & (self._frames >= self.config.max_frames)
        return self._row(frame[:, 0], reward, over, self._cut, lives)

    def state_dict(self) -> None:
        """None: these games cannot be saved."""

    def load_state_dict(self, state: Any) -> None:
        """Never called: there is no state."""
        raise TypeError("games of the vector backend cannot be restored")

    def close(self) -> None:
        """Stops the threads."""
        self._envs.close()


class PythonEnvs(_Envs):
    """The same in plain Python, lane after lane.

    Attributes:
        idle: bool[N], lanes that whoever plays is through with: they stand still, their rows mean nothing.
    """

    def __init__(self, config: EnvConfig, seed: np.random.SeedSequence):
        self.lanes = [AtariEnv(config, lane) for lane in seed.spawn(config.num_envs)]
        super().__init__(config, self.lanes[0].actions)
        self.idle = np.zeros(self.num_envs, bool)

    def reset(self) -> TimeStep:
        """New games in all lanes."""
        self._ended[:] = True
        self.send(np.zeros(self.num_envs, np.int64))
        return self.recv()

    def send(self, actions: np.ndarray) -> None:
        """Notes a row of decisions i64[N]."""
        self._actions = actions

    def recv(self) -> TimeStep:
        """Plays the row."""
        frame = np.zeros((self.num_envs, *self.frame_shape), np.uint8)
        reward, lives = np.zeros(self.num_envs), np.zeros(self.num_envs, np.int32)
        over, truncated = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        for i, lane in enumerate(self.lanes):
            if self.idle[i]:
                continue
            if self._ended[i]:
                lane.reset()
            else:
                reward[i], over[i], truncated[i] = lane.step(int(self._actions[i]))
            lives[i] = lane.ale.lives()
            resize(lane.picture, out=frame[i])
        return self._row(frame, reward, over, truncated, lives)

    def state_dict(self) -> dict[str, Any] | None:
        """Everything that the games go on from, in plain containers; None for a game that would not go on exactly."""
        if self.config.game not in EXACT_GAMES:
            return None
        lanes = [lane.state_dict() for lane in self.lanes]
        return {"lanes": lanes, "lives": self._lives.copy(), "ended": self._ended.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict`, bit for bit."""
        for lane, saved in zip(self.lanes, state["lanes"], strict=True):
            lane.load_state_dict(saved)
        self._lives, self._ended = np.array(state["lives"], np.int32), np.array(state["ended"], bool)

    def close(self) -> None:
        """Nothing to stop."""


class AtariEnv:
    """One game: no-op starts, frame skip, sticky actions, the maximum of the last two frames.

    Attributes:
        picture: u8[210, 160] gray, what the last decision showed; its memory is used again.
    """

    def __init__(self, config: EnvConfig, seed: np.random.SeedSequence, ale: Any = None):
        self.config = config
        self._rng = np.random.default_rng(seed)
        self.ale = ale or ALEInterface()
        self.ale.setInt("random_seed", int(seed.generate_state(1)[0] & 0x7FFFFFFF))
        # ALE's own stickiness is off: its generator is not in the state that ALE saves, ours is.
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(rom_path(config.game))
        self.actions = self.ale.getMinimalActionSet()
        width_height = self.ale.getScreenDims()
        self._screens = np.zeros((2, *width_height), np.uint8)
        self.picture = np.zeros(width_height, np.uint8)
        self.frames = 0
        self._last_action = Action.NOOP

    def reset(self) -> None:
        """A new game, after its no-op frames, alive."""
        self.ale.reset_game()
        for _ in range(self._rng.integers(self.config.noop_min_frames, self.config.noop_max_frames + 1)):
            self.ale.act(Action.NOOP)  # two games have no such action among their own
            if self.ale.game_over():
                self.ale.reset_game()
        self.frames, self._last_action = 0, Action.NOOP
        self.ale.getScreenGrayscale(self.picture)

    def step(self, action: int) -> tuple[float, bool, bool]:
        """Holds an action for `frame_skip_frames`; returns the raw reward, whether the game is over, and was cut."""
        reward, last = 0.0, self.config.frame_skip_frames - 1
        over = False
        for i in range(last + 1):
            if not (self.config.sticky_probability and self._rng.random() < self.config.sticky_probability):
                self._last_action = self.actions[action]
            reward += self.ale.act(self._last_action)
            self.frames += 1
            over = self.ale.game_over()
            if i >= last - 1 or over:
                self.ale.getScreenGrayscale(self._screens[i % 2])
            if over:
                break
        if i == last and last > 0:
            max_pool(self._screens[0], self._screens[1], out=self.picture)
        else:
            self.picture[:] = self._screens[i % 2]
        return reward, over, not over and self.frames >= self.config.max_frames

    def state_dict(self) -> dict[str, Any]:
        """The emulator's state as bytes (14 KB), and the wrapper's own."""
        return {
            "emulator": self.ale.cloneState(include_rng=True).__getstate__(),
            "rng": self._rng.bit_generator.state,
            "frames": self.frames,
            "last_action": self._last_action.value,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict`; plain bytes, nothing is unpickled."""
        emulator = ALEState.__new__(ALEState)
        emulator.__setstate__(state["emulator"])
        self.ale.restoreState(emulator)
        self._rng.bit_generator.state = state["rng"]
        self.frames, self._last_action = state["frames"], Action(state["last_action"])
