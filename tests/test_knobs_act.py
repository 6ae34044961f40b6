"""Each knob changes something in a real trial, or is refused: none is inert in silence."""

import os

import pytest
import torch
from measure_samples import SHAPE, knobs
from transformers import LlamaConfig

from tuner.core.errors import InputError
from tuner.core.setup.common import Loader
from tuner.predict.training import get_workload
from tuner.predict.training.causal_lm_settings import TrainingSetup
from tuner.predict.training.losses import apply_liger, fused_cross_entropy
from tuner.predict.training.token_data import build_loader
from tuner.space.data import DataFacts
from tuner.trial.device import RealEnvironment, open_session
from tuner.trial.measure import ALLOCATOR_VARIABLES, apply_settings, set_allocator

LLAMA = LlamaConfig(**SHAPE)


pytestmark = pytest.mark.usefixtures("one_thread")


def opened(config=LLAMA, *, data=None, **changes):
    torch.manual_seed(0)
    environment = RealEnvironment("cpu", data=data)
    return open_session(get_workload("causal_lm"), config, knobs(**changes), environment)


def layer(session, name="mlp.gate_proj", index=0):
    return session.model.get_submodule(f"base_model.model.model.layers.{index}.{name}")


# -- precision ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "mixed_precision", "stored", "computed"),
    [
        ("fp32", "no", torch.float32, torch.float32),
        ("tf32", "no", torch.float32, torch.float32),
        ("fp32", "bf16", torch.float32, torch.bfloat16),
        ("fp16", "fp16", torch.float16, torch.float16),
        ("bf16", "bf16", torch.bfloat16, torch.bfloat16),
        ("nf4", "bf16", torch.uint8, torch.bfloat16),
        ("int8", "bf16", torch.int8, torch.bfloat16),
    ],
)
def test_precision_decides_how_weights_are_kept_and_multiplied(
    precision, mixed_precision, stored, computed
):
    # After k-bit preparation hidden states are fp32, and bitsandbytes' layers answer in that.
    changes = {"precision": precision, "mixed_precision": mixed_precision}
    session = opened(**changes, kbit_preparation="none")
    seen = []
    gate = layer(session)
    gate.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    session.optimizer_step(1)
    assert gate.weight.dtype is stored
    assert set(seen) == {computed}


def test_under_fp16_the_loss_is_scaled_and_gradients_are_not(monkeypatch):
    session = opened(precision="fp32", mixed_precision="fp16", max_grad_norm=0.0)
    scales, norms = [], []
    weight = layer(session, "self_attn.q_proj").lora_B["default"].weight
    weight.register_post_accumulate_grad_hook(lambda p: scales.append(p.grad.norm().item()))
    step = session.optimizer.step
    monkeypatch.setattr(
        session.optimizer, "step", lambda: norms.append(weight.grad.norm().item()) or step()
    )
    session.optimizer_step(1)
    assert scales[0] == pytest.approx(norms[0] * 2**16, rel=1e-3)  # GradScaler's first scale
    assert opened(precision="bf16", mixed_precision="bf16")._scaler is None


def test_a_step_whose_gradients_overflow_is_left_out():
    session = opened(precision="fp32", mixed_precision="fp16")
    trainable = [p for p in session.model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trainable]
    handle = trainable[0].register_hook(lambda gradient: gradient * float("inf"))
    session.optimizer_step(1)
    assert all(torch.equal(p, q) for p, q in zip(trainable, before, strict=True))
    handle.remove()
    session.optimizer_step(1)
    assert any(not torch.equal(p, q) for p, q in zip(trainable, before, strict=True))


# -- the step -------------------------------------------------------------------------------


def test_checkpointing_runs_each_layer_twice():
    def runs(checkpointing):
        session = opened(gradient_checkpointing=checkpointing)
        seen = []
        layer(session).register_forward_hook(lambda *_: seen.append(1))
        session.optimizer_step(1)
        return len(seen)

    assert (runs(False), runs(True)) == (1, 2)


