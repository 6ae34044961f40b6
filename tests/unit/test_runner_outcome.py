"""What an ending means, from the real texts of libraries, drivers and kernels."""

import dataclasses
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runner_bodies import measurement
from tune_fakes import record_of

from tuner.core.errors import InputError
from tuner.core.outcome import (
    MESSAGE_CHARS,
    Ending,
    Raised,
    classify,
    is_out_of_memory,
    requested_bytes,
    unavailable,
)
from tuner.core.records import Configuration, Exhausted, Outcome, Status, TrialRecord

GIB = 2**30
CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 47.40 GiB of "
    "which 1.20 GiB is free."
)
CPU_OOM = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"
)
POISONED = [
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be "
    "asynchronously reported at some other API call",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "CUDA error: misaligned address",
    "CUDA error: the launch timed out and was terminated",
    "CUDA error: uncorrectable ECC error encountered",
    "NVML_ERROR_GPU_IS_LOST: GPU is lost",
    "Unable to determine the device handle for GPU0000:01:00.0: GPU has fallen off the bus.",
]


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


def raised(error, *, device="cuda:0", **known):
    return classify(Ending(device=device, raised=Raised.chain(error), **known))


@pytest.mark.parametrize("phase", ["load", "forward", "backward", "optimizer"])
def test_out_of_memory_says_where_and_how_much(phase):
    outcome = raised(OutOfMemoryError(CUDA_OOM), facts={"phase": phase}, duration_s=3.5)
    assert outcome.status is Status.OOM
    assert outcome.phase == phase
    assert outcome.requested_bytes == round(1.96 * GIB)
    assert outcome.exhausted is Exhausted.DEVICE
    assert outcome.duration_s == 3.5
    assert outcome.message.startswith(f"{__name__}.OutOfMemoryError: CUDA out of memory")


@pytest.mark.parametrize(
    ("error", "device", "exhausted"),
    [
        (RuntimeError("CUDA error: out of memory"), "cuda:0", Exhausted.DEVICE),
        (RuntimeError("CUDA driver error: out of memory"), "cuda:0", Exhausted.DEVICE),
        (RuntimeError("HIP out of memory. Tried to allocate 2 GiB."), "cuda:0", Exhausted.DEVICE),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "cuda:0", Exhausted.DEVICE),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `x`"), "cuda:0", Exhausted.DEVICE),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "cuda:0", Exhausted.DEVICE),
        (OutOfMemoryError(), "cuda:0", Exhausted.DEVICE),
        (RuntimeError(CPU_OOM), "cuda:0", Exhausted.HOST),
        (MemoryError(), "cuda:0", Exhausted.HOST),
        (MemoryError("std::bad_alloc"), "cuda:0", Exhausted.HOST),
        (RuntimeError("std::bad_alloc"), "cuda:0", Exhausted.HOST),
        (MemoryError("Unable to allocate 3.00 GiB for an array"), "cuda:0", Exhausted.HOST),
        (OSError(12, "Cannot allocate memory"), "cuda:0", Exhausted.HOST),
        # On the CPU it is the memory of the device that refuses.
        (RuntimeError(CPU_OOM), "cpu", Exhausted.DEVICE),
        (MemoryError(), "cpu", Exhausted.DEVICE),
    ],
    ids=str,
)
def test_the_memory_of_the_host_is_told_from_the_devices(error, device, exhausted):
    outcome = raised(error, device=device)
    assert (outcome.status, outcome.exhausted) == (Status.OOM, exhausted)
    assert outcome.device_ran_out == (exhausted is Exhausted.DEVICE)


def test_the_size_is_read_from_every_text_that_has_one():
    assert requested_bytes(CPU_OOM) == 4 * GIB
    assert requested_bytes("Unable to allocate 3.00 GiB for an array with shape (1,)") == 3 * GIB
    assert requested_bytes("CUDA error: out of memory") is None


@pytest.mark.parametrize("text", POISONED)
def test_a_poisoned_context_is_a_crash_with_its_text(text):
    outcome = raised(RuntimeError(text), facts={"phase": "backward"})
    assert (outcome.status, outcome.phase) == (Status.CRASHED, "backward")
    assert outcome.exhausted is None
    assert text[:60] in outcome.message


