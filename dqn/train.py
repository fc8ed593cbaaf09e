"""Deep Q-learning with experience replay: the single loop.

Algorithm 1 of Mnih et al. 2015, over N games at once. A *step* is one decision of one game; a pass of the loop is N of
them. While the emulators play in their threads, the learner learns.

    t          frame_t, state_t  ->  action_t  ->  reward, terminal, truncated of action_t, and frame_t+1
    replay     slot t holds frame_t, action_t and what action_t brought; it is appended when all of it is known
"""

import numpy as np

from dqn.config import LearnerConfig
from dqn.policy import epsilon_greedy, force_fire, linear_epsilon
from dqn.run import Run


def train(run: Run) -> None:
    """Trains until the run's budget is spent or something asks it to stop.

    Raises:
        NonFiniteLoss: the loss is no number any more; the last good checkpoint stays.
    """
    config, envs, replay, learner, frames = run.config, run.envs, run.replay, run.learner, run.frames
    fire_action = envs.fire_action if config.env.fire_on_life else None
    timestep, state = run.timestep, frames.state
    any_q = np.zeros((envs.num_envs, envs.num_actions), np.float32)  # asked for nothing while ε is 1

    while run.goes_on():
        step = run.step
        epsilon = linear_epsilon(step, config.policy, config.learner.learning_starts_steps)
        q_values = learner.q_values(state) if epsilon < 1 else any_q
        actions = epsilon_greedy(q_values, epsilon, run.policy_rng)
        actions = force_fire(actions, fire_action, timestep.first | timestep.lost_life)
        envs.send(actions)  # the emulators run in threads ...

        due = updates_due(step, step + envs.num_envs, config.learner, run.refill_until_step)  # ... meanwhile
        batches = replay.samples(len(due), config.learner.batch_size, run.beta(step))
        for now, transitions in zip(due, batches, strict=True):
            run.metrics = learner.learn(transitions)
            run.updates += 1
            if transitions.index is not None:
                replay.update_priorities(transitions.index, run.metrics.td_errors_abs.cpu().numpy())
            if (now - config.learner.learning_starts_steps) % config.learner.target_period_steps == 0:
                learner.update_target()  # θ⁻ ← θ

        following = envs.recv()
        reward = np.sign(following.reward) if config.env.clip_reward else following.reward
        replay.append(timestep.frame, timestep.first, actions, reward, following.terminal, following.truncated)
        state = frames.push(following.frame, following.first)
        timestep = following
        run.advance(timestep, epsilon)


def updates_due(begin: int, end: int, learner: LearnerConfig, refill_until_step: int = 0) -> range:
    """The steps in `(begin, end]` at which an update is due.

    Update j is due at step learning_starts_steps + j · update_period_steps, however many games play at once. While a
    lost replay fills again, due updates are dropped, not saved up.
    """
    period, start = learner.update_period_steps, learner.learning_starts_steps
    first = max(begin, start, refill_until_step)
    return range(start + ((first - start) // period + 1) * period, end + 1, period)
