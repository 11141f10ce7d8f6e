"""ResNet-18, 34, 50 and 101 (He et al., Deep Residual Learning for Image Recognition), for the synthetic benchmark."""

import torch
from torch import Tensor, nn


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Block(nn.Module):
    """Convolutions whose result is added to their input: two of 3 x 3, or 1 x 1, 3 x 3, 1 x 1 ("bottleneck")."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        """Make the layers of a block of some width; with a bottleneck it has four times as many outputs."""
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            layers = [_convolution(inputs, width, 1), _convolution(width, width, 3, stride)]
        else:
            layers = [_convolution(inputs, width, 3, stride)]
        steps: list[nn.Module] = []
        for layer in layers:
            steps += [layer, nn.ReLU()]
        self.residual = nn.Sequential(*steps, _convolution(width, outputs, 1 if bottleneck else 3))
        same = stride == 1 and inputs == outputs
        self.shortcut: nn.Module = nn.Identity() if same else _convolution(inputs, outputs, 1, stride)

    def forward(self, values: Tensor) -> Tensor:
        """Return input plus residual."""
        return torch.relu(self.residual(values) + self.shortcut(values))


# name: blocks of each of the four stages, whether they have bottlenecks
_STAGES = {
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
    "resnet101": ((3, 4, 23, 3), True),
}
NAMES = tuple(_STAGES)


def make_resnet(name: str, classes: int = 1000) -> nn.Module:
    """Return a network with random weights."""
    counts, bottleneck = _STAGES[name]
    layers: list[nn.Module] = [_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, count in enumerate(counts):
        width = 64 << stage
        for number in range(count):
            layers.append(Block(inputs, width, 2 if stage > 0 and number == 0 else 1, bottleneck))
            inputs = 4 * width if bottleneck else width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
