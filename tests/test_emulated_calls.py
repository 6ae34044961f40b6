"""The emulator for other projects' tests: functions that are called on it, and pytest's plugin."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.emulating import needs_emulator
from tests.started import run_python
from tuner.core.errors import InputError, UnavailableError
from tuner.emulator import Machine
from tuner.emulator.build import unavailable
from tuner.space.gpus import get_gpu

PLUGIN = "tuner.integrations.pytest_plugin"
WEIGHTS = 4 * (1024 * 1024 + 1024)


def train(width: int) -> tuple[int, int]:
    """Two steps; the peaks that PyTorch shows."""
    import torch

    layer = torch.nn.Linear(width, width, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(2):
        layer(torch.randn(8, width, device="cuda")).sum().backward()
        optimizer.step()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def take(size: int) -> None:
    import torch

    torch.empty(size, dtype=torch.uint8, device="cuda")


def add_gradients() -> list[float]:
    """The peak of a backward pass whose two gradients of a tied weight are added, in weights.

    Where nothing else holds the first of them, and where something does.
    """
    import torch

    found = []
    for kept in (False, True):
        torch.cuda.reset_peak_memory_stats()
        _add_gradients([], kept=kept)
        found.append(torch.cuda.max_memory_allocated() / (4 * 10_000 * 256))
    return found


def _add_gradients(seen: list[object], *, kept: bool) -> None:
    import torch

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight):
            ctx.shapes = hidden.shape, weight.shape
            return hidden.mean()

        @staticmethod
        def backward(ctx, gradient):
            of_weight = torch.zeros(ctx.shapes[1], device="cuda")
            seen.extend([of_weight] * kept)
            return torch.zeros(ctx.shapes[0], device="cuda"), of_weight

    weight = torch.nn.Parameter(torch.randn(10_000, 256, device="cuda"))
    hidden = torch.nn.functional.embedding(torch.zeros(8, dtype=torch.long, device="cuda"), weight)
    Product.apply(hidden, weight).backward()


def chosen() -> None:
    """Makes a tensor whose size depends on floats that are not computed."""
    import torch

    many = torch.randn(1 << 20, device="cuda")
    torch.empty(int((many == many.flip(0)).sum()), device="cuda")
    many[many == many.flip(0)].clone()


@needs_emulator
def test_a_function_is_called_on_a_machine():
    import torch

    called = Machine(get_gpu("t4")).call(train, width=1024)
    assert called.value == (called.peak_allocated_bytes, called.peak_reserved_bytes)
    phases = called.phase_peak_bytes
    assert list(phases) == ["load", "forward", "backward", "optimizer"]
    assert max(phases.values()) == called.peak_allocated_bytes
    assert phases["optimizer"] >= 4 * WEIGHTS
    assert WEIGHTS <= phases["load"] < 2 * WEIGHTS
    assert called.emulation.source == "emulated"

    with pytest.raises(torch.OutOfMemoryError) as refused:
        Machine(get_gpu("t4")).call(take, 30 << 30)
    assert "in take" in refused.value.__notes__[0]


@needs_emulator
def test_gradients_are_added_in_place_unless_someone_holds_the_first():
    called = Machine(get_gpu("h100_sxm")).call(add_gradients)
    assert called.value == [pytest.approx(3, rel=0.03), pytest.approx(4, rel=0.03)]


@needs_emulator
def test_a_function_without_an_answer_is_an_error():
    t4 = Machine(get_gpu("t4"))
    with pytest.raises(UnavailableError, match=r"ended \(error, exit status 7\)"):
        t4.call(os._exit, 7)
    with pytest.raises(InputError, match="used no GPU"):
        _ = t4.call(os.getpid).peak_allocated_bytes
    with pytest.raises(UnavailableError, match=r"test_emulated_calls.py:\d+: the size"):
        _ = t4.call(chosen).peak_allocated_bytes


def test_only_functions_that_another_process_can_import_are_called():
    with pytest.raises(InputError, match="cannot be sent"):
        Machine(get_gpu("t4")).call(lambda: 1)


TESTS = """
import pytest
import torch

def peak(size):
    torch.empty(size, dtype=torch.uint8, device="cuda")
    return torch.cuda.max_memory_allocated()

def test_large():
    peak(100 << 20)
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.get_device_name() == "Tesla T4"

def test_small():
    peak(10 << 20)
    with pytest.raises(torch.OutOfMemoryError):
        peak(30 << 30)

def test_computed():
    assert torch.arange(5, device="cuda").sum().item() == 10

def test_made_up():
    assert torch.randn(1 << 20, device="cuda").mean().item() < 100

def test_wrong():
    assert not torch.cuda.is_available()

def test_called(emulated_gpu):
    assert emulated_gpu("a100_80gb").call(peak, 30 << 30).peak_allocated_bytes == 30 << 30
"""


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_them.py").write_text(TESTS)
    installed = any(one.value == PLUGIN for one in entry_points(group="pytest11"))
    plugin = () if installed else ("-p", PLUGIN)
    root = str(Path(__file__).parents[1])
    return run_python(
        "-m",
        "pytest",
        "-rA",
        "--tb=no",
        *plugin,
        *options,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((root, *filter(None, sys.path)))},
    )


@needs_emulator
@pytest.mark.slow
def test_a_session_runs_on_an_emulated_gpu(tmp_path: Path):
    """Also where pytest leaves test files out of the search path."""
    options = ("--emulated-gpu", "t4", "--emulated-gpu-report", "--import-mode=importlib")
    done = run_pytest(tmp_path, *options)
    assert done.returncode == 1, done.stdout + done.stderr  # of the test that is wrong
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert [line for line in lines if " MiB  " in line][:2] == [
        "100.0 MiB  test_them.py::test_large",
        "10.0 MiB  test_them.py::test_small",
    ]
    assert [line for line in lines if "(read made-up values)" in line] == [
        "4.0 MiB  test_them.py::test_made_up (read made-up values)"
    ]
    assert any(line.startswith("1 of 6 tests read values") for line in lines)
    assert lines.count("PASSED test_them.py::test_called") == 1
    assert [line.partition(" - ")[0] for line in lines if line.startswith("FAILED")] == [
        "FAILED test_them.py::test_wrong"
    ]


@pytest.mark.skipif(unavailable() is None, reason="this machine can emulate")
def test_nothing_passes_where_nothing_can_be_emulated(tmp_path: Path):
    reason = str(unavailable())
    skipped = run_pytest(tmp_path, "-k", "called")
    assert re.search(rf"SKIPPED \[1\] test_them.py:\d+: {re.escape(reason)}", skipped.stdout)
    assert "1 skipped, 5 deselected" in skipped.stdout
    refused = run_pytest(tmp_path, "--emulated-gpu", "t4")
    assert (refused.returncode, reason in refused.stderr) == (pytest.ExitCode.USAGE_ERROR, True)


def test_the_plugin_costs_other_sessions_nothing():
    code = f"import sys, pytest, {PLUGIN}; print(*sys.modules)"
    run = run_python("-c", code, check=True)
    ours = {name for name in run.stdout.split() if name.split(".")[0] in ("tuner", "torch", "yaml")}
    assert ours == {"tuner", "tuner.integrations", PLUGIN}
