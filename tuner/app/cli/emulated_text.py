"""The result of an emulated run, printed."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence

from tuner.core.expressions import show
from tuner.core.outcome import signal_name
from tuner.core.records import MemoryBudget, Verdict
from tuner.core.units import GIB, format_duration, format_range, format_size, significant
from tuner.emulator.emulation import (
    BRANCH,
    FAILED,
    FIRST_STEPS,
    EmulatedAllocation,
    EmulatedDeviceUse,
    Emulation,
    UnknownValues,
)
from tuner.emulator.ending import OUT_OF_MEMORY, Afterwards, Ended, ProgramError, Refusal
from tuner.report.terminal.evidence import print_breakdown
from tuner.report.terminal.render import count, echo, print_fields
from tuner.report.terminal.tables import print_rows
from tuner.report.terminal.verdict import Answer, room_text

_ROWS = 12
"""Lines of code that are shown; `--json` has more."""

_FEW_ROWS = 0.05
"""Share of rows up to which cutting them is worth a word."""

_NEAR = 0.8
"""Share of the host's memory from which on its use is shown."""

_FEW_LINES = 3
"""Lines of the program that an answer names; `--json` has all."""

_COMMAND_CHARS = 40
_UNKNOWN = {
    Ended.LATER: "a program that began after the training failed",
    Ended.HOST: "this machine's own memory ended the run",
}
_LOG_LINES = 15
_LINE_CHARS = 300
_MORE_GPUS = "More GPUs are emulated with --gpus N"
# Lightning's MisconfigurationException, and CUDA error 101 in PyTorch's words.
_TOO_FEW_GPUS = re.compile(
    r"You requested gpu: .*But your machine only has|invalid device ordinal", re.DOTALL
)

_LEAST = 0.005
"""Share of the memory from which on a line is shown."""


def print_emulation(found: Emulation, *, refused: Emulation | None = None) -> None:
    """The answer: whether it fits, what takes the memory, and how long a step takes.

    `refused` is the run that ran out of memory, where `found` is of a GPU with more.
    """
    use = found.limiting
    phases = use.phase_peak_bytes.items() if use else ()
    trained = use.trainable_params if use else 0
    echo()
    print_fields(
        [
            ("program", shlex.join(found.command)),
            ("GPU", _gpu_text(found)),
            ("source", f"emulated: torch {found.torch}, after {_steps_text(found)}"),
            ("ended", _ended_text(refused or found)),
            ("steps", steps_by_text(found).removeprefix("steps ")),
            ("fault", _fault_text(found)),
            ("verdict", _verdict_text(found)),
            ("memory", _memory_text(found, use) if use else ""),
            ("processes", _holders_text(found)),
            ("refused", refusals_text(found)),
            ("phases", ", ".join(f"{name} {format_size(size)}" for name, size in phases)),
            *run_fields(refused or found, found),
            ("engine", engine_text(found)),
            ("decode", "" if found.whole else decoding_text(found)),
            ("not run", not_run_text(found).removeprefix("not run: ")),
            ("ranks", _ranks_text(found)),
            ("training", training_text(found)),
            ("speed", _speed_text(found)),
            ("run", _run_time_text(found)),
            ("data", input_bound_text(found)),
            ("limited by", _limit_text(found)),
            ("trainable", f"{count(trained)} parameters" if trained else ""),
            ("unknown", unknown_text(found)),
            ("sizes", sizes_text(found.unknown_values)),
            ("input", _asked_text(found)),
            ("took", format_duration(found.duration_s)),
        ]
    )
    if use is not None and use.breakdown:
        _print_peak(found, use)


def run_fields(found: Emulation, needed: Emulation | None) -> list[tuple[str, str]]:
    """Of a whole run: where memory ran out, the peak of each phase, and the rows of the largest.

    `needed` is the same run on a GPU with more memory.
    """
    of = found if needed is None else needed
    use = of.limiting
    if not (found.whole and found.steps) or use is None:
        return []
    ran = sorted(use.run_phases.items(), key=lambda phase: -phase[1][0])
    shown = [f"{phase} {significant(allocated / GIB)}" for phase, (allocated, _) in ran]
    return [
        ("ends", _run_end_text(found)),
        ("phases", f"{', '.join(shown)} GiB allocated" if shown else ""),
        ("decode", decoding_text(of)),
        ("host", host_phases_text(of)),
        ("rows", data_text(of)),
        ("grows", growth_text(of) if of.fits else ""),
        ("failed", _failed_text(found)),
    ]


