"""The learner against plain PyTorch, known Q values, equal sums however a batch is cut, saving, devices."""

import copy
import hashlib
import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from dqn import config, learner, networks
from dqn.config import LearnerConfig, UsageError
from dqn.learner import Learner, LearnMetrics, NonFiniteLoss, Resolved, load_policy, resolve
from dqn.networks import QNetwork
from dqn.optim import RMSPropGraves
from dqn.replay import Transitions

SMALL = {
    "env.screen_size": 36,
    "learner.device": "cpu",
    "learner.precision": "fp32",
    "learner.num_threads": 1,
    "learner.batch_size": 32,
}
NUM_ACTIONS = 4


def make(seed=1, num_actions=NUM_ACTIONS, resolved=None, **changes):
    chosen = config.from_flat({**SMALL, **{name.replace("__", "."): value for name, value in changes.items()}})
    return Learner(chosen, num_actions, torch.Generator().manual_seed(seed), resolved)


def make_fp16(**changes):
    return make(learner__device="auto", learner__precision="fp16", resolved=Resolved("cpu", "fp16", 1), **changes)


def batch_of(size, *, seed=1, n_steps=1, screen_size=36, stack_size=4, weight=False, **changes):
    rng = np.random.default_rng(seed)
    shape = (size, stack_size + n_steps, screen_size, screen_size)
    bootstrap_steps = rng.integers(1, n_steps + 1, size=size)
    fields = {
        "window": rng.integers(256, size=shape, dtype=np.uint8),
        "action": rng.integers(NUM_ACTIONS, size=size),
        "reward": rng.normal(size=size).astype(np.float32) * 2,
        "bootstrap_steps": bootstrap_steps,
        "discount": (0.99**bootstrap_steps * (rng.random(size) > 0.2)).astype(np.float32),
        "weight": rng.random(size).astype(np.float32) if weight else None,
        "index": None,
    }
    return Transitions(**{**fields, **changes})


def decide(ours):
    """Biases that leave every unit clearly on or off: where one is near 0, a rounding decides, and no bound holds."""
    generator, plain = torch.Generator().manual_seed(7), ours.network_state_dict()
    for name in ("conv1", "conv2", "conv3", "hidden"):
        plain[f"{name}.bias"] = torch.where(
            torch.rand(plain[f"{name}.bias"].shape, generator=generator) < 0.6, 3.0, -3.0
        )
        plain[f"{name}.weight"] *= 1.0 if name == "conv1" else 0.2
    packed = networks.pack(plain)
    ours.load_state_dict({**ours.state_dict(), "parameters": packed, "target_parameters": packed})


def hash_of(parameters):
    return hashlib.sha256(parameters.numpy().tobytes()).hexdigest()


class PlainLearner:
    """The same algorithm with autograd, the plain network and PyTorch's optimizer: the oracle."""

    def __init__(self, ours):
        self.config = ours.config
        self.online = load_policy(as_checkpoint(ours))
        self.target = copy.deepcopy(self.online)
        if self.config.optimizer == "adam":
            options = {"lr": self.config.learning_rate, "eps": self.config.optimizer_epsilon}
            self.adam = torch.optim.Adam(self.online.parameters(), **options)
        else:
            self.rmsprop = [
                RMSPropGraves(p.data, self.config.learning_rate, self.config.optimizer_epsilon)
                for p in self.online.parameters()
            ]

    def learn(self, batch):
        window, stack = torch.from_numpy(batch.window), 4
        following = torch.stack([window[b, k : k + stack] for b, k in enumerate(batch.bootstrap_steps)])
        with torch.no_grad():
            next_q = self.target(following)
            best = (self.online(following) if self.config.double_q else next_q).argmax(1)
            value = next_q[torch.arange(len(best)), best]
            target = torch.from_numpy(batch.reward) + torch.from_numpy(batch.discount) * value
        q = self.online(window[:, :stack]).gather(1, torch.from_numpy(batch.action)[:, None])[:, 0]
        if self.config.loss == "squared":
            loss = 0.5 * (q - target) ** 2
        else:
            loss = F.smooth_l1_loss(q, target, reduction="none")
        if batch.weight is not None:
            loss = loss * torch.from_numpy(batch.weight)
        loss = loss.sum() if self.config.loss == "clipped_sum" else loss.mean()
        self.online.zero_grad()
        loss.backward()
        if self.config.optimizer == "adam":
            self.adam.step()
        else:
            for optimizer, parameter in zip(self.rmsprop, self.online.parameters()):
                optimizer.step(parameter.data, parameter.grad)
        if self.config.target == "polyak":
            with torch.no_grad():
                for old, new in zip(self.target.parameters(), self.online.parameters()):
                    old.lerp_(new, self.config.polyak_tau)
        return loss.item()

    def update_target(self):
        self.target.load_state_dict(self.online.state_dict())


