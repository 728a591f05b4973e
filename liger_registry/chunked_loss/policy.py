"""A policy's loss over an output head: ``grpo`` with log-probabilities, references and normalisers around it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from liger_registry.chunked_loss import engine
from liger_registry.chunked_loss._checks import (
    check_flags,
    check_number,
    check_reference,
    check_sequences,
    check_shape,
    positive,
)
from liger_registry.chunked_loss.grpo import BY_BATCH, NAMES, Policy, Tokens, metrics, token_losses
from liger_registry.chunked_loss.head import PLAIN, Head, applied
from liger_registry.errors import UnsupportedOptionError

Tensor = torch.Tensor
IGNORED = -100


def tokens_of(token_constants: Tensor, sequence_constants: Tensor, given: list[str]) -> Tokens:
    """What is known of tokens, from the constants of ``policy_loss``."""
    columns = dict(zip(("mask", "advantages", *given), token_constants.unbind(-1), strict=True))
    ratio = columns.get("ratio")
    if ratio is None and sequence_constants.shape[-1] > 1:
        ratio = sequence_constants[..., 1, None]
    return Tokens(columns["mask"], columns["advantages"], columns.get("old_logps"), columns.get("ref_logps"), ratio)


def policy_terms(logp: Tensor, constants: Tensor, *, columns: int, given: list[str], **settings: Any) -> Tensor:
    """The part that each sequence has in the loss, (sequences,).

    Args:
        logp: (1, sequences, tokens).
        constants: (1, sequences, tokens, 3 and more): of sequences the factor of their sums, and the ratio if they have
            one; of tokens mask, advantages, and what is given.
        columns: how many there are of sequences.
        given: names of the further columns of tokens, as in ``Tokens``.
        settings: of a ``Policy``.
    """
    sequences = constants[0, :, 0, :columns]
    tokens = tokens_of(constants[0, ..., columns:], sequences, given)
    losses = token_losses(logp[0], tokens, Policy(**settings))
    return torch.where(tokens.counted, losses * tokens.mask, 0.0).sum(-1) * sequences[:, 0]


def policy_loss(
    face: str,
    policy: Policy,
    hidden: Tensor,
    weight: Tensor | nn.Module,
    selected_token_ids: Tensor,
    attention_mask: Tensor,
    advantages: Tensor,
    bias: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | nn.Module | None = None,
    ref_bias: Tensor | None = None,
    *,
    vllm_is_ratio: Tensor | None = None,
    num_items_in_batch: Tensor | int | float | None = None,
    max_completion_length: int | None = None,
    use_ref_model: bool = True,
    temperature: float = 1.0,
    head: Head = PLAIN,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss and its metrics; arguments as of ``LigerFusedLinearGRPOLoss``."""
    check_policy(face, policy, max_completion_length)
    check_flags(face, use_ref_model=use_ref_model)
    head = at_temperature(face, head, temperature)
    check_sequences(face, hidden, selected_token_ids, "selected_token_ids")
    count, length = selected_token_ids.shape
    check_shape(face, "attention_mask", attention_mask, (count, length))
    check_shape(face, "advantages", advantages, (count,), (count, length))
    check_shape(face, "vllm_is_ratio", vllm_is_ratio, (count,), (count, 1), (count, length))
    for name, tensor in (("ref_per_token_logps", ref_per_token_logps), ("old_per_token_logps", old_per_token_logps)):
        check_shape(face, name, tensor, (count, length))
    models = {"ref_input": ref_input, "ref_weight": ref_weight}
    check_reference(face, use_ref_model, models, {"ref_bias": ref_bias, "ref_per_token_logps": ref_per_token_logps})
    hidden, weight, bias = applied(face, hidden, weight, bias)
    counted = attention_mask != 0
    target = torch.where(counted, selected_token_ids, IGNORED)
    if policy.beta and ref_input is not None and ref_weight is not None:
        check_sequences(face, ref_input, target, "selected_token_ids")
        ref_per_token_logps = engine.reference_logps(face, ref_input, ref_weight, target, ref_bias, head=head)
    dtype = engine.wide(hidden)
    mask = attention_mask.to(dtype)
    optional = {"old_logps": old_per_token_logps, "ref_logps": ref_per_token_logps if policy.beta else None}
    share = [normaliser(policy, mask, num_items_in_batch, max_completion_length)]
    if vllm_is_ratio is not None:
        if vllm_is_ratio.dim() == 2 and vllm_is_ratio.shape[1] == length and length > 1:
            optional["ratio"] = vllm_is_ratio
        else:
            share.append(vllm_is_ratio.detach().to(dtype).reshape(count))
    given = [name for name, tensor in optional.items() if tensor is not None]
    broad = advantages if advantages.dim() == 2 else advantages[:, None].expand(count, length)
    # What tokens that do not count have is not read, be it NaN.
    there = (broad, *(t for t in optional.values() if t is not None))
    columns = [mask, *(torch.where(counted, t.detach().to(dtype), 0.0) for t in there)]
    constants = torch.stack(columns, -1), torch.stack(share, -1)
    loss, logp = engine.sequence_loss(
        policy_terms,
        hidden,
        weight,
        target,
        bias,
        *constants,
        ways=1,
        settings={**{name: getattr(policy, name) for name in NAMES}, "given": given, "columns": len(share)},
        separable=True,
        ignore_index=IGNORED,
        head=head,
    )
    return loss, metrics(logp, tokens_of(*constants, given), policy)


