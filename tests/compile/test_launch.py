from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from liger_registry import compile as compiling
from liger_registry.compile import Compiled, Target, compile_record, fits, target_of
from liger_registry.compile_pool import compile_many
from liger_registry.errors import CompileError, UnknownDeviceError
from liger_registry.launch import launch, record
from liger_registry.records import LaunchRecord

KERNELS = """
import triton
import triton.language as tl

SHIFT = tl.constexpr(1.0)

@triton.jit
def twice(v):
    return v * 2 + SHIFT

@triton.jit
def scale(x, y, n, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y + offsets, twice(tl.load(x + offsets, mask=mask).to(tl.float32)) * factor, mask=mask)

@triton.jit
def matmul(x, w, y, n, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros([M, N], tl.float32)
    for start in tl.range(0, n, K):
        a = tl.load(x + rows[:, None] * n + start + inner[None, :])
        b = tl.load(w + (start + inner)[:, None] * N + columns[None, :])
        total = tl.dot(a, b, total)
    tl.store(y + rows[:, None] * N + columns[None, :], total)

@triton.jit
def wrong(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), undefined)
"""
DEADLY = """
import multiprocessing, os
if multiprocessing.parent_process() is not None:
    os._exit(3)
import triton
import triton.language as tl

@triton.jit
def kernel(x, BLOCK: tl.constexpr):
    pass
"""
SM80, SM90, GFX942 = Target("cuda", 80, 32), Target("cuda", 90, 32), Target("hip", "gfx942", 64)
TARGETS = pytest.mark.parametrize("target", [SM80, SM90, GFX942], ids=str)


def device(vendor="cuda", arch="sm_80", shared_memory=166912, max_threads=1024, warp_size=32):
    limits = SimpleNamespace(shared_memory=shared_memory, max_threads=max_threads, warp_size=warp_size)
    return SimpleNamespace(vendor=vendor, emulates=vendor, arch=arch, sku="test", limits=limits)


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    directory = tmp_path / "kernels"
    directory.mkdir()
    (directory / "compile_kernels.py").write_text(KERNELS)
    (directory / "deadly_kernels.py").write_text(DEADLY)
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    names = ("compile_kernels", "deadly_kernels")
    for name in names:
        sys.modules.pop(name, None)
    yield SimpleNamespace(**vars(importlib.import_module(names[0])), deadly=importlib.import_module(names[1]).kernel)
    for name in names:
        sys.modules.pop(name, None)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def record_scale(kernels, aligned=True, n=4096, block=1024, **options) -> LaunchRecord:
    with record(aligned) as records:
        launch(kernels.scale, (4,), empty(n), empty(n, dtype=torch.float32), n, 1.5, BLOCK=block, **options)
    return records[0]


@TARGETS
def test_a_small_kernel_compiles(kernels, target):
    compiled = compile_record(record_scale(kernels, num_warps=4), target)
    assert compiled.kernel == "compile_kernels:scale"
    assert compiled.threads == 4 * target.warp_size
    assert 0 < compiled.registers <= 256
    assert compiled.spills == 0
    assert compiled.binary_bytes > 1000


@TARGETS
def test_shared_memory_shows_only_with_the_alignment_of_a_launch(kernels, target):
    needed = {}
    for aligned in (True, False):
        with record(aligned) as records:
            launch(
                kernels.matmul,
                (1,),
                empty(128, 8192),
                empty(8192, 256),
                empty(128, 256),
                8192,
                M=128,
                N=256,
                K=128,
                num_warps=8,
                num_stages=4,
            )
        needed[aligned] = compile_record(records[0], target)
    limit = {80: 166912, 90: 232448, "gfx942": 65536}[target.arch]
    there = device(shared_memory=limit)
    assert "bytes of shared memory" in fits(needed[True], there)
    assert fits(needed[False], there) is None


def test_spilled_registers_are_counted_and_still_fit(kernels):
    compiled = compile_record(record_scale(kernels, block=8192, n=8192, num_warps=1, maxnreg=32), SM80)
    assert compiled.registers == 32
    assert compiled.spills > 50
    assert fits(compiled, device()) is None


def test_fits_looks_at_threads():
    compiled = Compiled("a:b", 32, 0, 0, 2048, 1, "")
    assert "2048 threads" in fits(compiled, device())


def test_targets_of_devices():
    assert target_of(device(arch="sm_90")) == SM90
    assert target_of(device("rocm", "gfx942", warp_size=64)) == GFX942
    with pytest.raises(UnknownDeviceError):
        target_of(device("cpu", "x86_64"))


