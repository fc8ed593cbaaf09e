"""The command line: `python -m dqn {train,eval,plan,report,bench}`."""

import argparse
import dataclasses
import io
import os
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from dqn import budget, config
from dqn.config import UsageError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line with the nearest valid name."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Raises the parser's complaint as a UsageError."""
        raise UsageError(message)


def build_parser() -> Parser:
    """All commands with their options; the config's values are options of `train` and `plan`."""
    parser = Parser(prog="python -m dqn", description="DQN for Atari that says what it needs, and keeps to it.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{train,eval,plan,report,bench}")

    train = commands.add_parser("train", help="train into runs/NAME; the same command resumes")
    train.add_argument("--run", metavar="NAME", help="a name under runs/, or a path; default: the config's name")
    train.add_argument("--fresh", action="store_true", help="delete what a run wrote there and begin anew")
    plan = commands.add_parser("plan", help="memory, disk and time before the start; exit 3 if it does not fit")
    plan.add_argument("--steps-per-s", type=float, help="speed for the time to the end, instead of the table's")
    for command in (train, plan):
        command.add_argument("--config", metavar="FILE", default="configs/breakout.yaml", help="a YAML file")
        add_config_options(command)

    evaluate = commands.add_parser("eval", help="play whole games with a run's weights; writes eval.json")
    evaluate.add_argument("run", metavar="RUN_OR_CHECKPOINT", help="a run's name or folder, or a .pt file")
    evaluate.add_argument("--episodes", type=int, help="games; default: as the run's config")
    evaluate.add_argument("--epsilon", type=float, help="chance of a random action; default: as the protocol")
    evaluate.add_argument("--max-frames", type=int, help="cap on a game's frames; default: as the protocol")
    evaluate.add_argument("--protocol", default="nature", help="nature, machado, greedy, or config: the run's own")
    evaluate.add_argument("--seed", type=int, help="seed of the games; default: the run's")
    evaluate.add_argument("--video", metavar="F.mp4", type=Path, help="film the first game")

    report = commands.add_parser("report", help="report.png and report.md: the run beside the published curves")
    report.add_argument("runs", metavar="RUN", nargs="+", help="runs of one game; several are drawn as seeds")
    report.add_argument("--out", type=Path, help="folder for the report; default: the first run's")

    bench = commands.add_parser("bench", help="steps/s, updates/s, bytes per transition, sample time")
    bench.add_argument("--peers", action="store_true", help="alternate with Stable-Baselines3 in its own environment")
    bench.add_argument("--out", type=Path, help="folder for the table and the pictures")
    bench.add_argument("--steps", type=int, default=8_000, help="steps of each timed training")
    return parser


def add_config_options(parser: Parser) -> None:
    """One option per config value, with its text, its type and its default."""
    group = parser.add_argument_group("values of the config (the command line wins over the file)")
    for name, leaf in config.LEAVES.items():
        default = "null" if leaf.default is None else leaf.default
        text = f"{leaf.metadata['text']} [{type_name(leaf.type)}, default {default}]".replace("%", "%%")
        group.add_argument(f"--{name}", dest=f"value:{name}", metavar="V", help=text)


