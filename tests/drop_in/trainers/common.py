"""What the programs beside it share: a tiny model, a tokenizer that needs no download, and what a run has to show."""

import importlib.metadata
import json
import os
import warnings

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "the cat dog sat ran on under a red mat tree and then it saw one two three of them"
WORDS = ["<pad>", "</s>", "<unk>", *TEXT.split()]
OPTIONS = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 3,
}


def tokenizer():
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def losses(trainer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the trainers' own
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def show(plain, patched, model):
    """Print what a test reads: both runs, and the operations that the patched one had in it."""
    from liger_registry.transformers import applied_to

    report = applied_to(model).report
    ops = {}
    for row in report.applied():
        ops[row.op] = ops.get(row.op, 0) + 1
    told = {
        "plain": plain,
        "patched": patched,
        "ops": ops,
        "version": importlib.metadata.version("liger_kernel"),
        "launched": "ACCELERATE_MIXED_PRECISION" in os.environ or "LOCAL_RANK" in os.environ,
    }
    print("told", json.dumps(told))
