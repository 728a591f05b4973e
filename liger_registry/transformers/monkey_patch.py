"""``apply_liger_kernel_to_*``: the names of liger-kernel 0.8.5 over one engine, made from a table.

Each takes liger-kernel's keywords in its order and with its defaults. With ``model=`` it applies to that model, without
one to each model of the type that is built from then on. Both return a handle with ``report`` and ``revert()``, where
liger-kernel returns None.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.errors import RegistryWarning

if TYPE_CHECKING:
    from torch import nn

    from liger_registry.transformers.engine.apply import Applied
    from liger_registry.transformers.engine.hook import Armed

_LOSSES = "cross_entropy=False fused_linear_cross_entropy=True"
_SWIGLU = f"rope=True {_LOSSES} rms_norm=True swiglu=True model"
_GEGLU = f"rope=True {_LOSSES} rms_norm=True geglu=True model"
# Where liger-kernel leaves rotary embeddings out, its kernel has a layout less. Ours are confirmed model by model; the
# default stays what its users know.
_NO_ROPE = f"rope=False {_LOSSES} rms_norm=True swiglu=True model"

# For each function its keywords; a default of None stands for "model".
_KEYWORDS: dict[str, str] = {
    "deepseek_v2": _NO_ROPE,
    "deepseek_v3": _NO_ROPE,
    "deepseek_v4": f"rope=False {_LOSSES} rms_norm=True swiglu=False model",
    "exaone4": _SWIGLU,
    "falcon_h1": _SWIGLU,
    "gemma": _GEGLU,
    "gemma2": _GEGLU,
    "gemma3": f"rope=True {_LOSSES} layer_norm=True rms_norm=True geglu=True model",
    "gemma3_text": _GEGLU,
    "gemma4": f"rope=False {_LOSSES} layer_norm=False rms_norm=True geglu=True model",
    "gemma4_text": f"rope=False {_LOSSES} rms_norm=True geglu=True model",
    "glm4": _NO_ROPE,
    "glm4v": _NO_ROPE,
    "glm4v_moe": _NO_ROPE,
    "gpt_oss": f"rope=True {_LOSSES} rms_norm=True swiglu=False model",
    "granite": "rope=True cross_entropy=True fused_linear_cross_entropy=False rms_norm=True swiglu=True model",
    "hunyuan_v1_dense": _SWIGLU,
    "hunyuan_v1_moe": _SWIGLU,
    "internvl": f"{_LOSSES} rms_norm=True layer_norm=True model **",
    "llama": _SWIGLU,
    "llama4": f"rope=True {_LOSSES} rms_norm=True swiglu=True model layer_norm=True",
    "llava": f"{_LOSSES} model **",
    "ministral": _SWIGLU,
    "mistral": _SWIGLU,
    "mixtral": _SWIGLU,
    "mllama": f"rope=True {_LOSSES} layer_norm=True rms_norm=True swiglu=True model",
    "muse_glimmer": f"rope=True {_LOSSES} layer_norm=True rms_norm=True swiglu=True model",
    "nemotron": f"relu_squared=True {_LOSSES} model **",
    "olmo2": _SWIGLU,
    "olmo3": _SWIGLU,
    "paligemma": f"rope=True {_LOSSES} layer_norm=True rms_norm=True geglu=True model",
    "phi3": _SWIGLU,
    "pixtral": "rope=True rms_norm=True swiglu=True model",
    "qwen2": _SWIGLU,
    "qwen2_5_vl": _SWIGLU,
    "qwen2_vl": f"rope=True {_LOSSES} rms_norm=True layer_norm=True swiglu=True model",
    "qwen3": _SWIGLU,
    "qwen3_5": _NO_ROPE,
    "qwen3_5_moe": _NO_ROPE,
    "qwen3_moe": _SWIGLU,
    "qwen3_next": _NO_ROPE,
    "qwen3_vl": f"rope=True {_LOSSES} rms_norm=True swiglu=False model",
    "qwen3_vl_moe": _SWIGLU,
    "smollm3": _SWIGLU,
    "smolvlm": f"{_LOSSES} rms_norm=True layer_norm=True model **",
}
# Model types that are built under other names than their function's.
_TYPES: dict[str, tuple[str, ...]] = {
    "llama4": ("llama4_text", "llama4"),
    "mllama": ("mllama", "mllama_text_model"),
    **{
        name: (name, f"{name}_text")
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
    },
}
PREFIX = "apply_liger_kernel_to_"


def _parameters(keywords: str) -> Iterator[inspect.Parameter]:
    for word in keywords.split():
        name, _, default = word.partition("=")
        if name == "**":
            yield inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
        else:
            value = {"": None, "True": True, "False": False}[default]
            yield inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value)


def _make(name: str, keywords: str) -> Callable[..., Applied | Armed]:
    signature = inspect.Signature(list(_parameters(keywords)))
    types = _TYPES.get(name, (name,))

    def function(*args: Any, **kwargs: Any) -> Applied | Armed:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        model = given.pop("model")
        # Where liger-kernel takes further keywords it hands them to the language model's own function.
        given.update(given.pop("kwargs", {}))
        return _apply(types, model, _chosen(given, {}))

    function.__name__ = function.__qualname__ = PREFIX + name
    function.__module__ = __name__
    function.__doc__ = (
        f"Apply to models of type {', '.join(types)}: to ``model``, or else to those built until ``revert()``.\n\n"
        "Keywords and defaults are liger-kernel's; True lets the operation be used where the model is recognised to\n"
        "compute it. Returns a handle with ``report`` and ``revert()``. Raises AdapterError as ``apply`` does.\n"
    )
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _lenient(keywords: Mapping[str, bool]) -> dict[str, bool | None]:
    """liger-kernel's True says what to use where it is, and makes no absent layer an error; but a loss it chooses."""
    # None is what its False is: callers hand on settings that nobody has made.
    return {name: None if value and name != "cross_entropy" else bool(value) for name, value in keywords.items()}