def test_what_follows_a_survived_shortage_decides():
    """A script that catches an OOM, tries less and then crashes has crashed, and the reverse."""
    log = f"torch.OutOfMemoryError: {CUDA_OOM}\nretrying with half the batch\n"
    crashed = classify(Ending(device="cuda:0", exit_code=1, log_tail=log + POISONED[0]))
    assert crashed.status is Status.CRASHED
    ran_out = classify(Ending(device="cuda:0", exit_code=1, log_tail=POISONED[0] + log))
    assert ran_out.status is Status.OOM


@pytest.mark.parametrize(
    "text",
    [
        "expected scalar type Half but found Float",
        "out of resource: shared memory, Required: 147456, Hardware limit: 101376",  # Triton
        "CUBLAS_STATUS_EXECUTION_FAILED",
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory.",
        "",
    ],
)
def test_what_is_not_recognised_stays_unknown(text):
    assert not is_out_of_memory(text)
    outcome = raised(RuntimeError(text))
    assert (outcome.status, outcome.requested_bytes) == (Status.CRASHED, None)
    assert outcome.message == (f"RuntimeError: {text}" if text else "RuntimeError")


def test_the_cause_behind_an_exception_counts():
    for link in ("__cause__", "__context__"):
        error = RuntimeError("the step failed")
        setattr(error, link, OutOfMemoryError(CUDA_OOM))
        outcome = raised(error)
        assert outcome.status is Status.OOM
        assert outcome.requested_bytes == round(1.96 * GIB)


def test_a_cause_that_was_set_aside_does_not_count():
    error = RuntimeError("unrelated")
    error.__context__, error.__suppress_context__ = OutOfMemoryError(CUDA_OOM), True
    assert raised(error).status is Status.CRASHED


def test_a_configuration_that_cannot_be_built_is_invalid():
    outcome = raised(InputError("lora_targets x do not exist", hint="there are q_proj, v_proj"))
    assert outcome.status is Status.INVALID
    assert "q_proj" in outcome.message
    assert unavailable(Ending(device="cpu", raised=Raised.chain(InputError("x")))) is None


@pytest.mark.parametrize(
    "text",
    [
        "Torch not compiled with CUDA enabled",
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        "CUDA error: no CUDA-capable device is detected",
        "CUDA error: invalid device ordinal",
        "No CUDA GPUs are available",
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you",
        "CUDA error: initialization error",
        "CUDA error: no kernel image is available for execution on the device",
    ],
)
def test_a_device_that_cannot_be_used_is_no_trials_doing(text):
    ending = Ending(device="cuda:1", raised=Raised.chain(RuntimeError(text)))
    assert unavailable(ending) == f"cuda:1 cannot be used: {text}"


def test_floating_point_errors_are_numbers_that_are_not_finite():
    assert raised(FloatingPointError("loss is nan")).status is Status.NON_FINITE


def measured(**changes):
    result = dataclasses.replace(measurement(), **changes)
    return classify(Ending(device="cuda:0", exit_code=0, measurement=result.to_dict()))


def test_a_loss_that_is_not_finite_keeps_its_numbers():
    outcome = measured(loss_finite=False)
    assert outcome.status is Status.NON_FINITE
    assert outcome.measurement is not None


@pytest.mark.parametrize(
    ("retries", "steps", "status"),
    [
        (None, 3, Status.OK),
        (0, 3, Status.OK),
        (1, 3, Status.OK),  # a single one is not repeated
        (2, 3, Status.THRASHING),
        (3, 40, Status.OK),  # while caches found their sizes
        (20, 40, Status.THRASHING),
        (90, 40, Status.THRASHING),
    ],
)
def test_repeated_allocator_retries_are_thrashing(retries, steps, status):
    outcome = measured(timed_alloc_retries=retries, steps=steps)
    assert outcome.status is status
    assert outcome.measurement.timed_alloc_retries == retries


def test_a_result_outlives_what_came_after_it():
    """A trial that hangs or is killed once its result is known has ended well."""
    result = measurement().to_dict()
    for known in ({"timed_out_after_s": 9.0}, {"given_up": True}, {"exit_code": -9}):
        assert classify(Ending(device="cpu", measurement=result, **known)).status is Status.OK


def test_a_time_out_says_when_and_where():
    outcome = classify(
        Ending(device="cpu", exit_code=-9, timed_out_after_s=600.0, facts={"phase": "load"})
    )
    assert (outcome.status, outcome.phase) == (Status.TIMEOUT, "load")
    assert outcome.message == "killed after 600 s"


