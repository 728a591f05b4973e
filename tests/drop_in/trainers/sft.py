"""TRL's SFTTrainer with use_liger_kernel."""

import sys

from common import OPTIONS, losses, model, show, tokenizer
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

TEXTS = ["the cat sat on a red mat", "the dog ran under a tree and then it saw them", "one two three of them"] * 4


def run(**more):
    made = model()
    trainer = SFTTrainer(
        made,
        args=SFTConfig(sys.argv[1], max_length=16, bf16=False, **OPTIONS, **more),
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer(),
    )
    return losses(trainer), made


plain, _ = run()
show(plain, *run(use_liger_kernel=True))
