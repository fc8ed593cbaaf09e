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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqn import networks
from dqn.config import Config, LearnerConfig, UsageError
from dqn.losses import clipped_td_loss, q_learning_target, td_error
from dqn.memory import cores
from dqn.networks import FastNetwork, QNetwork
from dqn.optim import Adam, RMSPropGraves, forget_tiny
from dqn.replay import Transitions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE, GROWTH_UPDATES = 2.0**16, 2_000
"""fp16: the first loss scale, and the updates without overflow after which it doubles."""
CPUINFO = Path("/proc/cpuinfo")
EAGER_UPDATES = 3
"""CUDA: updates before the one that is recorded as a graph."""


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
            " has (for Pascal cards the builds on CUDA 12.6, see the README), or take learner.device cpu"
        )
    return None


def _has_bf16(device: str) -> bool:
    if device == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)
    try:
        flags = CPUINFO.read_text(encoding="utf-8")
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
        shape = (num_actions, config.env.stack_size, config.env.screen_size)
        self._stack = config.env.stack_size
        with torch.device("meta"):  # its shapes are all that is needed
            self._plain = QNetwork(*shape)
        self.parameters = networks.pack(networks.initial_parameters(self._plain, generator)).to(self.device)
        """θ, float32."""
        self.target_parameters = self.parameters.clone()
        """θ⁻, float32."""
        self._dtype = DTYPES[self.resolved.precision]
        self._online = FastNetwork(self.parameters, *shape, self._dtype)
        self._target = FastNetwork(self.target_parameters, *shape, self._dtype)
        self._gradient = torch.zeros_like(self.parameters)
        self._gradient_views = self._online.views(self._gradient)
        kind: type[Adam] | type[RMSPropGraves] = Adam if self.config.optimizer == "adam" else RMSPropGraves
        self.optimizer = kind(self.parameters, self.config.learning_rate, self.config.optimizer_epsilon)
        self.updates = 0
        scale = LOSS_SCALE if self._dtype == torch.float16 else 1.0
        self._scale = torch.tensor(scale, device=self.device)
        self._good_updates = torch.zeros((), device=self.device)
        self._inputs, self._graph = _Inputs(self.device), _Graph(self._update)
        self.as_graph = self.device.type == "cuda"
        """Whether updates are replayed as a CUDA graph."""

    def describe(self) -> str:
        """Device, precision and threads in words."""
        device, precision, threads = self.resolved
        if device == "cuda":
            return f"{torch.cuda.get_device_name()}, {precision}"
        return f"CPU, {threads} threads, {precision}"

    @torch.no_grad()
    def q_values(self, states: np.ndarray) -> np.ndarray:
        """Q values f32[N, A] of states u8[N, S, H, W]."""
        blocks = networks.space_to_depth(torch.from_numpy(states).to(self.device))
        return self._online.forward(blocks.to(self._dtype))[0].cpu().numpy()

    @torch.no_grad()
    def learn(self, batch: Transitions) -> LearnMetrics:
        """One gradient step on a batch; its metrics hold until the next one.

        Raises:
            NonFiniteLoss: on a CPU, where it costs nothing to look; on a GPU `LearnMetrics.check` does.
        """
        self._inputs.load(batch)
        metrics = self._graph.run() if self.as_graph else self._update()
        self.updates += 1
        if self.updates % 100 == 0:
            forget_tiny(self.optimizer.state())
        return metrics

    def _update(self) -> LearnMetrics:
        batch = len(self._inputs["action"])
        size = batch // self.config.gradient_accumulation
        parts = [self._differentiate(slice(i, i + size), size / batch) for i in range(0, batch, size)]
        loss, errors, values = (torch.cat([part[i] for part in parts]) for i in range(3))
        loss = loss.sum()
        if self.device.type == "cpu" and not torch.isfinite(loss):
            raise NonFiniteLoss(self._complaint(loss))
        self._step()
        errors = errors.abs_()
        return LearnMetrics(loss, values.mean(), errors.mean(), errors, self._gradient)

    def _differentiate(self, part: slice, share: float) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of a part of the batch, added to those before; returns its loss [1], TD errors and Q(s, a)."""
        inputs = {name: values[part] for name, values in self._inputs.items()}
        action, reward, discount = inputs["action"], inputs["reward"], inputs["discount"]
        blocks = networks.space_to_depth(inputs["window"])
        state = blocks[..., : 16 * self._stack].to(self._dtype)
        following = self._following(blocks, inputs["bootstrap_steps"]).to(self._dtype)

        selector_q = self._online.forward(following)[0] if self.config.double_q else None
        target = q_learning_target(reward, discount, self._target.forward(following)[0], selector_q)
        q, activations = self._online.forward(state)
        error = td_error(q, action, target)
        loss, gradient = clipped_td_loss(error, self.config.loss, inputs.get("weight"))
        if self.config.loss != "clipped_sum":  # a part's mean counts as much as the part
            loss, gradient = loss * share, gradient * share
        column = (gradient * self._scale).unsqueeze(1)
        q_gradient = torch.zeros_like(q).scatter_(1, action.unsqueeze(1), column)
        self._online.backward(q_gradient, activations, self._gradient_views, add=part.start > 0)
        return loss.unsqueeze(0), error, target - error

    def _following(self, blocks: Tensor, bootstrap_steps: Tensor) -> Tensor:
        """The pictures of the next states, [B, h, w, 16·S]."""
        if self.config.n_steps == 1:
            return blocks[..., 16:]
        frames = blocks.unflatten(3, (-1, 16))
        index = bootstrap_steps[:, None] + torch.arange(self._stack, device=self.device)
        rows = torch.arange(len(index), device=self.device)[:, None]
        return frames[rows, :, :, index].permute(0, 2, 3, 1, 4).flatten(3)

    def _step(self) -> None:
        found_inf = None
        if self._dtype == torch.float16:  # an overflow: no step, half the scale
            self._gradient.div_(self._scale)
            found_inf = (~torch.isfinite(self._gradient).all()).float()
            self._gradient.masked_fill_(found_inf > 0, 0)
            self._good_updates.add_(1).mul_(1 - found_inf)
            grow = (self._good_updates == GROWTH_UPDATES).float()
            self._scale.mul_(1 - 0.5 * found_inf + grow)
            self._good_updates.mul_(1 - grow)
        self.optimizer.step(self.parameters, self._gradient, found_inf)
        self._online.refresh()
        if self.config.target == "polyak":
            self.target_parameters.lerp_(self.parameters, self.config.polyak_tau)
            self._target.refresh()

    def _complaint(self, loss: Tensor) -> str:
        reward, window = self._inputs["reward"], self._inputs["window"]
        finite = bool(torch.isfinite(self.parameters).all())
        return (
            f"the loss of update {self.updates + 1:,} is {float(loss)}: rewards {reward.min():g} to {reward.max():g},"
            f" pixels {window.min()} to {window.max()}, parameters {'finite' if finite else 'not finite'}; a smaller"
            " learner.learning_rate may help"
        )

    def update_target(self) -> None:
        """θ⁻ ← θ; with Polyak averaging the target follows at each update instead."""
        if self.config.target == "periodic":
            self.target_parameters.copy_(self.parameters)
            self._target.refresh()

    def num_bytes(self) -> int:
        """Bytes of parameters, gradient, optimizer and buffers."""
        tensors = [self.parameters, self.target_parameters, self._gradient, self._online.working, self._target.working]
        tensors += [*self.optimizer.state().values(), *self._inputs.buffers()]
        return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())

    def network_state_dict(self) -> dict[str, Tensor]:
        """The online network's parameters by `QNetwork`'s names, on the CPU."""
        return networks.unpack(self.parameters.cpu(), self._plain)

    def _tensors(self) -> dict[str, Tensor]:
        own = {"parameters": self.parameters, "target_parameters": self.target_parameters}
        own |= {"scale": self._scale, "good_updates": self._good_updates}
        return own | {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything that an update depends on."""
        return {"updates": self.updates, **{name: tensor.cpu().clone() for name, tensor in self._tensors().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict`."""
        self.updates = state["updates"]
        for name, tensor in self._tensors().items():
            tensor.copy_(state[name])
        self._online.refresh()
        self._target.refresh()


class _Inputs(dict[str, Tensor]):
    """A batch on the device; on a GPU in memory that is allocated once, by way of pinned memory."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device
        self._pinned: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def load(self, batch: Transitions) -> None:
        """Takes a batch over; `uint8` windows are what travels, and the loop does not wait for them to arrive."""
        arrays = {name: array for name, array in batch._asdict().items() if array is not None and name != "index"}
        if self._device.type == "cpu":
            self.update({name: torch.from_numpy(array) for name, array in arrays.items()})
            return
        if self._copied is None:
            self._copied = torch.cuda.Event()
        self._copied.synchronize()  # the pinned memory is free again: the last batch has arrived
        for name, array in arrays.items():
            host = torch.from_numpy(array)
            if name not in self:
                self._pinned[name] = torch.empty_like(host, pin_memory=True)
                self[name] = torch.empty_like(host, device=self._device)
            self[name].copy_(self._pinned[name].copy_(host), non_blocking=True)
        self._copied.record()

    def buffers(self) -> list[Tensor]:
        """What is kept."""
        return [*self._pinned.values(), *self.values()] if self._pinned else []


class _Graph:
    """An update as a CUDA graph: eager at first, as PyTorch asks, then recorded once and replayed.

    All that it reads and writes stays where it is in memory, loaded checkpoints and copied targets included.
    """

    def __init__(self, update: Callable[[], LearnMetrics]):
        self._update, self._eager_updates = update, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._metrics: LearnMetrics | None = None

    def run(self) -> LearnMetrics:
        """One update; the metrics' memory is the next one's, too."""
        if self._graph is None and self._eager_updates < EAGER_UPDATES:
            self._eager_updates += 1
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                metrics = self._update()
            torch.cuda.current_stream().wait_stream(stream)
            return metrics
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._metrics = self._update()
        self._graph.replay()
        return self._metrics  # type: ignore[return-value]


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
            network.load_state_dict(networks.unpack(state["learner"]["parameters"], network))
        else:
            network.load_state_dict(state["network"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise UsageError(f"these are no weights of this program: {str(error).splitlines()[0]}") from None
    return network.eval()
