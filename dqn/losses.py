"""The maths of Q-learning, as pure functions of tensors. Shapes: B transitions, A actions.

Source: Mnih et al. 2015, Algorithm 1; van Hasselt et al. 2016, equation 4 (double Q-learning).
"""

import torch
from torch import Tensor


def q_learning_target(reward: Tensor, discount: Tensor, next_q: Tensor, selector_q: Tensor | None = None) -> Tensor:
    """The target y = r + discount · Q(s', a*).

    Args:
        reward: [B], for n steps already summed with their discounts.
        discount: [B], γ^k, or 0 where the game (or a life) ended.
        next_q: [B, A], the target network's values of the next state.
        selector_q: [B, A], the online network's values, which choose a* in double Q-learning; None: next_q chooses.
    """
    if selector_q is None:
        return reward + discount * next_q.max(dim=1).values
    return reward + discount * next_q.gather(1, selector_q.argmax(dim=1, keepdim=True)).squeeze(1)


def td_error(q: Tensor, action: Tensor, target: Tensor) -> Tensor:
    """δ = target − Q(s, a), [B]."""
    return target - q.gather(1, action.unsqueeze(1)).squeeze(1)


def td_loss(error: Tensor, kind: str, weight: Tensor | None = None) -> Tensor:
    """The loss of a batch whose gradient trains the network, a scalar.

    Args:
        error: [B], the TD errors δ.
        kind: `huber`, the mean of δ²/2 within ±1 and |δ| − 1/2 beyond; `squared`, the mean of δ²/2;
            `clipped_sum`, the original's: δ clipped to ±1 in the gradient, summed over the batch. Its sum has B times
            the gradient of the mean, which RMSProp's ε has to match.
        weight: [B], importance weights; None: all 1.
    """
    huber = torch.where(error.abs() <= 1, 0.5 * error.square(), error.abs() - 0.5)
    loss = 0.5 * error.square() if kind == "squared" else huber
    if weight is not None:
        loss = loss * weight
    return loss.sum() if kind == "clipped_sum" else loss.mean()
