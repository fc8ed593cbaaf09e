"""The learner: float32 masters in one flat vector, working copies in the arithmetic that the device is good at.

One update is Algorithm 1's gradient step: the targets of the whole batch in one forward of the target network without
gradients, one forward and backward of the online network, one fused step of the optimizer. Windows of S + n pictures
come in once as `uint8`; the state is the first S of them, the next state S of them from the bootstrap step on.

    window   f0 f1 f2 f3 f4          n = 1, S = 4
    state    f0 f1 f2 f3
    next        f1 f2 f3 f4
"""

import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqn import networks
from dqn.config import Config, LearnerConfig, UsageError
from dqn.losses import q_learning_target, td_error, td_loss
from dqn.memory import cores
from dqn.networks import FastNetwork, QNetwork
from dqn.optim import Adam, RMSPropGraves
from dqn.replay import Transitions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE, GROWTH_UPDATES = 2.0**16, 2_000
"""fp16: the first loss scale, and the updates without overflow after which it doubles."""


class NonFiniteLoss(Exception):
    """The loss is no number any more; the text says at which update and what went in."""


class Resolved(NamedTuple):
    """What `auto` means on this machine; a run keeps it when it resumes."""

    device: str
    precision: str
    num_threads: int


def resolve(config: LearnerConfig, stored: dict[str, Any] | None = None) -> Resolved:
    """Decides device, precision and threads by what the machine can do, never by timing.

    Args:
        config: the wishes.
        stored: what the run decided when it began; it holds as far as this machine can do it.

    Raises:
        UsageError: the config insists on a GPU that is not there or that PyTorch has no kernels for.
    """
    problem = _cuda_problem()
    if config.device == "cuda" and problem:
        raise UsageError(f"learner.device cuda: {problem}")
    if config.device == "auto" and problem and torch.cuda.is_available():
        warnings.warn(f"training on the CPU: {problem}", stacklevel=2)
    device = "cuda" if config.device != "cpu" and not problem else "cpu"
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if _has_bf16(device) else "fp32"
    if precision == "fp16" and device == "cpu" and config.device != "auto":
        raise UsageError("learner.precision fp16 needs a GPU; take bf16 or fp32")
    here = Resolved(device, precision, config.num_threads or cores())
    if stored is None:
        return here
    kept = Resolved(**stored)
    return kept if kept.device == "cpu" or device == "cuda" else here


def _cuda_problem() -> str | None:
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU here; take learner.device cpu or auto"
    major, minor = torch.cuda.get_device_capability()
    known = [name.split("_")[1].rstrip("af") for name in torch.cuda.get_arch_list() if "_" in name]
    if not any(int(name[:-1]) == major and int(name[-1]) <= minor for name in known):
        name = torch.cuda.get_device_name()
        return (
            f"this PyTorch has no kernels for {name} (sm_{major}{minor}, it has {', '.join(known)}); install one that"
            " has, such as torch 2.6 with CUDA 11.8 for Pascal cards, or take learner.device cpu"
        )
    return None


def _has_bf16(device: str) -> bool:
    if device == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


class LearnMetrics(NamedTuple):
    """What an update says of itself: tensors on the device, fetched only when they are logged.

    Attributes:
        loss: the loss of the batch.
        q_mean: mean of Q(s, a) over the batch.
        td_error_abs: mean of |δ|.
        td_errors_abs: |δ| of each transition, [B], the new priorities.
        gradient: the flat gradient, whose norm costs a pass over memory and is taken when it is logged.
    """

    loss: Tensor
    q_mean: Tensor
    td_error_abs: Tensor
    td_errors_abs: Tensor
    gradient: Tensor

    def scalars(self) -> dict[str, float]:
        """The figures to log; waits for the device."""
        self.check()
        return {
            "loss": float(self.loss),
            "q_mean": float(self.q_mean),
            "td_error_abs": float(self.td_error_abs),
            "grad_norm": float(torch.linalg.vector_norm(self.gradient)),
        }

    def check(self) -> None:
        """Raises NonFiniteLoss if the loss is no number; waits for the device."""
        if not math.isfinite(float(self.loss)):
            raise NonFiniteLoss(f"the loss is {float(self.loss)}")


