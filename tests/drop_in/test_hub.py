"""transformers' hook for kernels: our layers under its names, in layers that are marked with them."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys

import kernels
import pytest
import torch
import transformers
from kernels import Mode, kernelize, use_kernel_mapping
from kernels.layer import globals as kernel_globals
from transformers.integrations import hub_kernels
from transformers.loss import loss_utils
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3
from transformers.utils.import_utils import is_kernels_available

from liger_registry.errors import ExtraMissingError, RegistryWarning
from liger_registry.transformers import _handles, hub, kernel_mapping, register_kernels

CONFIG = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def nothing_registered():
    """kernels keeps one mapping a process; each test has an empty one."""
    token = kernel_globals._KERNEL_MAPPING.set({})
    yield
    kernel_globals._KERNEL_MAPPING.reset(token)


def marked(name, kind):
    """A subclass that is marked as transformers marks its layers where it finds kernels."""
    return kernels.use_kernel_forward_from_hub(name)(type(kind.__name__, (kind,), {"__doc__": kind.__doc__}))


def kernelized(module, mode=Mode.TRAINING, device="cpu"):
    with use_kernel_mapping(kernel_mapping()):
        return kernelize(module, mode=mode, device=device, use_fallback=False)


def counted(monkeypatch):
    """Calls of operations, by name; those of probes go other ways."""
    seen = []

    class Handles(dict):
        def get(self, op):
            seen.append(op)
            return super().get(op)

    monkeypatch.setattr(_handles, "_handles", Handles())
    return seen


def same(plain, ours, *inputs, **more):
    """Values bit for bit where they are rounded, gradients of inputs and parameters within their dtype."""
    results = []
    for module in (plain, ours):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = module(*leaves, **more)
        out = out if isinstance(out, tuple) else (out,)
        sum((x * (i + 1)).square().sum() for i, x in enumerate(out)).backward()
        results.append((*out, *(x.grad for x in leaves), *(p.grad for p in module.parameters())))
    for theirs, mine in zip(*results, strict=True):
        assert mine.dtype == theirs.dtype
        tolerance = 1e-5 if mine.dtype == torch.float32 else 1e-2
        assert (mine - theirs).float().norm() <= tolerance * theirs.float().norm()


@pytest.mark.parametrize("mode", [Mode.TRAINING, Mode.INFERENCE], ids=str)
@pytest.mark.parametrize("device", hub.DEVICES)
@pytest.mark.parametrize("name", hub.LAYERS)
def test_the_mapping_has_every_name_for_every_device_and_mode(name, device, mode):
    layer = kernel_mapping()[name][device][mode]
    assert layer.layer_name == name
    assert layer.load() is hub.LAYERS[name]
    assert layer == hub.Layer(name)
    assert len({layer, hub.Layer(name)}) == 1
    assert name in str(layer)


def test_the_names_are_those_of_transformers():
    """Read off its code, since the mapping is only made with a version of kernels that it takes."""
    text = inspect.getsource(hub_kernels)
    assert [name for name in hub.LAYERS if f'            "{name}": {{' not in text] == []


@pytest.mark.parametrize("family", [modeling_llama.LlamaRMSNorm, modeling_qwen3.Qwen3RMSNorm], ids=lambda k: k.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms(family, dtype, monkeypatch):
    torch.manual_seed(0)
    plain = family(32, eps=1e-5).to(dtype)
    torch.nn.init.normal_(plain.weight)
    ours = marked("RMSNorm", family)(32, eps=1e-5).to(dtype)
    ours.load_state_dict(plain.state_dict())
    kernelized(ours)
    seen = counted(monkeypatch)
    same(plain, ours, torch.randn(3, 5, 32).to(dtype))
    assert seen == ["rms_norm"]
    assert list(ours.state_dict()) == ["weight"]


def test_a_norm_of_another_formula_is_taken_for_what_it_is():
    """Gemma's weight counts from one; somebody's own that centres first is none that the operation knows."""
    torch.manual_seed(0)
    plain = modeling_gemma2.Gemma2RMSNorm(32)
    torch.nn.init.normal_(plain.weight)
    ours = marked("RMSNorm", modeling_gemma2.Gemma2RMSNorm)(32)
    ours.load_state_dict(plain.state_dict())
    same(plain, kernelized(ours), torch.randn(4, 32).bfloat16())

    class Centred(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(32))

        def forward(self, hidden_states):
            centred = hidden_states - hidden_states.amax(-1, keepdim=True)
            return self.weight * centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)

    plain = Centred()
    ours = marked("RMSNorm", Centred)()
    ours.load_state_dict(plain.state_dict())
    same(plain, kernelized(ours), torch.randn(4, 32))
    assert ours.__dict__[hub._FOUND] is False


@pytest.mark.parametrize(("name", "act", "op"), [("SwiGLUMLP", "silu", "swiglu"), ("GeGLUMLP", "gelu", "geglu")])
def test_gated_mlps(name, act, op, monkeypatch):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**CONFIG, hidden_act=act)
    plain = modeling_llama.LlamaMLP(config)
    ours = marked(name, modeling_llama.LlamaMLP)(config)
    ours.load_state_dict(plain.state_dict())
    kernelized(ours)
    seen = counted(monkeypatch)
    same(plain, ours, torch.randn(2, 5, 32))
    assert seen == [op]
    # A copy has its own weights.
    other = copy.deepcopy(ours)
    torch.nn.init.zeros_(other.down_proj.weight)
    assert not other(torch.ones(1, 32)).any()
    assert ours(torch.ones(1, 32)).any()


def test_the_rotary_function(monkeypatch):
    torch.manual_seed(0)
    function = modeling_llama.apply_rotary_pos_emb
    ours = kernels.use_kernel_forward_from_hub("rotary_pos_emb")(function)

    @kernels.use_kernelized_func(ours)
    class Attention(torch.nn.Module):
        def forward(self, q, k, cos, sin):
            return ours(q, k, cos, sin)

    attention = kernelized(Attention())
    angles = torch.randn(1, 6, 8)
    more = {"cos": angles.cos(), "sin": angles.sin()}
    seen = counted(monkeypatch)

    class Plain(torch.nn.Module):
        def forward(self, q, k, cos, sin):
            return function(q, k, cos, sin)

    same(Plain(), attention, torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), **more)
    before = len(seen)
    attention(torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), **more)
    assert seen[before:] == ["rope"]
    assert ours.__dict__[hub._FOUND]


def test_a_rotary_function_that_rope_does_not_compute():
    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        return q * cos.unsqueeze(unsqueeze_dim), k + sin.unsqueeze(unsqueeze_dim)

    ours = kernels.use_kernel_forward_from_hub("rotary_pos_emb")(apply_rotary_pos_emb)

    @kernels.use_kernelized_func(ours)
    class Attention(torch.nn.Module):
        def forward(self, *args):
            return ours(*args)

    kernelized(Attention())
    given = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(1, 6, 8), torch.randn(1, 6, 8)
    for mine, theirs in zip(ours(*given), apply_rotary_pos_emb(*given), strict=True):
        assert torch.equal(mine, theirs)
    assert ours.__dict__[hub._FOUND] is False


def test_the_loss_of_causal_models(monkeypatch):
    torch.manual_seed(0)
    ours = kernels.use_kernel_forward_from_hub("ForCausalLMLoss")(loss_utils.ForCausalLMLoss)

    @kernels.use_kernelized_func(ours)
    class Model(torch.nn.Module):
        pass

    kernelized(Model())
    seen = counted(monkeypatch)
    logits, labels = torch.randn(2, 7, 61), torch.randint(61, (2, 7))
    labels[0, :3] = -100
    for more in ({}, {"num_items_in_batch": torch.tensor(5)}, {"shift_labels": labels.clamp(min=0), "ignore_index": 4}):
        leaves = [logits.clone().requires_grad_() for _ in range(2)]
        mine = ours(leaves[0], labels, 61, **more)
        theirs = loss_utils.ForCausalLMLoss(leaves[1], labels, 61, **more)
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(*(torch.autograd.grad(x, y)[0] for x, y in zip((mine, theirs), leaves, strict=True)))
    assert seen == 3 * ["cross_entropy"]


def test_training_and_inference_are_ours_and_compiled_models_keep_their_own():
    norm = marked("RMSNorm", modeling_llama.LlamaRMSNorm)(32)
    for mode in (Mode.TRAINING, Mode.INFERENCE):
        assert kernelized(norm, mode).forward.__func__ is hub.RegistryRMSNorm.forward
    for mode in (Mode.TRAINING | Mode.TORCH_COMPILE, Mode.INFERENCE | Mode.TORCH_COMPILE):
        with use_kernel_mapping(kernel_mapping()):
            kernelize(norm, mode=mode, device="cpu")
        assert norm.forward.__func__ is not hub.RegistryRMSNorm.forward


@pytest.mark.ci
def test_a_graph_of_a_kernelized_layer():
    torch.manual_seed(0)
    norm, x = kernelized(marked("RMSNorm", modeling_llama.LlamaRMSNorm)(32)), torch.randn(4, 32)
    compiled = torch.compile(lambda x: norm(x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), norm(x))
    torch.testing.assert_close(compiled(x), norm(x))


def registered(name, device):
    return kernel_globals._KERNEL_MAPPING.get()[name][device].repos


class Theirs:
    """A layer of somebody else's."""

    def __init__(self, name):
        self.name = name


