"""The configuration of a run: frozen dataclasses, filled from YAML and then the command line.

Every value is checked where it enters: unknown keys are answered with the nearest name, values with their range.
Durations carry their unit in their name: a *frame* is one emulator frame, a *step* one decision of one game.
"""

import contextlib
import dataclasses
import difflib
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml


class UsageError(Exception):
    """Something the user asked for cannot be: one line for the console, exit code 2."""


def option(default: Any, text: str, *, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field with its help text and its inclusive range."""
    return field(default=default, metadata={"text": text, "low": low, "high": high})


@dataclass(frozen=True)
class EnvConfig:
    """The games."""

    game: str = option("breakout", "Atari game, as ALE names its ROM")
    backend: Literal["vector", "python"] = option("vector", "emulators in C++ threads, or our readable wrappers")
    num_envs: int = option(8, "lanes: games played at once", low=1, high=1024)
    num_threads: int = option(0, "emulator threads; 0: from the cores this process may use", low=0, high=1024)
    fire_on_life: bool = option(True, "FIRE on a game's first state and after a life loss")
    sticky_probability: float = option(0.0, "chance that the emulator repeats the last action", low=0, high=1)
    life_loss_terminal: bool = option(True, "a lost life ends the return that is learnt, not the game")
    clip_reward: bool = option(True, "learn from the reward's sign; scores stay raw")
    frame_skip_frames: int = option(4, "emulator frames a decision lasts", low=1, high=64)
    noop_min_frames: int = option(0, "fewest no-op frames at a game's start", low=0, high=1000)
    noop_max_frames: int = option(30, "most no-op frames at a game's start", low=0, high=1000)
    max_frames: int = option(108_000, "a game is truncated after so many frames", low=1)
    screen_size: int = option(84, "side of the square gray picture, in pixels", low=36, high=210)
    stack_size: int = option(4, "pictures in a state", low=1, high=16)


@dataclass(frozen=True)
class ReplayConfig:
    """The replay memory."""

    capacity: int = option(1_000_000, "transitions kept", low=1)
    codec: Literal["zstd", "raw"] = option("zstd", "lossless compression of the frames, or none")
    segment_slots: int = option(0, "slots per segment; 0: min(8192, capacity/8)", low=0)
    ram_budget_mib: float | None = option(None, "hard cap on the replay's RAM, in MiB; null: none", low=0.001)
    spill_dir: str | None = option(None, "folder for the segments beyond the RAM budget; null: shrink instead")
    eviction: Literal["fifo", "random"] = option("fifo", "which segment goes first: the oldest, or a random one")
    prioritized: bool = option(False, "sample in proportion to the last TD error")
    priority_alpha: float = option(0.6, "exponent of the priorities", low=0, high=4)
    priority_beta_start: float = option(0.4, "exponent of the importance weights, annealed to 1", low=0, high=1)
    priority_beta_steps: int = option(10_000_000, "steps until that exponent is 1", low=1)
    sampler_threads: int | None = option(None, "threads that copy batches ahead; null: by cores", low=0, high=64)


@dataclass(frozen=True)
class LearnerConfig:
    """The network's training."""

    batch_size: int = option(32, "transitions per update", low=1)
    learning_starts_steps: int = option(50_000, "steps before the first update", low=0)
    update_period_steps: int = option(4, "steps between updates", low=1)
    target: Literal["periodic", "polyak"] = option("periodic", "how the target network follows")
    target_period_steps: int = option(1_000, "steps between copies to the target network", low=1)
    polyak_tau: float = option(0.005, "share of the network that the target takes per update", low=0, high=1)
    n_steps: int = option(1, "rewards summed before the bootstrap, in steps", low=1, high=32)
    gamma: float = option(0.99, "discount per step", low=0, high=1)
    double_q: bool = option(False, "double DQN: the online network picks the action of the target")
    loss: Literal["huber", "squared", "clipped_sum"] = option("huber", "mean Huber, mean squared, or the original's")
    optimizer: Literal["adam", "rmsprop"] = option("adam", "Adam, or the original RMSProp (epsilon inside the root)")
    learning_rate: float = option(1e-4, "learning rate", low=0)
    optimizer_epsilon: float = option(1e-8, "the optimizer's epsilon", low=0)
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where the network lives")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = option("auto", "arithmetic of the network; masters stay fp32")
    num_threads: int = option(0, "PyTorch threads; 0: from the cores this process may use", low=0, high=1024)
    gradient_accumulation: int = option(1, "parts that a batch is learnt in, to save memory", low=1)


@dataclass(frozen=True)
class PolicyConfig:
    """Exploration."""

    epsilon_start: float = option(1.0, "chance of a random action at first", low=0, high=1)
    epsilon_final: float = option(0.01, "chance of a random action at last", low=0, high=1)
    epsilon_decay_steps: int = option(1_000_000, "steps from the first to the last", low=1)
    epsilon_decay_from: Literal["start", "learning"] = option("start", "decay counts from step 0 or from learning")


@dataclass(frozen=True)
class BudgetConfig:
    """When a run ends: whichever comes first."""

    max_steps: int = option(10_000_000, "steps in all", low=1)
    max_hours: float | None = option(47.5, "hours of each process; null: no limit", low=0)
    max_episodes: int | None = option(None, "games in all; null: no limit", low=1)


@dataclass(frozen=True)
class MemoryConfig:
    """RAM: the check before the start, the log during it."""

    budget_gib: float | None = option(None, "RSS in GiB at which the run saves and stops; null: the limit", low=0.001)
    limit_gib: float | None = option(None, "limit in GiB, if smaller than what the machine says; null: none", low=0.001)
    on_excess: Literal["refuse", "warn"] = option("refuse", "what a plan that does not fit does to a start")
    window_steps: int = option(1_000, "steps per row of memory.csv", low=1)
    growth_warning_mib: float = option(1.0, "growth per 10k steps after the fill that is worth a warning", low=0)
    leak_bytes_per_step: int = option(0, "test hook: bytes leaked on purpose at each step", low=0)


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving."""

    period_steps: int = option(100_000, "steps between checkpoints", low=1)
    period_seconds: float | None = option(None, "seconds between checkpoints, beside the steps; null: none", low=1)


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation, the Nature protocol by default."""

    period_steps: int = option(500_000, "steps between evaluations while training", low=1)
    episodes: int = option(30, "games per evaluation", low=1)
    epsilon: float = option(0.05, "chance of a random action", low=0, high=1)
    max_frames: int = option(18_000, "a game is capped after so many frames", low=4)
    num_envs: int = option(8, "games evaluated at once", low=1)


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on."""

    seed: int = option(1, "the one seed of every generator", low=0, high=2**63 - 1)
    env: EnvConfig = field(default_factory=EnvConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


# May change between two processes of one run: none of them changes what is learnt up to a given step.
HARMLESS = (
    "budget.max_steps",
    "budget.max_hours",
    "budget.max_episodes",
    "memory.budget_gib",
    "memory.limit_gib",
    "memory.on_excess",
    "memory.growth_warning_mib",
    "memory.leak_bytes_per_step",
    "checkpoint.period_steps",
    "checkpoint.period_seconds",
    "evaluation.period_steps",
    "evaluation.episodes",
    "evaluation.num_envs",
    "env.num_threads",
    "replay.sampler_threads",
)


def _leaves() -> dict[str, dataclasses.Field[Any]]:
    leaves = {}
    for outer in dataclasses.fields(Config):
        if "text" in outer.metadata:
            leaves[outer.name] = outer
        else:
            inner_type = outer.default_factory  # type: ignore[union-attr]
            hints = typing.get_type_hints(inner_type)
            for inner in dataclasses.fields(inner_type):  # type: ignore[arg-type]
                inner.type = hints[inner.name]
                leaves[f"{outer.name}.{inner.name}"] = inner
    return leaves


LEAVES = _leaves()
"""Every value's dotted name with its dataclass field (type, default, text, range)."""


def default_of(name: str) -> Any:
    """The default of the value with a dotted name."""
    return LEAVES[name].default


def flat(config: Config) -> dict[str, Any]:
    """A configuration as dotted names and values, in the order of the dataclasses."""
    return {name: _get(config, name) for name in LEAVES}


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Dotted names as the sections that YAML shows."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        *section, key = name.split(".")
        (result.setdefault(section[0], {}) if section else result)[key] = value
    return result


def from_flat(values: dict[str, Any]) -> Config:
    """A checked configuration; names that are absent take their defaults.

    Raises:
        UsageError: an unknown name, or a value of the wrong type, out of its range, or at odds with another.
    """
    checked = {name: check(name, value) for name, value in values.items()}
    sections = nested(checked)
    kinds = {f.name: f.default_factory for f in dataclasses.fields(Config) if "text" not in f.metadata}
    config = Config(**{key: kinds[key](**part) if key in kinds else part for key, part in sections.items()})  # type: ignore[operator,arg-type]
    _check_together(config)
    return config


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The dotted names and values of a YAML file.

    Raises:
        UsageError: no such file, not YAML, or an unknown name.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"config file '{path}': {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"config file '{path}' is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UsageError(f"config file '{path}' holds {type(content).__name__}, not sections with values")
    values = {}
    for key, value in content.items():
        if isinstance(value, dict):
            values.update({f"{key}.{inner}": item for inner, item in value.items()})
        elif value is not None or key in LEAVES:  # an empty section says nothing
            values[str(key)] = value
    for name in values:
        _known(name)
    return values


def write_yaml(config: Config) -> str:
    """A configuration as YAML text that `read_yaml` reads back."""
    return yaml.safe_dump(nested(flat(config)), sort_keys=False)


def difference(left: dict[str, Any], right: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The dotted names whose values differ, with both values."""
    return {name: (left[name], right[name]) for name in LEAVES if left[name] != right[name]}


def check(name: str, value: Any) -> Any:
    """One value, converted to its field's type.

    Raises:
        UsageError: an unknown name, the wrong type, or out of range.
    """
    leaf = _known(name)
    kinds: tuple[Any, ...] = (leaf.type,)
    if isinstance(leaf.type, types.UnionType):
        kinds = typing.get_args(leaf.type)
    if value is None and types.NoneType in kinds:
        return None
    kind = kinds[0]
    if typing.get_origin(kind) is Literal:
        return _choice(name, value, typing.get_args(kind))
    value = _convert(name, value, kind)
    low, high = leaf.metadata["low"], leaf.metadata["high"]
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise UsageError(f"{name} is {value}; it must be {bounds}")
    return value


def _convert(name: str, value: Any, kind: Any) -> Any:
    if kind in (int, float) and isinstance(value, str):  # YAML 1.1 reads 1e-4 as text
        with contextlib.suppress(ValueError):
            value = float(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        wanted = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}[kind]
        raise UsageError(f"{name} is {value!r}; it must be {wanted}")
    return value


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(choices)}{nearest(str(value), choices)}")
    return str(value)


def nearest(word: str, names: typing.Iterable[str]) -> str:
    """`" (did you mean …?)"` with the nearest names, or nothing."""
    close = difflib.get_close_matches(word, list(names), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def _known(name: str) -> dataclasses.Field[Any]:
    if name not in LEAVES:
        raise UsageError(f"unknown config value '{name}'{nearest(str(name), LEAVES)}")
    return LEAVES[name]


def _get(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _check_together(config: Config) -> None:
    env, replay, learner = config.env, config.replay, config.learner
    window = env.stack_size + learner.n_steps
    smallest = max(learner.batch_size + window, window * env.num_envs)
    if replay.capacity < smallest:
        raise UsageError(
            f"replay.capacity is {replay.capacity}; it must hold a batch and a window in each lane: at least"
            f" {smallest} (learner.batch_size {learner.batch_size}, window {window},"
            f" env.num_envs {env.num_envs})"
        )
    first = (learner.n_steps + 1) * env.num_envs
    if learner.learning_starts_steps < first:
        raise UsageError(
            f"learner.learning_starts_steps is {learner.learning_starts_steps}; nothing can be sampled before step"
            f" {first}, (learner.n_steps + 1) · env.num_envs"
        )
    if learner.batch_size % learner.gradient_accumulation:
        raise UsageError(
            f"learner.gradient_accumulation is {learner.gradient_accumulation}; it must divide learner.batch_size"
            f" {learner.batch_size}"
        )
    if env.noop_min_frames > env.noop_max_frames:
        raise UsageError(
            f"env.noop_min_frames is {env.noop_min_frames}; it must not exceed env.noop_max_frames"
            f" {env.noop_max_frames}"
        )
    if env.backend == "vector" and env.noop_min_frames:
        raise UsageError("env.noop_min_frames above 0 needs env.backend python: the vector emulator draws from 0")
    if learner.precision == "fp16" and learner.device == "cpu":
        raise UsageError("learner.precision fp16 needs a GPU; take bf16 or fp32 with learner.device cpu")
    if learner.target_period_steps % learner.update_period_steps:
        raise UsageError(
            f"learner.target_period_steps is {learner.target_period_steps}; it must be a multiple of"
            f" learner.update_period_steps {learner.update_period_steps}"
        )
