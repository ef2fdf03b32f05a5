"""The models of Li et al. (VLDB 2020), as shapes: built on the meta device, they can be traced and need no memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around which the input is added (He et al., 2016, figure 5), with BatchNorm.

    Args:
        channels_in: of the input.
        channels: of the 3x3 convolution; four times as many come out.
        stride: of the 3x3 convolution.
    """

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        channels_out = 4 * channels
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(channels, channels_out, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.norm3 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def resnet50(classes: int = 1000) -> nn.Module:
    """ResNet-50 for pictures of 224 x 224: 25.6 million parameters in 161 tensors."""
    parts: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    parts.append(nn.MaxPool2d(3, 2, 1))
    channels_in = 64
    for channels, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(depth):
            parts.append(Bottleneck(channels_in, channels, stride if index == 0 else 1))
            channels_in = 4 * channels
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, classes))


class Layer(nn.Module):
    """Post-norm attention and a four times wider perceptron (Devlin et al., 2019), without dropout.

    Args:
        width: of the residual stream.
        heads: of the attention.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.proj, self.norm1 = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (part(x).view(split).transpose(1, 2) for part in (self.query, self.key, self.value))
        # Written out: V100 had no fused attention in 2020.
        weights = (q @ k.transpose(2, 3) / split[-1] ** 0.5).softmax(-1)
        x = self.norm1(x + self.proj((weights @ v).transpose(1, 2).reshape(batch, length, width)))
        made: torch.Tensor = self.norm2(x + self.down(F.gelu(self.up(x))))
        return made


class Bert(nn.Module):
    """BERT with the head that fills in masked words, whose output layer is the embedding of words.

    Args:
        width: of the residual stream.
        heads: of each layer's attention.
        layers: their number.
        vocabulary: number of words.
        length: the longest sequence.
    """

    def __init__(self, width: int, heads: int, layers: int, vocabulary: int = 30522, length: int = 512):
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.kinds, self.norm = nn.Embedding(2, width), nn.LayerNorm(width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.dense, self.norm_out = nn.Linear(width, width), nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.positions(positions) + self.kinds(torch.zeros_like(ids)))
        x = self.norm_out(F.gelu(self.dense(self.layers(x))))
        return F.linear(x, self.words.weight, self.bias)


def bert_base() -> nn.Module:
    """BERT-base: 12 layers of width 768, 110 million parameters."""
    return Bert(768, 12, 12)


def bert_large() -> nn.Module:
    """BERT-large: 24 layers of width 1024, 335 million parameters."""
    return Bert(1024, 16, 24)
