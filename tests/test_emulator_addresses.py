"""Where emulated memory lies: PyTorch's allocator chooses by addresses, so their order counts."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

from tests.emulating import needs_emulator
from tuner.core.units import MIB
from tuner.emulator import Machine
from tuner.emulator.session import ASYNC_LOADING, Session
from tuner.space.gpus import get_gpu

PROGRAM = """
import json, os, sys
import torch

kept = []
def addresses(*mib):
    tensors = [torch.empty(size << 20, dtype=torch.uint8, device="cuda") for size in mib]
    kept.extend(tensors)
    return [tensor.data_ptr() for tensor in tensors]

found = {"large": addresses(40, 100, 30), "small": addresses(*[1] * 40)}
del kept[1]  # of 100 MiB
torch.cuda.empty_cache()
found["again"] = addresses(60, 40, 50)
found["loading"] = os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
json.dump(found, open(sys.argv[1], "w"))
"""


@needs_emulator
def test_large_allocations_go_down_and_small_ones_up_within_32_mib(tmp_path: Path) -> None:
    program, answer = tmp_path / "program.py", tmp_path / "answer.json"
    program.write_text(PROGRAM)
    with (tmp_path / "printed").open("w+") as printed:
        command = [sys.executable, str(program), str(answer)]
        ended = Machine(get_gpu("t4")).run(command, steps=0, output=printed)
        printed.seek(0)
        assert ended.exit_status == 0, printed.read()
    found = json.loads(answer.read_text())

    first, second, third = found["large"]
    assert first - second == 100 * MIB
    assert second - third == 30 * MIB
    # Two tensors of 1 MiB in each segment of 2 MiB, 16 segments in a row.
    small = found["small"]
    assert all(after - before == MIB for before, after in itertools.pairwise(small[:32]))
    assert small[32] < small[0]
    # What was given back is filled again from its end; what has no room there lies below all.
    assert found["again"][0] == second + 40 * MIB
    assert found["again"][1] == second
    assert found["again"][2] < small[32]
    assert found["loading"] == "1"


@needs_emulator
def test_a_program_may_still_load_with_threads() -> None:
    with Session(get_gpu("t4")) as session:
        assert session.environment({ASYNC_LOADING: "0"})[ASYNC_LOADING] == "0"
