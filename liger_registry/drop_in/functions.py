"""The autograd functions of ``liger_kernel.ops`` by what is called of them: ``apply``, with their arguments.

Each returns what liger-kernel's returns. They are no subclasses of ``torch.autograd.Function``: the operation that is
called has its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from liger_registry.transformers import _losses, functional
from liger_registry.transformers._arguments import refuse
from liger_registry.transformers._handles import call
from liger_registry.transformers.llama4_rope import liger_llama4_text_rotary_pos_emb

Tensor = torch.Tensor
Parts = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
_CHOICE = "the registry chooses implementations itself"
_FIX = "leave it out, or pin one with liger_registry.registry.use"


def _refused(face: str, **chosen: object) -> None:
    for name, value in chosen.items():
        refuse(face, name, value, _CHOICE, _FIX)


def _parts(found: Tensor | _losses.CrossEntropyOutput) -> Parts:
    if isinstance(found, Tensor):
        return found, None, None, None
    return found.loss, found.z_loss, found.token_accuracy, found.predicted_tokens


class LigerCrossEntropyFunction:
    """``liger_cross_entropy`` with everything that it can return."""

    @staticmethod
    def apply(
        _input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> Parts:
        """``(loss, z_loss, token_accuracy, predicted_tokens)``, None for what is not asked for."""
        return _parts(
            functional.liger_cross_entropy(
                _input,
                target,
                weight,
                ignore_index=ignore_index,
                lse_square_scale=lse_square_scale,
                label_smoothing=label_smoothing,
                reduction=reduction,
                softcap=softcap,
                return_z_loss=return_z_loss,
                return_token_accuracy=return_token_accuracy,
                return_predicted_tokens=return_predicted_tokens,
            )
        )


class LigerFusedLinearCrossEntropyFunction:
    """``liger_fused_linear_cross_entropy`` with everything that it can return."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        ce_impl: str | None = None,
        ce_mode: str | None = None,
        chunk_mem_const: int = 1,
    ) -> Parts:
        """``(loss, z_loss, token_accuracy, predicted_tokens)``, None for what is not asked for."""
        _refused("LigerFusedLinearCrossEntropyFunction", ce_impl=ce_impl, ce_mode=ce_mode)
        return _parts(
            functional.liger_fused_linear_cross_entropy(
                _input,
                weight,
                target,
                bias,
                ce_weight,
                ignore_index,
                lse_square_scale,
                label_smoothing,
                reduction,
                softcap,
                return_z_loss,
                accum_dtype,
                use_token_scaling,
                return_token_accuracy,
                return_predicted_tokens,
                chunk_mem_const,
            )
        )


def fused_linear_cross_entropy_forward(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    ce_weight: Tensor | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    ce_impl: str | None = None,
    ce_mode: str | None = None,
) -> tuple[Tensor | None, ...]:
    """The loss and its gradients, in one call and without a graph.

    Returns:
        ``(loss, z_loss, token_accuracy, predicted_tokens, grad_input, grad_weight, grad_bias)``; of losses that are not
        reduced the gradients are those of their sum. None for what is not asked for, and for gradients of tensors that
        do not require any, but that of the input.
    """
    given = (_input, weight, bias)
    needed = [True, weight.requires_grad, bias is not None and bias.requires_grad]
    leaves = [None if t is None else t.detach().requires_grad_(need) for t, need in zip(given, needed, strict=True)]
    hidden, head, shift = leaves
    assert hidden is not None
    assert head is not None
    with torch.enable_grad():
        found = LigerFusedLinearCrossEntropyFunction.apply(
            hidden,
            head,
            target,
            shift,
            ce_weight,
            ignore_index,
            lse_square_scale,
            label_smoothing,
            reduction,
            softcap,
            return_z_loss,
            accum_dtype,
            use_token_scaling,
            return_token_accuracy,
            return_predicted_tokens,
            ce_impl,
            ce_mode,
        )
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        grads = iter(torch.autograd.grad(found[0].sum(), wanted))
    return (
        *(None if part is None else part.detach() for part in found),
        *(next(grads) if need else None for need in needed),
    )


