"""The report, from synthetic run folders: what a run writes is fixed, so no run is needed."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from dqn.config import UsageError, from_flat, write_yaml
from dqn.evaluate import human_normalised
from dqn.memory import HEADER as MEMORY_HEADER
from dqn.report import _read_columns, _read_run, _references, report


def make_run(folder: Path, *, steps: int = 400_000, games: int = 400, seed: int = 1, **values) -> Path:
    """A run folder as `train` leaves it: 250 steps/s, returns that grow, a replay that fills and stays."""
    folder.mkdir(parents=True)
    config = from_flat(
        {"seed": seed, "budget.max_steps": steps, **{k.replace("__", "."): v for k, v in values.items()}}
    )
    (folder / "config.yaml").write_text(f"# versions: torch 2.13.0\n{write_yaml(config)}")
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.choice(np.arange(1, steps), games, replace=False))
    rows = ["step,lane,return,length_steps,lives_lost,wall_s"]
    for end in ends:
        score = 300 / (1 + np.exp(6 - 12 * end / steps)) * rng.uniform(0.7, 1.3)
        rows.append(f"{end},{end % 8},{score:.1f},{200},5,{end / 250:.3f}")
    (folder / "episodes.csv").write_text("\n".join(rows) + "\n")
    rows = [MEMORY_HEADER]
    for step in np.linspace(steps / 100, steps, 100).astype(int):
        replay, rss = 70 * min(step / 1e6, 1), 420 + 70 * min(step / 1e6, 1)
        values = [step, step / 250, rss - 2, rss, rss + 3, 0, replay, 26, 0, 12, 8192]
        rows.append(",".join(f"{value:g}" if value < 1e5 else str(int(value)) for value in values))
    (folder / "memory.csv").write_text("\n".join(rows) + "\n")
    return folder


def add_evaluation(folder: Path, steps: int) -> None:
    result = {"return_mean": 321.4, "return_std": 60.1, "return_median": 330, "returns": [321.4], "capped": 0}
    result |= {"episodes": 30, "epsilon": 0.05, "protocol": "no-ops, 30 games", "steps": steps, "game": "breakout"}
    (folder / "eval.json").write_text(json.dumps(result))


def picture(folder: Path) -> np.ndarray:
    return imread(folder / "report.png")[..., :3]


def test_a_finished_run_is_drawn_and_described(tmp_path):
    run = make_run(tmp_path / "breakout", steps=10_000_000, games=3000)
    add_evaluation(run, 10_000_000)
    path = report([run])
    assert path == run / "report.md"
    text = path.read_text()
    episodes = np.loadtxt(run / "episodes.csv", delimiter=",", skiprows=1)[:, 2]
    assert f"| breakout | 1 | 10,000,000 | 11.11 | 3000 | {episodes[-100:].mean():.1f} |" in text
    assert f"321.4 ± 60.1 (30 games, ε 0.05) | {100 * human_normalised('breakout', 321.4):.0f} %" in text
    assert "493 MiB" in text and "as evaluated: no-ops, 30 games" in text
    assert "CleanRL" in text and "cd35bde610f4045bf2e0731c8f4c88d22df8fc85" in text  # the source of a curve
    assert "| `learner.target_period_steps` | 10000 | 1000 |" in text and "`learner.batch_size`" not in text
    assert "torch 2.13.0" in text
    image = picture(run)
    assert image.shape[0] > 1000 and image.std() > 0.05
    blue = np.abs(image - np.array([0x0B, 0x62, 0xA8]) / 255).max(axis=2) < 0.02
    assert blue[: len(blue) // 2].sum() > 500  # the run's curve is in the learning chart


def test_the_last_100_games_are_averaged_by_hand(tmp_path):
    run = make_run(tmp_path / "run", games=400)
    loaded = _read_run(run)
    steps, curve = loaded.curve
    returns = loaded.episodes["return"]
    assert steps.tolist() == loaded.episodes["step"].tolist()
    assert curve[0] == returns[0] and curve[49] == pytest.approx(returns[:50].mean())
    assert curve[250] == pytest.approx(returns[151:251].mean())


def test_seeds_become_one_curve_and_other_configs_another(tmp_path):
    seeds = [make_run(tmp_path / f"seed{seed}", seed=seed) for seed in (1, 2, 3)]
    other = make_run(tmp_path / "double", learner__double_q=True)
    text = report([*seeds, other], tmp_path / "out").read_text()
    assert [line.split(" | ")[0] for line in text.splitlines() if " MiB |" in line] == [
        "| seed1",
        "| seed2",
        "| seed3",
        "| double",
    ]
    assert (tmp_path / "out" / "report.png").stat().st_size > 30_000
    assert not (seeds[0] / "report.md").exists()
    together = picture(tmp_path / "out")
    orange = np.abs(together - np.array([0xD1, 0x48, 0x0F]) / 255).max(axis=2) < 0.02
    half = len(orange) // 2
    assert orange[:half].any()  # the other configuration's curve; three seeds alone are all blue
    report(seeds, tmp_path / "seeds")
    alone = np.abs(picture(tmp_path / "seeds") - np.array([0xD1, 0x48, 0x0F]) / 255).max(axis=2) < 0.02
    assert not alone[:half].any()


def test_a_run_that_has_only_begun_is_drawn(tmp_path):
    run = make_run(tmp_path / "begun", steps=24_000, games=3)
    (run / "episodes.csv").write_text("step,lane,return,length_steps,lives_lost,wall_s\n")
    (run / "memory.csv").unlink()
    assert "| begun | 1 | 0 | 0.00 | 0 |" in report([run]).read_text()


def test_a_smoke_run_with_few_games_and_a_half_written_line(tmp_path):
    run = make_run(tmp_path / "smoke", steps=24_000, games=5, replay__capacity=20_000)
    with (run / "episodes.csv").open("a") as file:
        file.write("23999,1,40")  # the process is writing this line now
    assert len(_read_run(run).episodes["return"]) == 5
    assert "| smoke | 1 | 24,000 | 0.03 | 5 |" in report([run]).read_text()


def test_torn_rows_and_a_half_written_evaluation_are_passed_over(tmp_path):
    run = make_run(tmp_path / "full-disk", steps=24_000, games=5)
    with (run / "memory.csv").open("a") as file:
        file.write("23900,95.6,4924000,96,420,421,422,0,70,26,0,12,8192\n23950,1.2.3,1,1,1,1,1,1,1,1,1\n")
    (run / "eval.json").write_text("")
    assert "| full-disk | 1 | 24,000 |" in report([run]).read_text()
    (run / "config.yaml").write_text("a: [")
    with pytest.raises(UsageError, match="damaged"):
        report([run])


def test_a_game_without_a_published_curve_says_so_and_draws(tmp_path):
    run = make_run(tmp_path / "seaquest", env__game="seaquest")
    assert "no curve of this game" in report([run]).read_text()
    assert picture(run).std() > 0.05


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ({"env.game": "breakout"}, ["CleanRL", "SB3 zoo", "RLlib", "nnabla-rl (Nature settings)"]),
        ({"env.game": "breakout", "env.sticky_probability": 0.25}, ["Dopamine 2024 (sticky actions)"]),
        ({"env.game": "pong", "learner.double_q": True}, ["SB3 zoo", "nnabla-rl (Nature settings)"]),
        ({"env.game": "qbert"}, []),
    ],
)
def test_only_comparable_curves(values, labels):
    config = {"env.sticky_probability": 0.0, "learner.double_q": False} | values
    found = _references(config)
    assert [facts["label"].split(",")[0] for facts, _ in found] == labels
    for _, rows in found:
        assert rows.shape[1] == 3 and len(rows) > 10 and (np.diff(rows[:, 0]) > 0).all()


def test_a_known_point_of_a_published_curve():
    (rows,) = [
        rows
        for facts, rows in _references(
            {"env.game": "breakout", "env.sticky_probability": 0.25, "learner.double_q": False}
        )
    ]
    assert rows[-1, 0] == 50_000_000 and rows[-1, 1] == pytest.approx(
        199.4, abs=0.1
    )  # 200M frames, summary_breakout.csv


def test_columns_with_words_stay_words(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("# a source\nagent,mean\nDQN,1.5\nC51,2\n")
    columns = _read_columns(path)
    assert columns["agent"].tolist() == ["DQN", "C51"] and columns["mean"].tolist() == [1.5, 2.0]
    assert _read_columns(tmp_path / "absent.csv") == {}


def test_what_is_no_run_and_two_games_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no config"):
        report([tmp_path / "empty"])
    runs = [make_run(tmp_path / game, env__game=game) for game in ("pong", "breakout")]
    with pytest.raises(UsageError, match="breakout, pong"):
        report(runs)
    assert not (runs[0] / "report.png").exists()


def test_evaluations_come_from_tensorboard(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    run = make_run(tmp_path / "run")
    with SummaryWriter(str(run)) as writer:
        for step, value in ((1000, 2.0), (2000, 5.5)):
            writer.add_scalar("eval/return_mean", value, step)
    assert _read_run(run).evaluations.tolist() == [[1000, 2.0], [2000, 5.5]]
