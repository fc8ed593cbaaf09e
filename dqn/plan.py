"""What a run will need, said before anything is allocated: RAM by part, GPU memory, disk, and the time to the end.

The replay is arithmetic (`replay.log.needs`), the model too; the constants below were measured as RSS of this
program on Linux, x86-64, PyTorch 2.13. Expected figures decide whether a run fits; where content decides (compressed
frames) the table also says what is guaranteed.
"""

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from dqn.config import Config
from dqn.memory import GIB, MIB, Limit, cores, limits
from dqn.replay.log import needs

BASE_MIB = {"cpu": 303.0, "cuda": 1_900.0}
"""Interpreter, PyTorch with its optimizers, OpenCV, ALE, TensorBoard; on a GPU its libraries and context besides."""
EMULATOR_MIB = {"vector": 1.1, "python": 0.7}
"""Per lane."""
SEAL_MIB_PER_MIB = 1.0
"""What compressing a segment takes for a moment, in sizes of its raw frames."""
GAME_BYTES = {"breakout": (45.0, 65.0)}
"""Compressed bytes per picture of 84×84, measured on real play: lowest and highest seen."""
ANY_GAME_BYTES = (30.0, 420.0)
"""For a game that was not measured."""
GPU_CONTEXT_MIB = 500.0
UPDATE_S = {"fp32": 0.021, "bf16": 0.0135, "cuda": 0.0012}
"""One update of 32 windows, Nature's network, on two cores or a GPU."""
EMULATION_S, ACT_S = 1 / 2_400, 0.0008
"""One decision's emulation on one core; acting once, for all lanes."""


class Part(NamedTuple):
    """A row of the table: what takes memory, and how it comes about."""

    name: str
    bytes: float
    note: str = ""


class Remedy(NamedTuple):
    """A change of the config that makes it fit: the options, and the RAM it then takes."""

    options: str
    bytes: float


