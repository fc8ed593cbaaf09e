"""Nature's convolutional network, twice: plain, and laid out as the processor likes it.

`QNetwork` is the network of Mnih et al. 2015 as anyone would write it. `FastNetwork` is the same function, of the same
parameters in one flat vector:

- conv1, 8×8 with stride 4, is exactly a 2×2 convolution with stride 1 over pictures whose 4×4 blocks are 16 channels
  ("space to depth"): no strided reads, and 16·S channels instead of S.
- Convolutions are channels-last, so the flattening before the hidden layer is a view. The fully connected layers keep
  transitions as columns, `W x + b` as in a textbook: the large W is then read as it lies.
- Pixels stay 0…255 (bf16 holds them exactly); 1/255 is folded into conv1's working weights. The output layer, which
  is small, computes in float32 whatever the precision.
- The backward pass is written out: no gradient of the input, none of what no one needs, and each gradient lands in
  its place in the flat vector. `tests/test_networks.py` holds it to autograd's.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK = 4
"""Side of the pixel blocks that become channels: conv1's stride."""
PIXEL = 1 / 255
"""What a step of a pixel's value is to the network."""


class QNetwork(nn.Module):
    """The plain network: u8[B, S, H, W] states to f32[B, A] values of the actions."""

    def __init__(self, num_actions: int, stack_size: int = 4, screen_size: int = 84):
        super().__init__()
        side = output_side(screen_size)
        self.conv1 = nn.Conv2d(stack_size, 32, 8, 4)
        self.conv2 = nn.Conv2d(32, 64, 4, 2)
        self.conv3 = nn.Conv2d(64, 64, 3, 1)
        self.hidden = nn.Linear(64 * side * side, 512)
        self.output = nn.Linear(512, num_actions)

    def forward(self, states: Tensor) -> Tensor:
        """Q values f32[B, A] of states u8[B, S, H, W]."""
        x = F.relu(self.conv1(states.to(self.conv1.weight.dtype) / 255))
        x = F.relu(self.conv2(x))
        x = F.relu(self.conv3(x))
        return self.output(F.relu(self.hidden(x.flatten(1))))


