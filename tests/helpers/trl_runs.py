"""Short runs of TRL's trainers on the CPU: a tiny model, a tokenizer of bytes and data made here."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what other packages deprecate
    from trl import (
        DPOConfig,
        DPOTrainer,
        GRPOConfig,
        GRPOTrainer,
        KTOConfig,
        KTOTrainer,
        RLOOConfig,
        RLOOTrainer,
        SFTConfig,
        SFTTrainer,
    )

PROMPTS = ["the cat sat", "the dog ran", "it saw"] * 4
CHOSEN = [" on a red mat", " under a tree", " one of them"] * 4
REJECTED = [" on them", " and then the dog", " three red three"] * 4
DATA: dict[str, dict[str, list[Any]]] = {
    "sft": {"text": [a + b for a, b in zip(PROMPTS, CHOSEN, strict=True)]},
    "dpo": {"prompt": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED},
    "kto": {
        "prompt": PROMPTS,
        "completion": [a if i % 2 else b for i, (a, b) in enumerate(zip(CHOSEN, REJECTED, strict=True))],
        "label": [bool(i % 2) for i in range(12)],
    },
    "grpo": {"prompt": PROMPTS},
    "rloo": {"prompt": PROMPTS},
}
KINDS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTConfig, SFTTrainer),
    "dpo": (DPOConfig, DPOTrainer),
    "kto": (KTOConfig, KTOTrainer),
    "grpo": (GRPOConfig, GRPOTrainer),
    "rloo": (RLOOConfig, RLOOTrainer),
}
OPTIONS: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 3,
    "bf16": False,
}
ONLINE = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
MORE: dict[str, dict[str, Any]] = {
    "sft": {"max_length": 24},
    "dpo": {"max_length": 24},
    "kto": {"max_length": 24},
    "grpo": {**ONLINE, "temperature": 0.8},
    "rloo": {**ONLINE, "temperature": 0.8},
}


def tokenizer() -> Any:
    """One token a byte."""
    words = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def model(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return LlamaForCausalLM(LlamaConfig(**{**config, **more}))


def reward(completions: list[str], **told: Any) -> list[float]:
    """More for each of the letters that come first in the alphabet."""
    return [float(sum(letter < "n" for letter in text)) for text in completions]


def trainer(kind: str, directory: Any, *, peft: bool = False, **more: Any) -> Any:
    """A trainer of one kind, ready to train.

    Args:
        kind: a key of ``KINDS``.
        directory: where it writes.
        peft: whether an adapter is trained instead of the model.
        **more: options of its config.
    """
    configs, trainers = KINDS[kind]
    given: dict[str, Any] = {"reward_funcs": reward} if kind in ("grpo", "rloo") else {}
    if kind in ("dpo", "kto") and not peft:
        given["ref_model"] = model()
    if peft:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    if kind in ("grpo", "rloo") and not peft:
        # They load the reference by name; that of this model lies here.
        where = f"{directory}/model"
        model().save_pretrained(where)
        policy: Any = LlamaForCausalLM.from_pretrained(where)
    else:
        policy = model()
    args = configs(str(directory), **{**OPTIONS, **MORE[kind], **more})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trainers(
            policy, args=args, train_dataset=Dataset.from_dict(DATA[kind]), processing_class=tokenizer(), **given
        )


def trained(made: Any) -> list[dict[str, float]]:
    """Train, and give what was logged, without times."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(5)
        made.train()
    timed = ("runtime", "_per_second", "step_time", "profiling", "flos", "mfu")
    return [
        {name: value for name, value in entry.items() if not any(part in name for part in timed)}
        for entry in made.state.log_history
    ]
