"""Programs on a GPU that is not there: steps, peaks, errors, and that nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import runpy
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from tests.emulating import TRAINING, needs_emulator
from tests.installed import environment
from tests.started import run_python
from tests.waiting import is_alive, wait_for, wait_until_gone
from tuner.app.cli.main import cli
from tuner.core.errors import InputError, UnavailableError
from tuner.core.processes import marked
from tuner.core.supervised import TAIL_BYTES, Tail
from tuner.emulator import Machine
from tuner.emulator.build import OLDEST_TORCH, find_compiler, find_torch
from tuner.emulator.ending import Ended
from tuner.emulator.inside import lines
from tuner.emulator.inside.lines import places
from tuner.emulator.machine import interpreter_of
from tuner.emulator.session import Session
from tuner.space.gpus import get_gpu

EMULATE = ("-m", "tuner", "emulate")
TUNER = (sys.executable, *EMULATE)
WEIGHTS = 4 * (1024 * 4096 * 2 + 4096 + 1024)


def run(
    folder: Path,
    program: str,
    *options: str,
    gpu: str = "a6000",
    python: tuple[str, ...] = (sys.executable,),
    installed: Path | None = None,
    program_arguments: tuple[str, ...] = (),
) -> Any:
    """What `tuner emulate --json` answers, and its exit code as "exit".

    With `installed` tuner and the program run in that Python.
    """
    path = folder / "program.py"
    path.write_text(program)
    tuner = TUNER if installed is None else (str(installed), *EMULATE)
    program_python = python if installed is None else ()
    ran = subprocess.run(
        [
            *tuner,
            "--gpu",
            gpu,
            "--json",
            *options,
            "--",
            *program_python,
            str(path),
            *program_arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=None if installed is None else environment(),
    )
    assert ran.stdout, ran.stderr
    return {**json.loads(ran.stdout), "exit": ran.returncode, "stderr": ran.stderr}


@needs_emulator
def test_a_gpu_older_than_the_kernels_of_pytorch_refuses_them(tmp_path: Path) -> None:
    program = tmp_path / "ones.py"
    program.write_text("import torch\n\ntorch.ones(8, device='cuda').add_(1)\n")
    found = Machine(get_gpu("v100_16gb")).run([sys.executable, str(program)])
    assert (found.ended, found.fits) == (Ended.ERROR, None)
    assert found.error is not None
    assert "no kernel image is available" in found.error.message


@needs_emulator
def test_a_training_is_followed_for_three_steps(tmp_path: Path, installed_python: Path) -> None:
    found = run(tmp_path, TRAINING, installed=installed_python)

    assert (found["ended"], found["steps"], found["exit"], found["fits"]) == ("steps", 3, 0, True)
    assert found["source"] == "emulated"
    assert "all steps done" not in found["stderr"]
    [use] = found["devices"]
    # Weights, gradients and two moments are there at the peak of an update by AdamW.
    parts = use["breakdown"]
    assert use["trainable_params"] * 4 == WEIGHTS
    assert parts["weights"] == pytest.approx(WEIGHTS, abs=4096)
    assert parts["gradients"] == pytest.approx(WEIGHTS, abs=4096)
    assert parts["optimizer_state"] == pytest.approx(2 * WEIGHTS, abs=3 * 4096)
    assert sum(parts.values()) == pytest.approx(use["peak_allocated_bytes"], rel=0.02)
    assert list(use["phase_peak_bytes"]) == ["load", "forward", "backward", "optimizer"]
    first_batch = 4 * 256 * 1024
    assert use["loaded_bytes"] == pytest.approx(WEIGHTS + first_batch, abs=4096)
    assert use["device_bytes"] == use["peak_reserved_bytes"] + get_gpu("a6000").context_bytes
    by_kind = {row["kind"]: row["line"] for row in use["allocations"]}
    assert by_kind["optimizer_state"] == "program.py:12", by_kind
    files = {row["where"].partition(":")[0] for row in use["allocations"]}
    assert files == {"program.py", "the backward pass"}


NAMES = """
import gc
import sys
import torch
from torch import nn

