"""What is measured: an operation at a size, its fewest bytes and its products.

``bound`` is the least time a call takes: the fewest bytes (each input read once, each output written once) over the
rate of a copy, or the operations of the matrix products over the rate of a large one. The three passes of a
cross-entropy are a read for the sum, a read for the gradient and a write; a loss over a linear head takes three
products, and one more where it has to compute the logits again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

FORWARD, BACKWARD, BOTH, ERROR = "forward", "backward", "both", "error"
#: Bytes of an element in the dtype of all measurements, bf16.
ELEMENT = 2
#: Passes over the (rows, width) elements of one tensor, forward and backward.
PASSES: dict[str, tuple[int, int]] = {
    "rms_norm": (2, 3),
    "layer_norm": (2, 3),
    "fused_add_rms_norm": (4, 4),
    "swiglu": (3, 5),
    "geglu": (3, 5),
    "rope": (2, 2),
    # Backward reads q and k again, and their gradients come and go.
    "qk_norm_rope": (2, 3),
}
CROSS_ENTROPY_PASSES = 3
#: Matrix products of a whole head that forward and backward take together.
PRODUCTS = {"fused_linear_cross_entropy": 3, "linear_logp": 4}
#: Sizes that a run on the CPU takes in place of larger ones.
TINY = {
    "rows": 12,
    "width": 32,
    "vocab": 96,
    "tokens": 24,
    "hidden": 16,
    "batch": 2,
    "length": 8,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
}
NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("rms_norm", "layer_norm", "fused_add_rms_norm", "swiglu", "geglu"), ("rows", "width")),
    **dict.fromkeys(("rope", "qk_norm_rope"), ("batch", "length", "heads", "kv_heads", "head_dim")),
    "cross_entropy": ("rows", "vocab"),
    **dict.fromkeys(PRODUCTS, ("tokens", "hidden", "vocab")),
}


@dataclass(frozen=True, slots=True)
class Case:
    """An operation at a size. What all candidates of it compute is the same.

    Attributes:
        op: the operation.
        sizes: named by ``NAMES[op]``.
        casting: the roundings of a norm.
        offset: what a norm adds to its weight.
        softcap: the cap of logits; 0 for none.
        ignored: the part of the tokens that do not count.
        in_place: whether ours may write the gradient of a cross-entropy into the logits.
        slab_rows: the rows that ours gets a memory budget for, and 16-bit sums; 0 for the default of both.
        turned: whether the gradients of rotated heads come as (batch, heads, tokens, head_dim) lies in memory.
    """

    op: str
    sizes: tuple[int, ...]
    casting: str = "llama"
    offset: float = 0.0
    softcap: float = 0.0
    ignored: float = 0.0
    in_place: bool = False
    slab_rows: int = 0
    turned: bool = False
    names: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.op not in NAMES or len(self.sizes) != len(NAMES[self.op]):
            raise ValueError(f"{self.op} is not measured at {self.sizes}")
        object.__setattr__(self, "names", NAMES[self.op])

    def size(self, name: str) -> int:
        """One of the sizes, by name."""
        return self.sizes[self.names.index(name)]

    @property
    def shape(self) -> str:
        """The sizes as text."""
        if self.op in PRODUCTS:
            return " ".join(f"{letter}{size}" for letter, size in zip("NHV", self.sizes, strict=True))
        return "x".join(map(str, self.sizes))

    @property
    def variant(self) -> str:
        """What tells the case from the plain one of its size."""
        said = [
            f"{self.casting} norm" if self.casting != "llama" else "",
            f"softcap {self.softcap:g}" if self.softcap else "",
            f"{self.ignored:.0%} ignored" if self.ignored else "",
            "in place" if self.in_place else "",
            f"budget for {self.slab_rows} rows" if self.slab_rows else "",
            "gradients contiguous" if self.turned else "",
        ]
        return ", ".join(filter(None, said))

    @property
    def name(self) -> str:
        """What the case is called, unique."""
        return f"{self.op} {self.shape}" + (f" ({self.variant})" if self.variant else "")

    @property
    def linear(self) -> bool:
        """Whether matrix products bound it."""
        return self.op in PRODUCTS

    @property
    def capturable(self) -> bool:
        """Whether every candidate's call can be captured into a graph: losses of others wait for the device."""
        return not (self.linear or self.op == "cross_entropy")

    @property
    def elements(self) -> int:
        """Elements of one pass: of (rows, width), or of all heads."""
        if self.op in ("rope", "qk_norm_rope"):
            batch, length, heads, kv_heads, head_dim = self.sizes
            return batch * length * (heads + kv_heads) * head_dim
        return math.prod(self.sizes[:2]) if not self.linear else self.sizes[0] * self.sizes[2]

    def bytes(self, phase: str) -> int:
        """The fewest bytes that a phase moves; 0 where products bound it."""
        if self.linear:
            return 0
        if self.op == "cross_entropy":
            return CROSS_ENTROPY_PASSES * ELEMENT * self.elements
        forward, backward = PASSES[self.op]
        passes = {FORWARD: forward, BACKWARD: backward, BOTH: forward + backward}[phase]
        return passes * ELEMENT * self.elements

    def flops(self) -> int:
        """Operations of the matrix products of forward and backward together; 0 where bytes bound it."""
        if not self.linear:
            return 0
        counted = self.sizes[0] - self.ignored_tokens
        return PRODUCTS[self.op] * 2 * counted * self.sizes[1] * self.sizes[2]

    @property
    def ignored_tokens(self) -> int:
        """How many tokens do not count."""
        return int(self.ignored * self.sizes[0])

    def bound_ms(self, phase: str, copy_tb_s: float, product_tflop_s: float) -> float:
        """The least time of a phase at the rates of a run, in milliseconds."""
        if self.linear:
            return self.flops() / product_tflop_s / 1e9
        return self.bytes(phase) / copy_tb_s / 1e9

    def tiny(self) -> Case:
        """The same at sizes for which a CPU takes milliseconds."""
        sizes = tuple(min(TINY[name], size) for name, size in zip(self.names, self.sizes, strict=True))
        return replace(self, sizes=sizes, slab_rows=min(self.slab_rows, 8))
