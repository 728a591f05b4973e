"""TRL's ORPOTrainer, which computes logits itself: kernels in the layers, and its loss unchanged."""

from common import LENGTH, TRAINING, Run, logged, model, preferences, start, tokenizer
from datasets import Dataset
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from liger_registry.transformers import apply


def main(kernels: bool, directory: str) -> Run:
    policy, reports = model(), []
    if kernels:
        # It reads the logits of every batch, so there is no loss without them to be had.
        reports.append(apply(policy, fused_linear_cross_entropy=False).report)
    trainer = ORPOTrainer(
        policy,
        args=ORPOConfig(directory, max_length=LENGTH, **TRAINING),
        train_dataset=Dataset.from_dict(preferences()),
        processing_class=tokenizer(),
    )
    trainer.train()
    return Run(logged(trainer), reports)


if __name__ == "__main__":
    start(main)
