"""The report of one run or of several seeds: `report.png`, a picture to judge by, and `report.md`, what it means.

Three charts share the step axis. Learning: training returns, mean of the last 100 games, over published curves of the
same game under a like protocol (`benchmarks/reference`, each file names its source). RAM: its parts, stacked, against
what the replay of the forum script would hold. Speed: steps per second, evaluation and saving included.

Everything is read from the run's files (`config.yaml`, `episodes.csv`, `memory.csv`, TensorBoard, `eval.json`), so a
run in progress can be reported, and one that has only begun: what is absent is left out, and the text says so.
"""

import contextlib
import csv
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import yaml

from dqn.config import HARMLESS, LEAVES, UsageError, default_of, read_yaml
from dqn.evaluate import human_normalised

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator
from matplotlib.transforms import Bbox

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "benchmarks" / "reference"
WINDOW_GAMES = 100
FORUM_CAPACITY = 1_000_000
FORUM_BYTES_PER_TRANSITION = 34_270
"""What the forum's script held per transition: a strided view that pins the whole 210x160 picture, and its list."""
RUN_COLOURS = ("#0b62a8", "#d1480f", "#0f8a6d", "#8c1d6b", "#8a6d00")
RAM_COLOURS = ("#c9d3dc", "#8fb3cf", "#0b62a8", "#e0a458")
STYLE: dict[Any, Any] = {f"axes.spines.{side}": False for side in ("right", "top")} | {
    **{"font.size": 10, "axes.edgecolor": "#999999", "axes.grid": True, "grid.color": "#ececec"},
    **{"axes.axisbelow": True, "axes.titlelocation": "left", "axes.titleweight": "bold", "legend.frameon": False},
}
PROTOCOL = [name for name in LEAVES if name.startswith(("env.", "evaluation."))]
RESULTS = ("run", "seed", "steps", "hours", "games", "last 100", "best 100", "evaluation", "human-normalised", "RAM")
NOTE = (
    "Returns are raw scores of whole games. *Last* and *best 100* games are of training, with the ε of that moment;"
    " *evaluation* is `eval.json`, mean ± standard deviation. Human-normalised: 0 % plays at random, 100 % like the"
    " human tester of Wang et al. 2016. RAM is the highest resident size of any window, child processes included."
)
Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Run:
    """What a run has written so far."""

    name: str
    config: dict[str, Any]
    notes: list[str]  # versions and commit, as config.yaml states them
    episodes: Columns
    memory: Columns
    evaluations: np.ndarray  # [E, 2]: step, mean return, while training
    final: dict[str, Any]  # eval.json

    @property
    def clock(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps, and the hours of running time at which they were reached; both begin at 0."""
        tables = [table for table in (self.episodes, self.memory) if table]
        steps = np.concatenate([[0.0], *(table["step"] for table in tables)])
        order = np.argsort(steps, kind="stable")
        hours = np.concatenate([[0.0], *(table["wall_s"] for table in tables)])[order] / 3600
        return steps[order], np.maximum.accumulate(hours)

    @property
    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps at which games ended, and the mean return of the last 100 games there (fewer at the start)."""
        total = np.concatenate([[0.0], np.cumsum(self.episodes.get("return", []))])
        end = np.arange(1, len(total))
        start = np.maximum(end - WINDOW_GAMES, 0)
        return self.episodes.get("step", np.zeros(0)), (total[end] - total[start]) / (end - start)

    @property
    def peak_mib(self) -> np.ndarray:
        """The highest resident size in each window, child processes included."""
        return self.memory["rss_mib_max"] + self.memory["children_mib"] if self.memory else np.zeros(1)


def report(runs: list[Path], out: Path | None = None) -> Path:
    """Writes `report.png` and `report.md` about runs of one game.

    Runs whose configurations differ in nothing but the seed (and limits that change no learning) become one curve:
    their mean, with a band of one standard deviation.

    Args:
        runs: run folders, finished or in progress.
        out: the folder to write into; the first run's own where it is None.

    Returns:
        The path of `report.md`.

    Raises:
        UsageError: a folder that is not a run, or runs of different games.
    """
    read = [_read_run(Path(folder)) for folder in runs]
    games = sorted({run.config["env.game"] for run in read})
    if len(games) != 1:
        raise UsageError(f"a report is about one game, and these runs play {', '.join(games) or 'none'}: report each")
    groups: dict[str, list[Run]] = {}
    for run in read:
        key = {name: value for name, value in run.config.items() if name != "seed" and name not in HARMLESS}
        groups.setdefault(json.dumps(key), []).append(run)
    references = _references(read[0].config)
    folder = Path(out or runs[0])
    folder.mkdir(parents=True, exist_ok=True)
    _draw(list(groups.values()), references, folder / "report.png")
    (folder / "report.md").write_text(_describe(read, references), encoding="utf-8")
    return folder / "report.md"


def _read_run(folder: Path) -> Run:
    try:
        text = (folder / "config.yaml").read_text(encoding="utf-8")
    except OSError:
        raise UsageError(f"'{folder}' is not a run: it holds no config.yaml") from None
    config = {name: default_of(name) for name in LEAVES}
    notes = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    try:
        sections = dict(yaml.safe_load(text) or {})
    except (yaml.YAMLError, TypeError, ValueError):
        raise UsageError(f"'{folder / 'config.yaml'}' is damaged: it is no YAML of sections") from None
    for key, part in sections.items():
        named = {f"{key}.{inner}": value for inner, value in part.items()} if isinstance(part, dict) else {key: part}
        config |= {name: value for name, value in named.items() if name in LEAVES}
        notes += [f"{name}: {value}" for name, value in named.items() if name not in LEAVES]
    final = folder / "eval.json"
    results: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # none yet, or not whole
        results = json.loads(final.read_text(encoding="utf-8"))
    episodes, memory = (_read_columns(folder / name, numbers=True) for name in ("episodes.csv", "memory.csv"))
    return Run(folder.resolve().name, config, notes, episodes, memory, _read_evaluations(folder), results)


def _read_columns(path: Path, *, numbers: bool = False) -> Columns:
    """The columns of a CSV file, numbers where they can be; empty if it has no row. `#` lines are passed over.

    With `numbers`, rows that hold anything else are too: a disk that was full may have torn one in the middle.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("#")]
    rows = list(csv.reader(line for line in lines if line.endswith("\n")))  # the last line may be half written
    if numbers:
        rows = rows[:1] + [row for row in rows[1:] if len(row) == len(rows[0]) and all(map(_is_number, row))]
    columns: Columns = {}
    for name, *cells in zip(*rows):
        try:
            columns[name] = np.array(cells, dtype=np.float64)
        except ValueError:
            columns[name] = np.array(cells)
    return columns if len(rows) > 1 else {}


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _read_evaluations(folder: Path) -> np.ndarray:
    if not any(folder.glob("events.out.tfevents.*")):
        return np.zeros((0, 2))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    scalars = events.Scalars("eval/return_mean") if "eval/return_mean" in events.Tags()["scalars"] else []
    return np.array([(event.step, event.value) for event in scalars], dtype=np.float64).reshape(-1, 2)


def _references(config: dict[str, Any]) -> list[tuple[dict[str, str], np.ndarray]]:
    """The published curves comparable to a run, each with its facts and its rows [R, 3]: steps, mean, deviation."""
    table = (REFERENCE / "curves.csv").read_text(encoding="utf-8").splitlines()
    found = []
    for facts in csv.DictReader(line for line in table if not line.startswith("#")):
        sticky = facts["needs"] == "env.sticky_probability"
        comparable = sticky == bool(config["env.sticky_probability"]) and config.get(facts["needs"], True)
        if facts["game"] == config["env.game"] and comparable:
            columns = _read_columns(REFERENCE / facts["file"])
            std = columns[facts["std"]] if facts["std"] else np.full(len(columns[facts["mean"]]), np.nan)
            rows = np.stack([columns[facts["steps"]], columns[facts["mean"]], std], axis=1)
            found.append((facts, rows[columns["agent"] == facts["agent"]] if facts["agent"] else rows))
    return found


def _draw(groups: list[list[Run]], references: list[tuple[dict[str, str], np.ndarray]], path: Path) -> None:
    runs = [run for group in groups for run in group]
    whole, last = runs[0].config["budget.max_steps"], max(run.clock[0][-1] for run in runs)
    right = max(whole, last) if last > whole / 5 else max(5 * last, 1.0)  # a young run shows a part of its way
    game = runs[0].config["env.game"].replace("_", " ").title()
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(11, 13), dpi=110)
        rows = figure.add_gridspec(3, 1, height_ratios=[5, 3.8, 2.2], hspace=0.3)
        figure.subplots_adjust(left=0.08, right=0.95, top=0.88, bottom=0.05)
        split = rows[1].subgridspec(2, 1, height_ratios=[1, 2], hspace=0.07)
        learning, above, below, speed = map(figure.add_subplot, (rows[0], split[0], split[1], rows[2]))
        for axes in (learning, above, below, speed):
            axes.set_xlim(0, right)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        _draw_learning(learning, groups, [(facts, rows[rows[:, 0] <= right]) for facts, rows in references])
        _draw_hours(learning, runs[0])
        _draw_ram(above, below, runs[0])
        _draw_speed(speed, runs)
        subtitle = f"{', '.join(run.name for run in runs)}: {int(last):,} steps, {4 * int(last):,} frames"
        figure.text(0.08, 0.965, f"DQN on {game}", fontsize=20, fontweight="bold")
        figure.text(0.08, 0.944, subtitle, fontsize=11, color="#555555")
        figure.savefig(path)
        plt.close(figure)


def _draw_learning(axes: Axes, groups: list[list[Run]], references: list[tuple[dict[str, str], np.ndarray]]) -> None:
    axes.set_title("Learning", pad=34)
    axes.set_ylabel("return of a whole game")
    for facts, (steps, mean, std) in ((facts, rows.T) for facts, rows in references if len(rows) > 1):
        axes.plot(steps, mean, color=facts["colour"], linewidth=1.3, label=facts["label"])
        axes.fill_between(steps, mean - std, mean + std, color=facts["colour"], alpha=0.1, linewidth=0)
    for runs, colour in zip(groups, itertools.cycle(RUN_COLOURS)):
        name, curves = runs[0].name, [run.curve for run in runs if run.episodes]
        if curves:
            start = max(steps[0] for steps, _ in curves)
            grid = np.linspace(start, max(start, min(steps[-1] for steps, _ in curves)), 1000)
            values = np.stack([np.interp(grid, *curve) for curve in curves])
            mean, std = values.mean(axis=0), values.std(axis=0)
            seeds = f", {len(curves)} seeds ± 1 s.d." if len(curves) > 1 else ""
            axes.plot(
                grid,
                mean,
                color=colour,
                linewidth=2.4,
                label=f"{name}: mean of {WINDOW_GAMES} games{seeds}",
                zorder=5,
            )
            axes.fill_between(grid, mean - std, mean + std, color=colour, alpha=0.2, linewidth=0)
        point: dict[str, Any] = {"color": colour, "markeredgecolor": "white", "zorder": 6, "clip_on": False}
        if len(points := np.concatenate([run.evaluations for run in runs])):
            axes.plot(*points.T, "o", label="evaluated while training", **point)
        for run in (run for run in runs if "steps" in run.final):
            x, y, std = (run.final[key] for key in ("steps", "return_mean", "return_std"))
            axes.errorbar(x, y, std, fmt="D", capsize=4, label=f"{run.name}: {_score(run.final)}", **point)
    if not any(len(rows) > 1 for _, rows in references):
        absent = "the published curves begin later" if references else "no published curve for this game and protocol"
        axes.text(0.99, 0.04, absent, transform=axes.transAxes, ha="right", color="#777777", style="italic")
    if axes.get_legend_handles_labels()[1]:
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.3 * (high - low))
        axes.legend(loc="upper left", fontsize=9, ncols=2, columnspacing=3)


def _draw_hours(axes: Axes, run: Run) -> None:
    """A second axis above: running time as this run measured it, and beyond its end at its latest speed."""
    steps, hours = run.clock
    tail = int(np.searchsorted(steps, steps[-1] * 0.8))
    if steps[tail] == steps[-1] or hours[-1] == 0:
        return
    right = max(axes.get_xlim()[1], steps[-1])
    end = hours[-1] + (right - steps[-1]) * (hours[-1] - hours[tail]) / (steps[-1] - steps[tail])
    steps, hours = np.append(steps, right), np.append(hours, end)
    unit, scale = ("hours", 1) if end >= 2 else ("minutes", 60)
    ticks = [tick for tick in MaxNLocator(8, steps=[1, 2, 3, 6, 10]).tick_values(0, end * scale) if tick <= end * scale]
    upper = axes.twiny()
    upper.set_xlim(axes.get_xlim())
    upper.set_xticks(np.interp(np.array(ticks) / scale, hours, steps), [f"{tick:g}" for tick in ticks])
    upper.grid(False)
    upper.set_xlabel(f"{unit} of running time ({run.name})", fontsize=9, color="#555555")
    upper.tick_params(colors="#555555", labelsize=9)
    upper.spines["top"].set_visible(True)


def _draw_ram(above: Axes, below: Axes, run: Run) -> None:
    """RAM by part in `below`; the forum script's line leaves it through the broken axis into `above`."""
    above.set_title(f"RAM of {run.name} by part, against what the forum's script stored")
    memory, peak = run.memory, run.peak_mib
    if memory:
        model, replay, children = (memory[f"{part}_mib"] for part in ("model", "replay", "children"))
        rest = np.maximum(memory["rss_mib_mean"] - replay - model, 0)
        labels = ["Python, PyTorch, emulators", "networks, optimizer", "replay", "child processes"]
        below.stackplot(memory["step"], rest, model, replay, children, labels=labels, colors=RAM_COLOURS)
        below.plot(memory["step"], peak, color="#333333", linewidth=0.9, label="peak of each window")
        below.legend(loc="lower right", ncols=5, fontsize=9, facecolor="white", frameon=True, framealpha=0.85)
    steps = np.linspace(0, above.get_xlim()[1], 1000)
    forum_gib = np.minimum(steps, FORUM_CAPACITY) * FORUM_BYTES_PER_TRANSITION / 2**30
    low_gib, high_gib = 1.3 * float(peak.max()) / 1024 + 0.01, 1.2 * forum_gib[-1]
    broken = high_gib > 2 * low_gib
    below.set(ylim=(0, 1024 * (low_gib if broken else max(low_gib, high_gib))), ylabel="MiB")
    above.set(ylim=(low_gib, high_gib if broken else 2 * low_gib), ylabel="GiB")
    cut: dict[str, Any] = {"marker": [(-1, -0.6), (1, 0.6)], "markersize": 9, "color": "#777777", "clip_on": False}
    for axes, scale, edge in ((below, 1024, 1), (above, 1, 0)):
        axes.plot(steps, forum_gib * scale, color="#c1121f", linewidth=1.8)
        axes.plot([0], [edge], transform=axes.transAxes, visible=broken, **cut)
    above.tick_params(labelbottom=False, bottom=False)
    above.spines["bottom"].set_visible(False)
    if not broken:
        above.axis("off")
        below.set_position(Bbox.union([above.get_position(), below.get_position()]))
    label = f"the forum's script: {FORUM_BYTES_PER_TRANSITION:,} B a transition, here {forum_gib[-1]:.3g} GiB"
    where, x, y, side = (above, 0.985, 0.3, "right") if broken else (below, 0.015, 0.95, "left")
    where.text(x, y, label, transform=where.transAxes, ha=side, va="top", color="#c1121f")


def _draw_speed(axes: Axes, runs: list[Run]) -> None:
    for run, colour in zip(runs, itertools.cycle(RUN_COLOURS)):
        steps, hours = run.clock
        grid = np.linspace(0, steps[-1], min(120, 2 + len(run.memory.get("step", ()))))
        seconds = np.diff(np.interp(grid, steps, hours)) * 3600
        speed = np.divide(np.diff(grid), seconds, out=np.zeros_like(seconds), where=seconds > 0)
        axes.stairs(speed, grid, baseline=None, color=colour, linewidth=1.6, label=run.name)
    starts = runs[0].config["learner.learning_starts_steps"]
    axes.axvline(starts, color="#777777", linestyle=":", label="learning starts")
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])
    axes.set(ylabel="steps/s", xlabel="steps (one step is one decision of a game: 4 frames)")
    axes.set_title("Speed, evaluation and saving included")
    axes.legend(loc="upper right", fontsize=9, ncols=6)


