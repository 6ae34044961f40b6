"""Classifies the end of a trial, by the texts in which libraries and kernels fail.

Everything that is known of a trial that ended is an `Ending`; `classify` makes an `Outcome` of
it. It needs neither torch nor a GPU, so that the supervising process can call it. What is not
recognised is `crashed`, with its text: nothing is guessed.
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tuner.core.environment import all_masked, masked
from tuner.core.records import Exhausted, Measurement, Outcome, Phase, Source, Status
from tuner.core.units import last_lines, parse_bytes

MESSAGE_CHARS = 600
"""Messages in the journal are cut to this length; the runner's `last_log` has the whole log."""

LOG_CHARS = 4000
"""This many characters at the end of a log are searched for the cause of a failure."""

STEPS_PER_RETRY = 2
"""A configuration is thrashing when the allocator retries in every second timed step or more.

At a retry PyTorch's allocator gives its cache back to the driver, which waits for the device, and
asks again (PyTorch, "CUDA memory management", num_alloc_retries). The first steps may need one or
two; scarce memory needs them again and again.
"""


class _Verdict(enum.Enum):
    """The meaning of a text. Values are names of groups in `_TEXTS`."""

    POISONED = "poisoned"
    DEVICE = "device"
    HOST = "host"


# Each line names where the text comes from.
_TEXTS = re.compile(
    r"(?P<poisoned>"
    r"illegal memory access|misaligned address|illegal instruction"  # CUDA errors 700, 716, 715
    r"|device-side assert|unspecified launch failure|launch timed out"  # 710, 719, 702
    r"|uncorrectable ECC error|hardware stack error"  # 214, 714
    r"|fallen off the bus|GPU is lost"  # driver log (Xid 79), NVML_ERROR_GPU_IS_LOST
    r")|(?P<host>"
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"  # PyTorch on the CPU
    r"|std::bad_alloc"  # C++
    r"|Unable to allocate [0-9.]+ [KMGT]?i?B for an array"  # numpy
    r"|Cannot allocate memory"  # errno ENOMEM: mmap, fork
    r"|(?m:^MemoryError\b)"  # the last line of Python's traceback
    r")|(?P<device>"
    r"out of memory"  # torch.OutOfMemoryError, CUDA runtime and driver, Triton, bitsandbytes
    r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"  # CUDA, by the names of the errors
    r"|CUBLAS_STATUS_ALLOC_FAILED"  # cuBLAS, creating a handle
    r"|CUDNN_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)"  # cuDNN 8 and 9
    r")",
    re.IGNORECASE,
)
_REQUESTED = re.compile(
    r"(?:tried to|Unable to) allocate ([0-9.]+ [KMGT]i?B|[0-9]+ bytes)", re.IGNORECASE
)
# PyTorch and the CUDA runtime, where a device cannot be used at all: no configuration is at fault.
_NO_DEVICE = re.compile(
    r"not compiled with CUDA enabled|Found no NVIDIA driver|NVIDIA driver .* is too old"
    r"|no CUDA-capable device is detected|CUDA driver version is insufficient"
    r"|invalid device ordinal|No CUDA GPUs are available"
    r"|Cannot re-initialize CUDA in forked subprocess|CUDA (driver )?error: initialization error"
    r"|no kernel image is available",
    re.IGNORECASE,
)
RANK = "rank"
"""The fact that says which rank of a trial on several GPUs ended it."""

_FROM_OUTSIDE = tuple(
    code
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    for code in (-number, 128 + number)
)
"""Exit codes by signals that no trial sends to itself, also by way of a shell: the configuration is
not the cause."""

_KILLED_HELPER = re.compile(r"killed by signal: Killed")  # torch.utils.data, a worker

# gloo (tcp/pair.cc and "Application timeout" of its unbound buffers), the process group's store,
# and NCCL: a rank whose peer has gone.
_LOST_PEER = re.compile(
    r"Connection (closed by|reset by|refused)|Broken pipe|Socket closed|recvBytes|sendBytes"
    r"|remote process exited|NCCL error|ncclRemoteError|ncclSystemError"
    r"|gloo/transport/tcp",
    re.IGNORECASE,
)

_DEVICE_ERROR = "OutOfMemoryError"  # torch's, under whatever module it is found
_HOST_ERROR = "builtins.MemoryError"
_INVALID_ERROR = "tuner.core.errors.InputError"
_UNAVAILABLE_ERROR = "tuner.core.errors.TunerError"
_NON_FINITE_ERROR = "builtins.FloatingPointError"


