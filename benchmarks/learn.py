"""One update, ours beside the plain way, alternating: `python -m benchmarks.learn`.

Plain is what a careful beginner writes: the network as in the paper, `torch.autocast` for bf16, Adam with `fused=True`,
the targets of a batch in one forward under `no_grad`. Both learn from the same batch of 32 windows. Prints a table of
medians and of the median ratio of neighbours, which a busy machine bends least.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F

from dqn.config import from_flat
from dqn.learner import Learner, resolve
from dqn.networks import QNetwork
from dqn.replay import Transitions

NUM_ACTIONS, BLOCK_UPDATES = 4, 10


def random_batch(size: int, seed: int = 1) -> Transitions:
    """Windows of noise: the arithmetic does not care."""
    rng = np.random.default_rng(seed)
    return Transitions(
        window=rng.integers(256, size=(size, 5, 84, 84), dtype=np.uint8),
        action=rng.integers(NUM_ACTIONS, size=size),
        reward=rng.normal(size=size).astype(np.float32),
        bootstrap_steps=np.ones(size, np.int64),
        discount=np.full(size, 0.99, np.float32),
        weight=None,
        index=None,
    )


def ours(precision: str, threads: int) -> Callable[[Transitions], object]:
    """The learner's update."""
    config = from_flat({"learner.precision": precision, "learner.device": "cpu", "learner.num_threads": threads})
    return Learner(config, NUM_ACTIONS, torch.Generator().manual_seed(1), resolve(config.learner)).learn


def plain(precision: str) -> Callable[[Transitions], object]:
    """The same update with autograd, autocast and PyTorch's Adam."""
    online, target = QNetwork(NUM_ACTIONS), QNetwork(NUM_ACTIONS)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-4, fused=True)

    def learn(batch: Transitions) -> torch.Tensor:
        window, action = torch.from_numpy(batch.window), torch.from_numpy(batch.action)
        reward, discount = torch.from_numpy(batch.reward), torch.from_numpy(batch.discount)
        low = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
        with low:
            with torch.no_grad():
                y = reward + discount * target(window[:, 1:]).float().max(1).values
            q = online(window[:, :4]).float().gather(1, action[:, None])[:, 0]
        loss = F.smooth_l1_loss(q, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return learn


def block_ms(learn: Callable[[Transitions], object], batch: Transitions) -> float:
    """Milliseconds per update over a few updates."""
    begin = time.perf_counter()
    for _ in range(BLOCK_UPDATES):
        learn(batch)
    return (time.perf_counter() - begin) / BLOCK_UPDATES * 1e3


def compare(precision: str, rounds: int, threads: int) -> tuple[float, float, float]:
    """Median milliseconds of ours, of plain, and the median of the ratios."""
    batch = random_batch(32)
    pair = ours(precision, threads), plain(precision)
    for learn in pair:
        block_ms(learn, batch)
    rows = [[block_ms(learn, batch) for learn in pair] for _ in range(rounds)]
    ratio = statistics.median(a / b for a, b in rows)
    return statistics.median(a for a, _ in rows), statistics.median(b for _, b in rows), ratio


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="alternations of ten updates each")
    parser.add_argument("--threads", type=int, default=0, help="PyTorch threads; 0: from the cores")
    parser.add_argument("--precision", action="append", help="fp32 or bf16; several times for both")
    options = parser.parse_args()
    print("| precision | ours ms | plain ms | ratio |\n| --- | --- | --- | --- |")
    for precision in options.precision or ["bf16", "fp32"]:
        mine, theirs, ratio = compare(precision, options.rounds, options.threads)
        print(f"| {precision} | {mine:.2f} | {theirs:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
