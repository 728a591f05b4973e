from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import triton
import triton.language as tl

from liger_registry.compile import Target, compile_record
from liger_registry.errors import DeviceMismatchError
from liger_registry.launch import NotLoaded, launch, record


@triton.jit
def scale(x, y, n, factor, BLOCK: tl.constexpr, SQUARE: tl.constexpr = False):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    value = tl.load(x + offsets, mask=mask).to(tl.float32) * factor
    if SQUARE:
        value *= value
    tl.store(y + offsets, value, mask=mask)


@triton.jit
def slow_add(x, n, rounds, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < n)
    for _ in range(rounds):
        value = value * 1.0 + 1.0
    tl.store(x + offsets, value, mask=offsets < n)


@pytest.fixture
def through_triton(monkeypatch):
    """Counts launches of `scale` that go through Triton's own run."""
    count = []
    run = type(scale).run

    def counted(self, *args, **keywords):
        count.append(keywords["grid"])
        return run(self, *args, **keywords)

    monkeypatch.setattr(type(scale), "run", counted)
    return count


def check(x, y, factor=2.0, **keywords):
    y.fill_(-1)
    launch(scale, (triton.cdiv(x.numel(), 1024),), x, y, x.numel(), factor, BLOCK=1024, **keywords)
    expected = x.float() * factor
    torch.testing.assert_close(y, expected * expected if keywords.get("SQUARE") else expected)


def test_second_launch_is_prepared(through_triton):
    x, y = torch.randn(5000, device="cuda"), torch.empty(5000, device="cuda")
    check(x, y, num_warps=2)
    first = len(through_triton)
    check(x, y, num_warps=2)
    check(x * 2, y, num_warps=2, factor=-0.1)
    assert len(through_triton) == first
    check(x, y, num_warps=2, SQUARE=True)
    assert len(through_triton) == first + 1


def test_misaligned_views_after_an_aligned_call():
    for dtype in (torch.bfloat16, torch.float32):
        flat, out = torch.randn(4104, device="cuda").to(dtype), torch.empty(4104, device="cuda")
        for skip in (0, 1, 0, 2, 3, 8):
            check(flat[skip : skip + 4096], out[:4096])
            check(flat[:4096], out[skip : skip + 4096])


@pytest.mark.parametrize("n", [1, 16, 17, 1000])
def test_ints_of_every_class_after_each_other(n):
    for count in (n, 1, 32, n):
        check(torch.randn(count, device="cuda"), torch.empty(count, device="cuda"))


def test_key_of_an_offline_compile_is_that_of_the_launch(through_triton, monkeypatch):
    hashes = []
    kernel_class = type(scale)
    run = kernel_class.run

    def kept(self, *args, **keywords):
        compiled = run(self, *args, **keywords)
        hashes.append(compiled.hash)
        return compiled

    monkeypatch.setattr(kernel_class, "run", kept)
    major, minor = torch.cuda.get_device_capability()
    target = Target("cuda", major * 10 + minor, 32)
    monkeypatch.setattr("liger_registry.compile._find", lambda name: scale)
    for skip, aligned in ((0, True), (1, False)):
        flat = torch.randn(2048, device="cuda")
        x, y = flat[skip : skip + 1000], flat[skip + 1024 : skip + 2024]
        launch(scale, (1,), x, y, 1000, 3.0, BLOCK=1024, num_warps=8, num_stages=2)
        with record(aligned) as records:
            launch(scale, (1,), torch.empty(1000, device="meta"), torch.empty(1000, device="meta"), 1000, 3.0,
                   BLOCK=1024, num_warps=8, num_stages=2)  # fmt: skip
        assert compile_record(records[0], target).hash == hashes[-1]
    assert len(hashes) == 2


def test_capture_takes_what_is_loaded_and_compiles_nothing():
    x, y = torch.randn(2048, device="cuda"), torch.zeros(2048, device="cuda")
    check(x, y, num_warps=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(scale, (2,), x, y, 2048, 2.0, BLOCK=1024, num_warps=1)
        with pytest.raises(NotLoaded):
            launch(scale, (4,), x, y, 2048, 2.0, BLOCK=512, num_warps=16)
    y.zero_()
    x.copy_(torch.randn(2048, device="cuda"))
    graph.replay()
    torch.testing.assert_close(y, x * 2)
    launch(scale, (4,), x, y, 2048, 2.0, BLOCK=512, num_warps=16)
    torch.testing.assert_close(y, x * 2)


def test_launches_go_to_the_current_stream():
    rounds = 2_000_000
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    tensors = [torch.zeros(1024, device="cuda") for _ in streams]
    launch(slow_add, (1,), tensors[0], 1024, 17, BLOCK=1024)
    tensors[0].zero_()
    torch.cuda.synchronize()
    for stream, x in zip(streams, tensors, strict=True):
        with torch.cuda.stream(stream):
            launch(slow_add, (1,), x, 1024, rounds + 1, BLOCK=1024)  # long enough to be seen unfinished
    assert torch.cuda.default_stream().query()
    assert not streams[0].query()
    for stream, x in zip(streams, tensors, strict=True):
        with torch.cuda.stream(stream):
            launch(slow_add, (1,), x, 1024, 17, BLOCK=1024)
    torch.cuda.synchronize()
    for x in tensors:
        assert torch.equal(x, torch.full_like(x, rounds + 18))


def test_tensors_on_the_cpu_are_named():
    with pytest.raises(DeviceMismatchError, match="cpu"):
        launch(scale, (1,), torch.zeros(4), torch.zeros(4), 4, 1.0, BLOCK=16)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_tensors_own_device_is_used():
    with torch.cuda.device(0):
        for index in (1, 0, 1):
            x = torch.randn(3000, device=f"cuda:{index}")
            check(x, torch.empty_like(x))
            assert torch.cuda.current_device() == 0


def test_hooks_see_every_launch(through_triton):
    x, y = torch.randn(1024, device="cuda"), torch.empty(1024, device="cuda")
    seen = []
    check(x, y)
    before = len(through_triton)
    hook = triton.knobs.runtime.launch_enter_hook
    if not hasattr(hook, "add"):
        pytest.skip("this Triton has no hook chains")
    hook.add(seen.append)
    try:
        check(x, y)
    finally:
        hook.remove(seen.append)
    assert len(seen) == 1
    assert len(through_triton) == before + 1
    check(x, y)
    assert len(through_triton) == before + 1
