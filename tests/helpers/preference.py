"""Preference, policy and distillation losses in plain PyTorch with all logits there, as the papers write them."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.nn import functional

IGNORED = -100


def model(sequences=6, tokens=7, hidden=16, vocab=37, dtype=torch.float32, bias=True, seed=0, size=0.5):
    """Hidden states, weight, bias and targets of a policy, and those of a reference of another width."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    target = torch.randint(vocab, (sequences, tokens), generator=generator)
    for n in range(sequences):  # prompts and padding of several lengths
        target[n, : n % 3] = IGNORED
        target[n, tokens - (n + 1) % 4 :] = IGNORED
    return SimpleNamespace(
        hidden=random(sequences, tokens, hidden).requires_grad_(),
        weight=random(vocab, hidden, scale=size).requires_grad_(),
        bias=random(vocab, scale=size).requires_grad_() if bias else None,
        target=target,
        ref_hidden=random(sequences, tokens, 12),
        ref_weight=random(vocab, 12, scale=size),
        ref_bias=random(vocab, scale=size) if bias else None,
    )


def wide(m):
    """The same in float64, as new leaves."""
    return SimpleNamespace(
        **{
            name: t.detach().double().requires_grad_(t.requires_grad)
            if torch.is_tensor(t) and t.is_floating_point()
            else t
            for name, t in vars(m).items()
        }
    )


def leaves(m):
    return [t for t in (m.hidden, m.weight, m.bias) if t is not None and t.requires_grad]


def logits_of(hidden, weight, bias, softcap=None, logit_scale=1.0, temperature=1.0):
    z = functional.linear(hidden, weight, bias) * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    return z / temperature


def logps(hidden, weight, bias, target, **head):
    """Each token's log-probability, 0 where ignored."""
    found = torch.log_softmax(logits_of(hidden, weight, bias, **head), -1)
    found = found.gather(-1, target.clamp(min=0)[..., None]).squeeze(-1)
    return torch.where(target == IGNORED, 0.0, found)


def scores(tokens, target, average):
    total = tokens.sum(-1)
    return total / (target != IGNORED).sum(-1).clamp(min=1) if average else total


def nll(tokens, target):
    """The mean over the chosen half's tokens."""
    half = target.shape[0] // 2
    return -tokens[:half].sum() / (target[:half] != IGNORED).sum()


def compare(run, right, m, rtol=2e-5, atol=2e-6, metrics=True):
    """Hold a loss, its metrics and its gradients against float64."""
    exact = wide(m)
    loss, found = run(m)
    truth, known = right(exact)
    torch.testing.assert_close(loss.double(), truth, rtol=rtol, atol=atol)
    if metrics:
        assert len(found) == len(known)
        for mine, theirs in zip(found, known, strict=True):
            assert not mine.requires_grad
            torch.testing.assert_close(mine.double(), theirs.detach().double(), rtol=rtol, atol=5e-6)
    ours, theirs = torch.autograd.grad(loss, leaves(m)), torch.autograd.grad(truth, leaves(exact))
    for a, b in zip(ours, theirs, strict=True):
        limit = rtol * b.abs().max().item() + atol
        assert (a.double() - b).abs().max().item() <= limit
    return loss


def half_means(m):
    """The means of the chosen and of the rejected sequences' logits, of all their tokens."""
    z = logits_of(m.hidden, m.weight, m.bias)
    return [part.mean() for part in z.chunk(2)]


# -- distillation ------------------------------------------------------------------------------------------------------


def distilled(m, divergence, hard, soft, divided=1.0, **head):
    """``(loss, soft, hard)`` of rows that count; the student's logits beyond its vocabulary are 0."""
    rows = m.target.reshape(-1)
    counted = rows != IGNORED
    student = logits_of(m.hidden, m.weight, m.bias, **head).flatten(0, -2)
    teacher = logits_of(m.ref_hidden, m.ref_weight, m.ref_bias, **head).flatten(0, -2)
    likelihood = functional.cross_entropy(student, rows, ignore_index=IGNORED, reduction="sum")
    student = functional.pad(student, (0, teacher.shape[1] - student.shape[1]))
    found = divergence(student / divided, teacher / divided)
    count = counted.sum().clamp(min=1)
    parts = found[counted].sum() / count, likelihood / count
    return hard * parts[1] + soft * parts[0], parts


def jsd(beta):
    def rows(student, teacher):
        x, y = student.log_softmax(-1), teacher.log_softmax(-1)
        if beta == 0:
            return (y.exp() * (y - x)).sum(-1)
        if beta == 1:
            return (x.exp() * (x - y)).sum(-1)
        mean = (beta * y.exp() + (1 - beta) * x.exp()).log()
        return (beta * y.exp() * (y - mean) + (1 - beta) * x.exp() * (x - mean)).sum(-1)

    return rows


def cosine(beta):
    return lambda student, teacher: beta * (1 - functional.cosine_similarity(student, teacher, dim=-1))
