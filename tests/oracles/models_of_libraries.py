"""Models of timm, torchvision, diffusers and PyTorch Geometric to train: of each family a small one, on small data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusion_models
import torch

CLASSES, NODES, EDGES, FEATURES = 7, 12, 30, 8


@dataclass(frozen=True)
class LibraryModel:
    """A model, and how to train it.

    Attributes:
        library: whose it is, as it is imported.
        build: makes it with random parameters, the same at each call.
        batch: makes what it is called with.
        line: of a model that is refused, the file of the library that the error names.
    """

    library: str
    build: Callable[[], torch.nn.Module]
    batch: Callable[[torch.Generator], tuple[Any, ...]]
    line: str = ""


def images(size: int) -> Callable[[torch.Generator], tuple[torch.Tensor, ...]]:
    """Two square images."""
    return lambda g: (torch.randn(2, 3, size, size, generator=g),)


def graph(g: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Features of nodes, and edges between them."""
    return torch.randn(NODES, FEATURES, generator=g), torch.randint(0, NODES, (2, EDGES), generator=g)


TIMM_CONVOLUTIONAL = (
    "convmixer_768_32", "cpubone_nano", "cs3darknet_focus_s", "cspnext_tiny", "densenet121", "dla34", "dpn48b",
    "ese_vovnet19b_slim_dw", "fasternet_t0", "ghostnet_050", "hardcorenas_b", "hgnetv2_b0", "hrnet_w18_small",
    "inception_next_atto", "inception_v3", "lcnetv2_small", "legacy_seresnet18", "legacy_xception",
    "mobilenetv3_small_050", "rdnet_tiny", "regnetx_004_tv", "repghostnet_050", "repvit_m1", "res2next50",
    "resnest14d", "resnetv2_18", "rexnet_100", "selecsls42", "skresnet18", "starnet_s050", "test_byobnet",
    "test_convnext", "test_efficientnet", "test_mambaout", "test_nfnet", "test_resnet", "tresnet_m", "xception41p",
)  # fmt: skip
TIMM_OTHERS = (
    "cait_xxs24_224", "coat_tiny", "convit_tiny", "csatv2", "davit_tiny", "deit_tiny_patch16_224",
    "edgenext_xx_small", "efficientformerv2_s0", "efficientvim_m1", "efficientvit_b0", "efficientvit_m0",
    "fastvit_t8", "focalnet_tiny_srf", "gcvit_xxtiny", "gmlp_ti16_224", "hiera_tiny_224", "iformer_t", "levit_128",
    "lowformer_b0", "mobilevit_xxs", "mvitv2_tiny", "nest_tiny", "nextvit_small", "pit_ti_224", "poolformer_s12",
    "pvt_v2_b0", "sam2_hiera_tiny", "sequencer2d_s", "shvit_s1", "swiftformer_xs", "swin_tiny_patch4_window7_224",
    "swinv2_cr_tiny_224", "swinv2_tiny_window8_256", "test_coatnet", "test_vit", "test_vit_relpos",
    "tiny_vit_5m_224", "tnt_s_legacy_patch16_224", "twins_svt_small", "visformer_tiny",
    "vit_tiny_patch16_dinov3_qkvb", "vit_tiny_r_s16_p8_224", "vitamin_small_224", "volo_d1_224",
    "xcit_nano_12_p8_224",
)  # fmt: skip
"""With attention, or other ways to mix what lies apart."""

_TAKE_A_SIZE = frozenset({
    "cait_xxs24_224", "coat_tiny", "convit_tiny", "deit_tiny_patch16_224", "efficientformerv2_s0", "efficientvit_m0",
    "gcvit_xxtiny", "gmlp_ti16_224", "hiera_tiny_224", "levit_128", "mobilevit_xxs", "mvitv2_tiny", "nest_tiny",
    "pit_ti_224", "sequencer2d_s", "swiftformer_xs", "swin_tiny_patch4_window7_224", "swinv2_cr_tiny_224",
    "swinv2_tiny_window8_256", "test_coatnet", "test_vit", "test_vit_relpos", "tnt_s_legacy_patch16_224",
    "twins_svt_small", "visformer_tiny", "vit_tiny_patch16_dinov3_qkvb", "vit_tiny_r_s16_p8_224",
    "vitamin_small_224", "volo_d1_224", "xcit_nano_12_p8_224",
})  # fmt: skip


_BEGIN_AT_ZERO = frozenset({"gmlp_ti16_224", "hiera_tiny_224", "sam2_hiera_tiny", "sequencer2d_s", "vit_b_16"})
"""Models whose last layer is zero at first: the loss would be the same for all data."""


