from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
import threading
import timeit
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_registry import launch as launching
from liger_registry._triton import triton_release
from liger_registry.errors import DeviceMismatchError, InvalidInputError
from liger_registry.launch import NotLoaded, interpreting, launch, record, triton_available, triton_version
from liger_registry.records import Argument

pytest.importorskip("triton")

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def plain(x, y, n, eps, BLOCK: tl.constexpr):
    pass

@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["m"])
def marked(x, n, m, BLOCK: tl.constexpr):
    pass

@triton.jit
def woven(x, BLOCK: tl.constexpr, n, HAS: tl.constexpr = True, m=7):
    pass

@triton.jit
def wide(x, w, y, r, z, sx, sy, n, eps, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS: tl.constexpr):
    pass
"""


class Spy:
    """Stands for Triton under kernels: counts what goes through `kernel[grid]` and what goes to the compiled kernel."""

    def __init__(self):
        self.compiled, self.prepared = [], []
        self.capturing = False

    def run(self, *args, grid, warmup, **options):
        self.compiled.append((grid, args, options))
        return SimpleNamespace(run=self.call, function=11, packed_metadata=(4, 1, 0))

    def call(self, *args):
        self.prepared.append(args)


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    (tmp_path / "launch_kernels.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "launch_kernels", raising=False)
    yield importlib.import_module("launch_kernels")
    sys.modules.pop("launch_kernels", None)


@pytest.fixture
def spy(kernels, monkeypatch):
    found = Spy()
    monkeypatch.setattr(launching, "_layouts", {})
    monkeypatch.setattr(launching, "_latest", {})
    monkeypatch.setattr(launching, "_device_calls", lambda: ((lambda: -1), (lambda index: 99), None, False))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    for name in ("plain", "marked", "woven", "wide"):
        getattr(kernels, name).run = found.run
    return found


def aligned(count=64, dtype=torch.float32):
    tensor = torch.zeros(count, dtype=dtype)
    assert tensor.data_ptr() % 16 == 0
    return tensor


def test_imports_and_answers_without_triton():
    program = """
    import sys
    sys.modules["triton"] = None
    import liger_registry.launch as launching, liger_registry.compile as compiling, liger_registry.compile_pool
    assert not launching.triton_available() and not launching.interpreting()
    assert launching.triton_version() == "none"
    from liger_registry.errors import TritonMissingError
    from liger_registry.records import LaunchRecord
    try:
        compiling.compile_record(LaunchRecord("a:b", (1,), (), (), ()), compiling.Target("cuda", 90, 32))
    except TritonMissingError:
        print("named")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout == "named\n", done.stderr


def test_importing_does_not_import_triton():
    program = (
        "import sys, liger_registry.launch as l, liger_registry.compile_pool; l.triton_version(); l.interpreting()"
    )
    subprocess.run([sys.executable, "-c", f"{program}; assert 'triton' not in sys.modules"], check=True, timeout=120)


def test_version_and_interpreter_are_those_of_this_process(monkeypatch):
    import triton

    assert triton_available()
    assert triton_version() == ".".join(triton.__version__.split(".")[:2])
    assert not interpreting()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert interpreting()


# --- recording --------------------------------------------------------------------------------------------------------


def test_record_holds_what_decides_the_binary_and_runs_nothing(kernels):
    x = torch.empty(8, 64, dtype=torch.bfloat16, device="meta")
    with record() as records:
        launch(kernels.plain, (8,), x, None, 64, 1e-6, num_warps=4, BLOCK=128)
        launch(kernels.plain, (0, 3), x, None, 64, 1e-6, num_warps=4, BLOCK=128)
    (one,) = records
    assert one.kernel == "launch_kernels:plain"
    assert one.grid == (8,)
    assert one.arguments == (
        Argument("pointer", "bfloat16"),
        Argument("none"),
        Argument("int", value=16),
        Argument("float"),
    )
    assert (one.constexprs, one.options) == ((("BLOCK", 128),), (("num_warps", 4),))
    assert one.text == "BLOCK=128,num_warps=4"
    assert hash(one) == hash(one)


def test_record_tells_aligned_from_not(kernels):
    x = torch.empty(64, dtype=torch.float32, device="meta")
    for asked, tensor, expected in ((True, x, True), (True, x[1:], False), (True, x[4:], True), (False, x, False)):
        with record(aligned=asked) as records:
            launch(kernels.plain, (1,), tensor, x, 3, 0.5, BLOCK=16)
        assert records[0].arguments[0].aligned is expected


def test_record_knows_storage_beyond_32_bit_offsets():
    assert Argument.of(torch.empty(2**29, device="meta")).small is False
    assert Argument.of(torch.empty(2**29 - 1, device="meta")).small is True


