"""A LightningModule: the model is applied to where it is built."""

import lightning
import torch
from common import Run, batches, model, start

from liger_registry.transformers import apply


class Tuned(lightning.LightningModule):
    def __init__(self, kernels: bool) -> None:
        super().__init__()
        self.llama, self.losses = model(), []
        self.handle = apply(self.llama) if kernels else None

    def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.llama(input_ids=ids, labels=ids.masked_fill(ids == 0, -100)).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def main(kernels: bool, directory: str) -> Run:
    module = Tuned(kernels)
    trainer = lightning.Trainer(
        devices=1,
        max_epochs=1,
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    return Run(module.losses, [module.handle.report] if module.handle else [])


if __name__ == "__main__":
    start(main)