def test_attention_is_what_was_asked_for(monkeypatch):
    calls = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: calls.append(1) or sdpa(*args, **kwargs),
    )
    opened(attention="eager").optimizer_step(1)
    assert not calls
    opened(attention="sdpa").optimizer_step(1)
    assert calls


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("sgd", set()),
        ("adamw_torch", {torch.float32}),
        ("adamw_8bit", {torch.uint8, torch.float32}),
    ],
)
def test_optimizers_keep_their_own_state(name, states):
    # bitsandbytes keeps tensors of fewer than 4096 values in fp32.
    session = opened(optimizer=name, lora_rank=64)
    session.optimizer_step(1)
    found = {
        value.dtype
        for state in session.optimizer.state.values()
        for key, value in state.items()
        if key in ("exp_avg", "state1")
    }
    assert found == states


@pytest.mark.slow
def test_compiled_models_run_compiled(monkeypatch):
    """With a backend that takes the graph as it is: what a real one makes of it takes a minute."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_model = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self: compile_model(self, backend=backend)
    )
    torch._dynamo.reset()
    session = opened(torch_compile=True)
    session.optimizer_step(1)
    assert graphs
    assert float(session.loss) > 0
    graphs.clear()
    opened(torch_compile=False).optimizer_step(1)
    assert not graphs


# -- the data loader ------------------------------------------------------------------------


def loader(**settings):
    return build_loader(
        Loader(**settings), vocab_size=100, shape=(2, 8), data=DataFacts(examples=8)
    )


KNOBS_OF_LOADERS = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")


@pytest.mark.parametrize("values", [(2, 3, True, True), (0, None, False, False)])
def test_knobs_of_the_loader_are_those_of_pytorch(values):
    asked = {name: value for name, value in zip(KNOBS_OF_LOADERS, values, strict=True) if value}
    made = loader(**asked)
    assert tuple(getattr(made, name) for name in KNOBS_OF_LOADERS) == values


def test_a_session_trains_on_its_workers_batches_epoch_after_epoch():
    session = opened(num_workers=1, micro_batch=2, data=DataFacts(examples=4))
    for _ in range(3):
        session.optimizer_step(2)
    assert session.counts.samples == 12
    workers = session._batches._batches._workers
    session.close()
    assert all(not worker.is_alive() for worker in workers)


def test_waiting_for_data_is_counted(monkeypatch):
    import time

    from tuner.predict.training.token_data import _SyntheticTokens

    session = opened(micro_batch=2)
    session.optimizer_step(2)
    before = session.counts.data_wait_s
    made = _SyntheticTokens.__getitem__
    monkeypatch.setattr(
        _SyntheticTokens, "__getitem__", lambda self, i: time.sleep(0.02) or made(self, i)
    )
    started = time.perf_counter()
    session.optimizer_step(2)
    assert 0.08 <= session.counts.data_wait_s - before <= time.perf_counter() - started


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefetch_factor": 4}, "prefetch_factor: 4 has no effect"),
        ({"persistent_workers": True}, "persistent_workers: true has no effect"),
    ],
)
def test_knobs_of_workers_need_workers(changes, words):
    with pytest.raises(InputError, match=words):
        opened(**changes)
    opened(num_workers=1, **changes)


# -- offload --------------------------------------------------------------------------------


def test_offloaded_layers_are_elsewhere_between_their_uses_and_train_the_same():
    here, there = opened(), opened(offload=0.5)
    state = {n: p.detach().clone() for n, p in here.model.named_parameters()}
    frozen = [n for n, p in there.model.named_parameters() if p.is_meta]
    assert frozen
    assert all(".layers.1." in name and "lora" not in name for name in frozen)
    # The same weights in both, so that the losses can be compared.
    for name, parameter in there.model.named_parameters():
        if parameter.is_meta:
            parent, _, last = name.rpartition(".")
            there.model.get_submodule(parent)._hf_hook.weights_map[last].copy_(state[name])
        else:
            parameter.data.copy_(state[name])
    for _ in range(3):
        here.optimizer_step(1)
        there.optimizer_step(1)
    assert float(there.loss) == pytest.approx(float(here.loss), rel=1e-5)
    assert all(there.model.get_parameter(name).is_meta for name in frozen)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_rank": 0}, "only a frozen base"),
        ({"precision": "nf4"}, "nf4 layers"),
        ({"precision": "int8"}, "int8 layers"),
        ({"gradient_checkpointing": False}, "autograd keeps every weight"),
        ({"torch_compile": True}, "torch_compile"),
    ],
)
def test_what_offload_does_not_go_with_is_refused(changes, words):
    with pytest.raises(InputError, match=words):
        opened(offload=0.5, **changes)


# -- what needs a GPU, or a package -----------------------------------------------------------


NEED_A_GPU = {
    "allocator": "expandable_segments:True",
    "cudnn_benchmark": True,
    "pin_memory": True,
    "liger": True,
    "fused_loss": True,
    "attention": "flash_attention_2",
    "optimizer": "paged_adamw_8bit",
}


@pytest.mark.parametrize(("knob", "value"), NEED_A_GPU.items())
def test_what_cannot_act_on_a_processor_is_refused(knob, value):
    with pytest.raises(InputError, match=f"{knob}: "):
        opened(**{knob: value})
    TrainingSetup.of(knobs(**{knob: value})).check_machine("cuda:0")


def test_all_refusals_are_said_at_once():
    with pytest.raises(InputError) as raised:
        opened(**NEED_A_GPU, lora_rank=0, offload=0.5)
    assert len(raised.value.problems) == len(NEED_A_GPU) + 1


@pytest.fixture
def _settings_restored(monkeypatch):
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = benchmark
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:1000000")


@pytest.mark.usefixtures("_settings_restored")
def test_process_settings_are_in_force():
    text = "max_split_size_mb:128"
    notes = apply_settings(knobs(allocator=text, cudnn_benchmark=True), "cuda:0")
    assert torch._C._accelerator_getAllocatorSettings() == text
    assert {os.environ[name] for name in ALLOCATOR_VARIABLES} == {text}
    assert torch.backends.cudnn.benchmark
    assert "convolutions" in notes[0]
    assert text in apply_settings(knobs(), "cuda:0")[0]  # as left in the environment by the first
    assert apply_settings(knobs(), "cpu") == ()
    assert not torch.backends.cudnn.benchmark


@pytest.mark.usefixtures("_settings_restored")
@pytest.mark.parametrize("text", ["max_split_size_mb:many", "expandable_segments", "nonsense"])
def test_settings_that_pytorch_refuses_are_an_input_error(text):
    with pytest.raises(InputError, match="allocator"):
        set_allocator(text)


def test_liger_must_be_installed():
    with pytest.raises(InputError, match="pip install liger-kernel"):
        apply_liger(opened().model)
    with pytest.raises(InputError, match="pip install liger-kernel"):
        fused_cross_entropy()


def test_liger_is_applied_to_models_that_it_knows(tmp_path, monkeypatch):
    """A stand-in for the package, which needs Triton: what is called with what."""
    package = tmp_path / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text(
        "def _apply_liger_kernel_to_instance(model):\n    model.has_liger = True\n"
    )
    (package / "monkey_patch.py").write_text("MODEL_TYPE_TO_APPLY_LIGER_FN = {'llama': None}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("transformers.utils.is_liger_kernel_available", lambda: True)
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True)
    model = opened().model.get_base_model()
    apply_liger(model)
    assert model.has_liger
    model.config.model_type = "gpt_neo"
    with pytest.raises(InputError, match=r"gpt_neo.*\n.*llama"):
        apply_liger(model)


def test_a_trace_is_of_the_defaults_of_what_it_does_not_model():
    from estimate_samples import traced

    machine = {"offload": 0.5, "num_workers": 2, "cudnn_benchmark": True}
    plain, changed = traced(), traced(**machine, allocator="expandable_segments:True")
    assert changed.timeline.events == plain.timeline.events
