"""The network's layouts: the fast one is the plain one, forward and backward, whatever the shape and precision."""

import numpy as np
import pytest
import torch

from dqn import networks
from dqn.networks import FastNetwork, QNetwork

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.2, torch.float16: 0.2}
"""Of a tensor's length. Half precisions switch units near 0, autocast's as ours; a misplaced weight gives about 1."""


def make(num_actions=4, stack_size=4, screen_size=84, seed=1):
    """A plain network with parameters from the generator, and the packed parameters."""
    network = QNetwork(num_actions, stack_size, screen_size)
    initial = networks.initial_parameters(network, torch.Generator().manual_seed(seed))
    network.load_state_dict(initial)
    return network, networks.pack(initial)


def random_states(batch, stack_size=4, screen_size=84, seed=2):
    return np.random.default_rng(seed).integers(256, size=(batch, stack_size, screen_size, screen_size), dtype=np.uint8)


def clear_states(plain, shape):
    """States that leave no unit so near 0 that a rounding could switch it: else no tolerance would hold."""
    for seed in range(100):
        states = random_states(3, *shape[1:], seed=seed)
        nearest = []
        with torch.no_grad():
            x = torch.from_numpy(states).float() / 255
            for layer in (plain.conv1, plain.conv2, plain.conv3, plain.hidden):
                x = layer(x.flatten(1) if layer is plain.hidden else x)
                nearest.append(float(x.abs().min()))
                x = torch.relu(x)
        if min(nearest) > 5e-7:
            return states
    raise AssertionError("no such states")


def difference(left, right):
    left, right = left.detach().float(), right.detach().float()
    return float((left - right).norm() / right.norm())


def test_the_papers_architecture():
    network = QNetwork(18)
    shapes = {name: tuple(value.shape) for name, value in network.named_parameters() if name.endswith("weight")}
    assert shapes == {
        "conv1.weight": (32, 4, 8, 8),
        "conv2.weight": (64, 32, 4, 4),
        "conv3.weight": (64, 64, 3, 3),
        "hidden.weight": (512, 3136),
        "output.weight": (18, 512),
    }
    assert sum(value.numel() for value in network.parameters()) == 1_693_362
    assert network(torch.from_numpy(random_states(3))).shape == (3, 18)


def test_initial_parameters_are_pytorchs_distribution_from_the_named_generator():
    network = QNetwork(6)
    torch_default = dict(network.named_parameters())
    ours = networks.initial_parameters(network, torch.Generator().manual_seed(7))
    again = networks.initial_parameters(network, torch.Generator().manual_seed(7))
    other = networks.initial_parameters(network, torch.Generator().manual_seed(8))
    assert list(ours) == list(torch_default)
    for name, value in ours.items():
        assert torch.equal(value, again[name]) and not torch.equal(value, other[name])
        fan_in = torch_default[name.replace("bias", "weight")][0].numel()
        assert float(value.abs().max()) <= fan_in**-0.5
        if value.numel() > 1000:  # uniform in ±1/√fan_in, as `reset_parameters` draws it
            assert float(value.std()) == pytest.approx((3 * fan_in) ** -0.5, rel=0.03)
            assert float(torch_default[name].detach().std()) == pytest.approx((3 * fan_in) ** -0.5, rel=0.03)


@pytest.mark.parametrize(("size", "frames"), [(84, 5), (36, 4), (85, 1), (87, 2)])
def test_space_to_depth_names_each_pixel(size, frames):
    windows = random_states(2, frames, size)
    blocks = networks.space_to_depth(torch.from_numpy(windows)).numpy()
    side = size // 4
    assert blocks.shape == (2, side, side, 16 * frames)
    for _ in range(50):
        frame, row, column = (np.random.default_rng(_).integers(n) for n in (frames, 4 * side, 4 * side))
        channel = 16 * frame + 4 * (row % 4) + column % 4
        assert (blocks[:, row // 4, column // 4, channel] == windows[:, frame, row, column]).all()


def test_pack_and_unpack_are_inverse():
    network, packed = make(6, 3, 60)
    back = networks.unpack(packed, network)
    assert packed.numel() == sum(value.numel() for value in network.parameters())
    assert list(back) == list(network.state_dict())
    for name, value in network.state_dict().items():
        assert torch.equal(back[name], value)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "shape", [(4, 4, 84), (18, 4, 84), (3, 2, 36), (6, 1, 43), (4, 4, 60)], ids=lambda shape: "-".join(map(str, shape))
)
def test_forward_and_backward_are_the_plain_networks(dtype, shape):
    num_actions = shape[0]
    plain, packed = make(*shape)
    fast = FastNetwork(packed, *shape, dtype)
    states = clear_states(plain, shape)
    q_gradient = torch.randn(len(states), num_actions, generator=torch.Generator().manual_seed(3))

    q = plain(torch.from_numpy(states))
    q.backward(q_gradient)
    wanted = networks.pack({name: value.grad for name, value in plain.named_parameters()})

    with torch.no_grad():
        fast_q, activations = fast.forward(networks.space_to_depth(torch.from_numpy(states)).to(dtype))
        gradient = torch.full_like(packed, float("nan"))  # all of it is written
        fast.backward(q_gradient, activations, fast.views(gradient))
    assert fast_q.dtype == torch.float32
    assert difference(fast_q, q) < TOLERANCE[dtype]
    for name, part in fast.views(gradient).items():
        assert difference(part, fast.views(wanted)[name]) < TOLERANCE[dtype], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_adds_where_asked(dtype):
    shape = (4, 4, 84)
    _, packed = make(*shape)
    fast = FastNetwork(packed, *shape, dtype)
    once, twice = torch.zeros_like(packed), torch.zeros_like(packed)
    with torch.no_grad():
        _, activations = fast.forward(networks.space_to_depth(torch.from_numpy(random_states(4))).to(dtype))
        for gradient, adds in ((once, [False]), (twice, [False, True])):
            for add in adds:  # backward works in place on its own tensors only
                fast.backward(torch.ones(4, 4), activations, fast.views(gradient), add=add)
    assert difference(twice, 2 * once) < 1e-6


def test_refresh_follows_the_masters():
    for dtype in (torch.float32, torch.bfloat16):
        _, packed = make()
        fast = FastNetwork(packed, 4, 4, 84, dtype)
        blocks = networks.space_to_depth(torch.from_numpy(random_states(2))).to(dtype)
        with torch.no_grad():
            before = fast.forward(blocks)[0]
            packed.mul_(1.5)
            fast.refresh()
            after = fast.forward(blocks)[0]
            again = FastNetwork(packed.clone(), 4, 4, 84, dtype).forward(blocks)[0]
        assert torch.equal(after, again) and not torch.allclose(after, before, rtol=0.1)
