"""The configuration: what it takes, what it refuses, and the paper's table field by field."""

from pathlib import Path

import pytest
import yaml

from dqn import config
from dqn.config import LEAVES, Config, UsageError, flat, from_flat

CONFIGS = Path(__file__).parent.parent / "configs"


def load(name):
    return from_flat(config.read_yaml(CONFIGS / f"{name}.yaml"))


def test_nature_is_the_papers_table():
    """Mnih et al. 2015, Extended Data Table 1, in its order; then what the original code adds."""
    values = flat(load("nature"))
    table = {
        "learner.batch_size": 32,
        "replay.capacity": 1_000_000,
        "env.stack_size": 4,
        "learner.target_period_steps": 10_000,
        "learner.gamma": 0.99,
        "env.frame_skip_frames": 4,
        "learner.update_period_steps": 4,
        "learner.learning_rate": 0.00025,
        "learner.optimizer_epsilon": 0.01,
        "policy.epsilon_start": 1.0,
        "policy.epsilon_final": 0.1,
        "policy.epsilon_decay_steps": 1_000_000,
        "learner.learning_starts_steps": 50_000,
        "env.noop_max_frames": 30,
        "learner.optimizer": "rmsprop",
        "learner.loss": "clipped_sum",
        "learner.target": "periodic",
        "learner.double_q": False,
        "learner.n_steps": 1,
        "learner.precision": "fp32",
        "policy.epsilon_decay_from": "learning",
        "replay.prioritized": False,
        "env.noop_min_frames": 1,
        "env.num_envs": 1,
        "env.backend": "python",
        "env.fire_on_life": False,
        "env.life_loss_terminal": True,
        "env.clip_reward": True,
        "env.sticky_probability": 0.0,
        "env.screen_size": 84,
        "env.max_frames": 108_000,
        "budget.max_steps": 50_000_000,
        "evaluation.epsilon": 0.05,
        "evaluation.max_frames": 18_000,
        "evaluation.episodes": 30,
    }
    assert {name: values[name] for name in table} == table


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "breakout",
            {
                "env.num_envs": 8,
                "env.backend": "vector",
                "env.fire_on_life": True,
                "replay.capacity": 1_000_000,
                "replay.codec": "zstd",
                "learner.learning_starts_steps": 50_000,
                "learner.update_period_steps": 4,
                "learner.target_period_steps": 1_000,
                "learner.optimizer": "adam",
                "learner.learning_rate": 1e-4,
                "policy.epsilon_final": 0.01,
                "policy.epsilon_decay_from": "start",
                "budget.max_steps": 10_000_000,
                "budget.max_hours": 47.5,
                "checkpoint.period_steps": 100_000,
                "evaluation.period_steps": 500_000,
                "evaluation.episodes": 30,
                "evaluation.epsilon": 0.05,
                "evaluation.max_frames": 18_000,
            },
        ),
        ("sticky", {"env.sticky_probability": 0.25, "env.life_loss_terminal": False, "policy.epsilon_final": 0.01}),
        ("pong", {"env.game": "pong"}),
        ("smoke", {"env.game": "breakout"}),
    ],
)
def test_published_configs(name, expected):
    values = flat(load(name))
    assert {key: values[key] for key in expected} == expected


def test_yaml_roundtrip(tmp_path):
    original = load("nature")
    path = tmp_path / "config.yaml"
    path.write_text(config.write_yaml(original))
    assert from_flat(config.read_yaml(path)) == original


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replay.capasity": 5}, "unknown config value 'replay.capasity' (did you mean replay.capacity"),
        ({"learner": 5}, "unknown config value 'learner'"),
        ({"learner.loss": "hubber"}, "learner.loss is 'hubber'; it must be one of huber, squared, clipped_sum (did"),
        ({"policy.epsilon_final": 1.5}, "policy.epsilon_final is 1.5; it must be between 0 and 1"),
        ({"replay.capacity": 0}, "replay.capacity is 0; it must be at least 1"),
        ({"replay.capacity": 10.5}, "replay.capacity is 10.5; it must be a whole number"),
        ({"replay.capacity": True}, "replay.capacity is True; it must be a whole number"),
        ({"learner.gamma": float("nan")}, "learner.gamma is nan; it must be a finite number"),
        ({"learner.learning_rate": "fast"}, "learner.learning_rate is 'fast'; it must be a finite number"),
        ({"env.game": 5}, "env.game is 5; it must be text"),
        ({"env.fire_on_life": "yes"}, "env.fire_on_life is 'yes'; it must be true or false"),
        ({"budget.max_steps": None}, "budget.max_steps is None; it must be a whole number"),
        ({"replay.capacity": 30}, "replay.capacity is 30; it must hold a batch and a window"),
        ({"learner.gradient_accumulation": 5}, "learner.gradient_accumulation is 5; it must divide"),
        ({"env.noop_min_frames": 31}, "env.noop_min_frames is 31; it must not exceed"),
        ({"env.noop_min_frames": 1}, "env.noop_min_frames above 0 needs env.backend python"),
        ({"learner.precision": "fp16", "learner.device": "cpu"}, "learner.precision fp16 needs a GPU"),
        ({"learner.target_period_steps": 1001}, "learner.target_period_steps is 1001; it must be a multiple"),
    ],
)
def test_refusals_name_the_thing_the_value_and_the_fix(values, message):
    with pytest.raises(UsageError) as caught:
        from_flat(values)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n", "just words\n"])
def test_files_that_are_no_config(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match="config file"):
        config.read_yaml(path)


def test_missing_file(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        config.read_yaml(tmp_path / "none.yaml")


def test_yaml_numbers_in_every_spelling(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("replay: {capacity: 1e5}\nlearner: {learning_rate: 1e-3, gamma: 1}\nbudget: {max_hours: 3}\n")
    values = from_flat(config.read_yaml(path))
    assert values.replay.capacity == 100_000 and type(values.replay.capacity) is int
    assert values.learner.learning_rate == 0.001
    assert type(values.learner.gamma) is float and type(values.budget.max_hours) is float


def test_every_value_has_a_text_and_durations_carry_units():
    for name, leaf in LEAVES.items():
        assert leaf.metadata["text"], name
        if any(word in name for word in ("period", "max_h", "decay_s", "starts", "window_")):
            assert name.endswith(("_steps", "_frames", "_hours", "_seconds", "_updates")), name
    assert set(config.HARMLESS) <= set(LEAVES)
    assert flat(Config()) == {name: leaf.default for name, leaf in LEAVES.items()}


def test_difference_lists_both_values():
    left, right = flat(load("breakout")), flat(load("nature"))
    assert config.difference(left, right)["learner.optimizer"] == ("adam", "rmsprop")
    assert config.difference(left, left) == {}


def test_configs_say_nothing_unknown():
    for path in CONFIGS.glob("*.yaml"):
        content = yaml.safe_load(path.read_text())
        assert content["seed"] == 1, path