def host_phases_text(found: Emulation) -> str:
    """The host memory of each phase, where it comes near its limit or the limit is stated."""
    host = found.host
    if host is None or not (host.is_stated or host.peak_bytes >= _NEAR * host.limit_bytes):
        return ""
    ordered = sorted(host.phases.items(), key=lambda phase: -phase[1])
    shown = ", ".join(f"{phase} {significant(size / GIB)}" for phase, size in ordered)
    whose = "" if host.is_stated else "this machine's "
    text = f"{shown} of {whose}{significant(host.limit_bytes / GIB)} GiB"
    return text if host.is_stated or not host.is_killed else f"{text}: Linux would kill it here"


def _host_text(found: Emulation) -> str:
    """The phase in which Linux kills the program for want of memory on the host; else empty."""
    host = found.host
    if host is None or not found.host_is_full:
        return ""
    sizes = (significant(size / GIB) for size in (host.peak_bytes, host.limit_bytes))
    text = f"host memory: {{}} GiB in {host.peak_phase}, of {{}} GiB".format(*sizes)
    return f"{text}: Linux kills it (out-of-memory killer)"


def growth_text(found: Emulation) -> str:
    """The line that keeps memory of each step or batch, and the one that ends the run."""
    ends, use = found.ends_at_step, found.limiting
    if use is not None and found.evaluation_ends_at is not None:
        batch, batches = found.evaluation_ends_at
        return (
            f"evaluation keeps {format_size(use.evaluation_growth_bytes)} of each batch: out of "
            f"memory at batch {batch:,} of {batches:,}"
        )
    if ends is None or use is None:
        return ""
    most = max(use.growth, key=lambda one: one.bytes_per_step)
    return (
        f"{most.line} keeps {format_size(most.bytes_per_step)} of each step: out of memory at "
        f"step {ends:,}"
    )


def _failed_text(found: Emulation) -> str:
    """The failure after the first steps, which is not the verdict's: values are made up."""
    if found.later_error is None:
        return ""
    return f"after the first steps: {_error_text(found.later_error)}"


def _run_end_text(found: Emulation) -> str:
    if found.ended is not Ended.OOM:
        return ""
    phase = found.refused.phase if found.refused else ""
    return f"out of memory{f' in the {phase}' if phase else ''}{_at(found.error)}"


def refusals_text(found: Emulation) -> str:
    """The lines that ran out of memory and did not end the run."""
    texts = []
    ways = (Afterwards.RECOVERED, "got as much or less later"), (Afterwards.SURVIVED, "trained on")
    for afterwards, what in ways:
        refused = [one for one in found.refusals if one.afterwards is afterwards]
        if refused:
            lines = dict.fromkeys(_asking(one) for one in refused)
            times = f" {len(refused)} times" if len(refused) > 1 else ""
            texts.append(f"ran out of memory{times} at {', '.join(lines)}, and {what}")
    return "; ".join(texts)


def _asking(refused: Refusal) -> str:
    thread = f" (thread {refused.thread})" if refused.thread else ""
    return f"{refused.line or 'a line of a library'}{thread}"


def data_text(found: Emulation) -> str:
    """The rows that make the largest batch of the training, and the share of long ones."""
    data = found.training_data
    if data is None:
        return ""
    if data.of is None:
        return f"a stream: unknown beyond the {data.read:,} batches that were read"
    unread = f"{data.read:,} of {data.of:,} rows read" if data.read < data.of else ""
    if data.step <= FIRST_STEPS:
        return unread  # it is one of the first steps, or not known
    what = f"a batch of {data.size:,} {data.unit}"
    if data.row is not None:
        what = f"row {data.row:,} ({data.size:,} {data.unit})"
    text = f"{what} makes step {data.step:,} of {data.steps:,} the largest"
    shorter = [limit for limit in map(int, data.longer) if limit < data.size]
    if shorter and (share := data.longer[str(shorter[-1])]) < _FEW_ROWS:
        text += f"; {share:.2%} are longer than {shorter[-1]:,}".replace("%", " %")
    return "; ".join(filter(None, (text, unread)))


def input_bound_text(found: Emulation) -> str:
    """The time in which the batches of a step are read, where the device is faster."""
    data, time = found.training_data, found.time
    if data is None or data.read_s is None or time is None:
        return ""
    read_s = data.read_s * data.accumulation
    if read_s <= time.step_s:
        return ""
    return (
        f"input-bound: the data of a step takes {format_duration(read_s)} to read on this machine, "
        f"and the step {format_duration(time.step_s)}; workers of the data loader share it"
    )


