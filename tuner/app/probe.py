"""Abilities of PyTorch and bitsandbytes on this machine, probed in a separate process.

A library that was built for other versions may end its process when it is loaded, and a CUDA
context would stay with whoever made it. `python -m tuner.app.probe` prints one JSON object.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tuner.core.environment import own_python

TIMEOUT_S = 120.0
MARK = "tuner-probe:"
"""Before the answer: libraries print too."""

LARGEST_ERROR = 0.2
"""Bound on the rounding error of a value between -1 and 1 in NF4: the widest gap between two of
its 16 values is 0.30 (QLoRA, arXiv 2305.14314, appendix E), of which at most half is lost."""


def probe(command: tuple[str, ...] = ()) -> dict[str, Any]:
    """The answer of a new process; {"error": ...} where it gave none."""
    try:
        done = subprocess.run(  # noqa: S603 - this program itself
            command or own_python("tuner.app.probe"),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {TIMEOUT_S:.0f} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return found
    said = done.stderr.strip().splitlines()
    return {"error": f"{said[-1] if said else 'no answer'} (exit code {done.returncode})"}


def look() -> dict[str, Any]:
    """Everything that needs the libraries themselves."""
    import torch

    found: dict[str, Any] = {
        "torch_cuda": torch.version.cuda,
        "cuda_available": torch.cuda.is_available(),
        "architectures": [],
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "flash_sdp": torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
    }
    if found["cuda_available"]:
        found["architectures"] = torch.cuda.get_arch_list()
    device = "cuda" if found["cuda_available"] else "cpu"
    return {**found, "bitsandbytes": _quantise(device)}


def _quantise(device: str) -> str:
    """The fault of bitsandbytes' four-bit quantisation; empty when the round trip works."""
    try:
        import torch
        from bitsandbytes import functional

        values = torch.linspace(-1, 1, 4096, device=device)
        packed, state = functional.quantize_4bit(values, quant_type="nf4")
        error = (functional.dequantize_4bit(packed, state) - values).abs().max().item()
    except (ImportError, OSError, RuntimeError, ValueError, AttributeError) as problem:
        return (str(problem).strip().splitlines() or [type(problem).__name__])[-1]
    return "" if error <= LARGEST_ERROR else f"values come back {error:.2f} off on {device}"


if __name__ == "__main__":
    print(MARK + json.dumps(look()))  # the answer of this process
