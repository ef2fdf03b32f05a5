"""The fine-tune of a model of Hugging Face, as a person runs it: on two ranks, and its weights read again."""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import re

import pytest
import torch
from samples import exhaustive
from torchrun import torchrun

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="no transformers: pip install fdp[huggingface]"
)


@exhaustive
def test_finetune_on_two_ranks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = ROOT / "examples" / "finetune.py"
    done = torchrun(script, "--epochs", "2", "--freeze-embeddings", "--save", str(tmp_path / "weights"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = [float(percent) for percent in re.findall(r"accuracy ([\d.]+)%", done.stdout)]
    assert len(found) == 3
    assert found[-1] > 55 > 33 + 10  # three languages, in equal parts
    assert "all 2 ranks hold the same bits; 1 trace" in done.stdout

    # The dumber program: the model itself, from the folder, on the same texts.
    monkeypatch.syspath_prepend(str(script.parent))
    import finetune

    model = finetune.BertForSequenceClassification.from_pretrained(tmp_path / "weights").eval()
    _, test = finetune.load_texts(torch.device("cpu"))
    with torch.no_grad():
        logits = model(test["input_ids"], test["attention_mask"]).logits
    right = (logits.argmax(1) == test["labels"]).float().mean().item()
    assert abs(100 * right - found[-1]) < 0.5  # the last bits of a near tie may differ
    torch.manual_seed(0)
    fresh = finetune.build(argparse.Namespace(weights=None))
    assert torch.equal(*(m.bert.embeddings.word_embeddings.weight for m in (fresh, model)))  # frozen
    assert not torch.equal(*(m.classifier.weight for m in (fresh, model)))