@dataclass(frozen=True, slots=True)
class Raised:
    """One exception: the full names of its class and of its bases, and its text."""

    kinds: tuple[str, ...]
    text: str

    @classmethod
    def chain(cls, error: BaseException) -> tuple[Raised, ...]:
        """The exception, then what it was raised from or while handling, outermost first."""
        links = []
        seen: set[int] = set()
        link: BaseException | None = error
        while link is not None and id(link) not in seen:
            seen.add(id(link))
            kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(link).__mro__]
            links.append(cls(tuple(kinds), str(link)))
            link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        return tuple(links)

    @property
    def name(self) -> str:
        """The class as tracebacks name it."""
        return self.kinds[0].removeprefix("builtins.")

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" if self.text else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The facts about a trial that ended.

    - `device` is its torch device string.
    - `exit_code` is as in `subprocess`: negative for a signal, None when unknown.
    - `facts` has the last value of each name that the child reported.
    - `measurement` is its result (`Measurement.to_dict`), `raised` the exceptions without one.
    - `oom_kills` counts processes of this control group that the kernel killed for lack of memory;
      None when the kernel does not tell.
    - `left_processes` are ids of processes of the trial that could not be ended.
    - `starter_died`: the process that starts trials ended, and the trial with it.
    """

    device: str
    exit_code: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    measurement: Mapping[str, Any] | None = None
    raised: tuple[Raised, ...] = ()
    log_tail: str = ""
    timed_out_after_s: float | None = None
    given_up: bool = False
    starter_died: bool = False
    oom_kills: int | None = None
    left_processes: tuple[int, ...] = ()
    duration_s: float = 0.0

    def masked(self, secrets: Collection[str]) -> Ending:
        """A copy with these secrets and known tokens masked in every text of the trial."""
        return replace(
            self,
            facts=all_masked(self.facts, secrets),
            measurement=all_masked(self.measurement, secrets),
            raised=tuple(replace(one, text=masked(one.text, secrets)) for one in self.raised),
            log_tail=masked(self.log_tail, secrets),
        )

    @property
    def phase(self) -> str | None:
        """The last phase that the trial reported."""
        phase = self.facts.get("phase")
        return str(phase) if phase in set(Phase) else None


def is_out_of_memory(text: str) -> bool:
    """True if an error text or log reports that memory of the device or the host ran out."""
    return _verdict(text) in (_Verdict.DEVICE, _Verdict.HOST)


def is_lost_peer(text: str) -> bool:
    """True if the error of a rank only reports that another rank ended."""
    return _LOST_PEER.search(text) is not None


def requested_bytes(text: str) -> int | None:
    """The size of the failed allocation, if an out-of-memory text has it."""
    found = _REQUESTED.search(text)
    return parse_bytes(found[1].replace(" bytes", " B")) if found else None


def unavailable(ending: Ending) -> str | None:
    """The text of an error of the machine, not of the trial; None for any other."""
    if ending.measurement is not None or not ending.raised:
        return None
    first = ending.raised[0]
    if _UNAVAILABLE_ERROR in first.kinds and _INVALID_ERROR not in first.kinds:
        return first.text
    if _NO_DEVICE.search(first.text):
        return f"{ending.device} cannot be used: {first.text}"
    return None


def classify(ending: Ending) -> Outcome:
    """The outcome of a trial.

    Its own result or exception comes first, then an interruption or a time limit, then the end of
    its process, and last its log.
    """
    if ending.measurement is not None:
        return _measured(ending, Measurement.from_dict(ending.measurement))
    if ending.raised:
        return _raised(ending)
    if ending.given_up:
        return _outcome(ending, Status.INTERRUPTED, "interrupted before it had ended")
    if ending.timed_out_after_s is not None:
        text = f"killed after {ending.timed_out_after_s:g} s"
        return _outcome(ending, Status.TIMEOUT, text)
    return _died(ending)


def _measured(ending: Ending, measurement: Measurement) -> Outcome:
    status, message = Status.OK, ""
    retries = measurement.timed_alloc_retries
    computed = measurement.source is Source.MEASURED  # on an emulated device the loss is made up
    if computed and not measurement.loss_finite:
        status, message = Status.NON_FINITE, "the loss is not finite"
    elif retries is not None and retries >= max(2.0, measurement.steps / STEPS_PER_RETRY):
        status = Status.THRASHING
        message = (
            f"{retries} allocator retries in {measurement.steps} steps: memory is barely enough, "
            "and costs speed"
        )
    text = _with_left(message, ending)
    return Outcome.of(status, measurement, message=text, duration_s=ending.duration_s)


def _raised(ending: Ending) -> Outcome:
    first = ending.raised[0]
    if _INVALID_ERROR in first.kinds:
        return _outcome(ending, Status.INVALID, first.text)
    verdict, link = _cause(ending)
    if verdict in (_Verdict.DEVICE, _Verdict.HOST):
        return _out_of_memory(ending, verdict, str(link))
    if _NON_FINITE_ERROR in first.kinds:
        return _outcome(ending, Status.NON_FINITE, str(first))
    return _outcome(ending, Status.CRASHED, str(first))


def _cause(ending: Ending) -> tuple[_Verdict | None, Raised]:
    """The first exception of the chain with a known meaning, and that meaning."""
    for link in ending.raised:
        names = {kind.rpartition(".")[2] for kind in link.kinds}
        verdict = _verdict(link.text)
        if verdict is None and _DEVICE_ERROR in names:
            verdict = _Verdict.DEVICE
        if verdict is None and _HOST_ERROR in link.kinds:
            verdict = _Verdict.HOST
        if verdict is None and ending.oom_kills and _KILLED_HELPER.search(link.text):
            verdict = _Verdict.HOST
        if verdict is not None:
            return verdict, link
    return None, ending.raised[0]


def _died(ending: Ending) -> Outcome:
    """Judge by the exit code and the log, without a result or an exception."""
    code = ending.exit_code
    # SIGKILL, also as the exit code of a shell in between.
    if ending.oom_kills and code in (None, -signal.SIGKILL, 128 + signal.SIGKILL):
        text = f"{_exit_text(ending)}: the kernel killed a process for lack of memory"
        return _outcome(ending, Status.OOM, text, exhausted=Exhausted.HOST)
    if ending.starter_died:
        text = "interrupted, because the process that starts trials ended"
        return _outcome(ending, Status.INTERRUPTED, text)
    tail = ending.log_tail[-LOG_CHARS:]
    log = last_lines(tail, MESSAGE_CHARS // 2)
    # Signals other than abort()'s come from outside or from a bug: the trial survived any lack of
    # memory in its log.
    by_itself = code is not None and (code >= 0 or code == -signal.SIGABRT)
    verdict = _verdict(tail) if by_itself else None
    if verdict in (_Verdict.DEVICE, _Verdict.HOST):
        return _out_of_memory(ending, verdict, f"{_exit_text(ending)}: {log}")
    text = f"{_exit_text(ending)}; its log ends: {log}" if log else _exit_text(ending)
    return _outcome(ending, Status.INTERRUPTED if code in _FROM_OUTSIDE else Status.CRASHED, text)


def _out_of_memory(ending: Ending, verdict: _Verdict, text: str) -> Outcome:
    """Out of the device's memory or the host's; on the CPU the device's is the host's."""
    is_host = verdict is _Verdict.HOST and ending.device != "cpu"
    return _outcome(
        ending,
        Status.OOM,
        text,
        exhausted=Exhausted.HOST if is_host else Exhausted.DEVICE,
        size_bytes=requested_bytes(text),
    )


def _outcome(
    ending: Ending,
    status: Status,
    text: str,
    *,
    exhausted: Exhausted | None = None,
    size_bytes: int | None = None,
) -> Outcome:
    message = text if len(text) <= MESSAGE_CHARS else f"{text[: MESSAGE_CHARS - 4]} ..."
    return Outcome(
        status,
        phase=ending.phase,
        requested_bytes=size_bytes,
        message=_with_left(message, ending),
        duration_s=ending.duration_s,
        exhausted=exhausted,
    )


def _verdict(text: str) -> _Verdict | None:
    """The last known meaning in a text, as later lines of a log count more."""
    found = list(_TEXTS.finditer(text))
    if not found:
        return None
    return next(verdict for verdict in _Verdict if found[-1][verdict.value] is not None)


def _exit_text(ending: Ending) -> str:
    code = ending.exit_code
    process = f"rank {ending.facts[RANK]}" if RANK in ending.facts else "the process"
    if code is None:
        return f"{process} ended in a way that is not known"
    if code >= 0:
        return f"{process} ended without a result (exit code {code})"
    return f"{process} was ended by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """The name of a signal: "SIGKILL"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _with_left(message: str, ending: Ending) -> str:
    """The message, with the processes that could not be ended."""
    left = ", ".join(map(str, ending.left_processes))
    return "; ".join(filter(None, (message, left and f"could not be ended: process {left}")))
