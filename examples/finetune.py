"""Teach a small BERT of Hugging Face to tell Python, C++ and English apart, on as many ranks as there are.

    torchrun --standalone --nproc-per-node 2 examples/finetune.py     # two ranks of this machine
    python examples/finetune.py                                       # the same program, a world of one

It needs transformers (`pip install ".[huggingface]"` in a checkout of fdp), and downloads nothing. The model is built
from its configuration, with random weights; `--weights FOLDER` starts from weights that `save_pretrained` wrote,
`--save FOLDER` writes them. The texts are on every machine that runs this: Python's own sources, the headers that
PyTorch ships, Python's documentation.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import pydoc_data.topics
import sysconfig
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

import fdp

LANGUAGES = ("Python", "C++", "English")
PAD, START = 256, 257  # behind the bytes
LENGTH, SHORTEST = 48, 24
CORPUS_BYTES, TRAIN_SIZE, TEST_SIZE = 400_000, 3000, 600

Data = dict[str, torch.Tensor]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fine-tune a small model of Hugging Face data-parallel with fdp.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=3, help=f"passes over the {TRAIN_SIZE:,} training texts")
    parser.add_argument("--batch-size", type=int, default=60, help="texts in a step, over all ranks")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate; up in a line, and down again")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and dropout")
    parser.add_argument("--freeze-embeddings", action="store_true", help="train all but the embeddings")
    parser.add_argument("--weights", help="a folder that save_pretrained wrote")
    parser.add_argument("--save", help="a folder for the trained weights")
    args = parser.parse_args()
    if args.epochs < 1 or not 1 <= args.batch_size <= TRAIN_SIZE:
        parser.error(f"--epochs must be at least 1, --batch-size between 1 and {TRAIN_SIZE}")
    return args


def join() -> torch.device:
    """Join the ranks that torchrun started, if it did, and choose this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if dist.is_torchelastic_launched():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device


def corpora() -> list[bytes]:
    """The first bytes of what there is in each language, file after file."""
    python = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    cpp = sorted((pathlib.Path(torch.__file__).parent / "include" / "ATen").glob("*.h"))
    english = "\n".join(pydoc_data.topics.topics.values()).encode()
    found = [b"".join(itertools.islice((path.read_bytes() for path in paths), 60)) for paths in (python, cpp)]
    return [text[:CORPUS_BYTES] for text in (*found, english)]


def load_texts(device: torch.device) -> tuple[Data, Data]:
    """Cut (train, test) pieces of text out of each corpus; the same on every rank."""
    g = torch.Generator().manual_seed(0)
    parts: tuple[list[Data], list[Data]] = ([], [])
    for label, text in enumerate(corpora()):
        # Every fifth kilobyte is for the test, so that both parts are of all files.
        values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        blocks = values[: len(values) // 5000 * 5000].view(-1, 5, 1000)
        for part, source, count in zip(parts, (blocks[:, 1:], blocks[:, 0]), (TRAIN_SIZE, TEST_SIZE), strict=True):
            source, rows = source.reshape(-1, 1000), count // len(LANGUAGES)
            block = torch.randint(len(source), (rows, 1), generator=g)
            start = torch.randint(1000 - LENGTH, (rows, 1), generator=g)
            length = torch.randint(SHORTEST, LENGTH, (rows, 1), generator=g)
            mask = torch.arange(LENGTH) < length
            ids = torch.where(mask, source[block, start + torch.arange(LENGTH)], PAD)
            ids[:, 0] = START
            part.append({"input_ids": ids, "attention_mask": mask.long(), "labels": torch.full((rows,), label)})
    train, test = ({key: torch.cat([p[key] for p in part]).to(device) for key in part[0]} for part in parts)
    return train, test


def build(args: argparse.Namespace) -> BertForSequenceClassification:
    if args.weights:
        return BertForSequenceClassification.from_pretrained(args.weights)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=258, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
            max_position_embeddings=LENGTH, pad_token_id=PAD, num_labels=len(LANGUAGES),
            initializer_range=0.1, problem_type="single_label_classification",
        )
    )  # fmt: skip


def main() -> None:
    args = parse_args()
    device = join()
    rank, ranks = int(fdp.axis_index()), fdp.axis_size()
    if args.batch_size % ranks:
        raise SystemExit(f"--batch-size {args.batch_size} cannot be shared evenly by {ranks} ranks")
    console = Console(quiet=rank != 0, highlight=False)  # one rank speaks for all
    train, test = load_texts(device)

    torch.manual_seed(args.seed)
    model = build(args).to(device).train()
    model.bert.embeddings.requires_grad_(not args.freeze_embeddings)  # what is frozen goes into `buffers`
    apply, params, buffers = fdp.from_module(model)
    apply_eval, _, _ = fdp.from_module(build(args).to(device).eval())
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=args.lr, weight_decay=0.01)
    state: dict[str, Any] = fdp.replicate({"params": params, "opt": optimizer.init(params)})
    buffers = fdp.replicate(buffers)
    torch.manual_seed(args.seed + rank + 1)  # from here on each rank drops other units

    @fdp.data_parallel(donate_argnums=0)
    def train_step(state: Any, buffers: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> torch.Tensor:
            output, _ = apply(params, buffers, **batch)  # a batch has "labels": the model computes the loss
            loss: torch.Tensor = output.loss
            return loss

        loss, grads = fdp.value_and_grad(loss_fn)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, {"loss": fdp.pmean(loss)}

    @fdp.data_parallel
    def count_right(params: Any, buffers: Any, batch: Any) -> Any:
        output, _ = apply_eval(params, buffers, batch["input_ids"], batch["attention_mask"])
        return fdp.psum((output.logits.argmax(1) == batch["labels"]).sum())

    def accuracy() -> float:
        share = {name: x[rank::ranks] for name, x in test.items()}
        return count_right(state["params"], buffers, share).item() / TEST_SIZE

    steps_per_epoch = TRAIN_SIZE // args.batch_size
    steps = args.epochs * steps_per_epoch
    shuffle = torch.Generator().manual_seed(args.seed)  # the same on every rank: they share one order
    console.print(f"{sum(p.numel() for p in state['params'].values()):,} parameters, accuracy {accuracy():.2%} before")
    for epoch in range(args.epochs):
        order = torch.randperm(TRAIN_SIZE, generator=shuffle).to(device)
        own = order[: steps_per_epoch * args.batch_size].view(steps_per_epoch, -1)[:, rank::ranks]
        losses = []
        for step, chosen in enumerate(own, start=epoch * steps_per_epoch):
            # As a tokenizer returns it.
            batch = BatchEncoding({name: x[chosen] for name, x in train.items()})
            slope = min((step + 1) / (steps // 5 + 1), (steps - step) / (steps - steps // 5))
            # The learning rate is part of the state, so a new value is no reason for a new trace.
            lr = torch.full_like(state["opt"]["lr"], args.lr * slope)
            state, metrics = train_step({**state, "opt": {**state["opt"], "lr": lr}}, buffers, batch)
            losses.append(metrics["loss"])
        loss = torch.stack(losses).mean().item()
        console.print(f"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}  test accuracy {accuracy():.2%}")

    fdp.assert_replicated(state)  # raises, and names the leaf, if one bit differs on one rank
    console.print(f"all {ranks} ranks hold the same bits; {train_step.traces} trace")
    if args.save and rank == 0:
        model.load_state_dict({**state["params"], **buffers}, strict=False)  # also buffers that are never saved
        model.save_pretrained(args.save)
        console.print(f"saved to {args.save}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
