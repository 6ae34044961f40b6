"""Everything that can go wrong in a trial, on the real runner with real training on the CPU.

Each trial trains a tiny model in a process of its own, under a memory limit. The same on a GPU,
with real CUDA errors, is at the end, and is skipped where there is none.
"""

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from faulty_training import COUNTER, FAULTS, PIDS, TOO_MUCH_BYTES
from measure_samples import SHAPE, knobs
from runner_bodies import CLOCK
from transformers import LlamaConfig
from tune_fakes import record_of
from waiting import is_alive

from tuner.core import processes
from tuner.core.nvml import device_use
from tuner.core.records import Exhausted, Status, TrialRecord
from tuner.emulator.here import is_emulated
from tuner.space.gpus import get_gpu
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.isolated import MARK, IsolatedRunner
from tuner.trial.preflight import obstacle

MIB = 2**20
LIMIT_BYTES = 256 * MIB
TIMEOUT_S = 300.0  # for a machine that others use too; a trial that hangs ends it at once
SEED = 4
TRIALS = 48

LLAMA = LlamaConfig(**SHAPE)
CONFIGURATION = knobs(grad_accum=1, lora_rank=4, gradient_checkpointing=False, fault="none")


@dataclass(frozen=True)
class Expected:
    """What must come of a fault."""

    status: Status
    phase: str | None = None
    requested_bytes: int | None = None
    exhausted: Exhausted | None = None
    text: str = ""


def ran_out(phase):
    return Expected(Status.OOM, phase, TOO_MUCH_BYTES, Exhausted.DEVICE, "allocate")


EXPECTED = {
    "none": Expected(Status.OK),
    "not_finite": Expected(Status.NON_FINITE, text="not finite"),
    "thrashing": Expected(Status.THRASHING, text="allocator retries in"),
    "oom_load": ran_out("load"),
    "oom_forward": ran_out("forward"),
    "oom_backward": ran_out("backward"),
    "oom_optimizer": ran_out("optimizer"),
    "filled_up": Expected(Status.OOM, "forward", 4 * MIB, Exhausted.DEVICE),
    "host_oom": Expected(Status.OOM, "forward", None, Exhausted.HOST, "SIGKILL"),
    "segfault": Expected(Status.CRASHED, "backward", text="SIGSEGV"),
    "hang": Expected(Status.TIMEOUT, "forward", text="killed after 300 s"),
    "killed": Expected(Status.INTERRUPTED, "optimizer", text="SIGKILL"),
    "poisoned": Expected(Status.CRASHED, "backward", text="illegal memory access"),
    "asserted": Expected(Status.CRASHED, "forward", text="device-side assert"),
    "disk_full": Expected(Status.CRASHED, "optimizer", text="No space left on device"),
    "wrong": Expected(Status.CRASHED, "forward", text="TypeError: expected a tensor"),
}


ENDED_WELL = {"none", "not_finite", "thrashing"}
"""What is found in the measurement."""


