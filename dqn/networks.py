"""Nature's convolutional network, twice: plain, and laid out as the processor likes it.

`QNetwork` is the network of Mnih et al. 2015 as anyone would write it. `FastNetwork` is the same function with the
same parameters in one flat vector:

- conv1, 8×8 with stride 4, is exactly a 2×2 convolution with stride 1 over pictures whose 4×4 blocks are 16 channels
  ("space to depth"): no strided reads, and 16·S channels instead of S.
- Everything is channels-last, so the flattening before the hidden layer is a view.
- Pixels stay 0…255 (bf16 holds them exactly); 1/255 is folded into conv1's working weights.
- The backward pass is written out: no gradient of the input, none of what no one needs, and each gradient lands in
  its place in the flat vector. `tests/test_networks.py` holds it to autograd's.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK = 4
"""Side of the pixel blocks that become channels: conv1's stride."""


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


def space_to_depth(windows: Tensor, out: Tensor) -> Tensor:
    """Rearranges u8[B, F, H, W] into out u8[B, h, w, 16·F], where h = H/4: block rows, then pixels of a block.

    Runs of four pixels move as one 32-bit word: 0.5 ms for 32 windows of 5, against 6.6 ms byte by byte.
    """
    batch, frames = windows.shape[:2]
    height, width = out.shape[1:3]
    windows = windows[:, :, : BLOCK * height, : BLOCK * width].contiguous()
    words = windows.view(torch.int32).view(batch, frames, height, BLOCK, width)
    out.view(torch.int32).view(batch, height, width, frames, BLOCK).copy_(words.permute(0, 2, 4, 1, 3))
    return out


class Shapes(NamedTuple):
    """Where the layers lie in the flat vector."""

    sizes: dict[str, torch.Size]
    side: int
    """Side of the blocked picture: 21 for 84 pixels."""

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters as views of a flat vector, in FastNetwork's layout (convolutions [O, kh, kw, I])."""
        parts = flat.split([size.numel() for size in self.sizes.values()])
        return {name: part.view(size) for (name, size), part in zip(self.sizes.items(), parts)}


