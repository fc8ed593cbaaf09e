"""Where each millisecond of a step goes: `python -m benchmarks.phases`.

Trains Breakout with the defaults of `breakout.yaml` and a small replay, through the real loop, with a clock around each
thing that the loop calls. Printed are milliseconds per update (per four steps), after learning has begun. With
`--plain` the same loop learns by the plain update of `benchmarks.learn`.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from typing import Any

from benchmarks.learn import plain
from dqn import config, run, train
from dqn.learner import LearnMetrics

CONFIG = "configs/breakout.yaml"
SMALL: dict[str, Any] = {
    "replay.capacity": 20_000,
    "learner.learning_starts_steps": 2_000,
    "policy.epsilon_decay_steps": 20_000,
    "evaluation.episodes": 1,
    "evaluation.max_frames": 40,
}
PHASES = {
    "learn": ("learner", "learn"),
    "sample": ("replay", "samples"),
    "Q values of acting": ("learner", "q_values"),
    "start the emulators": ("envs", "send"),
    "wait for the emulators": ("envs", "recv"),
    "append": ("replay", "append"),
    "stack of frames": ("frames", "push"),
    "target copy": ("learner", "update_target"),
    "RAM log, TensorBoard, console": (None, "advance"),
    "budget, signals, save, evaluate": (None, "goes_on"),
}


def timed_loop(skip_updates: int, update: Any = None) -> tuple[Any, dict[str, float]]:
    """The loop with clocks, perhaps with another update, and the milliseconds per update that it leaves behind."""
    seconds: dict[str, float] = defaultdict(float)
    result: dict[str, float] = {}

    def clock(owner: Any, name: str, phase: str) -> None:
        method = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                seconds[phase] += time.perf_counter() - begin

        setattr(owner, name, timed)

    def loop(run: Any) -> None:
        goes_on, began = run.goes_on, 0.0

        def skip() -> bool:
            nonlocal began
            if not began and run.updates >= skip_updates:
                seconds.clear()
                began = time.perf_counter()
            return goes_on()

        run.goes_on = skip
        if update is not None:
            run.learner.learn = lambda transitions: LearnMetrics(*[update(transitions)] * 5)
        for phase, (part, name) in PHASES.items():
            clock(run if part is None else getattr(run, part), name, phase)
        train.train(run)
        whole, updates = time.perf_counter() - began, run.updates - skip_updates
        seconds["the rest: Python between them"] = whole - sum(seconds.values())
        result.update({phase: 1e3 * value / updates for phase, value in seconds.items()})
        result["all"], result["steps/s"] = 1e3 * whole / updates, 4 * updates / whole

    return loop, result


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--plain", action="store_true", help="learn by the plain update")
    options = parser.parse_args()
    chosen = {"budget.max_steps": options.steps, "learner.precision": options.precision}
    values = config.read_yaml(CONFIG) | SMALL | chosen
    update = plain("fp32" if options.precision == "fp32" else "bf16") if options.plain else None
    loop, result = timed_loop(500, update)
    with tempfile.TemporaryDirectory() as folder:
        run.start(config.from_flat(values), f"{folder}/run", loop)
    speed = result.pop("steps/s")
    print("| of an update and its four steps | ms | share |\n| --- | --- | --- |")
    for phase, value in sorted(result.items(), key=lambda item: -item[1]):
        print(f"| {phase} | {value:.2f} | {value / result['all']:.1%} |")
    print(f"{speed:.0f} steps/s")


if __name__ == "__main__":
    main()
