"""TRL's DPOTrainer with use_liger_kernel."""

import sys

from common import OPTIONS, losses, model, show, tokenizer
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

PAIRS = {
    "prompt": ["the cat sat", "the dog ran", "it saw"] * 4,
    "chosen": [" on a red mat", " under a tree", " one of them"] * 4,
    "rejected": [" on them", " and then the dog", " three red three"] * 4,
}


def run(**more):
    made = model()
    trainer = DPOTrainer(
        made,
        ref_model=model(),
        args=DPOConfig(sys.argv[1], max_length=16, bf16=False, **OPTIONS, **more),
        train_dataset=Dataset.from_dict(PAIRS),
        processing_class=tokenizer(),
    )
    return losses(trainer), made


plain, _ = run()
show(plain, *run(use_liger_kernel=True))
