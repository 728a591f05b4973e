"""transformers' Trainer with use_liger_kernel."""

import sys

import torch
from common import OPTIONS, WORDS, losses, model, show
from transformers import Trainer, TrainingArguments

ROWS = torch.randint(3, len(WORDS), (16, 12), generator=torch.Generator().manual_seed(5))


def run(**more):
    made = model()
    data = [{"input_ids": row, "labels": row} for row in ROWS]
    trainer = Trainer(made, TrainingArguments(sys.argv[1], **OPTIONS, **more), train_dataset=data)
    return losses(trainer), made


plain, untouched = run()
patched, made = run(use_liger_kernel=True)
assert "forward" not in untouched.model.norm.__dict__
show(plain, patched, made)
