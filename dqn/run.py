"""A run: its parts, assembled, and what happens around the loop's steps.

`train.train` is the algorithm; everything that a long run on a shared machine needs besides is here: the check before
the start, resuming, logging, evaluating, saving, and leaving in good order.
"""

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dqn import budget as exits
from dqn import checkpoint, config
from dqn.atari import TimeStep, make_envs, resolve_game
from dqn.budget import Budget, StopEarly
from dqn.config import Config, UsageError
from dqn.csvlog import replace_text
from dqn.evaluate import EvalResult, evaluate
from dqn.learner import Learner, LearnMetrics, NonFiniteLoss, resolve
from dqn.memory import GIB, MIB, MemoryLog, limits, return_freed
from dqn.plan import plan
from dqn.preprocessing import FrameStack
from dqn.replay import Replay
from dqn.runlog import RunFolder, RunLog

OWNER = "owner"
"""A file in a spill folder: the path of the run whose segments lie there. A run that was moved takes its own over."""
RETRY_SAVE_S = 60.0
"""Seconds from a save that failed to the next try."""
NATURE = Path(__file__).parent.parent / "configs" / "nature.yaml"


def start(wanted: Config, name: str, loop: Callable[["Run"], None], *, fresh: bool = False) -> int:
    """Runs the loop in `runs/NAME`, from the start or from where the run was; returns the exit code.

    Raises:
        UsageError: the config, the folder or the device cannot be used; nothing was written.
    """
    spill_dir = wanted.replay.spill_dir
    wanted = dataclasses.replace(
        wanted,
        env=dataclasses.replace(wanted.env, game=resolve_game(wanted.env.game)),
        replay=dataclasses.replace(wanted.replay, spill_dir=spill_dir and str(Path(spill_dir).resolve())),
    )
    resolve(wanted.learner)  # a device that is not there is refused before anything is written
    forecast = plan(wanted)
    if not forecast.fits:
        print(forecast.table())
        if wanted.memory.on_excess == "refuse":
            return exits.DOES_NOT_FIT
        if forecast.problem:
            raise UsageError(forecast.problem)
    with RunFolder(name, fresh=fresh) as folder:
        changed = differences(wanted, folder)
        claim_spill_folder(wanted, folder)
        folder.clear()
        run = Run(wanted, folder)
        try:
            run.introduce(changed)
            return run.supervise(loop)
        finally:
            run.close()


def replay_folder(wanted: Config, folder: RunFolder) -> Path:
    """Where the run's segment files lie: in its folder, or under `replay.spill_dir`."""
    spill_dir, path = wanted.replay.spill_dir, folder.path.resolve()
    return path / "replay" if spill_dir is None else Path(spill_dir) / path.name


def claim_spill_folder(wanted: Config, folder: RunFolder) -> None:
    """Sees to it that the spill folder is this run's alone and takes files; what a former run left there is deleted.

    Raises:
        UsageError: the segments there are another run's, or the folder cannot be written to.
    """
    spill, mine = replay_folder(wanted, folder), str(folder.path.resolve())
    if wanted.replay.spill_dir is not None:
        try:
            spill.mkdir(parents=True, exist_ok=True)
            owner = (spill / OWNER).read_text(encoding="utf-8") if (spill / OWNER).exists() else ""
            if owner != mine and (Path(owner).is_dir() if owner else any(spill.iterdir())):
                whose = f"the replay of {owner}" if owner else "files of no known run"
                raise UsageError(f"{spill} holds {whose}; take another replay.spill_dir, or another name in --run")
            (spill / OWNER).write_text(mine, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"replay.spill_dir: {spill} cannot be used: {error.strerror}") from None
    if folder.has_checkpoint:
        return
    with contextlib.suppress(UsageError, OSError):  # a run that `--fresh` ends may have spilled elsewhere
        before = folder.read_config()["replay.spill_dir"]
        former = Path(before or folder.path) / folder.path.resolve().name
        if former != spill and (former / OWNER).read_text(encoding="utf-8") == mine:
            shutil.rmtree(former)
    if wanted.replay.spill_dir is not None:
        for file in spill.glob("*.npy*"):
            file.unlink()


