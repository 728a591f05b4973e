"""A small operation, implementations of it, tables about them, and plugins that are not installed."""

from __future__ import annotations

import sys
from importlib import metadata

import torch

from liger_registry import Capability, Catalog, Config, ConfigSpace, Device, Implementation, Problem
from liger_registry.config import Fields
from liger_registry.decision import CLUSTER, SHIPPED_TABLES, USER, Source
from liger_registry.dispatch import Dispatcher
from liger_registry.examples import fill
from liger_registry.implementation import OWN_DISTRIBUTION, source_hash
from liger_registry.launch import triton_version
from liger_registry.op import Description, DimKind, Input, Op, Option, Scheme
from liger_registry.problem import BACKWARD, FORWARD
from liger_registry.store import TableStore
from liger_registry.table import Choice, Provenance, Sample, Stored

H100, H200, MI300X, CPU = (Device.parse(name) for name in ("h100-sxm", "h200", "mi300x", "cpu"))


def reference(x, w=None, gain=1.0, style="plain", steps=1, exact=False):
    return gain * x if w is None else gain * x * w


def describe(inputs, options):
    x, w = inputs
    return Description(
        Fields(rows=x.shape[:-1].numel(), hidden=x.shape[-1]),
        Fields(x=str(x.dtype)[6:], w="none" if w is None else str(w.dtype)[6:]),
        Fields(style=options["style"]),
    )


def magnitude(inputs, grad_outputs, options):
    (x, w), (dy,) = inputs, grad_outputs
    y = reference(x, w, **options)
    sizes = {"y": y.abs(), "grad_x": (dy if w is None else dy * w).abs()}
    if w is not None:
        sizes["grad_w"] = (dy * x).reshape(-1, x.shape[-1]).abs().sum(0)
    return sizes


def example(problem, device, seed=0, style="random"):
    x = fill((problem.rows, problem.hidden), getattr(torch, problem.dtypes["x"]), device, seed, style)
    if problem.dtypes["w"] == "none":
        return x, None
    return x, fill((problem.hidden,), getattr(torch, problem.dtypes["w"]), device, seed + 1)


def make_op(name="affine", **changes):
    fields = {
        "name": name,
        "inputs": (Input("x"), Input("w", optional=True)),
        "options": (
            Option("gain", float, 1.0, minimum=0.0),
            Option("style", str, "plain", choices=("plain", "fancy")),
            Option("steps", int, 1, minimum=1),
            Option("exact", bool, False),
        ),
        "outputs": ("y",),
        "schemes": (
            Scheme(
                "default",
                ("x", "w"),
                (),
                lambda x, w, **options: (torch.empty_like(x),),
                lambda x, w, **options: (reference(x, w, **options),),
            ),
        ),
        "dims": {"rows": DimKind.BUCKET, "hidden": DimKind.EXACT},
        "validate": lambda inputs, options: None,
        "describe": describe,
        "reference": reference,
        "magnitude": magnitude,
        "reduced": {"y": (), "grad_x": (), "grad_w": ("rows",)},
        "example": example,
        "proxies": lambda problem: ({"rows": 5}, {"rows": 1}),
        "calls": lambda architecture, tokens, dtype: (),
        "order": {FORWARD: ("tiled", "plain"), BACKWARD: ("tiled", "plain")},
    }
    return Op(**{**fields, **changes})


def forward(x, w, *, device, gain, style, steps, exact, block=0):
    return (reference(x, w, gain),)


def backward(dy, x, w, *, device, needs, gain, style, steps, exact, block=0):
    dx = (gain * dy if w is None else gain * dy * w) if needs[0] else None
    dw = (gain * dy * x).reshape(-1, x.shape[-1]).sum(0) if needs[1] and w is not None else None
    return dx, dw


def implementation(name, phase=FORWARD, vendor="any", op="affine", **fields):
    launch = forward if phase == FORWARD else backward
    return Implementation(
        **{"op": op, "phase": phase, "name": name, "launch": launch, "capability": Capability(vendor), **fields}
    )


SPACE = ConfigSpace(block=[32, 64, 128]).where(lambda c, p, d: c.block <= p.hidden, "the block is wider than the row")


def tiled(phase=FORWARD, vendor="cuda", **fields):
    """An implementation with a space; 100 bytes for each unit of its block."""
    return implementation(
        "tiled",
        phase,
        vendor,
        **{
            "space": SPACE,
            "heuristic": lambda problem, device: Config(block=32),
            "extra_bytes": lambda problem, config: 100 * config.block,
            **fields,
        },
    )


def catalog(*plugins, op=None, own=None):
    """The fake operation, its own implementations, and those that a plugin's distribution registers."""
    made = Catalog()
    if own is None:
        own = [
            tiled(),
            tiled(BACKWARD),
            tiled(vendor="rocm"),
            implementation("plain"),
            implementation("plain", BACKWARD),
        ]
    with made.stage(OWN_DISTRIBUTION) as staging:
        for item in (op or make_op(), *own):
            staging.register(item)
    if plugins:
        with made.stage("a-plugin") as staging:
            for item in plugins:
                staging.register(item)
    return made


def problem(rows=1024, hidden=256, phase=FORWARD, **flags):
    if phase == BACKWARD:
        flags.setdefault("needs", "x,w")
    sizes = Fields(rows=rows, hidden=hidden)
    return Problem(
        "affine", "default", phase, sizes, Fields(x="bfloat16", w="bfloat16"), Fields(style="plain", **flags)
    )


def provenance(launch=forward, triton=None, source=None):
    return Provenance(triton or triton_version(), source or source_hash(launch), date="2026-01-01T00:00:00Z")


def protocol(wanted):
    """That of the device a problem is asked for on: a GPU for ``affine``, the CPU for what registries run."""
    return (H200 if wanted.op == "affine" else CPU).protocol


def stored(wanted, implementation="cuda:tiled", block=64, time_us=10.0, **changes):
    config = Config() if block is None else Config(block=block)
    choice = Choice(implementation, config)
    return Stored(wanted, choice, time_us, choice, 20.0, 0.01, protocol(wanted), provenance(**changes))


def sample(wanted, implementation="cuda:tiled", block=64, status="ok", time_us=10.0, **changes):
    config = Config() if block is None else Config(block=block)
    time = time_us if status == "ok" else None
    return Sample(wanted, Choice(implementation, config), status, time, 0, "", protocol(wanted), provenance(**changes))


def stores(root):
    """User, cluster and shipped stores below a directory, all of them writable, by kind."""
    return {kind: TableStore(root / kind) for kind in (USER, CLUSTER, SHIPPED_TABLES)}


def dispatcher(root, *plugins, cat=None, **fields):
    kinds = stores(root)
    return Dispatcher(cat or catalog(*plugins), [Source(kind, store) for kind, store in kinds.items()], **fields), kinds


class Distribution(metadata.Distribution):
    """An installed distribution that is not on the disk."""

    def __init__(self, name, version="1.0"):
        self._name, self._version = name, version

    def read_text(self, filename):
        return (
            f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {self._version}\n" if filename == "METADATA" else None
        )

    def locate_file(self, path):
        return path


def entry_point(value, distribution, name="kernels", group="liger_registry.kernels", version="1.0"):
    entry = metadata.EntryPoint(name, value, group)
    vars(entry).update(dist=Distribution(distribution, version))
    return entry


def module(name, api=(1, 0), **attributes):
    """A module in sys.modules; the caller takes it out again."""
    import types

    made = types.ModuleType(name)
    if api is not None:
        made.LIGER_REGISTRY_API = api
    vars(made).update(attributes)
    sys.modules[name] = made
    return made