@TARGETS
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("n", [1, 4096, 4097, 2**31])
def test_key_in_tritons_cache_is_that_of_its_own_warmup(kernels, monkeypatch, target, aligned, n):
    """``kernel.warmup`` is ``run`` without the launch; a stand-in driver answers for the GPU that is not there."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Driver:
        def get_current_target(self):
            return GPUTarget(target.backend, target.arch, target.warp_size)

        def get_current_device(self):
            return str(target)

        def get_current_stream(self, device):
            return 0

    one = record_scale(kernels, aligned, n=n, num_warps=4)
    x, y = (compiling._Pointer(argument) for argument in one.arguments[:2])
    compiled = compile_record(one, target)
    monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", Driver())
    warm = kernels.scale.warmup(x, y, n, 1.5, grid=(4,), BLOCK=1024, num_warps=4)
    assert warm.hash == compiled.hash


def test_results_are_kept_and_read_back(kernels, tmp_path, monkeypatch):
    one, cache = record_scale(kernels), tmp_path / "results"
    first = compile_record(one, SM80, cache)
    (file,) = cache.rglob("*.json")
    monkeypatch.setattr(compiling, "_compile", lambda *args: pytest.fail("compiled again"))
    assert compile_record(one, SM80, cache) == first
    other = record_scale(kernels, n=8192)  # another value, the same specialisation
    assert compile_record(other, SM80, cache) == first
    monkeypatch.undo()
    for damage in (b"", b"{", b"[]", b"\x00\xff", b'{"kernel": 1}'):
        file.write_bytes(damage)
        monkeypatch.syspath_prepend(str(tmp_path / "kernels"))
        assert compile_record(one, SM80, cache).registers == first.registers


def test_another_source_has_another_result(kernels, tmp_path):
    one, cache = record_scale(kernels), tmp_path / "results"
    for target in (SM80, SM90):
        compile_record(one, target, cache)
    compile_record(record_scale(kernels, aligned=False), SM80, cache)
    compile_record(record_scale(kernels, n=4097), SM80, cache)
    compile_record(record_scale(kernels, num_warps=8), SM80, cache)
    assert len(list(cache.rglob("*.json"))) == 5
    source = tmp_path / "kernels" / "compile_kernels.py"
    source.write_text(source.read_text().replace("v * 2", "v * 3"))  # in a function that the kernel calls
    sys.modules.pop("compile_kernels")
    importlib.invalidate_caches()
    compile_record(one, SM80, cache)
    assert len(list(cache.rglob("*.json"))) == 6


def test_unwritable_cache_costs_nothing_but_the_next_compile(kernels, tmp_path):
    (tmp_path / "file").write_text("")
    assert compile_record(record_scale(kernels), SM80, tmp_path / "file").registers


def test_failures_are_named_and_kept(kernels, tmp_path, monkeypatch):
    with record() as records:
        launch(kernels.wrong, (1,), empty(64), BLOCK=64)
        launch(kernels.scale, (1,), empty(64), empty(64), 64, 1.0, BLOCK=63)
    for one, said in zip(records, ("undefined", "power of 2"), strict=True):
        with pytest.raises(CompileError, match=one.kernel) as caught:
            compile_record(one, SM80, tmp_path)
        assert f"BLOCK={dict(one.constexprs)['BLOCK']}" in caught.value.why
        assert said in caught.value.why
        with monkeypatch.context() as patch:
            patch.setattr(compiling, "_compile", lambda *args: pytest.fail("compiled again"))
            with pytest.raises(CompileError, match="found earlier") as again:
                compile_record(one, SM80, tmp_path)
        assert again.value.why == caught.value.why
    for missing in ("no_such_module:kernel", "compile_kernels:no_such_kernel", "compile_kernels:SHIFT"):
        with pytest.raises(CompileError):
            compile_record(LaunchRecord(missing, (1,), (), (), ()), SM80)


def test_failures_of_this_machine_are_not_kept(kernels, tmp_path, monkeypatch):
    def no_linker(*args):
        raise FileNotFoundError("no linker")

    with monkeypatch.context() as patch:
        patch.setattr(compiling, "_compile", no_linker)
        with pytest.raises(CompileError, match="no linker"):
            compile_record(record_scale(kernels), SM80, tmp_path / "results")
    assert compile_record(record_scale(kernels), SM80, tmp_path / "results").registers


def test_many_compile_in_workers_of_which_one_dies(kernels, tmp_path):
    with record() as deadly:
        launch(kernels.deadly, (1,), empty(64), BLOCK=64)
    with record() as wrong:
        launch(kernels.wrong, (1,), empty(64), BLOCK=64)
    good = record_scale(kernels)
    records = [good, *deadly, *wrong, good, record_scale(kernels, num_warps=8)]
    found = compile_many(records, SM80, processes=1, cache_dir=tmp_path / "results")
    assert [type(f) for f in found] == [Compiled, CompileError, CompileError, Compiled, Compiled]
    assert "exit code 3" in found[1].why
    assert "undefined" in found[2].why
    assert found[0] is found[3]
    assert found[0].threads == 128
    assert found[4].threads == 256
    assert found[0] == compile_record(good, SM80, tmp_path / "results")


def test_a_compile_that_hangs_fails_alone(kernels):
    (found,) = compile_many([record_scale(kernels)], SM80, timeout_s=0.01)
    assert "not done after 0.01 s" in found.why
