"""Optimizers over one flat vector of parameters, without allocating: one pass over memory is what a step costs.

Both keep their state in float32 tensors, so a checkpoint loads anywhere.
"""

import torch
from torch import Tensor

TINY = 1e-30
"""An average below this moves no float32 parameter: an ε stands beside it."""


def forget_tiny(averages: dict[str, Tensor]) -> None:
    """Sets averages that have decayed below `TINY` to 0, in place; to be called every 100 updates.

    The averages of a weight that gets no gradient any more decay into denormal numbers, which processors handle
    slowly, and stay there: after 60,000 updates of Breakout 45 % of Adam's means were such.
    """
    for average in averages.values():
        torch.ops.aten.hardshrink.out(average, TINY, out=average)


class Adam:
    """Adam (Kingma and Ba 2015), PyTorch's fused kernel: 1 ms for Nature's network where the loop takes 3."""

    def __init__(self, parameters: Tensor, learning_rate: float, epsilon: float):
        self.learning_rate, self.epsilon = learning_rate, epsilon
        self.mean, self.square = torch.zeros_like(parameters), torch.zeros_like(parameters)
        self.updates = torch.zeros((), dtype=torch.float32, device=parameters.device)

    def step(self, parameters: Tensor, gradient: Tensor, found_inf: Tensor | None = None) -> None:
        """Moves the parameters; `found_inf` of 1 leaves everything as it was."""
        self.updates.add_(1)
        lists = [[tensor] for tensor in (parameters, gradient, self.mean, self.square)]
        constants = {"lr": self.learning_rate, "beta1": 0.9, "beta2": 0.999, "eps": self.epsilon, "weight_decay": 0.0}
        torch._fused_adam_(  # type: ignore[call-overload]
            *lists, [], [self.updates], **constants, amsgrad=False, maximize=False, found_inf=found_inf
        )
        if found_inf is not None:
            self.updates.sub_(found_inf)

    def state(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint holds."""
        return {"mean": self.mean, "square": self.square, "updates": self.updates}


class RMSPropGraves:
    """The original DQN's RMSProp: centred, with ε inside the root (Graves 2013, equations 38–45; Mnih et al. 2015).

        g̅ ← 0.95 g̅ + 0.05 g;   n ← 0.95 n + 0.05 g²;   θ ← θ − lr · g / √(n − g̅² + ε)

    `torch.optim.RMSprop` has ε outside the root, which changes the effective step by an order of magnitude here.
    """

    DECAY = 0.95

    def __init__(self, parameters: Tensor, learning_rate: float, epsilon: float):
        self.learning_rate, self.epsilon = learning_rate, epsilon
        self.mean, self.square = torch.zeros_like(parameters), torch.zeros_like(parameters)
        self._scratch = torch.empty_like(parameters)

    def step(self, parameters: Tensor, gradient: Tensor, found_inf: Tensor | None = None) -> None:
        """Moves the parameters; `found_inf` of 1, with a gradient of 0, leaves everything as it was."""
        new = 1 - self.DECAY if found_inf is None else (1 - self.DECAY) * (1 - found_inf)
        self.mean.lerp_(gradient, new)
        self.square.lerp_(torch.mul(gradient, gradient, out=self._scratch), new)
        root = torch.addcmul(self.square, self.mean, self.mean, value=-1, out=self._scratch).add_(self.epsilon).sqrt_()
        parameters.addcdiv_(gradient, root, value=-self.learning_rate)

    def state(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint holds."""
        return {"mean": self.mean, "square": self.square}
