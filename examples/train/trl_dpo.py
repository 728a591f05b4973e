"""TRL's DPOTrainer: kernels in the layers of the policy and of the reference, and both fused heads served."""

from common import LENGTH, TRAINING, Run, logged, model, preferences, start, tokenizer
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from liger_registry.transformers import apply, apply_to_trl


def main(kernels: bool, directory: str) -> Run:
    policy, reference, reports = model(), model(), []
    if kernels:
        reports += [apply(policy).report, apply(reference).report]
    trainer = DPOTrainer(
        policy,
        ref_model=reference,
        args=DPOConfig(directory, max_length=LENGTH, **TRAINING),
        train_dataset=Dataset.from_dict(preferences()),
        processing_class=tokenizer(),
    )
    if kernels:
        reports.append(apply_to_trl(trainer).report)
    trainer.train()
    return Run(logged(trainer), reports)


if __name__ == "__main__":
    start(main)
