"""The host memory of an emulated run is what the program would take, written or not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.emulating import needs_emulator
from tuner.core.supervised import Tail
from tuner.core.units import GIB, MIB
from tuner.emulator import Machine
from tuner.emulator.emulation import Emulation
from tuner.space.gpus import get_gpu

pytestmark = needs_emulator

PROGRAM = """\
import torch
from torch.utils.data import DataLoader

def copy(number):
    global mine
    mine = bytes(range(256)) * (number + 1) * (256 << 10)  # 64 MiB, and 128

weights = [torch.full((64 << 20,), 1.0) for _ in range(2)]   # 512 MiB
again = [one.clone() for one in weights]                     # as much
there = [one.cuda() for one in weights]
del weights, again
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.randn(40, 64), batch_size=2, num_workers=2, worker_init_fn=copy)
for rows in loader:
    model(rows.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
gathered = {number: one.cpu().bfloat16() for number, one in enumerate(there)}  # 256 MiB and 256
pinned = torch.empty(128 << 20, pin_memory=True)  # 512 MiB
torch.save(model.state_dict(), "out.pt")
"""


def ran(folder: Path, **how: int) -> Emulation:
    (folder / "train.py").write_text(PROGRAM)
    output = Tail()
    found = Machine(get_gpu("t4")).run(
        [sys.executable, "train.py"], whole=True, output=output, cwd=folder, **how
    )
    assert found.own_fault is None, found.own_fault
    assert found.host is not None, output.text
    return found


def test_tensors_that_are_never_written_count_and_workers_do(tmp_path: Path) -> None:
    host = ran(tmp_path, host_memory_bytes=GIB).host
    assert host is not None
    least = host.phases["steps"] - host.worker_bytes
    assert host.phases["load"] - least == pytest.approx(GIB, rel=0.1)
    assert host.phases["save"] - least == pytest.approx(768 * MIB, rel=0.1)
    assert host.worker_bytes == pytest.approx(192 * MIB, rel=0.25)
    assert 0 < host.emulator_bytes < 100 * MIB
    assert host.is_killed
    assert host.peak_phase == "load"