def shapes(num_actions: int, stack_size: int, screen_size: int) -> Shapes:
    """The flat vector's layout."""
    side = output_side(screen_size)
    sizes = {
        "conv1.weight": (32, 2, 2, 16 * stack_size),
        "conv1.bias": (32,),
        "conv2.weight": (64, 4, 4, 32),
        "conv2.bias": (64,),
        "conv3.weight": (64, 3, 3, 64),
        "conv3.bias": (64,),
        "hidden.weight": (512, side * side * 64),
        "hidden.bias": (512,),
        "output.weight": (num_actions, 512),
        "output.bias": (num_actions,),
    }
    return Shapes({name: torch.Size(size) for name, size in sizes.items()}, (screen_size - 8) // 4 + 2)


def to_fast(plain: dict[str, Tensor]) -> Tensor:
    """The plain network's parameters in FastNetwork's flat layout, an exact rearrangement."""
    parts = dict(plain)
    weight = plain["conv1.weight"]  # [32, S, 8, 8]: rows and columns of 2 blocks of 4 pixels
    blocks = weight.unflatten(2, (2, BLOCK)).unflatten(4, (2, BLOCK))
    parts["conv1.weight"] = blocks.permute(0, 2, 4, 1, 3, 5)
    for name in ("conv2.weight", "conv3.weight"):
        parts[name] = plain[name].permute(0, 2, 3, 1)
    hidden = plain["hidden.weight"]
    side = round((hidden.shape[1] // 64) ** 0.5)
    parts["hidden.weight"] = hidden.unflatten(1, (64, side, side)).permute(0, 2, 3, 1)
    return torch.cat([part.reshape(-1) for part in parts.values()])


def to_plain(views: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_fast`, from the views of the flat vector."""
    parts = dict(views)
    weight = views["conv1.weight"].unflatten(3, (-1, BLOCK, BLOCK))  # [32, 2, 2, S, 4, 4]
    parts["conv1.weight"] = weight.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    for name in ("conv2.weight", "conv3.weight"):
        parts[name] = views[name].permute(0, 3, 1, 2)
    hidden = views["hidden.weight"]
    side = round((hidden.shape[1] // 64) ** 0.5)
    parts["hidden.weight"] = hidden.unflatten(1, (side, side, 64)).permute(0, 3, 1, 2).flatten(1)
    return {name: part.clone(memory_format=torch.contiguous_format) for name, part in parts.items()}


class Activations(NamedTuple):
    """What the backward pass needs: the input and each layer's output after ReLU."""

    x: Tensor
    y1: Tensor
    y2: Tensor
    y3: Tensor
    flat: Tensor
    hidden: Tensor


class FastNetwork:
    """The network over a flat vector of parameters in a working precision.

    Args:
        layout: where the layers lie.
        dtype: the working precision: float32, bfloat16 or float16.
        device: where the vector lives.
    """

    def __init__(self, layout: Shapes, dtype: torch.dtype, device: torch.device):
        self.layout = layout
        total = sum(size.numel() for size in layout.sizes.values())
        self.flat = torch.zeros(total, dtype=dtype, device=device)
        self._w = layout.views(self.flat)
        self._hidden_gradient = torch.empty_like(self._w["hidden.weight"])
        self._kernels = {name: self._w[f"{name}.weight"].permute(0, 3, 1, 2) for name in ("conv1", "conv2", "conv3")}

    def take(self, masters: Tensor) -> None:
        """Copies float32 parameters into the working precision, conv1's scaled for pixels of 0…255."""
        self.flat.copy_(masters)
        self._w["conv1.weight"].copy_(self.layout.views(masters)["conv1.weight"] * (1 / 255))

    def forward(self, x: Tensor) -> tuple[Tensor, Activations]:
        """Q values f32[B, A] of blocked pictures [B, h, w, 16·S] in the working precision."""
        w, k = self._w, self._kernels
        x = x.permute(0, 3, 1, 2)  # a view: channels-last
        y1 = F.conv2d(x, k["conv1"], w["conv1.bias"]).relu_()
        y2 = F.conv2d(y1, k["conv2"], w["conv2.bias"], 2).relu_()
        y3 = F.conv2d(y2, k["conv3"], w["conv3.bias"]).relu_()
        flat = y3.permute(0, 2, 3, 1).flatten(1)  # a view
        hidden = F.linear(flat, w["hidden.weight"], w["hidden.bias"]).relu_()
        q = F.linear(hidden, w["output.weight"], w["output.bias"])
        return q.float(), Activations(x, y1, y2, y3, flat, hidden)

    def backward(self, q_gradient: Tensor, a: Activations, gradient: dict[str, Tensor], add: bool = False) -> None:
        """Writes the parameters' gradients into views of a flat float32 vector, or adds them, given dL/dQ f32[B, A]."""
        w, k = self._w, self._kernels

        def put(name: str, value: Tensor) -> None:
            gradient[name].add_(value) if add else gradient[name].copy_(value)

        g = q_gradient.to(self.flat.dtype)
        put("output.weight", g.t() @ a.hidden)
        put("output.bias", q_gradient.sum(0))
        g = torch.ops.aten.threshold_backward(g @ w["output.weight"], a.hidden, 0)
        if add or self.flat.dtype != torch.float32:
            put("hidden.weight", torch.mm(g.t(), a.flat, out=self._hidden_gradient))
        else:  # 6 MB that need no copy
            torch.mm(g.t(), a.flat, out=gradient["hidden.weight"])
        put("hidden.bias", g.float().sum(0))
        g = (g @ w["hidden.weight"]).view(a.y3.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)
        for name, below, above, stride in (("conv3", a.y2, a.y3, 1), ("conv2", a.y1, a.y2, 2), ("conv1", a.x, a.y1, 1)):
            g = torch.ops.aten.threshold_backward(g, above, 0)
            needed = [name != "conv1", True, True]
            g, kernel, bias = torch.ops.aten.convolution_backward(
                g, below, k[name], [g.shape[1]], [stride] * 2, [0, 0], [1, 1], False, [0, 0], 1, needed
            )
            put(f"{name}.weight", kernel.permute(0, 2, 3, 1) * (1 / 255 if name == "conv1" else 1))
            put(f"{name}.bias", bias)