def check(fault, outcome, expected=EXPECTED):
    want = expected[fault]
    got = (outcome.status, outcome.phase, outcome.requested_bytes, outcome.exhausted)
    assert got == (want.status, want.phase, want.requested_bytes, want.exhausted), (fault, outcome)
    assert want.text in outcome.message
    numbers = outcome.measurement or outcome.emulation  # the latter on an emulated GPU
    assert (numbers is not None) == (fault in ENDED_WELL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults")
    LLAMA.save_pretrained(path / "model")
    (path / "kills").write_text("oom_kill 0\n")
    (path / "pids").touch()
    return path


@pytest.fixture(scope="module")
def environment(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(COUNTER, str(folder / "kills"))
        patch.setenv(PIDS, str(folder / "pids"))
        patch.setenv(CLOCK, str(folder / "time is up"))
        # Threads of a busy machine wait for each other, and a tiny model gains nothing by them.
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def options(**changes):
    known = {"device": "cpu", "budget_s": 0.05, "warmup_steps": 2, "timeout_s": TIMEOUT_S}
    return MeasureOptions(**{**known, "memory_limit_bytes": LIMIT_BYTES, **changes})


def faulty_job(folder):
    return TrialJob("faulty_training:WORKLOAD", str(folder / "model"), get_gpu("a6000"))


@pytest.fixture(scope="module")
def runner(folder, environment):
    with IsolatedRunner(faulty_job(folder), options(), body="faulty_training:BODY") as opened:
        opened.start()
        yield opened


def run(runner, fault, **changes):
    try:
        return runner.run(CONFIGURATION.replace(fault=fault, **changes))
    finally:
        Path(os.environ[CLOCK]).unlink(missing_ok=True)


def test_every_fault_has_an_expectation():
    assert ON_CUDA.keys() == ENDED_WELL | FAULTS.keys()
    assert ON_CUDA.keys() - EXPECTED.keys() == {"asserted_on_device"}  # needs a device


def test_allocator_retries_reach_the_journal(runner):
    outcome = run(runner, "thrashing")
    measured = outcome.measurement
    assert measured.timed_alloc_retries == measured.steps  # one a micro-step, one of them a step
    assert measured.num_alloc_retries == measured.steps + measured.warmup_steps
    record = record_of(CONFIGURATION, outcome)
    assert not record.fits
    assert TrialRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_a_batch_that_is_too_large_runs_out_by_itself(runner):
    outcome = run(runner, "none", micro_batch=256, max_length=2048)
    assert (outcome.status, outcome.exhausted) == (Status.OOM, Exhausted.DEVICE)
    assert outcome.phase in ("forward", "backward")
    assert outcome.requested_bytes > MIB


def shared_memory():
    return {path.name for path in Path("/dev/shm").iterdir()}


def resident_bytes(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)[1]) * 1024


def open_files(pid):
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def mark_of(pid):
    """By which all processes that descend from the warm one are known."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(text for text in variables if text.startswith(f"{MARK}="))


def shuffled_faults():
    """Trials of which each fault has about equally many."""
    faults = (list(EXPECTED) * TRIALS)[:TRIALS]
    random.Random(SEED).shuffle(faults)
    return faults


@pytest.mark.proof
def test_trials_in_random_order_have_their_outcomes_and_leave_nothing(runner, folder):
    undisturbed = run(runner, "none")
    warm, before = runner.warm_pid, resident_bytes(runner.warm_pid)
    files = open_files(warm)
    faults = shuffled_faults()
    outcomes = [run(runner, fault) for fault in faults]
    for fault, outcome in zip(faults, outcomes, strict=True):
        check(fault, outcome)
    assert len(outcomes) == TRIALS
    assert runner.warm_pid == warm
    assert psutil.Process(warm).children() == []
    assert processes.marked(mark_of(warm)) == [warm]
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert len(pids) >= 8
    assert not any(map(is_alive, pids))
    assert open_files(warm) == files
    assert resident_bytes(warm) - before < 8 * MIB
    left = [name for name in shared_memory() if any(str(pid) in name for pid in pids)]
    assert left == []
    check_same(run(runner, "none"), undisturbed)


def check_same(after, before):
    """Peak memory within noise: pages of shared libraries that one touched more."""
    assert after.status is before.status is Status.OK
    # What ran, on a device or on an emulated one.
    now, then = after.ran.memory, before.ran.memory
    assert now.peak_allocated_bytes == pytest.approx(then.peak_allocated_bytes, rel=0.05)
    assert now.loaded_bytes == pytest.approx(then.loaded_bytes, rel=0.05)
    assert after.ran.trainable_params == before.ran.trainable_params
    assert after.ran.device == before.ran.device


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# PyTorch's allocator asks CUDA for segments, and names their size.
ON_CUDA = {
    **EXPECTED,
    "filled_up": Expected(Status.OOM, "forward", 20 * MIB, Exhausted.DEVICE, "CUDA out of memory"),
    "asserted_on_device": Expected(Status.CRASHED, "forward", text="device-side assert"),
}


@pytest.fixture(scope="module")
def cuda_runner(folder, environment):
    limited = options(device="cuda:0", memory_limit_bytes=4 << 30, timeout_s=TIMEOUT_S)
    known = {"body": "faulty_training:BODY", "preflight": lambda options, given_up: True}
    with IsolatedRunner(faulty_job(folder), limited, **known) as opened:
        yield opened


def device_bytes():
    use = device_use(0)
    return use.used_bytes if use else 0


@pytest.mark.gpu
@needs_cuda
@pytest.mark.proof
def test_on_a_gpu_every_fault_has_its_outcome_and_gives_memory_back(cuda_runner):
    undisturbed = run(cuda_runner, "none")
    before = device_bytes()
    # Kernels do nothing on an emulated GPU: no index is found out of range, and no loss is lost.
    left_out = {"hang", *(("asserted_on_device", "not_finite") if is_emulated() else ())}
    faults = [name for name in ON_CUDA if name not in left_out]
    random.Random(SEED).shuffle(faults)
    for fault in faults:
        check(fault, run(cuda_runner, fault), ON_CUDA)
    assert device_bytes() - before < 64 * MIB
    check_same(run(cuda_runner, "none"), undisturbed)


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_that_another_process_uses_is_refused_with_its_name():
    code = "import torch; x = torch.zeros(1, device='cuda:0'); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        other.stdout.readline()
        text = obstacle(MeasureOptions(device="cuda:0"))
        other.communicate(b"\n")
    assert text is not None
    assert "python" in text