class Learner:
    """Q networks and their training.

    Args:
        config: the run's config.
        num_actions: A.
        generator: for the initial parameters.
        resolved: device, precision and threads; None decides them here.
    """

    def __init__(self, config: Config, num_actions: int, generator: torch.Generator, resolved: Resolved | None = None):
        self.config = config.learner
        self.resolved = resolved or resolve(config.learner)
        self.device = torch.device(self.resolved.device)
        if self.device.type == "cpu":
            torch.set_num_threads(self.resolved.num_threads)
        stack, size = config.env.stack_size, config.env.screen_size
        self._plain = QNetwork(num_actions, stack, size)
        self._layout = networks.shapes(num_actions, stack, size)
        initial = networks.to_fast(networks.initial_parameters(self._plain, generator))
        self.parameters = initial.to(self.device)
        """θ, float32."""
        self.target_parameters = self.parameters.clone()
        """θ⁻, float32."""
        self._gradient = torch.zeros_like(self.parameters)
        self._gradient_views = self._layout.views(self._gradient)
        dtype = DTYPES[self.resolved.precision]
        self._online, self._target = (FastNetwork(self._layout, dtype, self.device) for _ in range(2))
        self._online.take(self.parameters)
        self._target.take(self.target_parameters)
        kind = Adam if self.config.optimizer == "adam" else RMSPropGraves
        self.optimizer: Adam | RMSPropGraves = kind(
            self.parameters, self.config.learning_rate, self.config.optimizer_epsilon
        )
        self.updates = 0
        fp16 = self.resolved.precision == "fp16"
        self._scale = torch.tensor(LOSS_SCALE if fp16 else 1.0, device=self.device)
        self._good_updates = torch.zeros((), device=self.device)
        self._stack, self._buffers = stack, _Buffers(self._layout.side, dtype, self.device)

    def describe(self) -> str:
        """Device, precision and threads in words."""
        device, precision, threads = self.resolved
        if device == "cuda":
            return f"{torch.cuda.get_device_name()}, {precision}"
        return f"CPU, {threads} threads, {precision}"

    @torch.inference_mode()
    def q_values(self, states: np.ndarray) -> np.ndarray:
        """Q values f32[N, A] of states u8[N, S, H, W]."""
        blocks = self._buffers.blocks(states)
        return self._online.forward(self._buffers.working(blocks, "act"))[0].cpu().numpy()

    def learn(self, batch: Transitions) -> LearnMetrics:
        """One gradient step on a batch.

        Raises:
            NonFiniteLoss: on a CPU, where it costs nothing to look; on a GPU `LearnMetrics.check` does.
        """
        with torch.no_grad():
            size = len(batch.action) // self.config.gradient_accumulation
            parts = [self._accumulate(batch, slice(i, i + size)) for i in range(0, len(batch.action), size)]
            errors, values, losses = (torch.cat([part[i] for part in parts]) for i in range(3))
            loss = losses.sum()
            if self.device.type == "cpu" and not torch.isfinite(loss):
                raise NonFiniteLoss(self._complaint(loss, batch))
            self._step()
            errors = errors.abs_()
            return LearnMetrics(loss, values.mean(), errors.mean(), errors, self._gradient)

    def _accumulate(self, batch: Transitions, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Adds a part's gradient; returns its TD errors, Q(s, a), and its share of the loss as [1]."""
        to = self._buffers.to_device
        blocks = self._buffers.blocks(batch.window[part])
        action, reward, discount = to(batch.action[part]), to(batch.reward[part]), to(batch.discount[part])
        weight = None if batch.weight is None else to(batch.weight[part])
        state = self._buffers.working(blocks[..., : 16 * self._stack], "state")
        following = self._buffers.working(self._following(blocks, batch.bootstrap_steps[part]), "next")

        selector_q = self._online.forward(following)[0] if self.config.double_q else None
        target = q_learning_target(reward, discount, self._target.forward(following)[0], selector_q)
        q, activations = self._online.forward(state)
        with torch.enable_grad():  # of the loss alone: the network's part is written out
            q.requires_grad_()
            error = td_error(q, action, target)
            share = 1.0 if self.config.loss == "clipped_sum" else len(error) / len(batch.action)
            loss = td_loss(error, self.config.loss, weight) * share
            (q_gradient,) = torch.autograd.grad(loss * self._scale, q)
        self._online.backward(q_gradient, activations, self._gradient_views, add=part.start > 0)
        error = error.detach()
        return error, target - error, loss.detach().unsqueeze(0)

    def _following(self, blocks: Tensor, bootstrap_steps: np.ndarray) -> Tensor:
        """The pictures of the next states, [B, h, w, 16·S]."""
        if self.config.n_steps == 1:
            return blocks[..., 16:]
        frames = blocks.unflatten(3, (-1, 16))
        first = self._buffers.to_device(bootstrap_steps)
        index = first[:, None] + torch.arange(self._stack, device=self.device)
        lanes = torch.arange(len(first), device=self.device)[:, None]
        return frames[lanes, :, :, index].permute(0, 2, 3, 1, 4).flatten(3)

    def _step(self) -> None:
        found_inf = None
        if self.resolved.precision == "fp16":
            self._gradient.div_(self._scale)
            found_inf = (~torch.isfinite(self._gradient).all()).float()
            self._good_updates.add_(1).mul_(1 - found_inf)
            grow = (self._good_updates == GROWTH_UPDATES).float()
            self._scale.mul_(1 - 0.5 * found_inf + grow)
            self._good_updates.mul_(1 - grow)
        self.optimizer.step(self.parameters, self._gradient, found_inf)
        self._online.take(self.parameters)
        self.updates += 1
        if self.config.target == "polyak":
            self.target_parameters.lerp_(self.parameters, self.config.polyak_tau)
            self._target.take(self.target_parameters)

    def _complaint(self, loss: Tensor, batch: Transitions) -> str:
        finite = bool(torch.isfinite(self.parameters).all())
        return (
            f"the loss of update {self.updates + 1:,} is {float(loss)}: rewards {batch.reward.min():g} to"
            f" {batch.reward.max():g}, pixels {batch.window.min()} to {batch.window.max()}, parameters"
            f" {'finite' if finite else 'not finite'}; a smaller learner.learning_rate may help"
        )

    def update_target(self) -> None:
        """θ⁻ ← θ; with Polyak averaging the target follows at each update instead."""
        if self.config.target == "periodic":
            self.target_parameters.copy_(self.parameters)
            self._target.take(self.target_parameters)

    def num_bytes(self) -> int:
        """Bytes of parameters, gradient, optimizer and buffers."""
        tensors = [self.parameters, self.target_parameters, self._gradient, self._online.flat, self._target.flat]
        tensors += [*self.optimizer.state().values(), *self._buffers.tensors()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def network_state_dict(self) -> dict[str, Tensor]:
        """The online network's parameters by `QNetwork`'s names, on the CPU."""
        return networks.to_plain(self._layout.views(self.parameters.cpu()))

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything that an update depends on."""
        tensors = {"parameters": self.parameters, "target_parameters": self.target_parameters, "scale": self._scale}
        tensors |= {"good_updates": self._good_updates}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        return {"updates": self.updates, **{name: tensor.cpu().clone() for name, tensor in tensors.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict`."""
        self.updates = state["updates"]
        own = {"parameters": self.parameters, "target_parameters": self.target_parameters, "scale": self._scale}
        own |= {"good_updates": self._good_updates}
        own |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self._online.take(self.parameters)
        self._target.take(self.target_parameters)


class _Buffers:
    """Memory that is allocated once: a batch on its way from `uint8` windows to blocked pictures on the device."""

    def __init__(self, side: int, dtype: torch.dtype, device: torch.device):
        self._side, self._dtype, self._device = side, dtype, device
        self._kept: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (name, shape)
        if key not in self._kept:
            pin = device.type == "cpu" and self._device.type == "cuda"
            self._kept[key] = torch.empty(shape, dtype=dtype, device=device, pin_memory=pin)
        return self._kept[key]

    def blocks(self, windows: np.ndarray) -> Tensor:
        """Blocked pictures u8[B, h, w, 16·F] on the device; `uint8` is all that travels."""
        batch, frames = windows.shape[:2]
        shape = (batch, self._side, self._side, 16 * frames)
        out = self._buffer("blocks", shape, torch.uint8, torch.device("cpu"))
        networks.space_to_depth(torch.from_numpy(windows), out)
        if self._device.type == "cpu":
            return out
        return self._buffer("device", shape, torch.uint8, self._device).copy_(out, non_blocking=True)

    def working(self, blocks: Tensor, name: str) -> Tensor:
        """The same in the working precision."""
        return self._buffer(name, tuple(blocks.shape), self._dtype, self._device).copy_(blocks)

    def to_device(self, values: np.ndarray) -> Tensor:
        """A small array."""
        return torch.from_numpy(values).to(self._device, non_blocking=True)

    def tensors(self) -> list[Tensor]:
        """What is held."""
        return list(self._kept.values())


def load_policy(state: dict[str, Any]) -> QNetwork:
    """The plain network of a `model.pt` or a checkpoint, ready to play.

    Raises:
        UsageError: the state is of something else.
    """
    try:
        env = state["config"]
        shape = (state["num_actions"], env["env.stack_size"], env["env.screen_size"])
        network = QNetwork(*shape)
        if "learner" in state:  # a checkpoint
            views = networks.shapes(*shape).views(state["learner"]["parameters"])
            network.load_state_dict(networks.to_plain(views))
        else:
            network.load_state_dict(state["network"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise UsageError(f"these are no weights of this program: {str(error).splitlines()[0]}") from None
    return network.eval()