@pytest.mark.parametrize("code", [-9, 137, None])
def test_a_kill_by_the_kernel_for_want_of_memory_needs_evidence(code):
    killed = classify(Ending(device="cuda:0", exit_code=code, oom_kills=1))
    assert (killed.status, killed.exhausted) == (Status.OOM, Exhausted.HOST)
    for kills in (0, None):
        unknown = classify(Ending(device="cuda:0", exit_code=code, oom_kills=kills))
        status = Status.CRASHED if code is None else Status.INTERRUPTED  # from outside
        assert (unknown.status, unknown.exhausted) == (status, None)


def test_a_helper_that_the_kernel_killed_is_the_hosts_memory():
    text = "DataLoader worker (pid 12) is killed by signal: Killed. "
    assert raised(RuntimeError(text), oom_kills=1).exhausted is Exhausted.HOST
    assert raised(RuntimeError(text), oom_kills=0).status is Status.CRASHED
    # What the kernel killed meanwhile explains no other exception.
    assert raised(RuntimeError("shape mismatch"), oom_kills=1).status is Status.CRASHED


@pytest.mark.parametrize(
    ("code", "log", "status"),
    [
        (1, "Error out of memory at line 90 in file /src/csrc/pythonInterface.cpp", Status.OOM),
        (-signal.SIGABRT, f"terminate called: what(): {CUDA_OOM}", Status.OOM),
        (-signal.SIGABRT, "terminate called after throwing 'std::bad_alloc'", Status.OOM),
        (-signal.SIGABRT, "free(): invalid pointer", Status.CRASHED),
        # A signal from a bug or from outside: the log's shortage was survived.
        (-signal.SIGSEGV, CUDA_OOM, Status.CRASHED),
        (-signal.SIGKILL, CUDA_OOM, Status.INTERRUPTED),
        (0, "", Status.CRASHED),
        (-60, "", Status.CRASHED),
    ],
)
def test_a_process_without_a_word_is_judged_by_its_exit_and_log(code, log, status):
    outcome = classify(Ending(device="cuda:0", exit_code=code, log_tail=log))
    assert outcome.status is status
    if log:
        assert log[:20] in outcome.message or "SIGABRT" in outcome.message


def test_a_trial_that_lost_its_parent_was_given_up():
    outcome = classify(Ending(device="cpu", starter_died=True, oom_kills=0))
    assert outcome.status is Status.INTERRUPTED
    assert classify(Ending(device="cpu", given_up=True)).status is Status.INTERRUPTED


def test_processes_that_are_left_are_named():
    outcome = classify(
        Ending(device="cpu", exit_code=None, timed_out_after_s=1.0, left_processes=(7, 9))
    )
    assert outcome.message == "killed after 1 s; could not be ended: process 7, 9"


TEXTS = st.text(max_size=3000) | st.sampled_from([CUDA_OOM, CPU_OOM, *POISONED])


@given(
    text=TEXTS,
    log=TEXTS,
    code=st.none() | st.integers(-64, 255),
    kills=st.none() | st.integers(0, 3),
    has_raised=st.booleans(),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    phase=st.sampled_from([None, "load", "nonsense", 3]),
)
def test_every_ending_has_an_outcome_that_the_journal_can_hold(
    text, log, code, kills, has_raised, flags, phase
):
    ending = Ending(
        device="cuda:0",
        raised=Raised.chain(RuntimeError(text)) if has_raised else (),
        log_tail=log,
        exit_code=code,
        oom_kills=kills,
        given_up=flags[0],
        starter_died=flags[1],
        timed_out_after_s=3.0 if flags[2] else None,
        facts={"phase": phase},
    )
    outcome = classify(ending)
    assert outcome.status not in (Status.OK, Status.INVALID)
    assert (outcome.exhausted is not None) == (outcome.status is Status.OOM)
    assert len(outcome.message) <= MESSAGE_CHARS + 200
    assert outcome.phase in (None, "load")
    record = record_of(Configuration({"a": 1}), outcome)
    assert TrialRecord.from_dict(record.to_dict()).outcome == outcome


def test_journals_from_before_have_no_such_field():
    record = record_of(Configuration({"a": 1}), Outcome(Status.OOM, requested_bytes=5)).to_dict()
    del record["exhausted"]
    outcome = TrialRecord.from_dict(record).outcome
    assert outcome.exhausted is None
    assert outcome.device_ran_out
