"""The Trainer of transformers: one call before it is made, and a callback that reports."""

from common import TRAINING, Run, batches, logged, model, start
from transformers import Trainer, TrainingArguments

from liger_registry.transformers import LigerRegistryCallback, apply


def main(kernels: bool, directory: str) -> Run:
    llama, reports, callbacks = model(), [], []
    if kernels:
        reports.append(apply(llama).report)
        callbacks.append(LigerRegistryCallback())
    trainer = Trainer(
        llama,
        TrainingArguments(directory, **TRAINING),
        train_dataset=[
            {"input_ids": row, "labels": row.masked_fill(row == 0, -100)} for ids in batches() for row in ids
        ],
        callbacks=callbacks,
    )
    trainer.train()
    return Run(logged(trainer), reports)


if __name__ == "__main__":
    start(main)