@pytest.mark.parametrize(
    ("value", "stands_for"),
    [
        (1, 1),
        (0, 16),
        (48, 16),
        (7, 17),
        (-16, 16),
        (-3, 17),
        (2**31 - 1, 17),
        (2**31, 2**32 + 16),
        (2**31 + 1, 2**32 + 17),
        (-(2**31) - 16, 2**32 + 16),
        (2**63, 2**63 + 16),
        (2**63 + 1, 2**63 + 17),
    ],
)
def test_record_specialises_ints_by_value(value, stands_for):
    assert Argument.of(value).value == stands_for


def test_record_does_not_tell_apart_what_the_kernel_opts_out_of(kernels):
    x, found = torch.empty(64, device="meta"), []
    for n, m in ((1, 1), (16, 16), (17, 17), (2**31, 17)):
        with record() as records:
            launch(kernels.marked, (1,), x, n, m, BLOCK=64)
        found.append(tuple(a.value for a in records[0].arguments[1:]))
    assert [n for n, _ in found] == [17, 17, 17, 2**32 + 17]
    assert [m for _, m in found] == [1, 16, 17, 17]


def test_recordings_nest_and_belong_to_their_thread(spy, kernels):
    x = aligned()
    with record() as outer:
        with record() as inner:
            launch(kernels.plain, (1,), x, x, 3, 0.5, BLOCK=16)
        thread = threading.Thread(target=launch, args=(kernels.plain, (1,), x, x, 3, 0.5), kwargs={"BLOCK": 16})
        thread.start()
        thread.join()
    assert (len(outer), len(inner), len(spy.compiled)) == (0, 1, 1)
    launch(kernels.plain, (1,), x, x, 3, 0.5, BLOCK=16)
    assert len(spy.prepared) == 1


@pytest.mark.parametrize(
    ("args", "keywords", "said"),
    [
        ((1, 2, 3, 4, 5), {"BLOCK": 1}, "5 arguments"),
        ((1, 2, 3), {"BLOCK": 1}, "lacks parameter 'eps'"),
        ((1, 2, 3, 4), {}, "lacks constexpr parameter 'BLOCK'"),
        ((1, 2, 3, 4), {"BLOCK": 1, "num_warp": 4}, "no keyword 'num_warp'"),
    ],
)
def test_arguments_that_do_not_match_the_kernel(spy, kernels, args, keywords, said):
    with pytest.raises(TypeError, match=said), record():
        launch(kernels.plain, (1,), *args, **keywords)
    with pytest.raises(TypeError, match=said):
        launch(kernels.plain, (1,), *args, **keywords)


def test_only_jit_functions_are_launched():
    with pytest.raises(TypeError, match=r"@triton\.jit alone"):
        launch(SimpleNamespace(fn=test_only_jit_functions_are_launched), (1,))


# --- grids and devices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "grid", [(2**31,), (1, 65536), (1, 1, 65536), (65536, 32768), (65536, 65535), (-1,), (), (1,) * 4]
)
def test_grids_beyond_the_limits_are_refused(spy, kernels, grid):
    with pytest.raises(InvalidInputError):
        launch(kernels.plain, grid, aligned(), None, 3, 0.5, BLOCK=16)
    with record() as records, pytest.raises(InvalidInputError):
        launch(kernels.plain, grid, aligned(), None, 3, 0.5, BLOCK=16)
    assert not records
    assert not spy.compiled


@pytest.mark.parametrize("grid", [(0,), (3, 0), (0, 65536), (4, 2, 0)])
def test_empty_grids_launch_nothing(spy, kernels, grid):
    launch(kernels.plain, grid, aligned(), None, 3, 0.5, BLOCK=16)
    assert not spy.compiled


def test_grid_arrives_as_three_sizes(spy, kernels):
    for grid, sizes in (((5,), (5, 1, 1)), ((5, 6), (5, 6, 1)), ((2**31 - 1,), (2**31 - 1, 1, 1))):
        launch(kernels.plain, grid, aligned(), None, 3, 0.5, BLOCK=16)
        launch(kernels.plain, grid, aligned(), None, 3, 0.5, BLOCK=16)
        assert spy.prepared[-1][:3] == sizes


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU changes the answer for the second kernel")
def test_cpu_and_meta_tensors_are_named(kernels):
    for device in ("cpu", "meta"):
        with pytest.raises(DeviceMismatchError, match=device):
            launch(kernels.plain, (1,), torch.zeros(4, device=device), None, 3, 0.5, BLOCK=16)


