"""A loop of one's own with accelerate: the model is applied to before it is prepared."""

import torch
from accelerate import Accelerator
from common import Run, batches, model, start

from liger_registry.transformers import apply


def main(kernels: bool, directory: str) -> Run:
    accelerator = Accelerator()
    llama, reports, losses = model(), [], []
    if kernels:
        reports.append(apply(llama).report)
    llama, optimizer = accelerator.prepare(llama, torch.optim.AdamW(llama.parameters(), lr=5e-3))
    for ids in batches():
        ids = ids.to(accelerator.device)
        loss = llama(input_ids=ids, labels=ids.masked_fill(ids == 0, -100)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, reports)


if __name__ == "__main__":
    start(main)
