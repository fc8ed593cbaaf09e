"""Steps per second by lanes and by threads, after learning began: `python -m benchmarks.lanes`.

Whole trainings with the defaults of `breakout.yaml`, one after the other, several times over, so that a machine
that slows down slows all of them.
"""

import argparse
import statistics
from typing import Any

from benchmarks.bench import train_ours

KINDS: dict[str, dict[str, Any]] = {
    **{f"{lanes} lanes": {"env.num_envs": lanes} for lanes in (1, 4, 8, 16, 32)},
    "8 lanes, 1 thread for the learner": {"learner.num_threads": 1},
    "8 lanes, 2 threads for the emulators": {"env.num_threads": 2},
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    for _ in range(options.rounds):
        for name, values in KINDS.items():
            found[name].append(train_ours(options.steps, **values)["steps_per_s"])
            print(f"  {name}: {found[name][-1]:.0f} steps/s", flush=True)
    print("| breakout.yaml with | steps/s | each |\n| --- | --- | --- |")
    for name, speeds in found.items():
        print(f"| {name} | {statistics.median(speeds):.0f} | {', '.join(f'{speed:.0f}' for speed in speeds)} |")


if __name__ == "__main__":
    main()
