"""Models of diffusers to train: U-Nets, transformers and autoencoders, each as small as it takes."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

Batch = Callable[[torch.Generator], tuple[Any, ...]]

_FLAT = {"layers_per_block": 1, "sample_size": 16, "block_out_channels": (4, 8), "norm_num_groups": 4}
_TEXT = {"cross_attention_dim": 8, "attention_head_dim": 2}


@functools.cache
def diffusers() -> ModuleType:
    """The library, without what it offers to those who have transformers: it knows no release that others here need."""
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: (  # type: ignore[assignment]
        None if name.split(".")[0] == "transformers" else find(name, package)
    )
    try:
        return importlib.import_module("diffusers")
    finally:
        importlib.util.find_spec = find


def build(name: str, **config: Any) -> torch.nn.Module:
    """A model. Matrices that begin at zero get random numbers: else the loss would be the same for all data."""
    torch.manual_seed(0)
    made: torch.nn.Module = getattr(diffusers(), name)(**config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.05)
    return made


def noise(*shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    """Two samples."""
    return lambda g: torch.randn(2, *shape, generator=g)


def steps(g: torch.Generator) -> torch.Tensor:
    """How much noise there is in each."""
    return torch.randint(0, 100, (2,), generator=g)


def classes(g: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 8, (2,), generator=g)


def places(count: int) -> Callable[[torch.Generator], torch.Tensor]:
    """Where tokens are in a picture."""
    return lambda g: torch.randint(0, 8, (count, 3), generator=g).float()


def given(*each: Callable[[torch.Generator], Any]) -> Batch:
    """What a model is called with."""
    return lambda g: tuple(one(g) for one in each)


MODELS: dict[str, tuple[dict[str, Any], Batch]] = {
    "UNet1DModel": (
        {
            "block_out_channels": (8, 16), "in_channels": 4, "out_channels": 4, "time_embedding_type": "positional",
            "use_timestep_embedding": True, "freq_shift": 1.0, "out_block_type": "OutConv1DBlock",
            "mid_block_type": "MidResTemporalBlock1D", "down_block_types": ("DownResnetBlock1D",) * 2,
            "up_block_types": ("UpResnetBlock1D",), "act_fn": "swish",
        },
        given(noise(4, 16), steps),
    ),
    "UNet2DModel": (
        {
            **_FLAT, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "attention_head_dim": 4,
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        given(noise(3, 16, 16), steps),
    ),
    "UNet2DConditionModel": (
        {
            **_FLAT, **_TEXT, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        },
        given(noise(4, 16, 16), steps, noise(5, 8)),
    ),
    "UNet3DConditionModel": (
        {
            **_FLAT, **_TEXT, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        given(noise(4, 3, 16, 16), steps, noise(5, 8)),
    ),
    "UNetSpatioTemporalConditionModel": (
        {
            "block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 16, "in_channels": 4,
            "cross_attention_dim": 8, "num_attention_heads": 2, "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 24,
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        },
        given(noise(2, 4, 16, 16), steps, noise(1, 8), noise(3)),
    ),
    "ControlNetModel": (
        {
            **_TEXT, "block_out_channels": (4, 8), "layers_per_block": 1, "norm_num_groups": 4,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "conditioning_embedding_out_channels": (4, 8),
        },
        given(noise(4, 16, 16), steps, noise(5, 8), noise(3, 32, 32)),
    ),
    "AutoencoderKL": (
        {
            **_FLAT, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
        },
        given(noise(3, 16, 16)),
    ),
    "VQModel": (
        {
            **_FLAT, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
            "num_vq_embeddings": 16,
        },
        given(noise(3, 16, 16)),
    ),
    "DiTTransformer2DModel": (
        {
            "sample_size": 8, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "out_channels": 8,
            "num_embeds_ada_norm": 8,
        },
        given(noise(4, 8, 8), steps, classes),
    ),
    "PixArtTransformer2DModel": (
        {
            "sample_size": 8, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2,
            "caption_channels": 8, "cross_attention_dim": 16, "use_additional_conditions": False,
        },
        given(noise(4, 8, 8), noise(5, 8), steps, lambda g: {"resolution": None, "aspect_ratio": None}),
    ),
    "SD3Transformer2DModel": (
        {
            "sample_size": 16, "patch_size": 1, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8,
            "num_attention_heads": 2, "caption_projection_dim": 16, "joint_attention_dim": 8,
            "pooled_projection_dim": 8, "out_channels": 4,
        },
        given(noise(4, 8, 8), noise(5, 8), noise(8), steps),
    ),
    "FluxTransformer2DModel": (
        {
            "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 8, "pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8),
        },
        given(noise(16, 4), noise(5, 8), noise(8), steps, places(16), places(5)),
    ),
    "SanaTransformer2DModel": (
        {
            "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 4, "num_attention_heads": 2,
            "num_cross_attention_heads": 2, "cross_attention_head_dim": 4, "cross_attention_dim": 8,
            "caption_channels": 8,
        },
        given(noise(4, 8, 8), noise(5, 8), steps),
    ),
    "WanTransformer3DModel": (
        {
            "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 8,
            "ffn_dim": 16, "num_layers": 2, "rope_max_seq_len": 32,
        },
        given(noise(4, 2, 8, 8), steps, noise(5, 8)),
    ),
    "LatteTransformer3DModel": (
        {
            "sample_size": 8, "num_layers": 2, "patch_size": 2, "attention_head_dim": 8, "num_attention_heads": 2,
            "caption_channels": 8, "in_channels": 4, "out_channels": 8, "cross_attention_dim": 16,
            "attention_bias": True, "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 100,
            "norm_type": "ada_norm_single", "norm_elementwise_affine": False, "video_length": 2,
        },
        given(noise(4, 2, 8, 8), steps, noise(5, 8)),
    ),
    "CogVideoXTransformer3DModel": (
        {
            "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4,
            "time_embed_dim": 4, "text_embed_dim": 8, "num_layers": 2, "sample_width": 8, "sample_height": 8,
            "sample_frames": 8, "max_text_seq_length": 5,
        },
        given(noise(2, 4, 8, 8), noise(5, 8), steps),
    ),
    "AuraFlowTransformer2DModel": (
        {
            "sample_size": 16, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "attention_head_dim": 8,
            "num_attention_heads": 2, "joint_attention_dim": 8, "caption_projection_dim": 16,
            "pos_embed_max_size": 64,
        },
        given(noise(4, 16, 16), noise(5, 8), steps),
    ),
    "PriorTransformer": (
        {
            "num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 2, "embedding_dim": 8,
            "num_embeddings": 5,
        },
        given(noise(8), steps, noise(8), noise(5, 8)),
    ),
}  # fmt: skip
