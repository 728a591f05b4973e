"""TRL's KTOTrainer, with answers that are good or bad each by itself."""

from common import LENGTH, TRAINING, Run, logged, model, preferences, start, tokenizer
from datasets import Dataset
from trl import KTOConfig, KTOTrainer

from liger_registry.transformers import apply, apply_to_trl


def main(kernels: bool, directory: str) -> Run:
    policy, reference, reports = model(), model(), []
    if kernels:
        reports += [apply(policy).report, apply(reference).report]
    data = preferences()
    trainer = KTOTrainer(
        policy,
        ref_model=reference,
        args=KTOConfig(directory, max_length=LENGTH, **TRAINING),
        train_dataset=Dataset.from_dict(
            {
                "prompt": data["prompt"] * 2,
                "completion": data["chosen"] + data["rejected"],
                "label": [True] * len(data["chosen"]) + [False] * len(data["rejected"]),
            }
        ),
        processing_class=tokenizer(),
    )
    if kernels:
        reports.append(apply_to_trl(trainer).report)
    trainer.train()
    return Run(logged(trainer), reports)


if __name__ == "__main__":
    start(main)