@pytest.fixture
def theirs(monkeypatch):
    """transformers' own mapping and its registration, as it has them with a version of kernels that it takes."""
    both = {Mode.TRAINING: Theirs("training"), Mode.TRAINING | Mode.TORCH_COMPILE: Theirs("compiled")}
    mapping = {"RMSNorm": {"cpu": dict(both), "xpu": dict(both)}, "SwiGLUMLP": {"cpu": Theirs("any")}, "Other": {}}

    def register(found=None):
        kernels.register_kernel_mapping(mapping if found is None else found)

    monkeypatch.setattr(hub_kernels, "get_kernel_mapping_transformers", lambda: mapping, raising=False)
    monkeypatch.setattr(hub_kernels, "register_kernel_mapping_transformers", register)
    return both


def test_ours_win_over_transformers_own_whenever_it_registers_them(theirs):
    for before in (True, False):
        if before:
            hub_kernels.register_kernel_mapping_transformers()
        register_kernels()
        hub_kernels.register_kernel_mapping_transformers()  # each time that a model is kernelized
        found = registered("RMSNorm", "cpu")
        assert found[Mode.TRAINING] == found[Mode.INFERENCE] == hub.Layer("RMSNorm")
        # What we have no layer for stays.
        assert found[Mode.TRAINING | Mode.TORCH_COMPILE] is theirs[Mode.TRAINING | Mode.TORCH_COMPILE]
        assert registered("RMSNorm", "xpu") == theirs
        assert registered("SwiGLUMLP", "cpu")[Mode.FALLBACK].name == "any"
        assert registered("rotary_pos_emb", "cpu")[Mode.TRAINING] == hub.Layer("rotary_pos_emb")
        kernel_globals._KERNEL_MAPPING.set({})