@dataclass(frozen=True)
class Plan:
    """The forecast of a run."""

    config: Config
    parts: list[Part]
    limits: list[Limit]
    gpu: list[Part]
    disk: list[Part]
    disk_free: float
    steps_per_s: float
    problem: str | None
    """Why it cannot run whatever the limit; None if nothing speaks against it."""
    remedies: list[Remedy]

    @property
    def total(self) -> float:
        """Expected RAM of the whole process, in bytes."""
        return sum(part.bytes for part in self.parts)

    @property
    def limit(self) -> Limit:
        """The smallest limit."""
        return self.limits[0]

    @property
    def fits(self) -> bool:
        """Whether the RAM suffices."""
        return self.problem is None and self.total <= self.limit.value

    def table(self) -> str:
        """All of it as text."""
        budget = self.config.budget
        hours = budget.max_steps / self.steps_per_s / 3600
        lines = [f"RAM, in MiB{'expected':>29}", *_rows(self.parts), _row(Part("total", self.total))]
        lines += [_row(Part(f"limit: {self.limit.name}", self.limit.value, "the smallest of those below"))]
        lines += [_row(Part(f"  {limit.name}", limit.value)) for limit in self.limits]
        lines += ["GPU memory", *_rows(self.gpu)] if self.gpu else ["GPU memory: none"]
        disk = sum(part.bytes for part in self.disk)
        short = "" if disk <= self.disk_free else "  TOO LITTLE: checkpoints will fail"
        lines += ["disk", *_rows(self.disk), _row(Part("total", disk, f"{self.disk_free / GIB:,.1f} GiB free{short}"))]
        lines += [f"time: {budget.max_steps:,} steps at {self.steps_per_s:,.0f} steps/s take {hours:,.1f} h"]
        if budget.max_hours is not None:
            jobs = -(-hours // budget.max_hours) if budget.max_hours else float("inf")
            lines[-1] += f", budget.max_hours {budget.max_hours:g}: " + ("fits" if jobs <= 1 else f"{jobs:.0f} jobs")
        if self.fits:
            return "\n".join([*lines, f"fits: {self.total / self.limit.value:.0%} of the limit"])
        reason = self.problem or f"{self.total / GIB:,.2f} GiB, limit {self.limit.value / GIB:,.2f} GiB"
        lines += [f"DOES NOT FIT: {reason} ({self.limit.name})" if not self.problem else f"DOES NOT FIT: {reason}"]
        lines += [f"  fits with {remedy.options}: {remedy.bytes / GIB:,.2f} GiB" for remedy in self.remedies]
        return "\n".join(lines if self.remedies else [*lines, "  no replay is small enough: raise the limit"])


def _row(part: Part) -> str:
    return f"  {part.name:<26}{part.bytes / MIB:>12,.1f}  {part.note}".rstrip()


def _rows(parts: list[Part]) -> list[str]:
    return [_row(part) for part in parts]


def plan(config: Config, *, steps_per_s: float | None = None, root: Path = Path("/")) -> Plan:
    """Forecasts a run.

    Args:
        config: the run's config.
        steps_per_s: the speed to reckon with; None estimates it.
        root: where `/proc` and `/sys` are.
    """
    found = limits(config.memory.limit_gib, root=root)
    on_gpu = _on_gpu(config, root)
    forecast = Plan(
        config,
        parts=ram_parts(config, on_gpu),
        limits=found,
        gpu=[Part("CUDA context", GPU_CONTEXT_MIB * MIB), *model_parts(config)] if on_gpu else [],
        disk=disk_parts(config),
        disk_free=_disk_free(Path(config.replay.spill_dir or "runs")),
        steps_per_s=steps_per_s or speed(config, on_gpu, root),
        problem=budget_problem(config),
        remedies=[],
    )
    return forecast if forecast.fits else replace(forecast, remedies=_remedies(config, found[0].value, on_gpu))


def ram_parts(config: Config, on_gpu: bool) -> list[Part]:
    """The process's RAM, part by part."""
    need = replay_need(config)
    lanes, evaluated = config.env.num_envs, config.evaluation.num_envs
    return [
        Part("interpreter, PyTorch", BASE_MIB["cuda" if on_gpu else "cpu"] * MIB, "a guess" if on_gpu else "measured"),
        Part("replay", need.expected, need.note),
        Part("sealing segments", need.sealing, "for a moment, in a background thread"),
        *([] if on_gpu else model_parts(config)),
        Part("emulators", EMULATOR_MIB[config.env.backend] * lanes * MIB, f"{lanes} lanes"),
        Part("evaluation", EMULATOR_MIB["python"] * evaluated * MIB, f"{evaluated} lanes"),
    ]


def _on_gpu(config: Config, root: Path) -> bool:
    driver = (root / "proc/driver/nvidia/version").exists()
    return config.learner.device == "cuda" or (config.learner.device == "auto" and driver)


class ReplayNeed(NamedTuple):
    """The replay's RAM in bytes; `floor` is what no budget can go below, `stored` the compressed log on disk."""

    expected: float
    floor: float
    sealing: float
    stored: float
    note: str


def replay_need(config: Config) -> ReplayNeed:
    """The replay's bytes: expected, and as a note what is guaranteed."""
    replay, frame = config.replay, config.env.screen_size**2
    need = needs(replay, config.env.num_envs, config.env.stack_size + config.learner.n_steps, frame)
    low, high = GAME_BYTES.get(config.env.game, ANY_GAME_BYTES)
    share = frame / 84**2  # compressed frames shrink about as their pixels do
    per_frame = float(frame) if replay.codec == "raw" else high * share
    one = need.segment_slots * frame
    floor = need.fixed - one if replay.codec == "zstd" else need.fixed - 2 * one
    stored = need.slots * per_frame + need.table
    expected, most = floor + stored, float(floor + need.slots * frame + need.table)
    note = f"{need.slots:,} slots when it is full"
    if replay.codec == "zstd":
        note += f", {low * share:.0f} to {per_frame:.0f} B each"
    if replay.ram_budget_mib is not None:
        budget = replay.ram_budget_mib * MIB
        if expected > budget and replay.spill_dir is None:
            held = int((budget - need.fixed) / (stored / need.slots))
            note = (
                f"about {held:,} of {need.slots:,} slots fit the budget, {int((budget - need.fixed) / frame):,} surely"
            )
        room = max(budget - need.fixed, 0.0)  # beside it there is always room for one raw segment more, on its way
        kept = room if replay.codec == "zstd" else room // one * one
        expected, most = min(expected, need.fixed - one + kept), min(most, budget)
    sealing = SEAL_MIB_PER_MIB * one if replay.codec == "zstd" else 0.0
    return ReplayNeed(expected, need.fixed, sealing, stored, f"{note}; never more than {most / MIB:,.0f}")


def budget_problem(config: Config) -> str | None:
    """Why the replay's RAM budget cannot be kept, or None."""
    budget, floor = config.replay.ram_budget_mib, replay_need(config).floor / MIB
    if budget is None or budget >= floor:
        return None
    return (
        f"replay.ram_budget_mib is {budget:g}, and three raw segments with the metadata take {floor:,.1f}; raise it, or"
        " take smaller replay.segment_slots"
    )


def model_parts(config: Config) -> list[Part]:
    """Networks and a batch on their way through it, wherever the learner is."""
    side, stack, batch = config.env.screen_size, config.env.stack_size, config.learner.batch_size
    one = (side - 8) // 4 + 1
    two = (one - 4) // 2 + 1
    three = two - 2
    parameters = 32 * (64 * stack + 1) + 64 * (512 + 1) + 64 * (576 + 1) + 512 * (64 * three**2 + 1) + 18 * 513
    precision = config.learner.precision
    working = 4 if precision == "fp32" or (precision == "auto" and not _has_bf16(Path("/"))) else 2
    activations = 32 * one**2 + 64 * two**2 + 64 * three**2 + 512
    window, state = (stack + config.learner.n_steps) * side**2, 4 * stack * side**2
    part = batch // config.learner.gradient_accumulation
    batches = max(1, config.env.num_envs // config.learner.update_period_steps)  # drawn at once
    note = f"{parameters:,} parameters: two networks, working copies, gradient, two moments"
    return [
        Part("networks and optimizer", (5 * 4 + 2 * working) * parameters, note),
        Part("batches, activations", batches * batch * window + part * (state + 12 * activations), f"of {batch}"),
    ]


def disk_parts(config: Config) -> list[Part]:
    """What the run's folder will hold."""
    weights = model_parts(config)[0].bytes / 7
    share = 1 + config.checkpoint.period_steps / config.replay.capacity
    stored = replay_need(config).stored * min(2.0, share)
    records = 4 * config.budget.max_steps / config.env.num_envs
    return [
        Part("replay segments", stored, "those of the two newest checkpoints"),
        Part("checkpoints, weights", (3 * 4 + 2) * weights, "two, and one in the writing"),
        Part("logs", records + 400 * config.budget.max_steps / config.memory.window_steps, "RAM at every iteration"),
    ]


def speed(config: Config, on_gpu: bool, root: Path) -> float:
    """An estimate of steps per second, from times measured on two cores."""
    bf16 = config.learner.precision in ("auto", "bf16") and _has_bf16(root)
    update = UPDATE_S["cuda" if on_gpu else "bf16" if bf16 else "fp32"] * config.learner.batch_size / 32
    machine = min(cores(), 4) / 2
    emulation = EMULATION_S / min(cores(), config.env.num_envs)
    return 1 / (update / config.learner.update_period_steps / machine**0.6 + emulation + ACT_S / config.env.num_envs)


def _has_bf16(root: Path) -> bool:
    try:
        flags = (root / "proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _disk_free(folder: Path) -> float:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return float(shutil.disk_usage(folder).free)


def _remedies(config: Config, limit: float, on_gpu: bool) -> list[Remedy]:
    """Up to three changes that make it fit, what costs least first: nothing, the disk's speed, bytes, transitions."""
    need = replay_need(config)
    others = sum(part.bytes for part in ram_parts(config, on_gpu)) - need.expected
    floor_mib, room_mib = math.ceil(need.floor / MIB), int((limit - others) / MIB)
    zstd = {"codec": "zstd"}
    spilled = {"ram_budget_mib": room_mib, "spill_dir": config.replay.spill_dir or "/var/tmp"}
    choices: list[list[dict[str, Any]]] = [
        [zstd],
        [{"ram_budget_mib": floor_mib}] if budget_problem(config) else [],
        [{**zstd, "segment_slots": 2**power} for power in range(12, 5, -1)],
        [spilled] if 0 < room_mib * MIB < need.expected else [],
        [{**zstd, "segment_slots": 1024, "capacity": capacity} for capacity in _round_numbers(config.replay.capacity)],
    ]
    found = []
    for choice in choices:
        for changes in choice:
            other = replace(config, replay=replace(config.replay, **changes))
            total = sum(part.bytes for part in ram_parts(other, on_gpu))
            new = {name: value for name, value in changes.items() if getattr(config.replay, name) != value}
            if new and total <= limit and budget_problem(other) is None:
                found.append(Remedy(" ".join(f"--replay.{name} {value}" for name, value in new.items()), total))
                break
    return found[:3]


def _round_numbers(below: int) -> list[int]:
    """Numbers of one or two digits and zeros, from just below a number down to 1,000."""
    numbers = (digits * 10**power for power in range(2, 12) for digits in range(10, 100, 5))
    return sorted((number for number in numbers if number < below), reverse=True)