def with_last_layer(name: str, model: torch.nn.Module) -> torch.nn.Module:
    """The model, with random numbers in matrices that begin at zero."""
    if name in _BEGIN_AT_ZERO:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1 and not parameter.any():
                    parameter.normal_(std=0.02)
    return model


def of_timm(name: str) -> LibraryModel:
    """On images of 64 x 64, or of 96 x 96 where these are too small."""

    def build() -> torch.nn.Module:
        import timm

        torch.manual_seed(0)
        options = {"img_size": 64} if name in _TAKE_A_SIZE else {}
        return with_last_layer(name, timm.create_model(name, num_classes=CLASSES, **options))

    return LibraryModel("timm", build, images(96 if name == "inception_v3" else 64))


CLASSIFIERS: dict[str, tuple[int, dict[str, Any]]] = {
    **dict.fromkeys(
        (
            "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "mnasnet0_5", "mobilenet_v2",
            "mobilenet_v3_small", "regnet_y_400mf", "resnet18", "resnext50_32x4d", "shufflenet_v2_x0_5",
            "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11_bn", "wide_resnet50_2",
        ),
        (64, {}),
    ),
    "alexnet": (96, {}),
    "googlenet": (96, {"init_weights": True}),
    "vit_b_16": (32, {"image_size": 32}),
}  # fmt: skip
SEGMENTERS: dict[str, tuple[int, dict[str, Any]]] = {
    "fcn_resnet50": (64, {"weights_backbone": None, "aux_loss": True}),
    "deeplabv3_resnet50": (64, {"weights_backbone": None, "aux_loss": True}),
    "deeplabv3_mobilenet_v3_large": (64, {"weights_backbone": None}),
    "lraspp_mobilenet_v3_large": (64, {"weights_backbone": None}),
}


def of_torchvision(name: str) -> LibraryModel:
    """On images as small as it takes."""
    size, options = {**CLASSIFIERS, **SEGMENTERS}[name]

    def build() -> torch.nn.Module:
        import torchvision

        torch.manual_seed(0)
        return with_last_layer(name, torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options))

    return LibraryModel("torchvision", build, images(size))


def of_diffusers(name: str) -> LibraryModel:
    """On small pictures, videos or signals, with what says how much noise there is in them."""
    config, batch = diffusion_models.MODELS[name]
    return LibraryModel("diffusers", lambda: diffusion_models.build(name, **config), batch)


_LAYER_ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "GINConv": lambda: (torch.nn.Linear(FEATURES, 16),),
    "EdgeConv": lambda: (torch.nn.Linear(2 * FEATURES, 16),),
    "ChebConv": lambda: (FEATURES, 16, 2),
    "PNAConv": lambda: (
        FEATURES,
        16,
        ["mean", "max", "min"],
        ["identity", "amplification"],
        torch.tensor([0, 2, 3, 4]),
    ),
}
LAYERS = (
    "SAGEConv", "GINConv", "GraphConv", "TransformerConv", "TAGConv", "ARMAConv", "LEConv", "GeneralConv", "EdgeConv",
    "ResGatedGraphConv", "PNAConv", "GENConv",
)  # fmt: skip
LOOPLESS = ("GCNConv", "GATConv", "GATv2Conv", "SGConv", "FeaStConv")
"""They add a loop to each node, unless they are told not to; to find those that are there depends on values."""
REFUSED_LAYERS = {
    **dict.fromkeys((*LOOPLESS, "ChebConv", "ClusterGCNConv", "SuperGATConv"), "loop.py"),
    "MFConv": "mf_conv.py",
}


def of_geometric(name: str, line: str = "", **options: Any) -> LibraryModel:
    """A layer on a graph."""

    def build() -> torch.nn.Module:
        import torch_geometric.nn

        torch.manual_seed(0)
        arguments = _LAYER_ARGUMENTS.get(name, lambda: (FEATURES, 16))()
        made: torch.nn.Module = getattr(torch_geometric.nn, name)(*arguments, **options)
        return made

    return LibraryModel("torch_geometric", build, graph, line)


RIGHT: dict[str, LibraryModel] = {
    **{f"timm {name}": of_timm(name) for name in (*TIMM_CONVOLUTIONAL, *TIMM_OTHERS)},
    **{f"torchvision {name}": of_torchvision(name) for name in (*CLASSIFIERS, *SEGMENTERS)},
    **{f"diffusers {name}": of_diffusers(name) for name in diffusion_models.MODELS},
    **{f"torch_geometric {name}": of_geometric(name) for name in LAYERS},
    **{f"torch_geometric {name}(add_self_loops=False)": of_geometric(name, add_self_loops=False) for name in LOOPLESS},
}
REFUSED: dict[str, LibraryModel] = {
    f"torch_geometric {name}": of_geometric(name, line) for name, line in REFUSED_LAYERS.items()
}
