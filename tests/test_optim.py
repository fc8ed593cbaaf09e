"""The optimizers against numbers worked out by hand, and against PyTorch's where it has the same one."""

import math

import pytest
import torch

from dqn.optim import TINY, Adam, RMSPropGraves, forget_tiny


def test_rmsprop_by_hand():
    """Two steps on one parameter, gradients 2 and −1, ε = 0.01 inside the root."""
    parameter = torch.tensor([1.0])
    optimizer = RMSPropGraves(parameter, learning_rate=0.1, epsilon=0.01)
    optimizer.step(parameter, torch.tensor([2.0]))
    # mean 0.05·2 = 0.1, square 0.05·4 = 0.2: root √(0.2 − 0.01 + 0.01)
    first = 1 - 0.1 * 2 / math.sqrt(0.2)
    assert float(parameter) == pytest.approx(first, rel=1e-6)
    optimizer.step(parameter, torch.tensor([-1.0]))
    # mean 0.95·0.1 − 0.05 = 0.045, square 0.95·0.2 + 0.05 = 0.24: root √(0.24 − 0.002025 + 0.01)
    assert float(parameter) == pytest.approx(first + 0.1 / math.sqrt(0.247975), rel=1e-6)
    assert optimizer.mean.tolist() == pytest.approx([0.045]) and optimizer.square.tolist() == pytest.approx([0.24])


def test_rmsprop_differs_from_pytorchs_by_where_epsilon_stands():
    ours, theirs = torch.tensor([1.0]), torch.nn.Parameter(torch.tensor([1.0]))
    RMSPropGraves(ours, 0.1, 0.01).step(ours, torch.tensor([0.01]))
    theirs.grad = torch.tensor([0.01])
    torch.optim.RMSprop([theirs], lr=0.1, alpha=0.95, eps=0.01, centered=True).step()
    root = math.sqrt(0.05 * 1e-4 - (0.05 * 0.01) ** 2)
    assert float(theirs.detach()) == pytest.approx(1 - 0.1 * 0.01 / (root + 0.01), rel=1e-6)
    assert float(ours) == pytest.approx(1 - 0.1 * 0.01 / math.sqrt(root**2 + 0.01), rel=1e-6)


def test_a_mean_needs_epsilon_by_the_square_of_the_batch():
    """Gradients 32 times smaller with ε/32² take the same steps: the sum and the mean over a batch of 32."""
    sums, means = torch.tensor([1.0, -2.0]), torch.tensor([1.0, -2.0])
    of_sum, of_mean = RMSPropGraves(sums, 2.5e-4, 0.01), RMSPropGraves(means, 2.5e-4, 0.01 / 32**2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        gradient = torch.randn(2, generator=generator)
        of_sum.step(sums, gradient)
        of_mean.step(means, gradient / 32)
    assert torch.allclose(sums, means, rtol=1e-6) and not torch.allclose(sums, torch.tensor([1.0, -2.0]), rtol=1e-5)


def test_adam_is_pytorchs():
    generator = torch.Generator().manual_seed(1)
    ours = torch.randn(1000, generator=generator)
    theirs = torch.nn.Parameter(ours.clone())
    optimizer, reference = Adam(ours, 1e-2, 1e-8), torch.optim.Adam([theirs], lr=1e-2, eps=1e-8)
    for _ in range(30):
        theirs.grad = torch.randn(1000, generator=generator)
        optimizer.step(ours, theirs.grad.clone())
        reference.step()
    assert torch.allclose(ours, theirs.detach(), rtol=1e-5, atol=1e-7)
    assert float(optimizer.updates) == 30


@pytest.mark.parametrize("kind", [Adam, RMSPropGraves])
def test_an_overflow_leaves_everything_as_it_was(kind):
    parameters = torch.randn(50, generator=torch.Generator().manual_seed(1))
    optimizer = kind(parameters, 1e-2, 1e-8)
    optimizer.step(parameters, torch.ones(50), torch.zeros(()))
    before = [tensor.clone() for tensor in (parameters, *optimizer.state().values())]
    optimizer.step(parameters, torch.zeros(50), torch.ones(()))
    after = [parameters, *optimizer.state().values()]
    assert all(torch.equal(left, right) for left, right in zip(before, after))
    optimizer.step(parameters, torch.ones(50), torch.zeros(()))
    assert not torch.equal(parameters, before[0])


@pytest.mark.parametrize("kind", [Adam, RMSPropGraves])
def test_state_is_float32(kind):
    optimizer = kind(torch.zeros(3), 1e-2, 1e-8)
    assert {tensor.dtype for tensor in optimizer.state().values()} == {torch.float32}


@pytest.mark.parametrize("kind", [Adam, RMSPropGraves])
def test_averages_without_a_gradient_end_at_zero_and_never_below_normal_numbers(kind):
    """A weight that learns for a while and then gets no gradient: its averages decay to 0, and it stays where it is."""
    parameters, plain = torch.ones(2), torch.ones(2)
    ours, reference = kind(parameters, 1e-3, 1e-8), kind(plain, 1e-3, 1e-8)
    for update in range(1, 2_001):
        gradient = torch.tensor([1e-3, 1e-3 if update < 100 else 0.0])
        ours.step(parameters, gradient)
        reference.step(plain, gradient)
        if update % 100 == 0:
            forget_tiny(ours.state())
        averages = torch.stack([ours.mean, ours.square])
        assert not ((averages != 0) & (averages.abs() < torch.finfo(torch.float32).tiny)).any()
    assert float(ours.mean[1]) == 0 and 0 < abs(float(reference.mean[1])) < 1e-38 < TINY
    assert torch.allclose(parameters, plain, rtol=1e-7)