def _chosen(defaults: Mapping[str, bool], given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of ``apply``: those given over liger-kernel's."""
    from liger_registry.transformers.engine.apply import check_losses

    both = {**defaults, **given}
    check_losses(both.get("cross_entropy"), both.get("fused_linear_cross_entropy"))
    return {**_lenient(defaults), **given}


def _apply(types: tuple[str, ...], model: nn.Module | None, options: dict[str, Any]) -> Applied | Armed:
    from liger_registry.transformers.engine.apply import applied_to, apply
    from liger_registry.transformers.engine.hook import arm

    if model is None:
        return arm(types, options)
    first = applied_to(model) if hasattr(model, "__dict__") else None  # `apply` says what is no model
    if first is not None and not options.get("strict") and set(options) <= keywords():
        # As liger-kernel's do, calls add up: a Trainer applies to a model that was built with the operations in it.
        if all(options.get(op) is False for op in first.left_out):
            return first
        options = {op: None if value is False and op not in first.left_out else value for op, value in options.items()}
        first.revert()
    return apply(model, **options)


FUNCTIONS: dict[str, Callable[..., Any]] = {name: _make(name, keywords) for name, keywords in _KEYWORDS.items()}
MODEL_TYPE_TO_APPLY_LIGER_FN: dict[str, Callable[..., Any]] = {
    model_type: function for name, function in FUNCTIONS.items() for model_type in _TYPES.get(name, (name,))
}


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith(PREFIX) and name[len(PREFIX) :] in FUNCTIONS:
        return FUNCTIONS[name[len(PREFIX) :]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def keywords() -> set[str]:
    """The names that ``apply`` takes."""
    from liger_registry.transformers.engine.adapters import adapters
    from liger_registry.transformers.engine.apply import apply

    named = {p.name for p in inspect.signature(apply).parameters.values() if p.kind is p.KEYWORD_ONLY}
    return named | set(adapters().ops)


def _defaults(model_type: str) -> dict[str, bool]:
    """liger-kernel's defaults for a type; none for a type that it does not know."""
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    parameters = inspect.signature(function).parameters.values() if function is not None else ()
    return {p.name: p.default for p in parameters if p.name not in ("model", "kwargs")}


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> Armed | None:
    """Apply to the models of a type that are built from now on, with keywords of ``apply`` over the type's defaults."""
    if not model_type:
        return None
    types = next((t for name in FUNCTIONS if model_type in (t := _TYPES.get(name, (name,)))), (model_type,))
    armed: Any = _apply(types, None, _chosen(_defaults(model_type), kwargs))
    return armed  # type: ignore[no-any-return]


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> Applied | None:
    """Apply to a model by its type; what ``transformers.Trainer`` calls for ``use_liger_kernel=True``."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if not model_type:
        warnings.warn(
            f"{type(model).__name__} has no config.model_type; nothing was applied to it", RegistryWarning, stacklevel=2
        )
        return None
    applied: Any = _apply((model_type,), model, _chosen(_defaults(model_type), kwargs))
    return applied  # type: ignore[no-any-return]
