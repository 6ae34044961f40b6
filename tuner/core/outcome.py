"""What an ending means: the one place that knows how failures of libraries and kernels read.

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
from tuner.core.units import parse_bytes

MESSAGE_CHARS = 600
"""A message in the journal is cut here; the whole log is the runner's `last_log`."""

LOG_CHARS = 4000
"""How far back from the end of a log the cause of a death is looked for."""

STEPS_PER_RETRY = 2
"""A configuration is thrashing when the allocator retries in every second timed step or more.

At a retry PyTorch's allocator gives its cache back to the driver, which waits for the device, and
asks again (PyTorch, "CUDA memory management", num_alloc_retries). One or two may happen while
the first steps find their blocks; memory that is short costs one again and again.
"""


class _Verdict(enum.Enum):
    """What a text says. Values are names of groups in `_TEXTS`."""

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

_KILLED_HELPER = re.compile(r"killed by signal: Killed")  # torch.utils.data, a worker

# gloo (tcp/pair.cc and "Application timeout" of its unbound buffers), the process group's store,
# and NCCL: a rank whose peer has gone.
_LOST_PEER = re.compile(
    r"Connection (closed by|reset by|refused)|Broken pipe|Socket closed|recvBytes|sendBytes"
    r"|remote process exited|NCCL error|ncclRemoteError|ncclSystemError"
    r"|gloo/transport/tcp",
    re.IGNORECASE,
)

_CRASH = "Fatal Python error"  # faulthandler
_STACK_LINES = 5

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
    """All that is known of a trial that ended.

    - `device` is the torch device string that it was to run on.
    - `exit_code` is as in `subprocess`: negative for a signal; None when it is not known.
    - `facts` is what the child had reported of itself, the last value of each name.
    - `measurement` is its result (`Measurement.to_dict`), `raised` what ended it instead.
    - `oom_kills` counts processes of this control group that the kernel killed for want of
      memory meanwhile; None where the kernel does not tell.
    - `left_processes` are ids of processes of the trial that could not be ended.
    - `starter_died`: the process that starts trials ended, and took the trial with it.
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
        """The same, with these secrets and known tokens masked in all that the trial said."""
        return replace(
            self,
            facts=all_masked(self.facts, secrets),
            measurement=all_masked(self.measurement, secrets),
            raised=tuple(replace(one, text=masked(one.text, secrets)) for one in self.raised),
            log_tail=masked(self.log_tail, secrets),
        )

    @property
    def phase(self) -> str | None:
        """The phase that the trial was in when it was last heard of."""
        phase = self.facts.get("phase")
        return str(phase) if phase in set(Phase) else None


def is_out_of_memory(text: str) -> bool:
    """Whether an error text or the end of a log says that memory ran out, whichever it was."""
    return _verdict(text) in (_Verdict.DEVICE, _Verdict.HOST)


def is_lost_peer(text: str) -> bool:
    """Whether an error of one rank of a trial only says that another rank has ended."""
    return _LOST_PEER.search(text) is not None


def requested_bytes(text: str) -> int | None:
    """The size of the allocation that failed, where an out-of-memory text names it."""
    found = _REQUESTED.search(text)
    return parse_bytes(found[1].replace(" bytes", " B")) if found else None


def unavailable(ending: Ending) -> str | None:
    """The text of an error that is not the trial's doing (something the machine lacks), if so."""
    if ending.measurement is not None or not ending.raised:
        return None
    first = ending.raised[0]
    if _UNAVAILABLE_ERROR in first.kinds and _INVALID_ERROR not in first.kinds:
        return first.text
    if _NO_DEVICE.search(first.text):
        return f"{ending.device} cannot be used: {first.text}"
    return None


def classify(ending: Ending) -> Outcome:
    """The outcome of a trial that ended like this; emulated numbers are in their own field.

    What the trial itself said comes first (a result, an exception), then what was done to it
    (given up, timed out), then how its process died, and last what its log says.
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
    return Outcome.of(
        status,
        measurement,
        message="; ".join(filter(None, (message, _left_text(ending)))),
        duration_s=ending.duration_s,
    )


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
    """The first exception of the chain that says something, and what."""
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
    """No result, no exception: only how the process ended, and its log."""
    if ending.oom_kills and _was_killed(ending.exit_code):
        text = f"{_exit_text(ending)}: the kernel killed a process for lack of memory"
        return _outcome(ending, Status.OOM, text, exhausted=Exhausted.HOST)
    if ending.starter_died:
        text = "interrupted, because the process that starts trials ended"
        return _outcome(ending, Status.INTERRUPTED, text)
    tail = ending.log_tail[-LOG_CHARS:]
    # A signal other than that of abort() comes from outside or from a bug: what the log says
    # of memory was then survived.
    verdict = _verdict(tail) if _ended_by_itself(ending.exit_code) else None
    if verdict in (_Verdict.DEVICE, _Verdict.HOST):
        return _out_of_memory(ending, verdict, f"{_exit_text(ending)}: {_last_lines(tail)}")
    log = _last_lines(tail)
    text = f"{_exit_text(ending)}; its log ends: {log}" if log else _exit_text(ending)
    return _outcome(ending, Status.CRASHED, text)


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
        message="; ".join(filter(None, (message, _left_text(ending)))),
        duration_s=ending.duration_s,
        exhausted=exhausted,
    )


def _verdict(text: str) -> _Verdict | None:
    """What the text says; the last thing where it says several, as later lines of a log do."""
    found = list(_TEXTS.finditer(text))
    if not found:
        return None
    return next(verdict for verdict in _Verdict if found[-1][verdict.value] is not None)


def _was_killed(exit_code: int | None) -> bool:
    """By SIGKILL, directly or, as shells say it, by way of a process in between."""
    return exit_code in (None, -signal.SIGKILL, 128 + signal.SIGKILL)


def _ended_by_itself(exit_code: int | None) -> bool:
    return exit_code is not None and (exit_code >= 0 or exit_code == -signal.SIGABRT)


def _exit_text(ending: Ending) -> str:
    code = ending.exit_code
    process = f"rank {ending.facts[RANK]}" if RANK in ending.facts else "the process"
    if code is None:
        return f"{process} ended in a way that is not known"
    if code >= 0:
        return f"{process} ended without a result (exit code {code})"
    return f"{process} was ended by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """A signal as people know it: "SIGKILL"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_lines(log: str) -> str:
    """The end of a log on one line; where Python itself crashed, the top of its stack."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    crashes = [number for number, line in enumerate(lines) if line.startswith(_CRASH)]
    if crashes:
        return " | ".join(lines[crashes[-1] : crashes[-1] + _STACK_LINES])
    return " | ".join(_end_of(lines, MESSAGE_CHARS // 2))


def _end_of(lines: list[str], chars: int) -> list[str]:
    """As many whole lines as fit, or the end of the last one."""
    start, kept = len(lines), 0
    while start > 0 and kept + len(lines[start - 1]) <= chars:
        start -= 1
        kept += len(lines[start])
    if start == len(lines):
        return [line[-chars:] for line in lines[-1:]]
    return lines[start:]


def _left_text(ending: Ending) -> str:
    if not ending.left_processes:
        return ""
    return f"could not be ended: process {', '.join(map(str, ending.left_processes))}"