def differences(wanted: Config, folder: RunFolder) -> dict[str, tuple[Any, Any]]:
    """What is new in the config against that of the run that lies in the folder, as (new, old).

    Raises:
        UsageError: values differ that would make it another run.
    """
    if not folder.has_checkpoint:
        return {}
    changed = config.difference(config.flat(wanted), folder.read_config())
    fatal = [f"{name} is {new} and was {old}" for name, (new, old) in changed.items() if name not in config.HARMLESS]
    if fatal:
        raise UsageError(
            f"{folder.path} holds a run of another config: {', '.join(fatal)}; take another --run, or --fresh"
        )
    return changed


class Run:
    """What the loop works with, and the run's own counters.

    Attributes:
        step: decisions taken so far, over all lanes.
        updates: gradient steps so far.
        refill_until_step: no update before this step, while a replay that was lost fills again.
        timestep: what the emulators showed last.
        metrics: the newest update's, on the device.
    """

    def __init__(self, config: Config, folder: RunFolder):
        self.config, self.folder = config, folder
        self.budget = Budget(config.budget)
        self.budget.listen()
        self.updates = self.refill_until_step = self.evaluated_step = 0
        self.best_return = -float("inf")
        self.metrics: LearnMetrics | None = None
        self._leak: list[bytes] = []
        self._checkpoints, self._replay_folder = folder.path / "checkpoint", replay_folder(config, folder)
        self._checkpoints.mkdir(exist_ok=True)
        state, notes = checkpoint.load_newest(self._checkpoints)
        if notes and not state:
            raise UsageError(f"{folder.path}: no checkpoint is whole ({notes[0]}); --fresh begins anew")
        self.step = self.saved_step = state["step"] if state else 0
        checkpoint.tidy(self._checkpoints, self.step)
        self._assemble(state)
        self._open_logs(state["wall_s"] if state else 0.0)
        for note in notes:
            self.log.say(f"warning: {note}; the checkpoint before it is used, and the file is renamed to .damaged")
        manifests = self._continue(state) if state else self._begin()
        self._saver = checkpoint.Saver(self._checkpoints, self._replay_folder, manifests)
        self._saved_at, self._save_after = time.monotonic(), 0.0
        folder.write_config(config)
        if not state:
            self.save(wait=True)  # so that whatever happens next, the same command goes on
        if checkpoint.generations(self._checkpoints):
            folder.has_begun()

    def _assemble(self, state: dict[str, Any] | None) -> None:
        config = self.config
        seeds = np.random.SeedSequence(config.seed).spawn(4)
        self.policy_rng = np.random.default_rng(seeds[0])
        if state:  # games that begin after a resume are others than those of the start
            seeds[1] = np.random.SeedSequence(config.seed, spawn_key=(1, self.step))
        self.envs = make_envs(config.env, seeds[1])
        self.frames = FrameStack(self.envs.num_envs, config.env.stack_size, self.envs.frame_shape)
        self.replay = Replay(
            config.replay,
            num_envs=self.envs.num_envs,
            frame_shape=self.envs.frame_shape,
            stack_size=config.env.stack_size,
            n_steps=config.learner.n_steps,
            gamma=config.learner.gamma,
            rng=np.random.default_rng(seeds[2]),
            folder=self._replay_folder,
        )
        self._decided = state["resolved"] if state else None
        self._resolved = resolve(config.learner, self._decided)
        generator = torch.Generator().manual_seed(int(seeds[3].generate_state(1)[0]))
        self.learner = Learner(config, self.envs.num_actions, generator, self._resolved)

    def _open_logs(self, wall_s_before: float) -> None:
        memory, limit = self.config.memory, limits(self.config.memory.limit_gib)[0].value
        budget = None if memory.budget_gib is None else memory.budget_gib * GIB
        self.memory_log = MemoryLog(
            self.folder.path,
            parts=lambda: {"replay": self.replay.memory_bytes()["replay"], "model": self.learner.num_bytes()},
            window_steps=memory.window_steps,
            limit_bytes=limit,
            budget_bytes=budget,
            growth_warning_mib=memory.growth_warning_mib,
            start_step=self.step,
            num_envs=self.envs.num_envs,
            wall_s_before=wall_s_before,
        )
        self.log = RunLog(
            self.folder.path,
            self.config,
            start_step=self.step,
            wall_s_before=wall_s_before,
            process_hours=lambda: self.budget.process_hours,
            limit_mib=min(limit, budget or limit) / MIB,
        )

    def introduce(self, changed: dict[str, tuple[Any, Any]]) -> None:
        """Says what runs here, and how it differs from the paper and from before."""
        nature = config.from_flat(config.read_yaml(NATURE))
        self.log.describe(nature)
        env, different = self.config.env, config.difference(config.flat(self.config), config.flat(nature))
        self.log.say(
            f"{self.folder.path}: {env.game}, sticky actions {env.sticky_probability:g}, {self.learner.describe()}"
        )
        self.log.say(
            "differs from nature.yaml: " + ", ".join(f"{name} {new} ({old})" for name, (new, old) in different.items())
        )
        for name, (new, old) in changed.items():
            self.log.say(f"{name} is now {new}, was {old}")
        here = resolve(self.config.learner)._asdict()
        for name, before in (self._decided or here).items():
            kept = getattr(self._resolved, name)
            if here[name] != before or kept != before:
                self.log.say(f"{name} was {before} before, this machine alone would take {here[name]}: it is {kept}")

    def _begin(self) -> list[dict[str, Any]]:
        self.timestep = self.envs.reset()
        self.frames.push(self.timestep.frame, self.timestep.first)
        return []

    def _continue(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Takes everything from a checkpoint; returns the manifests of the generations on disk, the oldest first."""
        for name in ("updates", "refill_until_step", "evaluated_step", "best_return"):
            setattr(self, name, state[name])
        self.learner.load_state_dict(state["learner"])
        self.policy_rng.bit_generator.state = state["policy_rng"]
        for note in self.replay.load(state["replay"], self._replay_folder):
            self.log.say(f"warning: {note}")
        self.log.say(f"resumed at step {self.step:,}, {self.updates:,} updates, {self.replay.num_slots:,} replay slots")
        if state["envs"] is not None:
            self.envs.load_state_dict(checkpoint.to_arrays(state["envs"]))
            self.timestep = TimeStep(**checkpoint.to_arrays(state["timestep"]))
            self.frames.state[:] = state["frames"].numpy()
            self.log.games.load_state_dict(state["games"])
        else:
            self._begin()
            self.log.say("the games in flight were cut: new ones begin, and no return is recorded for the cut ones")
        self._refill(state["num_slots"])
        manifests = [state["replay"]]
        for generation in checkpoint.generations(self._checkpoints):
            if generation.step != self.step:
                with contextlib.suppress(ValueError):
                    manifests.insert(0, checkpoint.load(generation.path)["replay"])
        return manifests

    def _refill(self, num_slots_saved: int) -> None:
        """After a loss, lets the current policy fill the replay to what learning needs, before updates go on."""
        lost, starts = num_slots_saved - self.replay.num_slots, self.config.learner.learning_starts_steps
        needed = min(starts, num_slots_saved + max(0, starts - self.step))
        until = self.step + needed - self.replay.num_slots
        if lost > 0 and until > max(self.step, starts):
            self.refill_until_step = until
            self.log.say(
                f"warning: {lost:,} of {num_slots_saved:,} replay slots are lost: the current policy fills it until"
                f" step {until:,}, then updates go on"
            )

    def supervise(self, loop: Callable[["Run"], None]) -> int:
        """Runs the loop to its end, whatever that is; returns the exit code."""
        finished = self.budget.finished(self.step, self.log.num_games)
        if finished and self.saved_step == self.step > 0 and self._has_final_evaluation:
            self.log.say(f"this run is finished at step {self.step:,}; a larger budget.max_steps would go on with it")
            return exits.FINISHED
        try:
            loop(self)
            return self._end()
        except NonFiniteLoss as error:
            self.log.say(f"error: stopped at step {self.step:,}: {error}; the last good checkpoint stays")
            return exits.FAILED

    @property
    def _has_final_evaluation(self) -> bool:
        return self.evaluated_step == self.step and (self.folder.path / "eval.json").is_file()

    def _end(self) -> int:
        """Evaluates if the run is finished, saves, and says how it ended."""
        if self.budget.finished(self.step, self.log.num_games) and self._evaluate(final=True):
            self.save(wait=True)
            self.log.say(f"finished: {self.step:,} steps, {self.updates:,} updates, {self.log.num_games:,} games")
            if self.saved_step == self.step:
                return exits.FINISHED
            self.budget.stop_reason = "the end is not saved"
        else:
            self.save(wait=True)
        if not checkpoint.generations(self._checkpoints):
            self.log.say(f"error: stopped at step {self.step:,} ({self.budget.stop_reason}) without any checkpoint")
            return exits.FAILED
        self.log.say(
            f"stopped early at step {self.step:,} ({self.budget.stop_reason}); the same command goes on from step"
            f" {self.saved_step:,}"
        )
        return exits.STOPPED_EARLY

    def goes_on(self) -> bool:
        """At the top of each pass: evaluates and saves when that is due; False when the run is to end."""
        if self._saver.busy:
            self._take(self._saver.finished())
        if self.memory_log.over_budget and self.budget.stop_reason is None:
            self.budget.stop_reason = f"memory: {self.memory_log.rss_mib:,.0f} MiB is beyond the budget"
        if self.budget.finished(self.step, self.log.num_games) or self.budget.must_stop():
            return False
        if self._passed(self.config.evaluation.period_steps, self.evaluated_step):
            self._evaluate()
        period_s = self.config.checkpoint.period_seconds
        now = time.monotonic()
        late = period_s is not None and now - self._saved_at > period_s
        due = late or self._passed(self.config.checkpoint.period_steps, self.saved_step)
        if due and now > self._save_after and not self._saver.busy:
            self.save()
        return not self.budget.must_stop()

    def _passed(self, period_steps: int, last_step: int) -> bool:
        return self.step // period_steps > last_step // period_steps

    def beta(self, step: int) -> float:
        """Exponent of the importance weights at a step (Schaul et al. 2016, section 3.4)."""
        start = self.config.replay.priority_beta_start
        return start + (1 - start) * min(1.0, step / self.config.replay.priority_beta_steps)

    def advance(self, timestep: TimeStep, epsilon: float) -> None:
        """After each pass: counts, and writes down what is due."""
        self.timestep = timestep
        self.step += self.envs.num_envs
        self.log.advance(self.step, timestep)
        if self.config.memory.leak_bytes_per_step:
            self._leak.append(bytes(self.config.memory.leak_bytes_per_step * self.envs.num_envs))
        if self.memory_log.record(self.step, self.replay.is_full):
            self._log_window(epsilon)
        self.log.progress(self.step, epsilon, self.memory_log.rss_mib)

    def _log_window(self, epsilon: float) -> None:
        values = {**self.memory_log.scalars(), **self.log.speeds(self.step, self.updates), "policy/epsilon": epsilon}
        if self.metrics is not None:
            values |= {f"learn/{name}": value for name, value in self.metrics.scalars().items()}
        self.log.scalars(self.step, values)
        for warning in self.memory_log.warnings() + self.replay.notes():
            self.log.say(f"warning: {warning}")

    def _evaluate(self, *, final: bool = False) -> bool:
        """Plays whole games with the newest weights; False if something asked the run to leave meanwhile."""
        if final and self._has_final_evaluation:
            return True
        seed = np.random.SeedSequence([self.config.seed, self.step])
        with self.log.during("evaluate"):
            try:
                result = evaluate(
                    self.learner.q_values,
                    self.config.env,
                    self.config.evaluation,
                    seed,
                    step=self.step,
                    poll=self.budget.poll,
                )
            except StopEarly:
                return False
            finally:
                return_freed()
        self.evaluated_step = self.step
        self.log.scalars(self.step, {"eval/return_mean": result.return_mean})
        self.log.say(f"evaluation at step {self.step:,}: {result.summary()}")
        self._keep(result, final)
        return True

    def _keep(self, result: EvalResult, final: bool) -> None:
        try:
            if final:
                replace_text(self.folder.path / "eval.json", result.to_json())
            if result.return_mean > self.best_return:
                self.best_return = result.return_mean
                checkpoint.write_file(self.folder.path / "best.pt", self._model())
        except OSError as error:
            self.log.say(f"warning: the evaluation's files could not be written: {error}")

    def _model(self) -> dict[str, Any]:
        """Enough to play on any machine."""
        return {
            "network": self.learner.network_state_dict(),
            "config": config.flat(self.config),
            "num_actions": self.envs.num_actions,
            "step": self.step,
        }

    def save(self, *, wait: bool = False) -> None:
        """Begins a checkpoint: the loop pauses for the copying, a thread does the writing."""
        self._take(self._saver.wait())
        if self.metrics is not None:
            self.metrics.check()
        begin = time.monotonic()
        with self.log.during("save"):
            model = self._model()
            state = {
                **{
                    name: getattr(self, name)
                    for name in ("step", "updates", "refill_until_step", "evaluated_step", "best_return")
                },
                "config": model["config"],
                "num_actions": model["num_actions"],
                "resolved": self._resolved._asdict(),
                "wall_s": self.log.wall_s,
                "learner": self.learner.state_dict(),
                "policy_rng": self.policy_rng.bit_generator.state,
                "envs": checkpoint.to_tensors(self.envs.state_dict()),
                "timestep": checkpoint.to_tensors(self.timestep._asdict()),
                "frames": torch.from_numpy(self.frames.state.copy()),
                "games": self.log.games.state_dict(),
                "num_slots": self.replay.num_slots,
            }
            self.log.flush()
            self.memory_log.flush()
            model_file = self.folder.path / "model.pt"
            extra = lambda: checkpoint.write_file(model_file, model)  # noqa: E731
            self._saver.start(self.step, state, self.replay.snapshot(), extra)
            self.saved_step, self._saved_at = self.step, time.monotonic()
            self._pause_s = self._saved_at - begin
            if wait:
                self._take(self._saver.wait())

    def _take(self, result: checkpoint.SaveResult | None) -> None:
        if result is None:
            return
        if result.error is None:
            self.budget.save_seconds = result.seconds
            paused = f"the loop paused {self._pause_s:.2f} s, the writing took {result.seconds:.1f} s"
            self.log.say(f"checkpoint of step {result.step:,}: {paused}")
            self.replay.collect(result.manifests)
            return
        good = checkpoint.generations(self._checkpoints)
        self.saved_step, self._save_after = good[0].step if good else 0, time.monotonic() + RETRY_SAVE_S
        stays = f"the checkpoint of step {self.saved_step:,} stays" if good else "there is no earlier checkpoint"
        self.log.say(f"warning: saving at step {result.step:,} failed: {result.error}; {stays}, training goes on")

    def close(self) -> None:
        """Waits for what is being written and closes everything."""
        self._take(self._saver.wait())
        self.envs.close()
        self.replay.close()
        self.memory_log.close()
        self.log.close()