def check_policy(face: str, policy: Policy, max_completion_length: int | None) -> None:
    """Raise UnsupportedOptionError if a policy's loss cannot be made with these."""
    policy.check(face)
    if policy.loss_type == "dr_grpo" and max_completion_length is None:
        raise UnsupportedOptionError(
            f"{face} has no max_completion_length",
            why="loss_type='dr_grpo' divides by it",
            fix="pass the number of tokens that completions are cut off at",
        )
    if max_completion_length is not None:
        check_number(face, "max_completion_length", max_completion_length, positive, "it divides", "pass 512")


def at_temperature(face: str, head: Head, temperature: float) -> Head:
    """The head at a face's own temperature."""
    if head.temperature != 1 and temperature != 1:
        raise UnsupportedOptionError(
            f"{face} has two temperatures, {head.temperature} and {temperature}",
            why="logits are divided by one",
            fix="pass temperature, and leave that of the Head out",
        )
    return head if temperature == 1 else replace(head, temperature=temperature)


def normaliser(
    policy: Policy, mask: Tensor, num_items_in_batch: Tensor | int | float | None, max_completion_length: int | None
) -> Tensor:
    """The factor of each sequence's sum of losses, (sequences,).

    ``dapo``, ``cispo`` and ``vespo`` divide by the tokens of all processes over their number: by
    ``num_items_in_batch``, or where there is none by the sum over processes of the tokens at hand, for which every
    process of the default group has to call the loss.

    Raises:
        UnsupportedOptionError: a ``num_items_in_batch`` that nothing would read.
    """
    sequences, kind = max(mask.shape[0], 1), policy.loss_type
    if num_items_in_batch is not None and kind not in BY_BATCH:
        raise UnsupportedOptionError(
            f"num_items_in_batch would do nothing with loss_type={kind!r}",
            why="that divides by what is in the call",
            candidates=BY_BATCH,
            fix="leave it out",
        )
    if kind in ("grpo", "sapo"):
        return 1 / (mask.sum(-1).clamp_min(1.0) * sequences)
    if kind == "dr_grpo":
        assert max_completion_length is not None
        return mask.new_full((mask.shape[0],), 1 / (sequences * max_completion_length))
    if kind == "luspo":
        return mask.new_full((mask.shape[0],), 1 / sequences)
    if kind == "bnpo":
        return (1 / mask.sum().clamp_min(1.0)).expand(mask.shape[0])
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    processes = torch.distributed.get_world_size() if distributed else 1
    if isinstance(num_items_in_batch, torch.Tensor):
        total = num_items_in_batch.detach().to(device=mask.device, dtype=mask.dtype, non_blocking=True).reshape(())
    elif num_items_in_batch is not None:
        total = mask.new_full((), float(num_items_in_batch))
    else:
        total = mask.sum()
        if distributed:
            torch.distributed.all_reduce(total)
    return (1 / (total / processes).clamp_min(1.0)).expand(mask.shape[0])