def type_name(kind: Any) -> str:
    """How a field's type reads in the help."""
    if typing.get_origin(kind) is typing.Literal:
        return " | ".join(typing.get_args(kind))
    if isinstance(kind, types.UnionType):
        return " | ".join("null" if part is types.NoneType else part.__name__ for part in typing.get_args(kind))
    return str(kind.__name__)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses a command line.

    Raises:
        UsageError: an unknown command or option (the nearest valid names are listed), or a missing value.
    """
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        word = unknown[0].split("=")[0]
        known = [f"--{name}" for name in config.LEAVES] if options.command in ("train", "plan") else []
        known += [f"--{name.replace('_', '-')}" for name in vars(options) if not name.startswith("value:")]
        raise UsageError(f"unknown argument '{word}'{config.nearest(word, known)}")
    return options


def config_of(options: argparse.Namespace) -> config.Config:
    """The configuration that a command line asks for: the file's values, then the options'."""
    values = config.read_yaml(options.config)
    for name, text in vars(options).items():
        if name.startswith("value:") and text is not None:
            values[name.removeprefix("value:")] = _value(name.removeprefix("value:"), text)
    return config.from_flat(values)


def _value(name: str, text: str) -> Any:
    kind = config.LEAVES[name].type
    if kind is str or (str in typing.get_args(kind) and text not in ("", "null", "~")):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise UsageError(f"{name} is {text!r}, which cannot be read as a value") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a console without ε or ± shows ? for it
        sys.stdout.reconfigure(errors="replace")
    command = ""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        command = options.command
        return _commands()[command](options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return budget.USAGE
    except KeyboardInterrupt:
        return budget.INTERRUPTED_TWICE
    except BrokenPipeError:
        return budget.FAILED
    except OSError as error:
        if command not in ("eval", "report"):
            raise
        print(f"error: {error.filename or command}: {error.strerror or error}", file=sys.stderr)
        return budget.USAGE


def _commands() -> dict[str, Any]:
    return {"train": _train, "eval": _eval, "plan": _plan, "report": _report, "bench": _bench}


# Each command imports what it needs: `plan` and a wrong option answer without loading PyTorch.
def _train(options: argparse.Namespace) -> int:
    from dqn.run import start
    from dqn.train import train

    return start(config_of(options), options.run or Path(options.config).stem, train, fresh=options.fresh)


def _plan(options: argparse.Namespace) -> int:
    from dqn.atari import resolve_game
    from dqn.plan import plan

    if options.steps_per_s is not None and not 0 < options.steps_per_s < float("inf"):
        raise UsageError(f"--steps-per-s is {options.steps_per_s:g}; it must be above 0")
    chosen = config_of(options)
    chosen = dataclasses.replace(chosen, env=dataclasses.replace(chosen.env, game=resolve_game(chosen.env.game)))
    result = plan(chosen, steps_per_s=options.steps_per_s)
    print(result.table())
    return budget.FINISHED if result.fits else budget.DOES_NOT_FIT


def _eval(options: argparse.Namespace) -> int:
    import contextlib

    import numpy as np
    import torch

    from dqn import evaluate as evaluation
    from dqn.atari import PythonEnvs
    from dqn.csvlog import replace_text
    from dqn.learner import load_policy
    from dqn.runlog import existing_run
    from dqn.video import Video

    path = Path(options.run)
    if path.suffix != ".pt":
        path = existing_run(options.run) / "model.pt"
    state = read_weights(path)
    network = load_policy(state)
    if options.protocol not in (*evaluation.PROTOCOLS, "config"):
        raise UsageError(
            f"--protocol is '{options.protocol}'; it must be one of {', '.join(evaluation.PROTOCOLS)}, config"
        )
    values = {**state["config"], **evaluation.PROTOCOLS.get(options.protocol, {}), "env.backend": "python"}
    for name in ("episodes", "epsilon", "max_frames"):
        if getattr(options, name) is not None:
            values[f"evaluation.{name}"] = getattr(options, name)
    if options.seed is not None:
        values["seed"] = options.seed
    values["env.noop_min_frames"] = min(values["env.noop_min_frames"], values["env.noop_max_frames"])
    chosen = config.from_flat(values)
    target = path.parent / "eval.json"
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{target} cannot be written; copy the weights to a folder of your own")
    with torch.inference_mode(), contextlib.ExitStack() as stack:
        film = None
        if options.video is not None:
            meanings = PythonEnvs(chosen.env, np.random.SeedSequence(0)).action_meanings
            film = stack.enter_context(Video(options.video, meanings))
        result = evaluation.evaluate(
            lambda states: network(torch.from_numpy(states)).numpy(),
            chosen.env,
            chosen.evaluation,
            np.random.SeedSequence(chosen.seed),
            step=state["step"],
            film=film,
        )
    print(result.table())
    replace_text(target, result.to_json())
    print(f"written: {target}" + (f", {options.video}" if film is not None and film.problem is None else ""))
    return budget.FINISHED


def read_weights(path: Path) -> dict[str, Any]:
    """The content of a weights file or of a checkpoint.

    Raises:
        UsageError: there is none, or it cannot be loaded.
    """
    from dqn.checkpoint import read_file

    if not path.is_file():
        raise UsageError(f"no weights at {path}: has the run saved a checkpoint yet?")
    try:
        return read_file(path)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _report(options: argparse.Namespace) -> int:
    from dqn.report import report
    from dqn.runlog import existing_run

    print(report([existing_run(name) for name in options.runs], options.out))
    return budget.FINISHED


def _bench(options: argparse.Namespace) -> int:
    from benchmarks.bench import LEAST_STEPS, bench

    if options.steps < LEAST_STEPS:
        raise UsageError(f"--steps is {options.steps}; a timed training takes at least {LEAST_STEPS}")
    return bench(options)


if __name__ == "__main__":
    sys.exit(main())