WORDS, WIDTH = 5000, 512
how = sys.argv[1]
if how == "strange":  # as a library does that tries a kernel when it is imported
    nn.Linear(8, 8, device="cuda")(torch.ones(1, 8, device="cuda"))
table = nn.Embedding(WORDS, WIDTH, device="cuda").requires_grad_(False)
base = nn.Sequential(table, *[nn.Linear(WIDTH, WIDTH) for _ in range(8)])
base.requires_grad_(False).cuda()
head = nn.Linear(WIDTH, WORDS, device="cuda")
if how == "strange":
    gc.freeze()
optimizer = torch.optim.AdamW([*base.parameters(), *head.parameters()])  # frozen ones too


def closure():
    optimizer.zero_grad()
    words = torch.randint(0, WORDS, (64, 32), device="cuda")
    logits = head(base(words))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())
    loss.backward()
    return loss


for _ in range(4):
    if how == "strange":
        optimizer.step(closure)  # as Lightning does
    else:
        closure()
        optimizer.step()
"""


@pytest.mark.proof
@needs_emulator
def test_the_same_bytes_have_the_same_names_however_a_program_is_written(tmp_path: Path) -> None:
    plain = run(tmp_path, NAMES, program_arguments=("plain",))["devices"][0]
    strange = run(tmp_path, NAMES, program_arguments=("strange",))["devices"][0]

    head = 4 * (512 * 5000 + 5000)
    base = 4 * (5000 * 512 + 8 * (512 * 512 + 512))
    logits = 4 * 64 * 32 * 5000
    for use in (plain, strange):
        assert use["trainable_params"] * 4 == head
        assert set(use["phase_peak_bytes"]) == {"load", "forward", "backward", "optimizer"}
        # What is tried before has cuBLAS take its workspace.
        assert use["loaded_bytes"] == pytest.approx(base + head, abs=9 << 20)
        parts = use["breakdown"]
        assert parts["weights"] == pytest.approx(base, abs=1 << 14)
        assert parts["adapters"] == pytest.approx(head, abs=1024)
        assert parts["optimizer_state"] == pytest.approx(2 * head, abs=4096)
        assert parts["logits_and_loss"] == 4 * logits  # two of them, and their gradients
        assert sum(parts.values()) == pytest.approx(use["peak_allocated_bytes"], rel=0.02)
    assert strange["breakdown"] == pytest.approx(plain["breakdown"], abs=1024)


@needs_emulator
def test_out_of_memory_is_the_programs_own_error_and_says_how_much_was_asked(
    tmp_path: Path,
) -> None:
    program = "import torch\nkeep = [torch.empty(1 << 30, device='cuda') for _ in range(9)]\n"
    found = run(tmp_path, program, gpu="t4", python=())  # a script is run by this Python

    assert (found["ended"], found["exit"], found["fits"]) == ("oom", 1, False)
    assert [one["bytes"] for one in found["refusals"]] == [4 << 30]
    assert found["error"]["type"] == "torch.OutOfMemoryError"
    assert found["error"]["line"] == "program.py:2"
    assert found["devices"][0]["peak_allocated_bytes"] == 3 * (4 << 30)


STEP = """
import gc, sys, threading, torch, torch.multiprocessing as mp
def step(n):
    m(torch.randn(n, 1024, device="cuda")).sum().backward(); opt.step(); opt.zero_grad()
def taken(gib): return torch.zeros(int(gib * 2**30), dtype=torch.uint8, device="cuda")
def holder(gib, held, go):
    x = taken(gib); held.set(); go.wait()
def model():
    m = torch.nn.Linear(1024, 1024).cuda()
    return m, torch.optim.AdamW(m.parameters())
"""
SMALLER = """
m, opt = model()
n = 20_000_000
while n > 1_000_000:
    try: step(n); break
    except torch.OutOfMemoryError: n //= 8
    gc.collect(); torch.cuda.empty_cache()
for _ in range(4): step(n)
"""
DOUBLED = """
m, opt = model()
def fits(n):
    try: step(n); return True
    except torch.OutOfMemoryError: opt.zero_grad(); return False
    finally: gc.collect(); torch.cuda.empty_cache()
