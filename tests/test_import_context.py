"""A process that only predicts takes nothing of a GPU: a trial beside it would be refused."""

from pathlib import Path

import pytest
from started import run_python

PROGRAM = """
import sys
import torch
from nvml_fakes import FakeNvml
from tuner.core.units import GIB

sys.modules["pynvml"] = FakeNvml(
    name="NVIDIA RTX A6000", memory=(0, 48 * GIB), capability=(8, 6), driver="570"
)
if not torch.version.cuda:  # PyTorch's CPU build has no such function to hand out
    torch._C._cuda_getCurrentRawStream = lambda device: 0
begun = []
torch.version.cuda = None  # the processor's library of bitsandbytes can be loaded anywhere
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda._lazy_init = lambda: begun.append("context")
torch.cuda._get_device_properties = lambda device: FakeNvml
__import__(MODULE)
assert "bitsandbytes" in sys.modules
print("contexts:", len(begun))
"""


@pytest.mark.proof
@pytest.mark.parametrize(
    ("module", "contexts"),
    [
        ("tuner.predict.tracing.trace", 0),
        # What it does by itself, or this test would say nothing.
        ("bitsandbytes", 1),
    ],
)
def test_predicting_creates_no_context(module, contexts):
    done = run_python("-c", PROGRAM.replace("MODULE", repr(module)), cwd=Path(__file__).parent)
    assert f"contexts: {contexts}\n" in done.stdout, done.stderr