@pytest.mark.skipif(is_kernels_available(), reason="transformers takes this version of kernels")
def test_a_version_of_kernels_that_transformers_does_not_take():
    with pytest.warns(RegistryWarning, match=f"installed kernels {kernels.__version__}"):
        register_kernels()
    assert registered("RMSNorm", "cpu")[Mode.TRAINING] == hub.Layer("RMSNorm")


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    for function in (register_kernels, kernel_mapping):
        with pytest.raises(ExtraMissingError, match="pip install kernels"):
            function()


LOADED = """
import importlib.metadata, pickle, sys
if {pretended}:
    installed = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.18.2" if name == "kernels" else installed(name)
import torch, transformers
from transformers.models.llama import modeling_llama
from liger_registry.transformers import hub, register_kernels

torch.manual_seed(0)
transformers.LlamaForCausalLM(transformers.LlamaConfig(**{config})).save_pretrained(sys.argv[1])
load = lambda: transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).train()
ids = torch.randint(61, (2, 9))
results = []
for use in (False, True):
    model = load()
    if use:
        register_kernels()
        model.set_use_kernels(True)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    results.append((loss, *(parameter.grad for parameter in model.parameters())))
torch.testing.assert_close(*results)
norms = [module for module in model.modules() if type(module).__name__ == "LlamaRMSNorm"]
assert len(norms) == 5
assert all(norm.__dict__[hub._FOUND] for norm in norms)
assert modeling_llama.apply_rotary_pos_emb.__dict__[hub._FOUND]
assert pickle.loads(pickle.dumps(norms[0])).__dict__[hub._FOUND]
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    "pretended",
    [
        pytest.param(
            False,
            marks=pytest.mark.skipif(
                not is_kernels_available(),
                reason=f"transformers {transformers.__version__} takes no kernels {kernels.__version__}",
            ),
        ),
        True,
    ],
)
def test_a_model_that_uses_kernels(pretended, tmp_path):
    """From end to end in transformers; the second time with a release of kernels that it is told to be another."""
    code = LOADED.format(pretended=pretended, config=CONFIG)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=240)
