"""TRL's SFTTrainer: kernels in the layers, and its fused head served too."""

from common import LENGTH, TRAINING, Run, logged, model, start, texts, tokenizer
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from liger_registry.transformers import LigerRegistryCallback, apply, apply_to_trl


def main(kernels: bool, directory: str) -> Run:
    llama, reports = model(), []
    if kernels:
        reports.append(apply(llama).report)
    trainer = SFTTrainer(
        llama,
        args=SFTConfig(directory, max_length=LENGTH, **TRAINING),
        train_dataset=Dataset.from_dict({"text": texts()}),
        processing_class=tokenizer(),
        callbacks=[LigerRegistryCallback()] if kernels else None,
    )
    if kernels:
        reports.append(apply_to_trl(trainer).report)
    trainer.train()
    return Run(logged(trainer), reports)


if __name__ == "__main__":
    start(main)