def output_side(screen_size: int) -> int:
    """Side of conv3's output: 7 for 84 pixels."""
    return (((screen_size - 8) // 4 + 1) - 4) // 2 + 1 - 2


def initial_parameters(network: QNetwork, generator: torch.Generator) -> dict[str, Tensor]:
    """PyTorch's default initialisation, uniform in ±1/√fan_in for weights and biases, from a named generator."""
    values = {}
    for name, layer in network.named_children():
        bound = layer.weight[0].numel() ** -0.5  # type: ignore[union-attr,operator,index]
        for part in ("weight", "bias"):
            shape = getattr(layer, part).shape
            values[f"{name}.{part}"] = (torch.rand(shape, generator=generator) * 2 - 1) * bound
    return values


def space_to_depth(windows: Tensor) -> Tensor:
    """Rearranges u8[B, F, H, W] into u8[B, h, w, 16·F], where h = H/4: frames, then the pixels of a block.

    Runs of four pixels move as one 32-bit word: 0.25 ms for 32 windows of 5 frames, against 6.6 ms byte by byte.
    """
    height, width = windows.shape[2] // BLOCK, windows.shape[3] // BLOCK
    windows = windows[:, :, : BLOCK * height, : BLOCK * width].contiguous()
    words = windows.view(torch.int32).unflatten(2, (height, BLOCK))  # [B, F, h, 4, w]
    return words.permute(0, 2, 4, 1, 3).contiguous().view(torch.uint8).flatten(3)


def pack(plain: dict[str, Tensor]) -> Tensor:
    """The plain network's parameters in FastNetwork's flat layout, an exact rearrangement."""
    parts = dict(plain)
    weight = plain["conv1.weight"].unflatten(3, (2, BLOCK)).unflatten(2, (2, BLOCK))  # [32, S, 2, 4, 2, 4]
    parts["conv1.weight"] = weight.permute(0, 2, 4, 1, 3, 5)
    for name in ("conv2.weight", "conv3.weight"):
        parts[name] = plain[name].permute(0, 2, 3, 1)
    side = round((plain["hidden.weight"].shape[1] // 64) ** 0.5)
    parts["hidden.weight"] = plain["hidden.weight"].unflatten(1, (64, side, side)).permute(0, 2, 3, 1)
    return torch.cat([part.reshape(-1) for part in parts.values()])


def unpack(flat: Tensor, network: QNetwork) -> dict[str, Tensor]:
    """The inverse of `pack`, for a network of the same shape: each place is asked where `pack` would put it."""
    sizes = {name: value.shape for name, value in network.state_dict().items()}
    numbers = torch.arange(flat.numel(), dtype=torch.int32).split([size.numel() for size in sizes.values()])
    places = pack({name: part.view(size) for (name, size), part in zip(sizes.items(), numbers)})
    plain = torch.empty_like(flat)
    plain[places] = flat
    parts = plain.split([size.numel() for size in sizes.values()])
    return {name: part.view(size).clone() for (name, size), part in zip(sizes.items(), parts)}


class Activations(NamedTuple):
    """What the backward pass needs: the input and each layer's output after ReLU."""

    x: Tensor
    y1: Tensor
    y2: Tensor
    y3: Tensor
    hidden: Tensor


class FastNetwork:
    """The network over a flat vector of float32 masters, computing in a working precision.

    In float32 it works on the masters themselves, otherwise on a copy that `refresh` renews after they changed.

    Args:
        masters: float32[P], as `pack` lays them out.
        num_actions: A.
        stack_size: S.
        screen_size: side of a frame.
        dtype: the working precision: float32, bfloat16 or float16.
    """

    def __init__(self, masters: Tensor, num_actions: int, stack_size: int, screen_size: int, dtype: torch.dtype):
        self.masters = masters
        self._side = output_side(screen_size)
        self._sizes = {
            "conv1.weight": (32, 2, 2, 16 * stack_size),
            "conv1.bias": (32,),
            "conv2.weight": (64, 4, 4, 32),
            "conv2.bias": (64,),
            "conv3.weight": (64, 3, 3, 64),
            "conv3.bias": (64,),
            "hidden.weight": (512, 64 * self._side**2),
            "hidden.bias": (512, 1),
            "output.weight": (num_actions, 512),
            "output.bias": (num_actions, 1),
        }
        self.working = masters if dtype == torch.float32 else torch.empty_like(masters, dtype=dtype)
        self._w = self.views(self.working)
        self._w |= {name: part for name, part in self.views(masters).items() if name.startswith("output")}
        self._w["conv1.weight"] = torch.empty_like(self._w["conv1.weight"])  # scaled for pixels of 0…255
        self._kernels = {name: self._w[f"{name}.weight"].permute(0, 3, 1, 2) for name in ("conv1", "conv2", "conv3")}
        self.refresh()

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The layers' parts of a flat vector; convolutions are [O, kh, kw, I]."""
        parts = flat.split([torch.Size(size).numel() for size in self._sizes.values()])
        return {name: part.view(size) for (name, size), part in zip(self._sizes.items(), parts)}

    def refresh(self) -> None:
        """Takes the masters over into the working precision."""
        if self.working is not self.masters:
            self.working.copy_(self.masters)
        torch.mul(self.views(self.masters)["conv1.weight"], PIXEL, out=self._w["conv1.weight"])

    def forward(self, x: Tensor) -> tuple[Tensor, Activations]:
        """Q values f32[B, A] of blocked pictures [B, h, w, 16·S] in the working precision."""
        w, k = self._w, self._kernels
        x = x.permute(0, 3, 1, 2)  # a view: channels-last
        y1 = F.conv2d(x, k["conv1"], w["conv1.bias"]).relu_()
        y2 = F.conv2d(y1, k["conv2"], w["conv2.bias"], stride=2).relu_()
        y3 = F.conv2d(y2, k["conv3"], w["conv3.bias"]).relu_()
        hidden = torch.addmm(w["hidden.bias"], w["hidden.weight"], _features(y3).t()).relu_()  # [512, B]
        q = torch.addmm(w["output.bias"], w["output.weight"], hidden.float())
        return q.t(), Activations(x, y1, y2, y3, hidden)

    def backward(self, q_gradient: Tensor, a: Activations, gradient: dict[str, Tensor], add: bool = False) -> None:
        """Writes dL/dθ into views of a flat float32 vector, or adds it to them, given dL/dQ f32[B, A]."""
        w = self._w
        put = Tensor.add_ if add else Tensor.copy_
        g = q_gradient.t()
        put(gradient["output.weight"], g @ a.hidden.float().t())
        put(gradient["output.bias"], g.sum(1, keepdim=True))

        g = _relu_backward((w["output.weight"].t() @ g).to(a.hidden.dtype), a.hidden)
        if g.dtype == torch.float32 and not add:  # most of the parameters, without a copy
            torch.mm(g, _features(a.y3), out=gradient["hidden.weight"])
        else:
            put(gradient["hidden.weight"], g @ _features(a.y3))
        put(gradient["hidden.bias"], g.sum(1, keepdim=True, dtype=torch.float32))

        g = (g.t() @ w["hidden.weight"]).view(-1, self._side, self._side, 64).permute(0, 3, 1, 2)
        for name, x, y, stride in (("conv3", a.y2, a.y3, 1), ("conv2", a.y1, a.y2, 2), ("conv1", a.x, a.y1, 1)):
            kernel, needed = self._kernels[name], [name != "conv1", True, True]
            g, kernel_gradient, bias_gradient = torch.ops.aten.convolution_backward(
                _relu_backward(g, y), x, kernel, [len(kernel)], [stride] * 2, [0, 0], [1, 1], False, [0, 0], 1, needed
            )
            if name == "conv1":
                kernel_gradient = kernel_gradient.float() * PIXEL
            put(gradient[f"{name}.weight"], kernel_gradient.permute(0, 2, 3, 1))
            put(gradient[f"{name}.bias"], bias_gradient)


def _features(y3: Tensor) -> Tensor:
    """[B, 64·h·w], a view of conv3's output."""
    return y3.permute(0, 2, 3, 1).flatten(1)


def _relu_backward(gradient: Tensor, output: Tensor) -> Tensor:
    """The gradient where the output is above 0, in place."""
    return torch.ops.aten.threshold_backward.grad_input(gradient, output, 0, grad_input=gradient)