def test_tensors_of_another_device_get_a_guard(spy, kernels, monkeypatch):
    current = [3]
    monkeypatch.setattr(
        launching, "_device_calls", lambda: ((lambda: current[0]), (lambda index: 40 + index), None, False)
    )

    class Guard:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            self.before, current[0] = current[0], self.index

        def __exit__(self, *exc):
            current[0] = self.before

    class OnDevice(torch.Tensor):
        def get_device(self):
            return 1

    monkeypatch.setattr(torch.cuda, "device", Guard)
    x = aligned().as_subclass(OnDevice)
    for _ in range(2):
        launch(kernels.plain, (1,), x, None, 3, 0.5, BLOCK=16)
    assert spy.prepared[0][3] == 41  # that device's stream
    assert current == [3]


# --- prepared launches ------------------------------------------------------------------------------------------------


def test_second_launch_calls_the_compiled_kernel(spy, kernels):
    x, y = aligned(), aligned()
    for _ in range(3):
        launch(kernels.plain, (7,), x, y, 33, 1e-6, BLOCK=64, num_warps=8)
    assert spy.compiled == [((7, 1, 1), (x, y, 33, 1e-6, 64), {"num_warps": 8})]
    assert spy.prepared == [(7, 1, 1, 99, 11, (4, 1, 0), None, None, None, x, y, 33, 1e-6, 64)] * 2
    assert type(spy.prepared[0][12]) is float


def test_arguments_and_constexprs_interleave_as_in_the_signature(spy, kernels):
    x = aligned()
    for _ in range(2):
        launch(kernels.woven, (1,), x, 33, BLOCK=64)
        launch(kernels.woven, (1,), x, 33, 5, HAS=False, BLOCK=64)
    assert [args for _, args, _ in spy.compiled] == [(x, 64, 33, True, 7), (x, 64, 33, False, 5)]
    assert [args[9:] for args in spy.prepared] == [(x, 64, 33, True, 7), (x, 64, 33, False, 5)]


def variants(spy, kernel, *calls):
    """How many of these launches, each (args, keywords), have a binary of their own."""
    for args, keywords in calls:
        launch(kernel, (1,), *args, **keywords)
    return len(spy.compiled)


def test_misaligned_view_does_not_reuse_the_aligned_kernel(spy, kernels):
    flat = aligned(65)
    assert (
        variants(spy, kernels.plain, *[((t, None, 3, 0.5), {"BLOCK": 16}) for t in (flat[:64], flat[1:], flat[2:66])])
        == 2
    )
    launch(kernels.plain, (1,), flat[:64], flat[1:], 3, 0.5, BLOCK=16)
    launch(kernels.plain, (1,), flat[1:], flat[:64], 3, 0.5, BLOCK=16)
    launch(kernels.plain, (1,), flat[1:], flat[1:], 3, 0.5, BLOCK=16)
    launch(kernels.plain, (1,), flat[:64], flat[:64], 3, 0.5, BLOCK=16)
    assert len(spy.compiled) == 6


def test_ints_floats_dtypes_and_absent_tensors_are_told_apart(spy, kernels):
    x = aligned()
    values = [1, 16, 17, 0, 2**31, 2**31 + 1, 2**63, -16, -5]
    expected = 6  # 1; 16, 0, -16; 17, -5; 2**31; 2**31 + 1; 2**63
    assert variants(spy, kernels.plain, *[((x, None, n, 0.5), {"BLOCK": 16}) for n in values]) == expected
    assert variants(spy, kernels.plain, ((x, None, 17, 2), {"BLOCK": 16})) == expected + 1
    assert variants(spy, kernels.plain, ((x, None, True, 0.5), {"BLOCK": 16})) == expected + 2
    assert variants(spy, kernels.plain, ((x.half(), None, 17, 0.5), {"BLOCK": 16})) == expected + 3
    assert variants(spy, kernels.plain, ((x, x, 17, 0.5), {"BLOCK": 16})) == expected + 4
    assert variants(spy, kernels.plain, *[((x, y, 17, 0.7), {"BLOCK": 16}) for y in (None, x, None, x)]) == expected + 4


def test_constexprs_and_options_are_told_apart_by_type_too(spy, kernels):
    x = aligned()
    calls = [((x, 33), {"BLOCK": 64, "HAS": has}) for has in (True, 1, 1.0, False, 0, None)]
    assert variants(spy, kernels.woven, *calls, *calls) == 6
    assert variants(spy, kernels.woven, ((x, 33), {"BLOCK": 64, "HAS": True, "num_warps": 2})) == 7


def test_marks_of_a_kernel_keep_lengths_from_compiling(spy, kernels):
    x = aligned()
    lengths = [1, 2, 16, 17, 31, 48, 100, 4096]
    assert variants(spy, kernels.marked, *[((x, n, 32), {"BLOCK": 16}) for n in lengths]) == 1
    assert variants(spy, kernels.marked, *[((x, 2, m), {"BLOCK": 16}) for m in lengths]) == 2  # m == 1 is specialised


