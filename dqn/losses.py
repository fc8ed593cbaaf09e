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


def clipped_td_loss(error: Tensor, kind: str, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The loss of a batch, a scalar, and its gradient by Q(s, a), [B].

    With c the slope of a transition's loss, that loss is c · (δ − c/2): δ²/2 where c = δ, and |δ| − 1/2 where c = ±1.

    Args:
        error: [B], the TD errors δ.
        kind: `huber`, δ clipped to ±1 as slope, mean over the batch; `squared`, δ itself, mean; `clipped_sum`, the
            original's: clipped, but summed. Its gradient is B times the mean's, which RMSProp's ε has to match.
        weight: [B], importance weights; None: all 1.
    """
    slope = error if kind == "squared" else error.clamp(-1, 1)
    weighted = slope if weight is None else slope * weight
    loss = torch.dot(weighted, error - slope / 2)
    share = 1.0 if kind == "clipped_sum" else 1 / len(error)
    return loss * share, weighted * -share
