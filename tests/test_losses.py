"""Q-learning's maths against numbers worked out by hand."""

import pytest
import torch

from dqn.losses import clipped_td_loss, q_learning_target, td_error

NEXT_Q = torch.tensor([[1.0, 3.0, 2.0], [5.0, -1.0, 0.0], [2.0, 4.0, 8.0]])
SELECTOR_Q = torch.tensor([[9.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
REWARD, DISCOUNT = torch.tensor([1.0, -1.0, 0.5]), torch.tensor([0.9, 0.0, 0.81])


def test_target_by_hand():
    # 1 + 0.9·3;  a terminal: the reward alone;  two steps: 0.5 + 0.9²·8
    assert q_learning_target(REWARD, DISCOUNT, NEXT_Q).tolist() == pytest.approx([3.7, -1.0, 6.98])


def test_double_target_by_hand():
    # the selector picks actions 0, 1, 2; the target network values them 1, −1, 8
    target = q_learning_target(REWARD, DISCOUNT, NEXT_Q, SELECTOR_Q)
    assert target.tolist() == pytest.approx([1.9, -1.0, 6.98])


def test_a_truncated_step_bootstraps():
    target = q_learning_target(torch.zeros(1), torch.tensor([0.99]), torch.tensor([[2.0, 7.0]]))
    assert target.tolist() == pytest.approx([6.93])


def test_td_error_by_hand():
    q = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert td_error(q, torch.tensor([1, 0]), torch.tensor([2.5, 1.0])).tolist() == [0.5, -2.0]


ERROR = torch.tensor([0.5, -2.0, 1.0, 3.0])
WEIGHT = torch.tensor([1.0, 0.5, 2.0, 0.0])


@pytest.mark.parametrize(
    ("kind", "weight", "loss", "gradient"),
    [
        # |δ| ≤ 1: δ²/2, beyond |δ| − 1/2:  0.125, 1.5, 0.5, 2.5
        ("huber", None, 4.625 / 4, [-0.125, 0.25, -0.25, -0.25]),
        ("huber", WEIGHT, (0.125 + 0.75 + 1.0) / 4, [-0.125, 0.125, -0.5, 0.0]),
        # δ²/2:  0.125, 2, 0.5, 4.5
        ("squared", None, 7.125 / 4, [-0.125, 0.5, -0.25, -0.75]),
        ("squared", WEIGHT, (0.125 + 1.0 + 1.0) / 4, [-0.125, 0.25, -0.5, 0.0]),
        # the original: the error itself is clipped, and summed
        ("clipped_sum", None, 4.625, [-0.5, 1.0, -1.0, -1.0]),
        ("clipped_sum", WEIGHT, 1.875, [-0.5, 0.5, -2.0, 0.0]),
    ],
)
def test_loss_and_gradient_by_hand(kind, weight, loss, gradient):
    found, found_gradient = clipped_td_loss(ERROR, kind, weight)
    assert float(found) == pytest.approx(loss)
    assert found_gradient.tolist() == pytest.approx(gradient)


@pytest.mark.parametrize("kind", ["huber", "squared", "clipped_sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_is_autograds(kind, weighted):
    generator = torch.Generator().manual_seed(1)
    q = (torch.randn(64, generator=generator) * 2).requires_grad_()
    target = torch.randn(64, generator=generator)
    weight = torch.rand(64, generator=generator) if weighted else None
    loss, gradient = clipped_td_loss(target - q, kind, weight)
    reduction = "sum" if kind == "clipped_sum" else "mean"
    if kind == "squared":
        plain = 0.5 * torch.nn.functional.mse_loss(q, target, reduction="none")
    else:
        plain = torch.nn.functional.smooth_l1_loss(q, target, reduction="none")
    plain = getattr(plain if weight is None else plain * weight, reduction)()
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-6)
    assert torch.allclose(gradient, torch.autograd.grad(plain, q)[0], rtol=1e-6)


@pytest.mark.parametrize("kind", ["huber", "squared", "clipped_sum"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_shows_in_the_loss(kind, bad):
    loss, _ = clipped_td_loss(torch.tensor([0.1, bad]), kind)
    assert not torch.isfinite(loss)
