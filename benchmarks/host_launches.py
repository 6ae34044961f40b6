"""How near launches are that a host is charged: `python -m benchmarks.host_launches`.

Needs a CUDA build of PyTorch and no GPU: on an emulated one kernels take no time, so a step takes
what the host needs to issue its operators. `tuner calibrate`'s measurement of one operator, times
the operators of a step, stands beside the step's wall time. A real driver adds to both what one
launch costs it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

from tuner.emulator.session import Session
from tuner.space.gpus import get_gpu

INSIDE = "--inside"
REPEATS = 20


def main() -> None:
    """Print a line for each program."""
    with Session(get_gpu("a6000"), settings={"plain": True}) as session:
        command = [sys.executable, "-m", "benchmarks.host_launches", INSIDE]
        done = subprocess.run(
            command, env=session.environment(), stdout=subprocess.PIPE, check=True, text=True
        )
    launch_s, rows = json.loads(done.stdout.splitlines()[-1])
    print(f"one operator: {launch_s * 1e6:.2f} us (measured, without a driver)")
    print("forward and backward          operators   predicted    measured  difference")
    for name, operators, wall_s in rows:
        predicted_s = operators * launch_s
        print(
            f"{name:28} {operators:10,} {predicted_s * 1e3:8.2f} ms {wall_s * 1e3:8.2f} ms "
            f"{predicted_s / wall_s - 1:+10.1%}"
        )


def measure() -> None:
    """Runs on the emulated GPU: what an operator costs, and steps that wait for the host."""
    import torch

    from tuner.cost.speed.microbench import OperatorCount, Stopwatch, time_launch

    watch = Stopwatch(torch.device("cuda"), 0.5)
    # What else runs on the host can only make a step longer.
    launch_s = min(time_launch(watch).typical_s for _ in range(REPEATS))
    rows = []
    for name, make in STEPS.items():
        step = make()
        step()
        with OperatorCount() as counter:
            step()
        shortest_s = min(watch.host_time(step, samples=2).typical_s for _ in range(REPEATS))
        rows.append((name, counter.operators, shortest_s))
    print(json.dumps((launch_s, rows)))


def _of_transformers(config: str, **changes: object) -> Callable[[], None]:
    import torch
    import transformers

    settings = getattr(transformers, config)(vocab_size=256, **changes)
    model = transformers.AutoModelForCausalLM.from_config(settings).cuda()
    tokens = torch.ones(1, 64, dtype=torch.long, device="cuda")

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()

    return step


def _with_lora() -> Callable[[], None]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), lora).cuda()
    tokens = torch.ones(1, 64, dtype=torch.long, device="cuda")

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            model(input_ids=tokens, labels=tokens).loss.backward()

    return step


STEPS: dict[str, Callable[[], Callable[[], None]]] = {
    "Llama, 8 layers": lambda: _of_transformers(
        "LlamaConfig", hidden_size=64, intermediate_size=128, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=4,
    ),
    "GPT-2, 12 layers": lambda: _of_transformers("GPT2Config", n_embd=64, n_head=4),
    "Qwen3, 8 layers": lambda: _of_transformers(
        "Qwen3Config", hidden_size=64, intermediate_size=128, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    ),
    "Llama with LoRA, autocast": _with_lora,
}  # fmt: skip


if __name__ == "__main__":
    if INSIDE in sys.argv:
        measure()
    else:
        main()