def not_run_text(found: Emulation) -> str:
    """The phases that did not come."""
    if not (found.whole and found.steps):
        return ""
    left = [phase for phase in found.not_run if found.ended is not Ended.OOM or phase == "resume"]
    return f"not run: {', '.join(left)}" if left else ""


def print_last_lines(log_tail: str, *, of: str = "the program", at_most: int = _LOG_LINES) -> None:
    """The end of what a program printed that failed."""
    echo(f"{of}'s last lines:")
    for line in log_tail.splitlines()[-at_most:]:
        echo(f"  {line[:_LINE_CHARS]}{'...' * (len(line) > _LINE_CHARS)}")


def _gpu_text(found: Emulation) -> str:
    number = f"{found.gpus} x " if found.gpus > 1 else ""
    return f"{number}{found.gpu.name}, {format_size(found.gpu.memory_bytes)}"


def _steps_text(found: Emulation) -> str:
    return f"{found.steps} optimizer step{'' if found.steps == 1 else 's'}"


def steps_by_text(found: Emulation) -> str:
    """The sign by which steps were counted, where no optimizer was seen."""
    return f"steps counted by {found.steps_by}: no optimizer was seen" if found.steps_by else ""


def _ended_text(found: Emulation) -> str:
    error = found.error
    if found.ended is Ended.OOM:
        asked_bytes = found.refused.bytes if found.refused else 0
        size = f": {format_size(asked_bytes)} asked for" if asked_bytes else ""
        if error is None or error.type == OUT_OF_MEMORY:
            return f"out of memory{size}{_at(error)}"
        return f"out of memory{size}; then {_error_text(error)}"
    if error is not None and found.ended is Ended.UNSUPPORTED:
        return f"it cannot be emulated: {error.message}{_at(error)}"
    if error is not None and found.ended in _UNKNOWN:
        return f"{_UNKNOWN[found.ended]}: {_error_text(error)}"
    if error is not None:
        more = f". {_MORE_GPUS}" if _TOO_FEW_GPUS.search(error.message) else ""
        return f"the program failed: {_error_text(error)}{more}"
    texts = {
        Ended.CRASH: f"{signal_name(-found.exit_status)} ended the program: a fault of the "
        "emulator, of the program, or too little memory in this machine",
        Ended.ERROR: f"the program ended with exit status {found.exit_status} after "
        f"{_steps_text(found)}",
        Ended.TIMEOUT: f"stopped by --timeout, after {_steps_text(found)}",
    }
    nothing = "" if found.steps else "no optimizer step ran: the memory below is of what did"
    return texts.get(found.ended, nothing)


def _error_text(error: ProgramError) -> str:
    return f"{error.type.removeprefix('builtins.')}: {error.message}{_at(error)}"


def _at(error: ProgramError | None) -> str:
    return f", at {error.line}" if error is not None and error.line else ""


def _fault_text(found: Emulation) -> str:
    if found.own_fault is None:
        return ""
    return f"{found.own_fault}. Please report it; no number below can be relied on"


def reason_text(found: Emulation) -> str:
    """Why it is unknown whether the program fits, or runs out of memory later; else empty."""
    if found.fits is not None:
        return growth_text(found) or _host_text(found) if found.fits is False else ""
    failed = found.ended in (Ended.ERROR, Ended.CRASH, Ended.UNSUPPORTED, *_UNKNOWN)
    return _fault_text(found) or (_ended_text(found) if failed else _why_unknown(found))


def so_far_text(found: Emulation) -> str:
    """The verdict of a program that fits until the end of its run, and has code that did not run.

    Empty for others.
    """
    is_left = bool(found.unreached) and found.sizes == "known" and not found.may_grow
    is_left = is_left and not found.survived
    return "fits, as far as it ran" if found.fits is None and is_left else ""


def _verdict_text(found: Emulation) -> str:
    limit = found.gpu.memory_bytes
    if found.fits is False and found.host_is_full:
        return f"{Verdict.DOES_NOT_FIT}: {_host_text(found)}"
    if found.ended is Ended.OOM and found.fits is False:
        return f"{Verdict.DOES_NOT_FIT}: out of memory on {format_size(limit)}"
    if found.fits is None or found.limiting is None:
        return f"{so_far_text(found) or Verdict.UNKNOWN}: {_why_unknown(found)}"
    budget = MemoryBudget(limit, found.margin_bytes)
    return room_text(Answer(found.verdict, found.used_bytes, budget, found.gpu.id))


