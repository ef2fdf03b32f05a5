"""The tables of docs/reference/models.md: which published models train, from a verdict on each."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping

from diffusion_models import MODELS
from families import FAMILIES, MORE
from families import REFUSED as REFUSED_FAMILIES
from models_of_libraries import CLASSIFIERS, REFUSED, RIGHT, SEGMENTERS, TIMM_CONVOLUTIONAL, TIMM_OTHERS

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
HEADS = {"transformers": "| family | kind | trains |", "others": "| library | kind | models | trains |"}
"""The first line of each table."""

_KINDS = {
    "decoder": "GPT-2, Llama, BLOOM, OPT, GPT-Neo, GPT-NeoX, GPT-J, CodeGen, CTRL, GPTBigCode, Mistral, Qwen2, Qwen3, "
    "Gemma, Gemma 2, Phi, StableLM, Falcon, MPT, OLMo",
    "encoder and decoder": "T5, BART, Pegasus, Marian, mBART, M2M-100, Blenderbot, ProphetNet, LED, "
    "ProphetNet with labels",
    "vision": "ViT, ConvNeXt, ResNet, DeiT, BEiT, DINOv2, Swin, SegFormer, MobileNetV2, MobileViT, RegNet, "
    "EfficientNet, PoolFormer, LeViT, ViT-MAE",
    "speech, sound": "Wav2Vec2, Whisper, HuBERT, WavLM, SEW, Speech2Text, AST, Wav2Vec2 with CTC, Wav2Vec2 with masks, "
    "Wav2Vec2 with layers dropped",
    "state space, recurrent": "Mamba, RecurrentGemma, RWKV, Mamba 2, Falcon-Mamba",
    "mixture of experts": "Mixtral, Qwen2-MoE, OLMoE, DeepSeek-V3, GPT-OSS, Granite-MoE, Switch",
    "state space and experts": "Jamba",
    "vision and text": "CLIP",
    "time series, control": "TimeSeries, PatchTST, Decision Transformer",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split(", ")}
_LABELS = {"torch_geometric": "PyTorch Geometric"}
Verdicts = Mapping[str, str]
"""Name of a model -> "yes", "refused", or what is wrong with it."""


def families() -> list[str]:
    """The families, in the order of the table."""
    return [*FAMILIES, *MORE, *REFUSED_FAMILIES]


def expected() -> Verdicts:
    """What the tests demand of each model."""
    yes = dict.fromkeys([*FAMILIES, *MORE, *RIGHT], "yes")
    return {**yes, **dict.fromkeys([*REFUSED_FAMILIES, *REFUSED], "refused")}


def table_of_families(verdicts: Verdicts) -> list[str]:
    """The rows of the families that there are verdicts on."""
    return [
        f"| {name} | {_KIND_OF.get(name, 'encoder')} | {verdicts[name]} |" for name in families() if name in verdicts
    ]


def table_of_libraries(verdicts: Verdicts) -> list[str]:
    """The rows of the other libraries' models that there are verdicts on: one for each kind and verdict."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name in (*RIGHT, *REFUSED):
        if name in verdicts:
            library, _, model = name.partition(" ")
            rows.setdefault((library, _kind_of_model(library, model), verdicts[name]), []).append(model)
    order = [(library, kind) for library, kinds in _GROUPS.items() for kind in kinds]
    return [
        f"| {_LABELS.get(library, library)} | {kind} | `{'`, `'.join(sorted(models))}` | {verdict} |"
        for (library, kind, verdict), models in sorted(rows.items(), key=lambda row: order.index(row[0][:2]))
    ]


_GROUPS: dict[str, dict[str, Callable[[str], bool]]] = {
    "timm": {
        "convolutional": TIMM_CONVOLUTIONAL.__contains__,
        "with attention, and others": TIMM_OTHERS.__contains__,
    },
    "torchvision": {"classifiers": CLASSIFIERS.__contains__, "segmenters": SEGMENTERS.__contains__},
    "diffusers": {
        "U-Nets": lambda name: "UNet" in name or "ControlNet" in name,
        "transformers": lambda name: "Transformer" in name and name in MODELS,
        "autoencoders": lambda name: name.startswith(("Autoencoder", "VQ")),
    },
    "torch_geometric": {"layers": lambda name: True},
}
"""Library -> the kinds of its models, and which model is of each; the first that takes it."""


def _kind_of_model(library: str, model: str) -> str:
    kinds = _GROUPS[library]
    return next((kind for kind, takes in kinds.items() if takes(model)), list(kinds)[-1])


def with_table(text: str, head: str, rows: list[str]) -> str:
    """A page with other rows in one of its tables.

    Args:
        text: the page.
        head: the first line of the table.
        rows: of the table, below its line of dashes.
    """
    before, _, rest = text.partition(f"{head}\n")
    dashes, *lines = rest.split("\n")
    end = next(at for at, line in enumerate(lines) if not line.startswith("|"))
    return "\n".join([before + head, dashes, *rows, *lines[end:]])