def _score(final: dict[str, Any]) -> str:
    return f"{final['return_mean']:.1f} ± {final['return_std']:.1f} ({final['episodes']} games, ε {final['epsilon']:g})"


def _describe(runs: list[Run], references: list[tuple[dict[str, str], np.ndarray]]) -> str:
    config = runs[0].config
    nature = {name: default_of(name) for name in LEAVES} | read_yaml(ROOT / "configs" / "nature.yaml")
    differences = [(f"`{name}`", nature[name], config[name]) for name in LEAVES if config[name] != nature[name]]
    protocol = [f"`{name}`: {config[name]} ({LEAVES[name].metadata['text']})" for name in PROTOCOL]
    protocol += [f"{run.name}, as evaluated: {run.final['protocol']}" for run in runs if "protocol" in run.final]
    curves = []
    for facts, _ in references:
        header = (REFERENCE / facts["file"]).read_text(encoding="utf-8").splitlines()[:3]
        curves.append(f"**{facts['label']}**: {' '.join(line[2:] for line in header if line[0] == '#')}")
    absent = ["none: `benchmarks/reference` has no curve of this game under a like protocol"]
    sections = [f"# DQN on {config['env.game']}", "![learning, RAM and speed over steps](report.png)"]
    sections += [_table(RESULTS, map(_row, runs)), NOTE]
    sections += ["## Protocol", "Minimal action set; a step is one decision of one game.", _list(protocol)]
    sections += ["## Published curves in the picture", _list(curves or absent)]
    sections += ["## What differs from `configs/nature.yaml`", _table(("value", "nature.yaml", "here"), differences)]
    sections += ["## Versions", _list(f"{run.name}: {note}" for run in runs for note in run.notes)]
    return "\n\n".join(sections) + "\n"


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (header, ["---"] * len(header), *rows))


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _row(run: Run) -> list[object]:
    (steps, hours), (_, curve), final = run.clock, run.curve, run.final
    normal = human_normalised(run.config["env.game"], final["return_mean"]) if final else None
    cells = [run.name, run.config["seed"], f"{int(steps[-1]):,}", f"{hours[-1]:.2f}", len(curve)]
    cells += [f"{curve[-1]:.1f}", f"{curve[WINDOW_GAMES - 1 :].max(initial=curve[-1]):.1f}"] if len(curve) else ["", ""]
    cells += [_score(final) if final else "", "" if normal is None else f"{100 * normal:.0f} %"]
    return [*cells, f"{run.peak_mib.max():.0f} MiB"]