def _why_unknown(found: Emulation) -> str:
    sizes = {
        "unknown": "sizes of tensors depend on values that are not emulated",
        "at most": "sizes of tensors are upper bounds, and with these it does not fit",
    }
    if found.engine is not None and found.engine.mode == "server" and found.steps:
        return engine_text(found)
    is_partial = (
        not found.survived and found.sizes == "known" and found.steps and found.ended not in FAILED
    )
    if is_partial and found.may_grow:
        return f"{growth_text(found)}; the number of steps isn't known"
    if is_partial and found.unreached:
        return _so_far_reason(found)
    reasons = {
        Ended.ERROR: "the program failed",
        Ended.CRASH: "the program failed",
        Ended.FAULT: "tuner itself failed",
        Ended.UNSUPPORTED: "it was not emulated to its end",
        **_UNKNOWN,
    }
    why = reasons.get(found.ended)
    if why is None and found.ended is not Ended.OOM and not (found.steps and found.devices):
        why = "no optimizer step ran on the device"
    return (
        why
        or (refusals_text(found) if found.survived else "")
        or sizes.get(found.sizes)
        or f"{_steps_text(found)} ran, and the peak shows from the second on"
    )


def _so_far_reason(found: Emulation) -> str:
    """The steps that ran, and the lines that were not reached."""
    of = f" of {found.all_steps:,}" if found.all_steps else ""
    steps = f"{found.steps:,}{of} steps" if of else _steps_text(found)
    first, more = found.unreached[:_FEW_LINES], len(found.unreached) - _FEW_LINES
    others = f" and {more} more" if more > 0 else ""
    return f"{steps}; not reached: {', '.join(first)}{others}"


def _memory_text(found: Emulation, use: EmulatedDeviceUse) -> str:
    text = (
        f"device memory {format_size(found.used_bytes)}, peak of"
        f" {format_size(use.peak_allocated_bytes)} allocated and"
        f" {format_size(use.peak_reserved_bytes)} reserved, in the {use.peak_phase} phase"
    )
    if use.managed_bytes:
        text += f"; {format_size(use.managed_bytes)} more in managed memory"
    if use.alloc_retries:
        text += f"; the allocator gave cached blocks back {use.alloc_retries} times"
    return text


def _holders_text(found: Emulation) -> str:
    """The processes that held the memory at its peak, where there were several."""
    held = found.peak.holders if found.peak is not None else ()
    if len(held) < 2:
        return ""
    shown = [f"{format_size(size)} {command[:_COMMAND_CHARS]}" for command, size in held[:3]]
    more = f" and {len(held) - 3} more" if len(held) > 3 else ""
    return f"at the peak {'; '.join(shown)}{more}"


def engine_text(found: Emulation) -> str:
    """The engine that generates, which is not emulated."""
    engine = found.engine
    if engine is None:
        return ""
    if engine.mode == "server":
        return (
            "a vLLM server is not modelled: the buffers through which it gets new weights are not "
            "in the memory, and its time is not in the speed"
        )
    sleeps = ", asleep while it trains" if engine.sleeps else ""
    return (
        f"vLLM takes {significant(engine.bytes / GIB)} GiB{sleeps} (declared: "
        f"gpu_memory_utilization={engine.share:g}); it is not emulated, and not in the speed"
    )


def decoding_text(found: Emulation) -> str:
    """The longest decode loop that was extrapolated."""
    if not found.decoding:
        return ""
    longest, more = found.decoding[0], sum(one.times for one in found.decoding) - 1
    is_steady = all(one.is_steady for one in found.decoding)
    changed = "" if is_steady else "; its last tokens took other memory: reserved memory is rough"
    others = f" ({more} more loop{'s' * (more > 1)})" if more else ""
    return (
        f"loop of {longest.tokens:,} tokens{others}, the longest that it may be, "
        f"extrapolated after {longest.run:,} (emulated){changed}"
    )


def training_text(found: Emulation) -> str:
    """Input shapes and settings, as they reached the trainer."""
    shapes = Counter(found.inputs)
    texts = [
        f"{number} x " * (number > 1) + f"{rows} x {count(tokens)} tokens"
        for (rows, tokens), number in shapes.most_common(3)
    ]
    more = f" and {len(shapes) - 3} other shapes" if len(shapes) > 3 else ""
    off = [name for name, value in found.settings.items() if value is False]
    if not found.settings.get("gradient_checkpointing"):
        off.append("use_reentrant")  # a way to do what is not done
    else:
        off = [name for name in off if name != "use_reentrant"]
    settings = ", ".join(
        f"{name}={show(tuple(value) if isinstance(value, list) else value)}"
        for name, value in found.settings.items()
        if name not in off or name == "gradient_checkpointing"
    )
    inputs = f"{', '.join(texts)}{more} a step" if texts else ""
    return "; ".join(filter(None, (inputs, settings)))


