"""What the examples share: a tiny model, a tokenizer and data, none of which is downloaded.

The model is a Llama built from a config with random weights, the tokenizer has a token for each byte, and the texts are
the help topics that come with Python.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "</s>"]
LENGTH = 64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# What every trainer of transformers and TRL is given here; a real run keeps its own.
TRAINING = {
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "learning_rate": 5e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": DEVICE.type == "cpu",
    "bf16": False,  # TRL's default is True; on a CPU fp32 is faster
    "seed": 7,
}


@dataclass
class Run:
    """What an example shows: its losses, and the reports of what was applied."""

    losses: list[float]
    reports: list[object] = field(default_factory=list)


def tokenizer() -> PreTrainedTokenizerFast:
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(SPECIAL) + 256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )


def pairs(count: int = 32) -> list[tuple[str, str]]:
    """Questions and the beginnings of their answers."""
    topics = sorted(pydoc_data.topics.topics.items())[:count]
    return [(f"What is {name}?", " " + " ".join(text.split())[:40]) for name, text in topics]


def texts(count: int = 32) -> list[str]:
    return [question + answer for question, answer in pairs(count)]


def preferences(count: int = 32) -> dict[str, list[str]]:
    """Questions, their own answers, and those of others."""
    questions, answers = zip(*pairs(count), strict=True)
    return {"prompt": list(questions), "chosen": list(answers), "rejected": [*answers[1:], answers[0]]}


def batches(steps: int = 4, size: int = 4) -> list[torch.Tensor]:
    """Token ids, (size, LENGTH) a step, padded with 0."""
    encoded = tokenizer()(texts(steps * size), padding="max_length", truncation=True, max_length=LENGTH)
    return list(torch.tensor(encoded["input_ids"]).split(size))


def logged(trainer: object) -> list[float]:
    """The losses that a trainer of transformers or TRL has logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def start(main: Callable[[bool, str], Run]) -> None:
    """Run an example from the command line; ``--plain`` leaves the kernels out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true", help="without liger-registry, to compare")
    plain = parser.parse_args().plain
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        run = main(not plain, directory)
    for report in run.reports:
        print(report)
    print("losses:", *(f"{loss:.4f}" for loss in run.losses))
