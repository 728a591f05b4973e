"""``linear_sequence_loss``: what its rounding errors scale with, and the call that stands for it token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.ops._divergences import FLUSHED
from liger_registry.ops._linear import Sizes
from liger_registry.ops._logits import softplus

if TYPE_CHECKING:
    import torch

    Tensors = tuple[torch.Tensor | None, ...]

EXAMPLE, LINEAR = "liger_registry.kernels.group_loss:logistic", "liger_registry.kernels.group_loss:linear"
# Logits in float64 that are computed at once, of which there are several copies.
_CUT = 1 << 25


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The size of the summed terms, float64, where the function is that of examples; see ``ops._linear.Sizes``."""
    import torch

    hidden, weight, target, constants, bias = inputs
    assert target is not None
    assert constants is not None
    upstream = grad_outputs[0]
    sizes = Sizes((hidden, weight, target, bias), options)
    counted = sizes.target != options["ignore_index"]
    value, off = (torch.where(counted, x, 0.0) for x in sizes.logp())
    known = constants.double().reshape(-1, constants.shape[-1])
    if options["function"] == LINEAR:  # see ``cut``
        slope, error = known[:, 0], known[:, 2]
        terms = (slope.abs() * (off + value) * (1.0 + error) + known[:, 1].abs()).sum()
    else:
        terms, slope, error = _group_sizes(value, off, known, options)
    slope = torch.where(counted, slope * (1.0 + error), 0.0)
    # A group's slope may be so small that what it is multiplied with is flushed to 0.
    held = {name: size + FLUSHED for name, size in sizes.gradients(slope, torch.zeros_like(slope)).items()}
    factor = 1.0 if upstream is None else upstream.abs()
    return {
        "loss": terms,
        "logp": sizes.logp()[1].view(sizes.shape),
        **{name: size * factor for name, size in held.items()},
        **{f"held_{name[5:]}": size for name, size in held.items()},
    }


def _group_sizes(
    value: torch.Tensor, off: torch.Tensor, known: torch.Tensor, options: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the example's function the size of the loss, its derivatives by tokens, and how much their margins are off.

    Args:
        value: (tokens,), negative log-probabilities.
        off: (tokens,), by how much these are off.
        known: (tokens, 3), the constants.
        options: of the operation.
    """
    import json

    import torch

    beta = float(json.loads(options["settings"]).get("beta", 1.0))
    ways, length = options["ways"], options["length"]
    if not value.numel():
        return value.sum(), value, value
    groups = known.reshape(ways, -1, length, known.shape[-1])
    shape = groups.shape[:-1]
    weights, taken, share = groups[..., 0], groups[:, :, 0, 1], groups[0, :, 0, 2]
    scores = -(value.reshape(shape) * weights).sum(-1) - taken
    margin = beta * (2 * scores[0] - scores.sum(0))
    # The errors of what a margin sums, and the roundings of the sum.
    error = beta * ((weights.abs() * (off + value).reshape(shape)).sum(-1) + taken.abs()).sum(0)
    terms = share.abs() * (softplus(-margin) + torch.sigmoid(-margin) * error)
    sign = known.new_full((ways, 1, 1), 1.0)
    sign[0] = -1.0
    slope = sign * weights * (beta * share * torch.sigmoid(-margin))[:, None]
    return terms.sum(), -slope.reshape(-1), error[None, :, None].expand(shape).reshape(-1)


def cut(inputs: Tensors, options: Mapping[str, Any]) -> tuple[Tensors, Mapping[str, Any]]:
    """The call's tangent: a sum over tokens with the same loss and gradients, in which each token stands for itself.

    The slopes are those at the log-probabilities in float64, which are computed in chunks of rows. Beside them stands
    how much the margins they depend on are off, for ``magnitude``.
    """
    import torch

    from liger_registry.kernels.group_loss import function_of, terms_and_slopes

    hidden, weight, target, constants, bias = inputs
    assert hidden is not None
    assert weight is not None
    assert target is not None
    assert constants is not None
    ways, length = max(options["ways"], 1), max(options["length"], 1)
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    step, counted = max(1, _CUT // weight.shape[0]), labels != options["ignore_index"]
    parts = []
    with torch.no_grad():
        for start in range(0, labels.shape[0], step):
            here = slice(start, start + step)
            known = (rows[here], weight, labels[here], bias)
            wide_inputs = tuple(t.double() if t is not None and t.is_floating_point() else t for t in known)
            parts.append(torch.stack(Sizes(wide_inputs, options).logp()))
        value, off = (torch.where(counted, x, 0.0) for x in torch.cat(parts, -1))
        groups = constants.double().reshape(ways, -1, length, constants.shape[-1])
        logp = -value.reshape(groups.shape[:-1])
        loss_of = function_of(options["function"], options["settings"])
        _, slopes = terms_and_slopes(loss_of, logp, groups, True)
        rest = torch.zeros_like(logp)
        rest[0, :, 0] = loss_of(logp, groups) - (slopes * logp).sum((0, 2))
        error = _group_sizes(value, off, groups.reshape(-1, groups.shape[-1]), options)[2]
    tangent = torch.stack([slopes.reshape(-1), rest.reshape(-1), error], -1).view(*target.shape, 3)
    changed = {"function": LINEAR, "settings": "{}", "ways": 1, "length": 1}
    return (hidden, weight, target, tangent.to(constants.dtype), bias), {**options, **changed}
