"""Generation on an emulated GPU: loops that are extrapolated, phases of reinforcement learning."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.emulating import needs_emulator
from tuner.app.cli.emulated_text import decoding_text, engine_text
from tuner.emulator import Machine
from tuner.space.gpus import get_gpu
from tuner.space.models.hollow import write_hollow

LOOPS = """
import gc
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from tuner.emulator.inside import decoding

def llama():
    return LlamaForCausalLM(LlamaConfig(hidden_size=256, intermediate_size=512, vocab_size=32000,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, eos_token_id=None))

def t5():
    return T5ForConditionalGeneration(T5Config(d_model=256, d_ff=512, num_layers=2, num_heads=4,
        vocab_size=32000, eos_token_id=None, decoder_start_token_id=0))

def peaks(make, padded):
    model = make().to("cuda", torch.bfloat16).eval()
    ids = torch.ones(16, 40, dtype=torch.long).cuda()
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=64, do_sample=True,
        pad_token_id=0)
    found = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(),
        torch.cuda.memory_allocated() - sum(p.nbytes for p in model.parameters()), *out.shape)
    assert out.max() < 32000
    return found

for make, padded in ((llama, 7), (t5, 0)):
    least = decoding.LEAST
    decoding.LEAST = 10**9
    whole = peaks(make, padded)
    decoding.LEAST = least
    assert peaks(make, padded) == whole, (peaks(make, padded), whole)
"""

GRPO = """
import sys
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

folder = sys.argv[1]
vllm = {"use_vllm": True, "vllm_enable_sleep_mode": True} if sys.argv[2] == "vllm" else {}
GRPOTrainer(model=folder, reward_funcs=lambda completions, **_: [
    float(len(one)) for one in completions], train_dataset=Dataset.from_list(
    [{"prompt": "one two"}] * 64), args=GRPOConfig(output_dir="out", bf16=True, report_to=[],
    per_device_train_batch_size=4, num_generations=4, max_completion_length=48, beta=0.1,
    max_steps=9, **vllm)).train()
"""


def run(folder: Path, program: str, *arguments: str, steps: int = 2) -> Any:
    (folder / "program.py").write_text(program)
    machine = Machine(get_gpu("a100_80gb"))
    command = [sys.executable, "program.py", *arguments]
    with (folder / "log.txt").open("wb") as log:
        found = machine.run(command, steps=steps, timeout_s=900, cwd=folder, output=log)
    text = (folder / "log.txt").read_text()[-3000:]
    assert (found.error, found.own_fault) == (None, None), text
    return found


@needs_emulator
@pytest.mark.proof
def test_an_extrapolated_loop_takes_the_memory_of_a_whole_one(tmp_path: Path) -> None:
    found = run(tmp_path, LOOPS, steps=0)
    assert found.exit_status == 0, (tmp_path / "log.txt").read_text()[-3000:]
    loops = [(one.tokens, one.is_steady) for one in found.decoding for _ in range(one.times)]
    assert loops == [(64, True)] * 2, found.decoding


@needs_emulator
@pytest.mark.proof
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_reinforcement_learning_has_phases_of_its_own(tmp_path: Path, engine: str) -> None:
    pytest.importorskip("trl")
    folder = tmp_path / "model"
    write_hollow("tiny-llama-3m", folder)
    found = run(tmp_path, GRPO, str(folder), engine)
    use = found.limiting
    assert use is not None
    assert found.generates
    assert {"generate", "reference", "backward"} <= set(use.phase_peak_bytes)
    training = max(use.phase_peak_bytes[name] for name in ("backward", "optimizer"))
    if engine == "transformers":
        assert "of 48 tokens" in decoding_text(found)
        assert "after 16" in decoding_text(found)
        assert found.time is not None
        assert found.time.phases_s["generate"] > 0
        assert found.sizes != "unknown", found.unknown_values
    else:
        assert use.phase_peak_bytes["generate"] > 0.3 * found.gpu.memory_bytes > training
        assert "23.8 GiB, asleep" in engine_text(found)
