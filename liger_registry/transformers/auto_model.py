"""``AutoLigerKernelForCausalLM``: a causal language model with the registry's operations in it."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM

from liger_registry.transformers.monkey_patch import _apply_liger_kernel_to_instance, keywords


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """``AutoModelForCausalLM`` that applies to each model it makes.

    Keywords of ``apply`` (``rope``, ``rms_norm``, ``swiglu`` ...) go there, all others to transformers. Any model type
    works; what is not recognised stays as it is, and ``applied_to(model).report`` says what was applied. Defaults are
    those of the type's ``apply_liger_kernel_to_*``, and for other types those of ``apply``.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """As of AutoModelForCausalLM."""
        chosen = _chosen(kwargs)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        # With output_loading_info=True it is a pair.
        _apply_liger_kernel_to_instance(loaded[0] if isinstance(loaded, tuple) else loaded, **chosen)
        return loaded

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """As of AutoModelForCausalLM."""
        chosen = _chosen(kwargs)
        model = super().from_config(config, **kwargs)  # type: ignore[no-untyped-call]
        _apply_liger_kernel_to_instance(model, **chosen)
        return model


def _chosen(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take the keywords of ``apply`` out."""
    return {name: kwargs.pop(name) for name in keywords() & set(kwargs)}