def test_hooks_see_every_launch(spy, kernels, monkeypatch):
    import triton

    x = aligned()
    call = (kernels.plain, (1,), x, None, 3, 0.5)
    launch(*call, BLOCK=16)
    kernels.plain.pre_run_hooks.append(print)
    launch(*call, BLOCK=16)
    kernels.plain.pre_run_hooks.clear()
    assert (len(spy.compiled), len(spy.prepared)) == (2, 0)
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
        launch(*call, BLOCK=16)
    chain = triton.knobs.runtime.launch_exit_hook
    if hasattr(chain, "add"):
        chain.add(print)
        launch(*call, BLOCK=16)
        chain.remove(print)
        assert len(spy.compiled) == 4
    assert spy.prepared == []
    launch(*call, BLOCK=16)
    assert len(spy.prepared) == 1


def test_an_unread_triton_is_launched_the_public_way(spy, kernels, monkeypatch):
    monkeypatch.setattr(launching, "prepared_supported", lambda: False)
    for rows in (5, 6):
        launch(kernels.plain, (rows,), aligned(), None, 3, 0.5, BLOCK=16, num_warps=2)
    assert [(grid, args[2:], options) for grid, args, options in spy.compiled] == [
        ((5, 1, 1), (3, 0.5, 16), {"num_warps": 2}),
        ((6, 1, 1), (3, 0.5, 16), {"num_warps": 2}),
    ]
    spy.capturing = True
    launch(kernels.plain, (1,), aligned(), None, 3, 0.5, BLOCK=16, num_warps=2)
    assert not spy.prepared


def test_capture_takes_what_is_loaded_and_compiles_nothing(spy, kernels):
    spy.capturing = True
    with pytest.raises(NotLoaded, match="plain"):
        launch(kernels.plain, (1,), aligned(), None, 3, 0.5, BLOCK=16)
    assert not spy.compiled
    spy.capturing = False
    launch(kernels.plain, (1,), aligned(), None, 3, 0.5, BLOCK=16)
    spy.capturing = True
    launch(kernels.plain, (1,), aligned(), None, 3, 0.5, BLOCK=16)
    assert len(spy.prepared) == 1


def test_a_failed_launch_is_tried_anew(spy, kernels, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("out of resource")

    with monkeypatch.context() as patch:
        patch.setattr(kernels.plain, "run", fail)
        with pytest.raises(RuntimeError, match="out of resource"):
            launch(kernels.plain, (1,), aligned(), None, 3, 0.5, BLOCK=16)
    launch(kernels.plain, (1,), aligned(), None, 3, 0.5, BLOCK=16)
    assert len(spy.compiled) == 1


INTS = st.one_of(st.integers(-20, 40), st.integers(-(2**63), 2**64 - 1), st.sampled_from([2**31, 2**31 - 1, 2**63]))


@pytest.mark.skipif(
    (triton_release() or (0, 0)) < (3, 6), reason="asks Triton's own specialisation, native from 3.6 on"
)
@pytest.mark.parametrize("backend", ["cuda", "hip"])
@given(first=INTS, second=INTS, skip_first=st.integers(0, 8), skip_second=st.integers(0, 8))
@settings(max_examples=200)
def test_whatever_triton_tells_apart_has_keys_of_its_own(backend, first, second, skip_first, skip_second):
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", 90, 32) if backend == "cuda" else GPUTarget("hip", "gfx942", 64)
    maker = make_backend(target)
    flat = torch.zeros(16, dtype=torch.bfloat16)
    for specialize in (True, False):
        for value, other in ((first, second), (flat[skip_first:], flat[skip_second:])):
            ours = [Argument.of(value), Argument.of(other)]
            theirs = [native_specialize_impl(maker, v, False, specialize, specialize) for v in (value, other)]
            assert ours[0] != ours[1] or theirs[0] == theirs[1]
    assert launching._int_class(first) != launching._int_class(second) or (
        native_specialize_impl(maker, first, False, True, True)
        == native_specialize_impl(maker, second, False, True, True)
    )


def test_host_cost(spy, kernels):
    """A guard against losing the prepared path's speed by a factor, not a measurement: the machine is shared."""
    x = aligned()
    spy.call = lambda *args: None

    def call():
        keywords = {"BLOCK": 4096, "ROWS": 4, "HAS": True, "num_warps": 8, "num_stages": 2}
        launch(kernels.wide, (4096,), x, x, x, x, x, 4096, 4096, 777, 1e-6, **keywords)

    call()
    seconds = min(timeit.repeat(call, number=1000, repeat=5)) / 1000
    assert len(spy.compiled) == 1
    assert seconds < 25e-6
