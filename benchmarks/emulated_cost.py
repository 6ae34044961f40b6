"""What emulating a step costs on the processor: `python -m benchmarks.emulated_cost`.

A training step of Llama-3.2-1B (random weights) with LoRA, 4 sequences of 1,024 tokens,
checkpointing. In one emulated process, by turns: steps as the emulator has them, and steps without
its dispatch mode, which computes values and prices operators; the stand-in libraries serve both.
Seconds are those of the process on the processor, so that other programs on the machine disturb
least; the ratio is what to compare between versions.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=8, help="steps of each kind")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with CUDA's torch")
    options = parser.parse_args(arguments)
    from tuner.emulator import Machine
    from tuner.space.gpus import get_gpu

    command = [options.python, str(Path(__file__).resolve()), str(options.rounds)]
    # It ends by itself: never after a number of optimizer steps.
    found = Machine(get_gpu("h100_sxm")).run(command, steps=0)
    return found.exit_status or 0


def _measure(rounds: int) -> None:
    """The emulated program."""
    import torch
    from torch.utils import _python_dispatch

    step = _step()
    mode: Any = _python_dispatch._get_current_dispatch_mode()
    taken: dict[str, list[float]] = {"with the mode": [], "without": []}
    step()  # the optimizer makes its state
    step()  # all operators are known
    for _ in range(rounds):
        taken["with the mode"].append(_timed(step))
        torch._C._pop_torch_dispatch_stack(None)
        taken["without"].append(_timed(step))
        torch._C._push_on_torch_dispatch_stack(mode)
    for name, seconds in taken.items():
        median = statistics.median(seconds)
        print(f"{name:14} {min(seconds):6.3f} s a step at best, {median:6.3f} s in the median")
    ratios = [one / other for one, other in zip(*taken.values(), strict=True)]
    print(f"ratio of neighbours, the median: {statistics.median(ratios):.2f}")


def _timed(step: Any) -> float:
    started = time.process_time()
    step()
    return time.process_time() - started


def _step() -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128256,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=32, target_modules="all-linear"))
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def step() -> None:
        ids = torch.randint(0, config.vocab_size, (4, 1024)).cuda()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    # The emulated program is this file with the number of its rounds; all else is the benchmark.
    if sys.argv[1:] and sys.argv[1].isdigit():
        _measure(int(sys.argv[1]))
    else:
        sys.exit(main())
