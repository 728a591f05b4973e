"""What programs that import ``liger_kernel`` take from its ``utils`` modules, for device code of their own."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import torch
from packaging.version import Version

from liger_registry.errors import InvalidInputError, UnknownDeviceError

PEFT_AVAILABLE = importlib.util.find_spec("peft") is not None
#: No implementation of liger-kernel's own is here to be chosen.
IMPL_REGISTRY: dict[str, Any] = {}
LIGER_KERNEL_IMPL_ENV = "LIGER_KERNEL_IMPL"
#: The largest block of ``calculate_settings``.
_LARGEST = 65536


def is_peft_available() -> bool:
    """Whether PEFT is installed."""
    return PEFT_AVAILABLE


def is_transformers_available() -> bool:
    """Whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def is_hip() -> bool:
    """Whether torch was built for AMD's GPUs."""
    return torch.version.hip is not None


def is_npu_available() -> bool:
    """Whether torch has an Ascend NPU at hand."""
    npu = getattr(torch, "npu", None)
    return npu is not None and bool(npu.is_available())


def infer_device() -> str:
    """The kind of device that torch has at hand: ``cuda`` (AMD's GPUs too), ``npu``, ``xpu`` or ``cpu``."""
    if torch.cuda.is_available():
        return "cuda"
    if is_npu_available():
        return "npu"
    return "xpu" if torch.xpu.is_available() else "cpu"


def infer_comm_backend() -> str:
    """The name of the backend for collectives on that device.

    Raises:
        UnknownDeviceError: torch was built without any.
    """
    of_devices = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl"}
    distributed = torch.distributed
    if distributed.is_available():
        if distributed.is_nccl_available():
            return "nccl"
        kind = infer_device()
        if kind in ("npu", "xpu"):
            return of_devices[kind]
        for name, there in (("mpi", distributed.is_mpi_available()), ("gloo", distributed.is_gloo_available())):
            if there:
                return name
    raise UnknownDeviceError("torch has no backend for collectives", fix="install a build with torch.distributed")


def get_total_gpu_memory() -> int:
    """The memory of the first device, in GiB rounded down.

    Raises:
        UnknownDeviceError: there is only a CPU.
    """
    kind = infer_device()
    if kind == "cpu":
        raise UnknownDeviceError("there is no GPU whose memory could be asked for", fix="run it where there is one")
    memory: int = getattr(torch, kind).get_device_properties(0).total_memory
    return memory // 2**30


def transformers_version_dispatch(
    required_version: str,
    before_fn: Callable[..., Any],
    after_fn: Callable[..., Any],
    before_args: tuple[Any, ...] = (),
    after_args: tuple[Any, ...] = (),
    before_kwargs: dict[str, Any] | None = None,
    after_kwargs: dict[str, Any] | None = None,
) -> Any:  # noqa: ANN401
    """What one of two functions returns, by the version of transformers that is installed.

    Args:
        required_version: the first one with which ``after_fn`` is called.
        before_fn: called with older ones.
        after_fn: called with this and newer ones.
        before_args: of ``before_fn``.
        after_args: of ``after_fn``.
        before_kwargs: of ``before_fn``.
        after_kwargs: of ``after_fn``.
    """
    if Version(metadata.version("transformers")) < Version(required_version):
        return before_fn(*before_args, **(before_kwargs or {}))
    return after_fn(*after_args, **(after_kwargs or {}))


def compare_version(package: str, operator: Callable[[Version, Version], bool], target: str) -> bool:
    """Whether a package can be imported and its version compares so with another; ``operator.ge`` for "at least"."""
    try:
        module = importlib.import_module(package)
    except ImportError:
        return False
    return operator(Version(module.__version__), Version(target))


def calculate_settings(n: int) -> tuple[int, int]:
    """A block that holds n elements, and warps for it: 4, 8 from 2,048 elements on, 16 from 8,192, 32 from 32,768.

    On AMD's GPUs, whose warps are wider, there are never more than 16.

    Raises:
        InvalidInputError: more elements than a block may have.
    """
    block = 1 << max(0, n - 1).bit_length()
    if block > _LARGEST:
        raise InvalidInputError(
            f"a block of {n} elements is too large", why=f"the most is {_LARGEST}", fix="split the row over blocks"
        )
    warps = next(w for least, w in ((32768, 32), (8192, 16), (2048, 8), (0, 4)) if block >= least)
    return block, min(warps, 16) if is_hip() else warps


@contextmanager
def device_context(device: torch.device | str | int) -> Iterator[None]:
    """Makes a device the current one of its kind; nothing on the CPU."""
    found = torch.device(device)
    kind = getattr(torch, found.type, None)
    if kind is None or not hasattr(kind, "device"):
        yield
        return
    with kind.device(found):
        yield


def ensure_contiguous(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A forward or backward of an autograd function that is called with contiguous tensors."""

    def contiguous(value: Any) -> Any:  # noqa: ANN401
        return value.contiguous() if isinstance(value, torch.Tensor) else value

    @functools.wraps(fn)
    def wrapper(ctx: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return fn(ctx, *map(contiguous, args), **{name: contiguous(value) for name, value in kwargs.items()})

    return wrapper


def get_amp_custom_fwd_bwd() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """torch's decorators for forward and backward of autograd functions under autocast, for the device at hand."""
    kind = infer_device()
    return (
        functools.partial(torch.amp.custom_fwd, device_type=kind),
        functools.partial(torch.amp.custom_bwd, device_type=kind),
    )


def _triton_dtypes() -> dict[torch.dtype, Any]:
    language = importlib.import_module("triton.language")
    return {torch.float32: language.float32, torch.float16: language.float16, torch.bfloat16: language.bfloat16}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - what imports Triton, transformers, or asks the device
    if name == "torch_to_triton_dtype":
        return _triton_dtypes()
    if name in ("amp_custom_fwd", "amp_custom_bwd"):
        return get_amp_custom_fwd_bwd()[name == "amp_custom_bwd"]
    if name == "transformer_version":
        return Version(metadata.version("transformers"))
    if name == "IS_TRANSFORMERS_V5_OR_LATER":
        return Version(metadata.version("transformers")) >= Version("5.0.0")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