def as_checkpoint(ours):
    shape = {"env.stack_size": 4, "env.screen_size": 36}
    return {"config": shape, "num_actions": NUM_ACTIONS, "learner": ours.state_dict()}


VARIANTS = {
    "breakout": {},
    "nature": {
        "learner__optimizer": "rmsprop",
        "learner__loss": "clipped_sum",
        "learner__optimizer_epsilon": 0.01,
        "learner__learning_rate": 1e-3,
    },
    "double, three steps, weights": {"learner__double_q": True, "learner__n_steps": 3, "learner__loss": "squared"},
    "polyak, accumulated": {
        "learner__target": "polyak",
        "learner__polyak_tau": 0.1,
        "learner__gradient_accumulation": 4,
    },
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_updates_are_the_plain_learners(changes):
    # Adam divides by the gradient's size: with a tiny ε the rounding of a near-zero gradient is a whole step
    ours = make(**{"learner__optimizer_epsilon": 1e-4, **changes})
    decide(ours)
    plain, begin = PlainLearner(ours), ours.network_state_dict()
    weighted = ours.config.n_steps == 3
    for update in range(6):
        batch = batch_of(32, seed=update, n_steps=ours.config.n_steps, weight=weighted)
        assert float(ours.learn(batch).loss) == pytest.approx(plain.learn(batch), rel=1e-5)
        if update == 2 and ours.config.target == "periodic":
            ours.update_target()
            plain.update_target()
    for name, value in ours.network_state_dict().items():
        wanted = plain.online.state_dict()[name]
        off = float((value - wanted).norm())
        assert off < 1e-5 * float(wanted.norm()), name
        assert off < 1e-3 * float((wanted - begin[name]).norm()), name  # of the way it went


def test_bf16_stays_near_fp32():
    """After 20 updates: Q values within 3 % of their spread, the step taken in nearly the same direction."""
    learners = {name: make(learner__precision=name) for name in ("fp32", "bf16")}
    begin = learners["fp32"].parameters.clone()
    for update in range(20):
        for ours in learners.values():
            ours.learn(batch_of(32, seed=update))
    states = batch_of(16, seed=99).window[:, :4]
    fp32, bf16 = (ours.q_values(states) for ours in learners.values())
    assert np.abs(fp32 - bf16).max() < 0.03 * max(1.0, np.abs(fp32).max())
    steps = [ours.parameters - begin for ours in learners.values()]
    assert float(F.cosine_similarity(steps[0], steps[1], dim=0)) > 0.9
    assert learners["bf16"].parameters.dtype == torch.float32


@pytest.mark.parametrize("loss", ["huber", "squared", "clipped_sum"])
def test_four_times_eight_are_thirty_two(loss):
    whole, parts = (make(learner__loss=loss, learner__gradient_accumulation=count) for count in (1, 4))
    batch = batch_of(32, weight=True)
    left, right = whole.learn(batch), parts.learn(batch)
    assert torch.allclose(left.gradient, right.gradient, rtol=0, atol=1e-6 * float(left.gradient.abs().max()))
    assert float(left.loss) == pytest.approx(float(right.loss), rel=1e-6)
    assert torch.allclose(left.td_errors_abs, right.td_errors_abs, rtol=1e-6)
    assert whole.updates == parts.updates == 1 and float(parts.optimizer.updates) == 1
    assert torch.equal(whole.target_parameters, parts.target_parameters)


def test_metrics():
    ours = make()
    batch = batch_of(32)
    plain = load_policy(as_checkpoint(ours))
    with torch.no_grad():
        window = torch.from_numpy(batch.window)
        target = torch.from_numpy(batch.reward) + torch.from_numpy(batch.discount) * plain(window[:, 1:]).max(1).values
        q = plain(window[:, :4])[torch.arange(32), torch.from_numpy(batch.action)]
    metrics = ours.learn(batch)
    assert metrics.td_errors_abs.shape == (32,)
    assert torch.allclose(metrics.td_errors_abs, (target - q).abs(), atol=1e-5)
    scalars = metrics.scalars()
    assert scalars["q_mean"] == pytest.approx(float(q.mean()), abs=1e-6)
    assert scalars["td_error_abs"] == pytest.approx(float((target - q).abs().mean()), rel=1e-5)
    assert scalars["grad_norm"] == pytest.approx(float(metrics.gradient.norm()), rel=1e-6)
    assert scalars["grad_norm"] > 0


def test_acting_is_the_plain_network_and_changes_nothing():
    ours = make()
    states = batch_of(5).window[:, :4]
    before = hash_of(ours.parameters)
    q = ours.q_values(states)
    assert q.shape == (5, NUM_ACTIONS) and q.dtype == np.float32
    with torch.no_grad():
        plain = load_policy(as_checkpoint(ours))(torch.from_numpy(states)).numpy()
    assert q == pytest.approx(plain, rel=1e-5, abs=1e-6)
    assert hash_of(ours.parameters) == before


def test_equal_seeds_give_equal_parameters():
    hashes = []
    for seed in (1, 1, 2):
        ours = make(seed)
        for update in range(3):
            ours.learn(batch_of(32, seed=update))
        hashes.append(hash_of(ours.parameters))
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    make().learn(batch_of(32))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_target_stays_until_it_is_copied():
    ours = make()
    begin = ours.target_parameters.clone()
    ours.learn(batch_of(32))
    assert torch.equal(ours.target_parameters, begin) and not torch.equal(ours.parameters, begin)
    before = float(ours.learn(batch_of(32, seed=5)).td_error_abs)
    ours.update_target()
    assert torch.equal(ours.target_parameters, ours.parameters)
    ours.learn(batch_of(32, seed=6))
    assert not torch.equal(ours.target_parameters, ours.parameters) and before > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_targets_change_after_the_copy(precision):
    """The working copies follow the masters: another target, other errors."""
    ours = make(learner__precision=precision, learner__learning_rate=1e-2)
    batch = batch_of(32)
    with torch.no_grad():
        ours.parameters.mul_(1.5)
    first = ours.learn(batch).td_errors_abs.clone()
    state = ours.state_dict()
    ours.load_state_dict(state)
    same = ours.learn(batch).td_errors_abs.clone()
    ours.load_state_dict(state)
    ours.update_target()
    other = ours.learn(batch).td_errors_abs
    assert not torch.allclose(same, other, rtol=0.05) and not torch.allclose(first, same, rtol=1e-4)


def test_polyak_follows_each_update_and_ignores_the_copy():
    ours = make(learner__target="polyak", learner__polyak_tau=0.25)
    begin = ours.target_parameters.clone()
    ours.learn(batch_of(32))
    wanted = 0.75 * begin + 0.25 * ours.parameters
    assert torch.allclose(ours.target_parameters, wanted, rtol=1e-6, atol=1e-8)
    ours.update_target()
    assert torch.allclose(ours.target_parameters, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("make_one", [make, make_fp16], ids=["fp32", "fp16"])
def test_saved_and_loaded_it_goes_on_the_same(make_one, tmp_path):
    ours = make_one()
    for update in range(3):
        ours.learn(batch_of(32, seed=update))
        if update == 1:
            ours.update_target()
    torch.save(ours.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    other = make_one(seed=9) if make_one is make else make_fp16()
    other.load_state_dict(state)
    assert other.updates == 3 and not torch.equal(other.parameters, other.target_parameters)
    for update in range(3, 6):
        ours.learn(batch_of(32, seed=update))
        other.learn(batch_of(32, seed=update))
    left, right = ours.state_dict(), other.state_dict()
    assert left.keys() == right.keys() and left["updates"] == right["updates"] == 6
    assert all(torch.equal(left[name], right[name]) for name in left if name != "updates")


def test_a_state_is_a_copy():
    ours = make()
    state = ours.state_dict()
    before = {name: value.clone() for name, value in state.items() if name != "updates"}
    ours.learn(batch_of(32))
    ours.update_target()
    assert all(torch.equal(state[name], value) for name, value in before.items())


def test_fp16_overflow_skips_the_step_and_halves_the_scale():
    ours = make_fp16()
    ours.learn(batch_of(32))
    ours._scale.fill_(2.0**60)  # the scaled gradient is infinite in half precision
    before = ours.state_dict()
    ours.learn(batch_of(32, seed=2))
    after = ours.state_dict()
    assert float(after["scale"]) == 2.0**59 and float(after["good_updates"]) == 0
    assert after["updates"] == 2 and float(after["optimizer.updates"]) == float(before["optimizer.updates"]) == 1
    for name in ("parameters", "target_parameters", "optimizer.mean", "optimizer.square"):
        assert torch.equal(before[name], after[name])
    resumed = make_fp16()
    resumed.load_state_dict(after)
    assert float(resumed._scale) == 2.0**59


def test_fp16_scale_grows_after_enough_good_updates(monkeypatch):
    monkeypatch.setattr(learner, "GROWTH_UPDATES", 3)
    ours = make_fp16()
    ours._scale.fill_(8.0)
    scales = []
    for update in range(7):
        ours.learn(batch_of(32, seed=update))
        scales.append(float(ours._scale))
    assert scales == [8, 8, 16, 16, 16, 32, 32]


def test_fp16_is_near_fp32():
    half, full = make_fp16(), make()
    for update in range(5):
        half.learn(batch_of(32, seed=update))
        full.learn(batch_of(32, seed=update))
    states = batch_of(16, seed=99).window[:, :4]
    assert half.q_values(states) == pytest.approx(full.q_values(states), abs=0.02)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_loss_that_is_no_number_stops_before_the_step(accumulation):
    ours = make(learner__gradient_accumulation=accumulation)
    ours.learn(batch_of(32))
    before = ours.parameters.clone()
    batch = batch_of(32)
    batch.reward[3] = np.nan
    with pytest.raises(
        NonFiniteLoss, match=r"the loss of update 2 is nan: rewards .*pixels 0 to 255, parameters finite"
    ):
        ours.learn(batch)
    assert torch.equal(ours.parameters, before) and ours.updates == 1


def test_fetched_metrics_check_themselves():
    bad = LearnMetrics(torch.tensor(float("inf")), *[torch.zeros(1)] * 4)
    with pytest.raises(NonFiniteLoss):
        bad.scalars()


def test_num_bytes():
    ours, low = make(), make(learner__precision="bf16")
    parameters = ours.parameters.numel()
    # θ, θ⁻, gradient and two averages, and Adam's counter; bf16 adds two working copies
    assert ours.num_bytes() == 5 * 4 * parameters + 4
    assert low.num_bytes() == ours.num_bytes() + 2 * 2 * parameters


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_no_float64_and_small_dtypes_travel(name, monkeypatch):
    """What goes to the device: `uint8` windows and small float32 and int64 arrays."""
    ours = make(learner__precision=name)
    ours.learn(batch_of(32, weight=True))
    kinds = {key: (value.dtype, value.numel() * value.element_size()) for key, value in ours._inputs.items()}
    assert kinds.pop("window") == (torch.uint8, 32 * 5 * 36 * 36)
    assert {dtype for dtype, _ in kinds.values()} == {torch.float32, torch.int64}
    assert sum(size for _, size in kinds.values()) == 32 * (3 * 4 + 2 * 8)
    tensors = [value for value in ours.state_dict().values() if isinstance(value, torch.Tensor)]
    assert all(value.dtype == torch.float32 for value in tensors)


def test_the_windows_of_n_steps():
    """Next states begin where `bootstrap_steps` says: with k = n they are the window's end."""
    ours = make(learner__n_steps=3)
    batch = batch_of(8, n_steps=3)
    blocks = networks.space_to_depth(torch.from_numpy(batch.window))
    following = ours._following(blocks, torch.from_numpy(batch.bootstrap_steps))
    for row, k in enumerate(batch.bootstrap_steps):
        wanted = networks.space_to_depth(torch.from_numpy(batch.window[row : row + 1, k : k + 4]))
        assert torch.equal(following[row], wanted[0])


# Probe environments: each removes one thing that can be wrong. States are told apart by their brightness.


def picture(level, size, frames=5):
    return np.full((size, frames, 36, 36), level, np.uint8)


def transitions(rng, window, action, reward, discount):
    size = len(action)
    return Transitions(
        window=window,
        action=np.asarray(action, np.int64),
        reward=np.asarray(reward, np.float32),
        bootstrap_steps=np.ones(size, np.int64),
        discount=np.asarray(discount, np.float32),
        weight=None,
        index=None,
    )


def windows_of(state, following):
    """Windows whose state is all `state` and whose next state ends in frames of `following`: u8[B] each."""
    window = np.repeat(state[:, None], 5, 1)
    window[:, 1:] = following[:, None]  # the probe's next state shows nothing of the last
    window[:, 0] = state
    window[:, 1:4] = state[:, None]
    window[:, 4] = following
    return np.broadcast_to(window[:, :, None, None], (*window.shape, 36, 36)).astype(np.uint8)


def train_probe(draw, updates=300, **changes):
    ours = make(num_actions=2, **{"learner__learning_rate": 1e-3, **changes})
    rng = np.random.default_rng(1)
    for update in range(updates):
        ours.learn(transitions(rng, *draw(rng)))
        if update % 20 == 19:
            ours.update_target()
    return ours


def q_of(ours, *frames):
    state = np.array(frames, np.uint8)[None, :, None, None]
    return ours.q_values(np.broadcast_to(state, (1, 4, 36, 36)).copy())[0]


PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16"])


@PRECISIONS
def test_probe_a_constant_reward(precision):
    """One state, one step, reward 1: the value is 1 for either action."""

    def draw(rng):
        level = np.full(32, 128)
        return windows_of(level, level), rng.integers(2, size=32), np.ones(32), np.zeros(32)

    ours = train_probe(draw, learner__precision=precision)
    assert q_of(ours, 128, 128, 128, 128) == pytest.approx([1, 1], abs=0.1)


@PRECISIONS
def test_probe_the_reward_depends_on_the_state(precision):
    """Two states, one step, reward −1 in the dark one and 1 in the bright one."""

    def draw(rng):
        bright = rng.random(32) < 0.5
        level = np.where(bright, 255, 0)
        return windows_of(level, level), rng.integers(2, size=32), np.where(bright, 1, -1), np.zeros(32)

    ours = train_probe(draw, learner__precision=precision)
    assert q_of(ours, 0, 0, 0, 0) == pytest.approx([-1, -1], abs=0.1)
    assert q_of(ours, 255, 255, 255, 255) == pytest.approx([1, 1], abs=0.1)


@pytest.mark.parametrize(
    ("precision", "changes"),
    [("fp32", {}), ("bf16", {}), ("fp32", {"learner__double_q": True}), ("fp32", {"learner__target": "polyak"})],
    ids=["fp32", "bf16", "double", "polyak"],
)
def test_probe_the_value_of_the_next_state_is_discounted(precision, changes):
    """Two steps, the reward of 1 at the second: values 0.9 and 1."""

    def draw(rng):
        second = rng.random(32) < 0.5
        state, following = np.where(second, 255, 0), np.full(32, 255)
        window = windows_of(state, following)
        window[~second, 1:] = 255  # the second state is all bright
        window[~second, 0] = 0
        window[second] = 255
        return window, rng.integers(2, size=32), second * 1.0, np.where(second, 0.0, 0.9)

    ours = train_probe(draw, learner__precision=precision, learner__polyak_tau=0.05, **changes)
    assert q_of(ours, 0, 255, 255, 255) == pytest.approx([0.9, 0.9], abs=0.1)
    assert q_of(ours, 255, 255, 255, 255) == pytest.approx([1, 1], abs=0.1)


@PRECISIONS
def test_probe_the_reward_depends_on_the_action(precision):
    """One state, reward −1 for action 0 and 1 for action 1."""

    def draw(rng):
        level, action = np.full(32, 128), rng.integers(2, size=32)
        return windows_of(level, level), action, np.where(action == 1, 1, -1), np.zeros(32)

    ours = train_probe(draw, learner__precision=precision)
    assert q_of(ours, 128, 128, 128, 128) == pytest.approx([-1, 1], abs=0.1)


@PRECISIONS
def test_probe_the_right_action_depends_on_the_state(precision):
    """Two states: the bright one rewards action 1, the dark one action 0."""

    def draw(rng):
        bright, action = rng.integers(2, size=32), rng.integers(2, size=32)
        level = np.where(bright == 1, 255, 0)
        return windows_of(level, level), action, np.where(action == bright, 1, -1), np.zeros(32)

    ours = train_probe(draw, learner__precision=precision)
    assert q_of(ours, 0, 0, 0, 0) == pytest.approx([1, -1], abs=0.1)
    assert q_of(ours, 255, 255, 255, 255) == pytest.approx([-1, 1], abs=0.1)


# Devices.


class Card:
    """Stands in for `torch.cuda`."""

    def __init__(self, monkeypatch, capability, arch_list):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: arch_list)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla P100-PCIE-16GB")


WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


def test_no_gpu(monkeypatch):
    Card(monkeypatch, None, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(LearnerConfig(precision="fp32", num_threads=3)) == Resolved("cpu", "fp32", 3)
    with pytest.raises(UsageError, match=r"learner.device cuda: PyTorch sees no GPU.*learner.device cpu"):
        resolve(LearnerConfig(device="cuda"))


def test_a_card_without_kernels(monkeypatch):
    Card(monkeypatch, (6, 0), WHEEL)
    with pytest.warns(UserWarning, match=r"training on the CPU.*P100.*sm_60.*Pascal.*CUDA 12\.6") as seen:
        assert resolve(LearnerConfig()).device == "cpu"
    assert len(seen) == 1
    with pytest.raises(UsageError, match="no kernels for Tesla P100"):
        resolve(LearnerConfig(device="cuda"))
    assert resolve(LearnerConfig(device="cpu")).device == "cpu"


@pytest.mark.parametrize(
    ("capability", "usable", "precision"),
    [
        ((9, 0), True, "bf16"),
        ((8, 9), True, "bf16"),  # kernels of 8.6 run on it
        ((7, 5), True, "fp32"),  # no bf16 in hardware
        ((12, 1), True, "bf16"),
        ((7, 0), False, None),
    ],
)
def test_capabilities(monkeypatch, capability, usable, precision):
    Card(monkeypatch, capability, WHEEL)
    if usable:
        assert resolve(LearnerConfig())[:2] == ("cuda", precision)
    else:
        with pytest.warns(UserWarning):
            assert resolve(LearnerConfig()).device == "cpu"


@pytest.mark.parametrize(
    ("flags", "precision"),
    [("avx2 avx512f avx512_bf16", "bf16"), ("avx512f amx_bf16 amx_tile", "bf16"), ("avx2 avx512f", "fp32")],
)
def test_precision_by_processor_flags(monkeypatch, tmp_path, flags, precision):
    Card(monkeypatch, None, [])
    (tmp_path / "cpuinfo").write_text(f"processor: 0\nflags: fpu {flags}\n")
    monkeypatch.setattr(learner, "CPUINFO", tmp_path / "cpuinfo")
    assert resolve(LearnerConfig()).precision == precision
    monkeypatch.setattr(learner, "CPUINFO", tmp_path / "none")
    assert resolve(LearnerConfig()).precision == "fp32"
    assert resolve(LearnerConfig(precision="bf16")).precision == "bf16"


def test_a_resumed_run_keeps_what_it_began_with(monkeypatch):
    Card(monkeypatch, None, [])
    stored = Resolved("cpu", "bf16", 7)._asdict()
    assert resolve(LearnerConfig(precision="auto", num_threads=0), stored) == Resolved("cpu", "bf16", 7)
    stored = Resolved("cuda", "bf16", 7)._asdict()
    assert resolve(LearnerConfig(precision="fp32"), stored).device == "cpu"  # the GPU is gone


def test_describe_names_the_choice():
    assert make().describe() == "CPU, 1 threads, fp32"


def test_load_policy_refuses_other_content():
    for state in ({}, {"config": {}}, {"config": {"env.stack_size": 4, "env.screen_size": 36}, "num_actions": 4}):
        with pytest.raises(UsageError, match="no weights of this program"):
            load_policy(state)
    state = as_checkpoint(make())
    state["num_actions"] = 6
    with pytest.raises(UsageError, match="no weights of this program"):
        load_policy(state)


def test_a_models_file_is_the_plain_network(tmp_path):
    ours = make()
    ours.learn(batch_of(32))
    shape = {"env.stack_size": 4, "env.screen_size": 36}
    torch.save({"config": shape, "num_actions": 4, "network": ours.network_state_dict()}, tmp_path / "model.pt")
    network = load_policy(torch.load(tmp_path / "model.pt"))
    assert isinstance(network, QNetwork)
    states = batch_of(3).window[:, :4]
    with torch.no_grad():
        assert network(torch.from_numpy(states)).numpy() == pytest.approx(ours.q_values(states), rel=1e-5, abs=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_graph_is_the_eager_update(precision):
    """Eight updates, five of them replayed, with a copied target and a loaded checkpoint in between."""
    options = {"learner__device": "cuda", "learner__precision": precision}
    graphed, eager = make(**options), make(**options)
    eager.as_graph = False
    for update in range(8):
        metrics = [ours.learn(batch_of(32, seed=update)) for ours in (graphed, eager)]
        assert float(metrics[0].loss) == pytest.approx(float(metrics[1].loss), rel=1e-3)
        if update == 5:
            for ours in (graphed, eager):
                ours.update_target()
                ours.load_state_dict(ours.state_dict())
    assert graphed._graph._graph is not None
    assert torch.allclose(graphed.parameters, eager.parameters, atol=1e-4)
    assert graphed.updates == eager.updates == 8


@pytest.mark.gpu
def test_the_gpu_learns_what_the_cpu_learns():
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    gpu, cpu = make(learner__device="cuda", learner__optimizer_epsilon=1e-4), make(learner__optimizer_epsilon=1e-4)
    for update in range(6):
        for ours in (gpu, cpu):
            ours.learn(batch_of(32, seed=update))
    assert float((gpu.parameters.cpu() - cpu.parameters).norm() / cpu.parameters.norm()) < 1e-4
    states = batch_of(4).window[:, :4]
    assert gpu.q_values(states) == pytest.approx(cpu.q_values(states), abs=1e-3)