def _speed_text(found: Emulation) -> str:
    time = found.time
    if time is None:
        return ""
    low, high = time.interval_s
    mfu = f", MFU {time.mfu:.0%}" if time.mfu is not None else ""
    rate = found.sequences_per_s
    where = " on each GPU" if found.ranks > 1 else ""
    each = f", {significant(rate)} sequences/s{where}" if rate is not None else ""
    text = (
        f"{format_duration(time.step_s)} an optimizer step (90 %: "
        f"{format_range(low, high, format_duration)}){each}{mfu}"
    )
    return "; ".join((text, *time.notes))


def _run_time_text(found: Emulation) -> str:
    run = found.run_time
    if run is None:
        return ""
    tests = f", {run.evaluations} evaluations" if run.evaluations else ", without evaluations"
    of = "the training" if run.is_whole else "an epoch"
    ends = format_range(*run.interval_s, format_duration)
    return (
        f"{format_duration(run.seconds)} (90 %: {ends}) for {of}: {run.steps:,} steps{tests}; "
        "loading and saving are not in it"
    )


def _limit_text(found: Emulation) -> str:
    if found.time is None:
        return ""
    kind, seconds = max(found.time.breakdown_s.items(), key=lambda item: item[1])
    slowest = found.time.most_expensive[:1]
    text = f"{kind} ({seconds / found.time.step_s:.0%} of the time)"
    return text + "".join(f"; most of all by {one.label}" for one in slowest)


def _ranks_text(found: Emulation) -> str:
    if found.stands_for > 1:
        return f"rank 0, which stands for all {found.stands_for}; --all-ranks runs each"
    if len(found.devices) < 2:
        return ""
    sizes = [use.peak_allocated_bytes for use in found.devices]
    return (
        f"{len(sizes)}, {format_range(min(sizes), max(sizes), format_size)} allocated; the "
        "largest is shown"
    )


def unknown_text(found: Emulation) -> str:
    """Calls of CUDA's libraries that are not emulated."""
    shown = [f"{name} ({number} calls)" for name, number in found.unknown_calls.items()]
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return f"not emulated: {', '.join(shown[:8])}{more}" if shown else ""


def _asked_text(found: Emulation) -> str:
    if found.asked is None:
        return ""
    where = f" at {found.asked}" if found.asked else ""
    return f"the program asked for input{where} and got end of file: answer in its arguments"


_TAKEN = {
    "at most": "at most that large",
    "assumed": "assumed (even choices, finite floats)",
    BRANCH: "branches on made-up values",
}


def sizes_text(values: Sequence[UnknownValues]) -> str:
    """Operators whose output sizes are unknown, the sizes taken instead, and unknown branches."""
    shown: dict[str, list[str]] = {}
    for one in values:
        if one.decides_shape or one.kind == BRANCH:
            where = f" at {one.line}" if one.line else ""
            shown.setdefault(_TAKEN.get(one.kind, "unknown"), []).append(f"{one.operator}{where}")
    texts = []
    for taken, operators in shown.items():
        more = f" and {len(operators) - 4} more (--json has all)" if len(operators) > 4 else ""
        texts.append(f"{taken}: {', '.join(operators[:4])}{more}")
    return "; ".join(texts)


def _print_peak(found: Emulation, use: EmulatedDeviceUse) -> None:
    parts = dict(use.breakdown)
    # Sizes of the history are rounded up as the allocator does; a rest that it does not split off
    # belongs to the block.
    overhead = use.peak_reserved_bytes - sum(parts.values())
    parts["allocator_overhead"] = overhead
    parts["context"] = use.device_bytes - use.peak_reserved_bytes
    echo()
    print_breakdown("device memory at the peak (emulated)", parts, format_size)
    echo()
    shown = [row for row in use.allocations[:_ROWS] if row.bytes >= _LEAST * use.device_bytes]
    print_rows(
        ["", "kind", "allocated at (by your line)"],
        [(format_size(row.bytes), row.kind.replace("_", " "), _place(row)) for row in shown],
        right=("",),
    )


def _place(row: EmulatedAllocation) -> str:
    number = f", {row.count} blocks" if row.count > 1 else ""
    if not row.line or row.line == row.where:
        return f"{row.line or row.where}{number}"
    return f"{row.where} ({row.line}){number}"
