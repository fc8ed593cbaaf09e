"""One update, ours beside the plain way, alternating: `python -m benchmarks.learn`.

Plain is what a careful beginner writes: the network as in the paper, `torch.autocast` for bf16, Adam with `fused=True`,
the targets of a batch in one forward under `no_grad`. All learn from the same batch of 32 windows, which comes from
the processor's memory. Prints medians of milliseconds, and the median ratio of neighbours, which a busy machine bends
least. Where there is a GPU, ours is timed as a CUDA graph and eagerly.
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
from dqn.learner import Learner
from dqn.networks import QNetwork
from dqn.replay import Transitions

NUM_ACTIONS, BLOCK_UPDATES = 4, 10

Learn = Callable[[Transitions], object]


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


def ours(precision: str, threads: int = 0, device: str = "cpu", as_graph: bool = False) -> Learn:
    """The learner's update."""
    values = {"learner.precision": precision, "learner.device": device, "learner.num_threads": threads}
    learner = Learner(from_flat(values), NUM_ACTIONS, torch.Generator().manual_seed(1))
    learner.as_graph = as_graph
    return learner.learn


def plain(precision: str, device: str = "cpu") -> Learn:
    """The same update with autograd, autocast and PyTorch's Adam."""
    online, target = QNetwork(NUM_ACTIONS).to(device), QNetwork(NUM_ACTIONS).to(device)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-4, fused=True)

    def learn(batch: Transitions) -> torch.Tensor:
        window, action, reward, discount = (
            torch.from_numpy(array).to(device) for array in (batch.window, batch.action, batch.reward, batch.discount)
        )
        low = torch.autocast(device, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
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


def block_ms(learn: Learn, batch: Transitions) -> float:
    """Milliseconds per update over a few updates."""
    begin = time.perf_counter()
    for _ in range(BLOCK_UPDATES):
        learn(batch)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / BLOCK_UPDATES * 1e3


def compare(kinds: dict[str, Learn], rounds: int) -> list[str]:
    """Rows of the table: each kind's median milliseconds, and its median ratio to the last kind."""
    batch = random_batch(32)
    for learn in kinds.values():
        block_ms(learn, batch)
    found = [[block_ms(learn, batch) for learn in kinds.values()] for _ in range(rounds)]
    rows = []
    for number, name in enumerate(kinds):
        ratio = statistics.median(block[number] / block[-1] for block in found)
        rows.append(f"| {name} | {statistics.median(block[number] for block in found):.2f} | {ratio:.2f} |")
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="alternations of ten updates each")
    parser.add_argument("--threads", type=int, default=0, help="PyTorch threads; 0: from the cores")
    parser.add_argument("--precision", action="append", help="fp32 or bf16; several times for both")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print("| update of 32 | ms | ratio |\n| --- | --- | --- |")
    for precision in options.precision or ["bf16", "fp32"]:
        kinds = {f"ours, {precision}, {device}": ours(precision, options.threads, device)}
        if device == "cuda":
            kinds[f"ours, {precision}, as a CUDA graph"] = ours(precision, options.threads, device, as_graph=True)
        kinds[f"plain, {precision}, {device}"] = plain(precision, device)
        print("\n".join(compare(kinds, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
