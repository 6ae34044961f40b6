"""Real sessions on the CPU: synthetic weights, phases, limits. CUDA where there is a device."""

import gc
import math
import multiprocessing

import pytest
import torch
from measure_samples import SHAPE, knobs
from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config

from tuner.core.outcome import is_out_of_memory, requested_bytes
from tuner.core.records import Phase
from tuner.predict.training import get_workload
from tuner.trial.device import RealEnvironment, _HostMeter, limit_memory, open_session

LLAMA = LlamaConfig(**SHAPE)
GEMMA = Gemma3TextConfig(**SHAPE)  # tied embeddings, norms around 1, scaled embeddings
QWEN = Qwen2Config(**SHAPE)  # biases

ADAPTED = [
    {},
    {"precision": "nf4", "mixed_precision": "bf16", "optimizer": "adamw_8bit"},
    {"precision": "nf4", "double_quant": False, "mixed_precision": "bf16"},
    {"precision": "int8", "mixed_precision": "bf16"},
    {"precision": "bf16", "lora_rank": 0, "gradient_checkpointing": False},
    {"attention": "eager", "training_loop": "loop"},
]


pytestmark = pytest.mark.usefixtures("one_thread")


def opened(config, device="cpu", **changes):
    environment = RealEnvironment(device)
    workload = get_workload("causal_lm")
    return environment, open_session(workload, config, knobs(**changes), environment)


@pytest.mark.parametrize(
    ("config", "changes"),
    [*[(GEMMA, changes) for changes in ADAPTED], (LLAMA, {}), (QWEN, ADAPTED[1])],
)
def test_a_session_trains_for_real(config, changes):
    environment, session = opened(config, **changes)
    trainable = [p for p in session.model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trainable]
    session.optimizer_step(2)
    environment.note_peak()
    assert not any(p.is_meta for p in session.model.parameters())
    assert not any(b.is_meta for b in session.model.buffers())
    assert all(bool(torch.isfinite(p).all()) for p in trainable)
    assert any(not torch.equal(p, q) for p, q in zip(trainable, before, strict=True))
    assert set(environment.phase_peak_bytes) == set(Phase) - {Phase.GENERATE, Phase.EVALUATION}
    assert environment.peak_allocated_bytes >= environment.loaded_bytes


def test_the_frozen_weights_stay_as_they_were_filled():
    environment, session = opened(LLAMA, precision="nf4", mixed_precision="bf16")
    packed = {n: p.clone() for n, p in session.model.named_parameters() if p.dtype == torch.uint8}
    session.optimizer_step(1)
    assert len(packed) == 14  # seven linear layers in each of two blocks
    for name, value in packed.items():
        assert torch.equal(session.model.get_parameter(name), value)
        assert value.float().std() > 50  # random codes use all of a byte
    del environment


@pytest.mark.parametrize(
    "changes",
    [{"precision": "nf4"}, {"precision": "int8"}, {"precision": "nf4", "double_quant": False}],
)
def test_quantised_layers_answer_with_half_the_size_of_their_input(changes):
    """So that no product of an MLP reaches 6, where LLM.int8() would see outliers."""
    _, session = opened(LLAMA, **changes, mixed_precision="bf16", lora_targets=("q_proj",))
    layer = session.model.get_submodule("base_model.model.model.layers.0.mlp.gate_proj")
    x = torch.randn(256, 64, dtype=torch.bfloat16)
    assert layer(x).float().std().item() == pytest.approx(0.5, rel=0.25)
    if "double_quant" in changes:  # then the scales are plain numbers
        assert layer.weight.quant_state.absmax.dtype is torch.float32


def test_layers_start_as_the_authors_of_the_model_start_them():
    _, gemma = opened(GEMMA, precision="fp32", lora_rank=0)
    _, llama = opened(LLAMA, precision="fp32", lora_rank=0)
    assert gemma.model.model.norm.weight.abs().max() == 0  # (1 + weight)
    assert llama.model.model.norm.weight.min() == llama.model.model.norm.weight.max() == 1
    assert gemma.model.model.embed_tokens.embed_scale.item() == pytest.approx(math.sqrt(64))
    frequencies = llama.model.model.rotary_emb.inv_freq
    assert frequencies[0] == 1
    assert (frequencies[1:] < frequencies[:-1]).all()


@pytest.fixture
def _no_collection():
    """What earlier tests left would else be given back in the middle of a measurement."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
def test_the_host_meter_sees_a_peak_that_is_gone():
    meter = _HostMeter()
    meter.reset()
    before = meter.allocated_bytes()
    block = torch.ones(16 << 20)  # 64 MiB
    del block
    peak, _ = meter.peaks()
    assert 60 << 20 < peak - before < 120 << 20
    meter.reset()
    assert meter.peaks()[0] < peak


def allocate_under_limit(sender):
    limit_memory("cpu", 200 << 20)
    small = torch.ones(10 << 20)  # 40 MiB
    try:
        torch.ones(100 << 20)  # 400 MiB
    except RuntimeError as error:
        sender.send((int(small[0]), str(error)))


@pytest.mark.slow
def test_a_limit_makes_real_allocations_fail():
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=allocate_under_limit, args=(sender,))
    child.start()
    child.join(300)
    assert child.exitcode == 0
    small, text = receiver.recv()
    assert small == 1
    assert is_out_of_memory(text)
    assert requested_bytes(text) == 400 << 20


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("changes", ADAPTED, ids=str)
def test_a_session_trains_on_cuda(changes):
    environment, session = opened(LLAMA, "cuda:0", **changes)
    session.optimizer_step(2)
    session.optimizer_step(2)
    environment.note_peak()
    assert all(p.is_cuda for p in session.model.parameters())
    trainable = [p for p in session.model.parameters() if p.requires_grad]
    assert all(bool(torch.isfinite(p).all()) for p in trainable)
    assert environment.phase_peak_bytes[Phase.BACKWARD] >= environment.loaded_bytes > 0


@pytest.mark.gpu
@needs_cuda
def test_memory_runs_out_where_the_limit_is():
    torch.cuda.empty_cache()
    limit_memory("cuda:0", 256 << 20)
    try:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            torch.empty(512 << 20, dtype=torch.uint8, device="cuda:0")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    assert is_out_of_memory(str(raised.value))
    assert requested_bytes(str(raised.value)) == 512 << 20