def fused_linear_cross_entropy_backward(
    grad_output: Tensor, grad_input: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of ``fused_linear_cross_entropy_forward`` times that of its loss, 0-dim."""
    scaled = (None if g is None else g * grad_output.to(g.dtype) for g in (grad_input, grad_weight, grad_bias))
    first, second, third = scaled
    return first, second, third


class LigerFusedLinearJSDFunction:
    """``liger_fused_linear_jsd``."""

    @staticmethod
    def apply(
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
        jsd_impl: str | None = None,
        jsd_mode: str | None = None,
    ) -> Tensor:
        """The loss, 0-dim."""
        _refused("LigerFusedLinearJSDFunction", jsd_impl=jsd_impl, jsd_mode=jsd_mode)
        return functional.liger_fused_linear_jsd(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            shift_labels,
            jsd_beta,
            ignore_index,
            temperature,
            accum_dtype,
        )


class LigerJSDFunction:
    """``liger_jsd``."""

    @staticmethod
    def apply(
        _input: Tensor,
        target: Tensor,
        shift_labels: Tensor | None = None,
        beta: float = 0.5,
        ignore_index: int = -100,
        jsd_impl: str | None = None,
        jsd_mode: str | None = None,
    ) -> Tensor:
        """The loss, 0-dim."""
        _refused("LigerJSDFunction", jsd_impl=jsd_impl, jsd_mode=jsd_mode)
        return functional.liger_jsd(_input, target, shift_labels, beta, ignore_index)


class LigerKLDivLossFunction:
    """``liger_kl_div`` with another default."""

    @staticmethod
    def apply(
        y_pred: Tensor, y_true: Tensor, reduction: str = "batchmean", log_target: bool = False, eps: float = 1e-10
    ) -> Tensor:
        """The loss of log-probabilities, 0-dim, or of their shape with ``reduction="none"``."""
        return functional.liger_kl_div(y_pred, y_true, reduction=reduction, log_target=log_target, eps=eps)


class LigerTVDLossFunction:
    """``liger_tvd`` with another default."""

    @staticmethod
    def apply(
        p: Tensor,
        q: Tensor,
        shift_labels: Tensor | None = None,
        reduction: str = "batchmean",
        ignore_index: int = -100,
    ) -> Tensor:
        """The loss of probabilities, 0-dim, or of their shape with ``reduction="none"``."""
        return functional.liger_tvd(p, q, shift_labels, reduction, ignore_index)


class LigerRMSNormFunction:
    """``liger_rms_norm``."""

    @staticmethod
    def apply(
        X: Tensor,
        W: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> Tensor:
        """The normalised X; ``in_place`` and ``row_mode`` are without effect on results."""
        return functional.liger_rms_norm(X, W, eps, offset, casting_mode, in_place)


class LigerSiLUMulFunction:
    """``silu(a * gate_multiplier) * b * down_multiplier``."""

    @staticmethod
    def apply(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
        """Of a and b, (..., width)."""
        y: Tensor = call("swiglu", a, b, float(gate_multiplier), float(down_multiplier))
        return y


class LigerFusedGateUpSiLUMulFunction:
    """``silu(gate) * up`` of both in one tensor."""

    @staticmethod
    def apply(y: Tensor, in_place: bool = False) -> Tensor:
        """Of (..., gates and ups), half as wide; ``in_place`` is without effect on results."""
        gated: Tensor = call("swiglu", y)
        return gated


class LigerMLPFunction:
    """A gated MLP with silu, of the weights of its three layers."""

    @staticmethod
    def apply(
        input: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        gate_multiplier: float = 1.0,
        down_multiplier: float = 1.0,
    ) -> Tensor:
        """Of (..., hidden), the same shape."""
        linear = torch.nn.functional.linear
        gated = LigerSiLUMulFunction.apply(linear(input, gate_weight), linear(input, up_weight), gate_multiplier)
        out = linear(gated, down_weight)
        return out if down_multiplier == 1.0 else out * down_multiplier


class LigerLlama4RopeFunction:
    """``liger_llama4_text_rotary_pos_emb``."""

    @staticmethod
    def apply(q: Tensor, k: Tensor, freqs_cis: Tensor, BLOCK_SIZE: int | None = None) -> tuple[Tensor, Tensor]:
        """Both turned; ``BLOCK_SIZE`` is without effect on results."""
        return liger_llama4_text_rotary_pos_emb(q, k, freqs_cis)


class LigerTiledMLPFunction:
    """An MLP over parts of a sequence, computed again in backward."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        mlp_module: torch.nn.Module,
        x: Tensor,
        shards: int,
        compute_params: list[torch.nn.Parameter] | None = None,
    ) -> Tensor:
        """``fn(mlp_module, part)`` of each part of (..., tokens, hidden), put together.

        ``compute_params`` is accepted: gradients of parts are summed by autograd, whoever owns the parameters.
        """
        parts = [checkpoint(fn, mlp_module, part, use_reentrant=False) for part in x.chunk(max(1, shards), -2)]
        return torch.cat(parts, -2)


def apply_tiled_mlp(
    fn: Callable[..., Tensor],
    mlp_module: torch.nn.Module,
    x: Tensor,
    num_shards: int | None = None,
    compute_params: list[torch.nn.Parameter] | None = None,
) -> Tensor:
    """``LigerTiledMLPFunction.apply``, by default with parts about as long as x is wide."""
    shards = math.ceil(x.shape[-2] / x.shape[-1]) if num_shards is None else num_shards
    return LigerTiledMLPFunction.apply(fn, mlp_module, x, shards, compute_params)


def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """Log-probabilities of tokens at the positions before theirs, fp32.

    Args:
        logits: (batch, tokens + 1, vocab); the last position says nothing on these tokens.
        input_ids: (batch, at least tokens), of which the last ones count.
        temperature: what logits are divided by.
        mask: of the shape of input_ids; where it is 0 the result is 0.
    """
    ids = input_ids[:, input_ids.shape[1] - logits.shape[1] + 1 :]
    scaled = logits[:, :-1].float() / temperature
    logps: Tensor = -call("cross_entropy", scaled, ids, reduction="none")
    return logps if mask is None else logps.masked_fill(mask[:, -ids.shape[1] :] == 0, 0.0)


def _face(name: str, function: Callable[..., Any]) -> type:
    """A class whose ``apply`` is a functional form of the same arguments."""
    doc = f"``{function.__name__}``."
    return type(name, (), {"apply": staticmethod(function), "__doc__": doc, "__module__": __name__})


LigerFusedAddRMSNormFunction = _face("LigerFusedAddRMSNormFunction", functional.liger_fused_add_rms_norm)
LigerGELUMulFunction = _face("LigerGELUMulFunction", functional.liger_geglu)
LigerGroupNormFunction = _face("LigerGroupNormFunction", functional.liger_group_norm)
LigerLayerNormFunction = _face("LigerLayerNormFunction", functional.liger_layer_norm)
LigerQwen2VLMRopeFunction = _face("LigerQwen2VLMRopeFunction", functional.liger_qwen2vl_mrope)
LigerReLUSquaredFunction = _face("LigerReLUSquaredFunction", functional.liger_relu_squared)
LigerRopeFunction = _face("LigerRopeFunction", functional.liger_rope)
LigerSoftmaxFunction = _face("LigerSoftmaxFunction", functional.liger_softmax)
