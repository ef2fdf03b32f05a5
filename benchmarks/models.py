"""The models that are measured, written out in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def perceptron(width: int, layers: int) -> nn.Module:
    """Linear layers of one width with ReLU between them."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


class Attention(nn.Module):
    """Pre-norm attention and a four times wider perceptron (GPT-2's block, without dropout)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.view(split).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        made: torch.Tensor = x + self.mlp(self.norm2(x))
        return made


class GPT(nn.Module):
    """A decoder whose output layer is its token embedding.

    Args:
        vocab: number of tokens.
        width: of the residual stream.
        heads: of each block's attention.
        layers: number of blocks.
        length: the longest sequence.
    """

    def __init__(self, vocab: int, width: int, heads: int, layers: int, length: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Attention(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def _rotary(x: torch.Tensor) -> torch.Tensor:
    """Turns pairs of features by angles that grow with the position (Su et al., 2021)."""
    half = x.shape[-1] // 2
    position = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)
    frequency = 10000.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angle = position[:, None] * frequency
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


class Gated(nn.Module):
    """Pre-norm causal attention within windows and a gated perceptron; normalised queries and keys, rotary positions.

    Narrow and over long sequences, it spends most of its time in pointwise operators.

    Args:
        width: of the residual stream.
        heads: of the attention.
        window: positions that attend to each other.
        dropout: the share that is dropped after attention, in the perceptron, and after it.
    """

    def __init__(self, width: int, heads: int, window: int, dropout: float):
        super().__init__()
        self.heads, self.window = heads, window
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_q, self.norm_k = nn.LayerNorm(width // heads), nn.LayerNorm(width // heads)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.drop1, self.drop2, self.drop3 = (nn.Dropout(dropout) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.view(split).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(width, dim=2))
        windows = (batch * self.heads, length // self.window, self.window, width // self.heads)
        q, k, v = (t.reshape(windows) for t in (_rotary(self.norm_q(q)), _rotary(self.norm_k(k)), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.reshape(batch, self.heads, length, -1).transpose(1, 2).reshape(batch, length, width)
        x = x + self.drop1(self.proj(y))
        gate, value = self.up(self.norm2(x)).chunk(2, dim=-1)
        made: torch.Tensor = x + self.drop3(self.down(self.drop2(F.gelu(gate) * value)))
        return made


class Residual(nn.Module):
    """Two 3x3 convolutions around which the input is added (He et al., 2016, figure 2), with BatchNorm."""

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18(classes: int) -> nn.Module:
    """ResNet-18 for pictures of 32 x 32: the stem is a 3x3 convolution of stride 1 and has no max-pool."""
    parts: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    channels_in = 64
    for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        parts += [Residual(channels_in, channels, stride), Residual(channels, channels, 1)]
        channels_in = channels
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))