n = 1_000_000
while fits(n): n *= 2
for _ in range(4): step(n // 2)
"""
ANOTHER_CALL = """
m, opt = model()
def run(n): return m(torch.randn(n, 1024, device="cuda")).sum()
try: run(20_000_000)
except torch.OutOfMemoryError: pass
for _ in range(4): run(8).backward(); opt.step(); opt.zero_grad()
"""
OTHERWISE = """
m, opt = model()
try: taken(30)
except torch.OutOfMemoryError: pass
for _ in range(4): step(8)
"""
SKIPPED = """
m, opt = model()
for n in torch.utils.data.DataLoader([8, 20_000_000, 8, 8]):
    try: step(int(n))
    except torch.OutOfMemoryError: print("skipped")
"""
IN_A_THREAD = """
m, opt = model()
step(8)
t = threading.Thread(target=taken, args=(30,), name="evaluation"); t.start(); t.join()
for _ in range(3): step(8)
"""
A_CHILD = """
if __name__ == "__main__":
    c = mp.get_context("spawn").Process(target=taken, args=(30,)); c.start(); c.join()
    m, opt = model()
    for _ in range(4): step(8)
"""
BESIDE = """
if __name__ == "__main__":
    c = mp.get_context("spawn"); held, go = c.Event(), c.Event()
    q = c.Process(target=holder, args=(GIB, held, go), daemon=True); q.start(); held.wait(60)
    m, opt = model(); y = taken(9)
    for _ in range(4): step(8)
    q.kill(); q.join()
"""


@needs_emulator
@pytest.mark.parametrize(
    ("program", "code", "gib", "refusals"),
    [
        # 2.5 million rows, and their output; the attempts before them filled the GPU.
        pytest.param(SMALLER, 0, (18, 20.5), ["recovered"], id="a search for the batch"),
        pytest.param(ANOTHER_CALL, 4, (0, 1), ["survived"], id="an evaluation in the same lines"),
        pytest.param(BESIDE.replace("GIB", "13.2"), 1, (22.9, 23.5), [], id="a helper too many"),
        *(
            pytest.param(*case, marks=pytest.mark.proof, id=name)
            for name, case in {
                "a search from below": (DOUBLED, 0, (14, 18), ["recovered"]),
                "a fallback": (OTHERWISE, 4, (0, 1), ["survived"]),
                "a batch that is skipped": (SKIPPED, 4, (0, 1), ["survived"]),
                "a thread": (IN_A_THREAD, 4, (0, 1), ["survived"]),
                "a child": (A_CHILD, 1, (0, 30), ["fatal"]),
                "beside a helper": (BESIDE.replace("GIB", "9"), 0, (18, 20), []),
            }.items()
        ),
    ],
)
def test_all_processes_count_at_each_moment_and_what_is_refused_ends_by_evidence(
    tmp_path: Path, program: str, code: int, gib: tuple[float, float], refusals: list[str]
) -> None:
    found = run(tmp_path, STEP + program, gpu="rtx4090")

    assert found["exit"] == code
    (peak,) = found["peaks"]
    assert gib[0] < peak["bytes"] / 2**30 < gib[1]
    assert peak["bytes"] == sum(size for _, size in peak["holders"])
    assert [one["afterwards"] for one in found["refusals"]] == refusals
    assert all(one["line"].startswith("program.py:") for one in found["refusals"])


@needs_emulator
def test_programs_that_run_one_after_the_other_do_not_add_up(tmp_path: Path) -> None:
    program = tmp_path / "one.py"
    program.write_text(STEP + "m, opt = model(); y = taken(13)\nfor _ in range(3): step(8)\n")
    both = f"{sys.executable} {program} && {sys.executable} {program}"
    run_twice = f"import subprocess\nsubprocess.run({both!r}, shell=True, check=True)\n"
    found = run(tmp_path, run_twice, gpu="rtx4090")
    assert found["fits"]
    assert 13 < found["peaks"][0]["bytes"] / 2**30 < 14


@needs_emulator
def test_an_error_of_the_program_is_told_from_one_of_the_emulator(tmp_path: Path) -> None:
    program = "import torch\ntorch.ones(2, 3).cuda() @ torch.ones(2, 3).cuda()\n"
    found = run(tmp_path, program)

    assert (found["ended"], found["exit"], found["fits"]) == ("error", 2, None)
    assert found["error"]["line"] == "program.py:2"


@needs_emulator
def test_an_error_before_the_device_is_used_is_named_with_its_line(tmp_path: Path) -> None:
    """In a rank, whose launcher raises an error of its own."""
    python = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    found = run(tmp_path, "import sys, torch\nimport no_such_module\n", python=python)

    assert (found["ended"], found["exit"], found["fits"]) == ("error", 2, None)
    assert found["error"] == {
        "type": "builtins.ModuleNotFoundError",
        "message": "No module named 'no_such_module'",
        "line": "program.py:2",
    }


@pytest.mark.proof
@needs_emulator
def test_the_environment_of_a_program_need_not_have_tuner(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(tmp_path / "env")}))
    # What comes first is put there last.
    for folder in reversed([Path(p) for p in sys.path if Path(p).name == "site-packages"]):
        for one in folder.iterdir():
            if "tuner" not in one.name and one.suffix != ".pth":
                (packages / one.name).unlink(missing_ok=True)
                (packages / one.name).symlink_to(one)
    python = str(tmp_path / "env" / "bin" / "python")
    failing = TRAINING.replace(
        "    print(", "    if step == 1: raise ValueError('bad')\n    print("
    )
    alone = [python, "-c", "import tuner"]
    assert subprocess.run(alone, cwd=tmp_path, capture_output=True, check=False).returncode == 1
    found = run(tmp_path, failing, python=(python,))

    assert (found["ended"], found["steps"], found["exit"]) == ("error", 2, 2), found["stderr"]
    assert found["error"]["line"] == "program.py:14"


@pytest.mark.proof
@needs_emulator
def test_whatever_of_tuners_bookkeeping_raises_the_program_goes_on(tmp_path: Path) -> None:
    program = Path(__file__).with_name("faulty_bookkeeping.py").read_text()
    found = run(tmp_path, program, "--steps", "0")

    assert "all steps done" in found["stderr"], found["stderr"]
    assert (found["ended"], found["error"], found["exit"]) == ("fault", None, 3)
    assert found["own_fault"]["message"] == "a fault of ours"
    assert found["own_fault"]["line"].startswith("inside/settling.py:")
    rows = [line.split("; ") for line in found["stderr"].splitlines() if "; " in line]
    assert len(rows) > 20
    assert [row for row in rows if not row[2].startswith("a fault of ours, reading ")] == []


@pytest.mark.proof
@needs_emulator
def test_sparse_gradients_and_a_working_folder_that_is_gone(tmp_path: Path) -> None:
    program = """
import os, torch

os.mkdir("gone")
embedding = torch.nn.Embedding(10_000, 64, sparse=True).cuda()
optimizer = torch.optim.SparseAdam(embedding.parameters())
os.chdir("gone")
os.rmdir("../gone")
for step in range(4):
    tokens = torch.randint(0, 10_000, (32, 16)).cuda()
    embedding(tokens).sum().backward()
    distinct = embedding.weight.grad.coalesce()._nnz()
    assert distinct == len(set(tokens.flatten().tolist())), distinct
    optimizer.step()
    optimizer.zero_grad()
    moved = torch.eye(8).to_sparse().cuda().coalesce().indices().tolist()
    assert moved == [list(range(8))] * 2, moved
"""
    found = run(tmp_path, program)

    assert (found["ended"], found["exit"], found["own_fault"]) == ("steps", 0, None), found
    [use] = found["devices"]
    assert use["breakdown"]["optimizer_state"] == 2 * 4 * 10_000 * 64
    assert {row["line"] for row in use["allocations"] if row["kind"] == "weights"} == {
        "program.py:5"
    }


@needs_emulator
def test_a_function_that_is_not_emulated_is_named(tmp_path: Path) -> None:
    program = (
        "import torch\n"
        "import ctypes\n"
        "torch.zeros(1).cuda()\n"
        "status = ctypes.CDLL('libcusparse.so.12').cusparseSpMM()\n"
        "if status: raise RuntimeError(f'cuSPARSE: {status}')\n"
    )
    found = run(tmp_path, program)

    assert found["exit"] == 3, found["stderr"]
    assert any(name.startswith("cusparse") for name in found["unknown_calls"])


@pytest.mark.proof
@needs_emulator
def test_small_allocations_share_what_the_driver_maps(tmp_path: Path) -> None:
    program = (
        "import ctypes, torch\n"
        "torch.cuda.init()\n"
        "runtime = ctypes.CDLL('libcudart.so.' + torch.version.cuda.split('.')[0])\n"
        "free = lambda: torch.cuda.mem_get_info()[0]\n"
        "def take(size):\n"
        "    p = ctypes.c_void_p(); before = free()\n"
        "    assert runtime.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(size)) == 0\n"
        "    return p, before - free()\n"
        "(a, x), (b, y), (c, z) = take(1000), take(1000), take(3 << 20)\n"
        "assert (x, y, z) == (2 << 20, 0, 4 << 20), (x, y, z)\n"
        "before = free()\n"
        "for p in (a, b, c): assert runtime.cudaFree(p) == 0\n"
        "assert free() - before == 6 << 20\n"
        "print('small allocations: as expected')\n"
    )
    assert "as expected" in run(tmp_path, program)["stderr"]


@pytest.mark.proof
@needs_emulator
def test_an_operator_with_a_kernel_of_its_own_is_not_taken_apart(tmp_path: Path) -> None:
    # PyTorch could: the parts of silu_backward would hold four tensors more than its kernel.
    program = """
import torch
from torch.nn import functional as F

for function in (F.silu, F.mish, F.gelu):
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    y, gradient = function(x), torch.ones_like(x)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y.backward(gradient)
    print(function.__name__, torch.cuda.max_memory_allocated() - before, file=open("peaks", "a"))
"""
    assert run(tmp_path, program)["ended"] == "end"
    peaks = dict(line.split() for line in (tmp_path / "peaks").read_text().splitlines())
    assert peaks == dict.fromkeys(("silu", "mish", "gelu"), str(4 << 20))


@needs_emulator
@pytest.mark.parametrize(
    "setting",
    ["expandable_segments:True", pytest.param("backend:cudaMallocAsync", marks=pytest.mark.proof)],
)
def test_other_ways_to_allocate(tmp_path: Path, setting: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    found = run(tmp_path, TRAINING)

    assert found["ended"] == "steps", found["stderr"]
    [use] = found["devices"]
    assert use["peak_allocated_bytes"] > 4 * WEIGHTS
    assert use["device_bytes"] == use["peak_reserved_bytes"] + get_gpu("a6000").context_bytes


@needs_emulator
def test_the_driver_counts_what_all_processes_hold(tmp_path: Path) -> None:
    program = (
        "import pynvml, torch, subprocess, sys\n"
        "if sys.argv[1:]: \n"
        "    keep = torch.empty(1 << 28, device='cuda:1'); print('there', flush=True); input()\n"
        "else:\n"
        "    other = subprocess.Popen([sys.executable, __file__, 'x'], stdin=-1, stdout=-1)\n"
        "    other.stdout.readline()\n"
        "    mine = torch.empty(1 << 27, device='cuda:1')\n"
        "    pynvml.nvmlInit()\n"
        "    device = pynvml.nvmlDeviceGetHandleByIndex(1)\n"
        "    found = {p.pid: p.usedGpuMemory\n"
        "             for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device)}\n"
        "    assert len(found) == 2 and found[other.pid] > 1 << 30, found\n"
        "    assert pynvml.nvmlDeviceGetMemoryInfo(device).used == sum(found.values())\n"
        "    other.kill(); other.wait()\n"
        "    assert len(pynvml.nvmlDeviceGetComputeRunningProcesses(device)) == 1\n"
        "    print('the driver agrees', torch.cuda.device_count())\n"
    )
    assert "the driver agrees 2" in run(tmp_path, program, "--gpus", "2")["stderr"]


@pytest.mark.proof
@needs_emulator
def test_paged_optimizers_are_counted_apart(tmp_path: Path) -> None:
    program = TRAINING.replace(
        "torch.optim.AdamW(", "__import__('bitsandbytes').optim.PagedAdamW8bit("
    )
    found = run(tmp_path, program)

    assert found["ended"] == "steps", found["stderr"]
    [use] = found["devices"]
    # Two moments of one byte a parameter, in managed memory.
    assert use["managed_bytes"] == pytest.approx(2 * WEIGHTS / 4, rel=0.05)
    assert "optimizer_state" not in use["breakdown"] or (
        use["breakdown"]["optimizer_state"] < WEIGHTS / 10
    )


@pytest.mark.proof
@needs_emulator
def test_killed_at_any_moment_it_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(TRAINING.replace("range(10)", "range(10**6)"))
    before = {p.name for p in Path("/dev/shm").iterdir()}
    draw = random.Random(3)
    for _ in range(2):
        process = subprocess.Popen(
            [*TUNER, "--gpu", "a6000", "--steps", "0", "--", sys.executable, str(path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=tmp_path,
        )
        time.sleep(draw.uniform(0.5, 8.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        mark = f"TUNER_EMULATOR=/proc/{process.pid}/fd/"
        wait_for(lambda: not _started_by(mark))  # noqa: B023
    assert {p.name for p in Path("/dev/shm").iterdir()} <= before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["program.py"]


def _started_by(mark: str) -> list[int]:
    return [pid for number in range(16) for pid in marked(f"{mark}{number}")]


@needs_emulator
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_ends_the_program_and_what_it_started(tmp_path: Path, number: int) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],\n"
        "                         start_new_session=True)\n"
        "open('started', 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [*TUNER, "--gpu", "a6000", "--", sys.executable, str(path)],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    while not (tmp_path / "started").exists() or not (tmp_path / "started").read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)

    assert process.wait(timeout=60) == 130
    child = int((tmp_path / "started").read_text())
    assert not is_alive(child)


@needs_emulator
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_a_launcher_ends_with_tuner_however_that_ends(tmp_path: Path, number: int) -> None:
    launcher = "sleep 600 & echo $$ $! > started; wait; true"
    process = subprocess.Popen([*TUNER, "--gpu", "a6000", "--", "sh", "-c", launcher], cwd=tmp_path)
    started = tmp_path / "started"
    while not started.exists() or not started.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)

    assert process.wait(timeout=60) == -number
    wait_until_gone(int(word) for word in started.read_text().split())


@pytest.mark.proof
@needs_emulator
def test_a_program_leaves_nothing_at_a_good_end(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    program = tmp_path / "program.py"
    program.write_text(
        "import os, subprocess, tempfile\n"
        "from multiprocessing import shared_memory\n"
        "segment = shared_memory.SharedMemory(create=True, size=1 << 20)\n"
        "other = subprocess.Popen(['sleep', '600'], env={}, start_new_session=True)\n"
        "print(other.pid, segment.name, tempfile.mkdtemp(), flush=True)\n"
        "os._exit(0)\n"
    )
    tail = Tail()
    found = Machine(get_gpu("a6000")).run([sys.executable, str(program)], output=tail)

    assert (found.exit_status, found.ended) == (0, "end"), tail.text
    pid, segment, folder = tail.text.splitlines()[0].split()
    assert not Path(f"/proc/{pid}").exists()
    assert not Path(f"/dev/shm/{segment}").exists()
    assert folder.startswith(str(tmp_path))
    assert not list((tmp_path / "temporary").iterdir())


ASKING = """
import sys
assert not sys.stdin.isatty()
try:
    open("/dev/tty")
except OSError:
    print("no terminal")
input("Choose (1/2/3)? ")
"""


@pytest.mark.proof
@needs_emulator
def test_a_program_that_asks_at_a_terminal_gets_end_of_file(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(ASKING)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [*TUNER, "--gpu", "a6000", "program.py"])
    said = b""
    with contextlib.suppress(OSError):  # Linux says so when the other side is closed
        while data := os.read(terminal, 4096):
            said += data
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    text = " ".join(said.decode().split())
    assert "no terminal Choose (1/2/3)?" in text
    assert "asked for input at program.py:8 and got end of file" in text


@needs_emulator
def test_a_program_whose_time_is_up_tells_its_steps(tmp_path: Path) -> None:
    signal_itself = "import os, tuner.emulator.here as here; os.kill(os.getpid(), here.TELL_SIGNAL)"
    program = TRAINING.replace("    print(", f"    if step == 1: {signal_itself}\n    print(")
    found = run(tmp_path, program)

    assert (found["ended"], found["steps"], found["exit"]) == ("timeout", 2, 0), found["stderr"]
    assert found["devices"][0]["breakdown"]["optimizer_state"] > WEIGHTS


@pytest.mark.proof
@needs_emulator
def test_check_stops_a_run_when_its_time_is_up_and_keeps_the_end_of_its_output(
    tmp_path: Path,
) -> None:
    (tmp_path / "flood").write_text("yes 123456789 | head -c 1000000; echo; echo last; sleep 600")
    options = ("--gpu", "a6000", "--timeout", "2s", "--json", "--no-changes")
    ran = run_python("-m", "tuner", "check", *options, "--", "sh", "flood", cwd=tmp_path)
    found = json.loads(ran.stdout)["program"]
    assert (found["ended"], found["steps"], found["fits"]) == ("timeout", 0, None)
    assert ran.returncode == 4

    tail = Tail()
    command = ["sh", "-c", (tmp_path / "flood").read_text().replace("600", "0")]
    Machine(get_gpu("a6000")).run(command, output=tail)
    assert len(tail.data) == TAIL_BYTES
    assert tail.text.endswith("\n123456789\n\nlast\n")


@needs_emulator
def test_a_session_keeps_to_the_visible_devices_and_the_python_path_of_a_program() -> None:
    code = "import sys; from torch import cuda\n"
    code += "print(cuda.device_count(), cuda.get_device_name(), sys.path[2])"
    with Session(get_gpu("h100_sxm"), count=4) as session:
        ran = subprocess.run(
            ["env", "PYTHONPATH=/of/its/own", sys.executable, "-c", code],
            env=session.environment({**os.environ, "CUDA_VISIBLE_DEVICES": "2,3"}),
            capture_output=True,
            text=True,
            check=True,
        )
    assert ran.stdout.strip() == "2 NVIDIA H100 80GB HBM3 /of/its/own"


def test_without_a_cuda_build_one_error_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/version.py").write_text("__version__ = '2.13.0+cpu'\ncuda = None\n")
    python = _python_with(tmp_path)

    with pytest.raises(UnavailableError, match=r"torch 2\.13\.0\+cpu is not one") as raised:
        find_torch(python)
    assert "pip install 'torch===2.13.0'" in str(raised.value.hint)

    (tmp_path / "torch/version.py").write_text("__version__ = '2.5.1+cu124'\ncuda = '12.4'\n")
    with pytest.raises(UnavailableError, match=r"2\.8 or newer"):
        find_torch(python)
    assert OLDEST_TORCH == (2, 8)


def _python_with(folder: Path) -> str:
    """An interpreter that finds packages in `folder`."""
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\nshift\nexec {sys.executable} -S "$1"'
        f' "import sys; sys.path.insert(0, {str(folder)!r})\n$2"\n'
    )
    python.chmod(0o755)
    return str(python)


def test_without_a_compiler_one_error_says_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UnavailableError, match="C compiler") as raised:
        find_compiler()
    assert "apt install gcc" in str(raised.value.hint)


def test_a_program_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match="no program 'no-such-program'"):
        Machine(get_gpu("a6000")).run(["no-such-program"])
    refused = CliRunner().invoke(cli, ["emulate", "--gpu", "a6000", "--gpus", "0", "--", "true"])
    assert isinstance(refused.exception, InputError)


def test_importing_the_emulator_loads_no_library() -> None:
    code = (
        "import sys, tuner.emulator\n"
        "assert not {'torch', 'numpy', 'tuner.emulator.machine'} & set(sys.modules)\n"
        "from tuner.emulator import Machine\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_emulator
def test_a_machine_runs_programs_for_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; print(os.environ['WORD'])\n" + TRAINING)
    tail = Tail()
    found = Machine(get_gpu("t4", memory_bytes=1 << 28)).run(
        [sys.executable, "train.py"],
        steps=2,
        on_larger_gpu=True,
        output=tail,
        cwd=tmp_path,
        environment={"WORD": "told"},
    )
    assert tail.text.startswith("told\n")
    assert (found.ended, found.steps, found.fits) == ("steps", 2, False)
    assert found.gpu.memory_bytes == 1 << 28 < found.used_bytes


def test_the_interpreter_of_a_script_is_that_of_its_first_line(tmp_path: Path) -> None:
    script = tmp_path / "torchrun"
    script.write_text("#!/opt/env/bin/python3.11\n")
    assert interpreter_of(str(script)) == "/opt/env/bin/python3.11"
    assert interpreter_of("/opt/env/bin/python") == "/opt/env/bin/python"
    script.write_bytes(b"\x7fELF")
    assert interpreter_of(str(script)) == sys.executable


def test_what_torch_compile_generates_is_not_the_programs_own_code() -> None:
    generated = f"/tmp/cache/f3/cf3{'x' * 48}.py"
    frames = [(generated, 365, "call"), ("/p/lib/site-packages/torch/a.py", 1, "f")]
    assert places([*frames, ("/home/me/train.py", 7, "<module>")]) == ("me/train.py:7",) * 2


def test_the_programs_line_is_none_of_tuners_wherever_it_is_installed(monkeypatch: Any) -> None:
    monkeypatch.setattr(lines, "_OURS", "/v/lib/site-packages/tuner/emulator/")
    frames = [("/v/lib/site-packages/tuner/emulator/inside/mode.py", 75, "__torch_dispatch__")]
    lines.package_of.cache_clear()
    assert places([*frames, ("/home/me/train.py", 7, "<module>")]) == ("me/train.py:7",) * 2
    assert places(frames) == (None, None)


STACK = [
    ("/v/lib/site-packages/torch/nn/modules/linear.py", 134, "forward"),
    ("/v/lib/site-packages/transformers/trainer.py", 9, "step"),
    ("/v/lib/site-packages/trl/scripts/sft.py", 120, "main"),
    ("/v/lib/site-packages/trl/cli.py", 5, "main"),
    (runpy.__file__, 88, "_run_code"),
]


@pytest.mark.parametrize("how", ["module", "file", "command"])
def test_of_a_program_in_a_package_the_line_is_one_of_that_package(
    how: str, tmp_path: Path, monkeypatch: Any
) -> None:
    main = ModuleType("__main__")
    script = tmp_path / "trl"
    script.write_text("#!/v/bin/python\nimport sys\nfrom trl.cli import main\nsys.exit(main())\n")
    if how == "module":
        main.__spec__ = ModuleSpec("trl.scripts.sft", None)
    else:
        main.__file__ = str(script) if how == "command" else STACK[2][0]
    about = tmp_path / "trl-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[console_scripts]\ntrl = trl.cli:main\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", main)
    lines.package_of.cache_clear()

    stack = [*STACK, (str(script), 4, "<module>")]
    assert places(stack) == ("scripts/sft.py:120", "transformers/trainer.py:9")
    own = [*STACK[:3], ("/home/me/reward.py", 3, "reward")]
    assert places(own) == ("me/reward.py:3", "transformers/trainer.py:9")


THREADS = """
import threading
import torch

def train():
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(40))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    together.wait()
    for _ in range(12):
        model(torch.randn(8, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

together = threading.Barrier(8)
threads = [threading.Thread(target=train) for _ in range(8)]
for one in threads:
    one.start()
for one in threads:
    one.join()
"""


@needs_emulator
@pytest.mark.proof
@pytest.mark.parametrize(("steps", "ended"), [(0, "end"), *[(3, "steps")] * 10])
def test_threads_that_train_free_gradients_while_tuner_looks(
    tmp_path: Path, steps: int, ended: str
) -> None:
    found = run(tmp_path, THREADS, "--steps", str(steps))
    assert (found["ended"], found["exit"], found["own_fault"]) == (ended, 0, None)
    assert found["steps"] >= 3
    assert found["devices"]
