"""TRL's GRPOTrainer, rewarded for completions with many vowels."""

from common import TRAINING, Run, logged, model, preferences, start, tokenizer
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from liger_registry.transformers import apply, apply_to_trl


def vowels(completions: list[str], **told: object) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


def main(kernels: bool, directory: str) -> Run:
    policy, reports = model(), []
    if kernels:
        reports.append(apply(policy).report)
    trainer = GRPOTrainer(
        policy,
        reward_funcs=vowels,
        args=GRPOConfig(directory, num_generations=4, max_completion_length=12, **TRAINING),
        train_dataset=Dataset.from_dict({"prompt": preferences()["prompt"]}),
        processing_class=tokenizer(),
    )
    if kernels:
        reports.append(apply_to_trl(trainer).report)
    trainer.train()
    return Run(logged(trainer), reports)


if __name__ == "__main__":
    start(main)
