"""The words for an emulated run: how it ended, what its phases took, and what stays unknown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from tuner.core.expressions import show
from tuner.core.outcome import signal_name
from tuner.core.units import GIB, format_duration, format_range, format_size, significant
from tuner.emulator import emulation
from tuner.emulator.ending import OUT_OF_MEMORY, Afterwards, Ended, ProgramError
from tuner.report.terminal.evidence import limit_text, peak_text
from tuner.report.terminal.render import count, echo
from tuner.report.terminal.tables import print_rows
from tuner.report.terminal.verdict import Field

_ROWS = 12
"""Lines of code that are shown; `--json` has more."""

_FEW_ROWS = 0.05
"""Share of rows up to which cutting them is worth a word."""

_NEAR = 0.8
"""Share of the host's memory from which on its use is shown."""

_FEW_LINES = 3
"""Lines of the program that an answer names; `--json` has all."""

_LEAST = 0.005
"""Share of the memory from which on a line is shown."""

_COMMAND_CHARS = 40
_LOG_LINES = 15
_LINE_CHARS = 300
_REMEDIES = {
    # Lightning's MisconfigurationException, and CUDA error 101 in PyTorch's words.
    r"You requested gpu: .*But your machine only has|invalid device ordinal": "More GPUs are "
    "emulated with --gpus N",
    r"huggingface\.co|on the Hub": "`tuner check --predict` needs no download",
}


# -- the verdict --------------------------------------------------------------------------------


def reason_text(found: emulation.Emulation) -> str:
    """Why it is unknown whether the program fits, or runs out of memory later; else empty."""
    if found.fits is not None:
        return growth_text(found) or _host_text(found) if found.fits is False else ""
    if found.own_fault is not None:
        return _fault_text(found)
    return (found.ended in emulation.FAILED and ended_text(found)) or _why_unknown(found)


def so_far_text(found: emulation.Emulation) -> str:
    """The verdict of a program that fits until the end of its run, and has code that did not run.

    Empty for others.
    """
    is_left = bool(found.unreached) and found.sizes == "known" and not found.may_grow
    is_left = is_left and not found.survived
    return "fits, as far as it ran" if found.fits is None and is_left else ""


def ended_text(found: emulation.Emulation) -> str:
    """The end of a program that neither ended by itself nor after the steps asked for."""
    error = found.error
    steps = f"{found.steps} optimizer step{'s' * (found.steps != 1)}"
    if found.ended is Ended.OOM:
        refused = found.refused
        phase = f" in the {refused.phase}" if refused and refused.phase else ""
        size = f": {format_size(refused.bytes)} asked for" if refused and refused.bytes else ""
        if error is None or error.type == OUT_OF_MEMORY:
            return f"out of memory{phase}{size}{_at(error)}"
        return f"out of memory{phase}{size}; then {_error_text(error)}"
    if error is not None:
        if found.ended is Ended.UNSUPPORTED:
            return f"it cannot be emulated: {error.message}{_at(error)}"
        why = {
            Ended.LATER: "a program that began after the training failed",
            Ended.HOST: "this machine's own memory ended the run",
        }.get(found.ended, "the program failed")
        found_in = (text for of, text in _REMEDIES.items() if re.search(of, error.message, re.S))
        return ". ".join((f"{why}: {_error_text(error)}", *found_in))
    texts = {
        Ended.CRASH: f"{signal_name(-found.exit_status)} ended the program: a fault of the "
        "emulator, of the program, or too little memory in this machine",
        Ended.ERROR: f"the program ended with exit status {found.exit_status} after {steps}",
        Ended.TIMEOUT: f"stopped by --timeout, after {steps}",
    }
    return texts.get(found.ended, "")


def _error_text(error: ProgramError) -> str:
    return f"{error.type.removeprefix('builtins.')}: {error.message}{_at(error)}"


def _at(error: ProgramError | None) -> str:
    return f", at {error.line}" if error is not None and error.line else ""


def _fault_text(found: emulation.Emulation) -> str:
    return f"{found.own_fault}. Please report it; no number below can be relied on"


def _why_unknown(found: emulation.Emulation) -> str:
    """Why a run that did not fail decides nothing."""
    steps = f"{found.steps} optimizer step{'s' * (found.steps != 1)}"
    if found.engine is not None and found.engine.mode == "server" and found.steps:
        return engine_text(found)
    if not found.survived and found.sizes == "known" and found.steps:
        if found.may_grow:
            return f"{growth_text(found)}; the number of steps isn't known"
        if found.unreached:
            of = f"{found.steps:,} of {found.all_steps:,} steps" if found.all_steps else steps
            first, more = found.unreached[:_FEW_LINES], len(found.unreached) - _FEW_LINES
            return f"{of}; not reached: {', '.join(first)}{f' and {more} more' * (more > 0)}"
    if found.ended is not Ended.OOM and not (found.steps and found.devices):
        return "no optimizer step ran on the device"
    sizes = {
        "unknown": "sizes of tensors depend on values that are not emulated",
        "at most": "sizes of tensors are upper bounds, and with these it does not fit",
    }
    return (
        (refusals_text(found) if found.survived else "")
        or sizes.get(found.sizes)
        or f"{steps} ran, and the peak shows from the second on"
    )


def _host_text(found: emulation.Emulation) -> str:
    """The phase in which Linux kills the program for want of memory on the host; else empty."""
    host = found.host
    if host is None or not found.host_is_full:
        return ""
    peak, limit = (significant(size / GIB) for size in (host.peak_bytes, host.limit_bytes))
    return (
        f"host memory: {peak} GiB in {host.peak_phase}, of {limit} GiB: Linux kills it "
        "(out-of-memory killer)"
    )


def growth_text(found: emulation.Emulation) -> str:
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


# -- fields -------------------------------------------------------------------------------------


def run_fields(found: emulation.Emulation, of: emulation.Emulation) -> list[Field]:
    """The place where memory ran out, the peak of each phase, and the rows of the largest batch.

    `of` is the same run, on a GPU with more memory if it ran out.
    """
    use = of.limiting
    is_told = found.ended is Ended.TIMEOUT or (found.ended is Ended.OOM and of is not found)
    ends = ("ends", ended_text(found) if is_told else "")
    decode = ("decode", decoding_text(of))
    if not (found.whole and found.steps) or use is None:
        return [ends, decode]
    ran = sorted(use.run_phases.items(), key=lambda phase: -phase[1][0])
    shown = [f"{phase} {significant(allocated / GIB)}" for phase, (allocated, _) in ran]
    later = found.later_error
    return [
        ends,
        ("phases", f"{', '.join(shown)} GiB allocated" if shown else ""),
        decode,
        ("host", host_phases_text(of)),
        ("rows", data_text(of)),
        ("grows", growth_text(of) if of.fits else ""),
        # This is not the verdict's: values are made up.
        ("failed", f"after the first steps: {_error_text(later)}" if later else ""),
    ]


def more_fields(found: emulation.Emulation) -> list[Field]:
    """The numbers of an emulated run that only --verbose shows."""
    use, memory, time = found.limiting, found.memory, found.time
    held = found.peak.holders if found.peak is not None else ()
    holders = [f"{format_size(size)} {command[:_COMMAND_CHARS]}" for command, size in held[:3]]
    holders += [f"{len(held) - 3} more"] * (len(held) > 3)
    ranks = ""
    if found.stands_for > 1:
        ranks = f"rank 0, which stands for all {found.stands_for}; --all-ranks runs each"
    elif len(found.devices) > 1:
        sizes = [one.peak_allocated_bytes for one in found.devices]
        ranks = f"{len(sizes)}, {format_range(min(sizes), max(sizes), format_size)} allocated; the "
        ranks += "largest is shown"
    peaks = use.phase_peak_bytes.items() if use else ()
    retries, trained = (use.alloc_retries, use.trainable_params) if use else (0, 0)
    more = f"; the allocator gave cached blocks back {retries} times" if retries else ""
    slowest = [f"; most of all by {one.label}" for one in time.most_expensive[:1]] if time else ()
    where = f" at {found.asked}" if found.asked else ""
    asked = f"the program asked for input{where} and got end of file: answer in its arguments"
    return [
        ("settings", training_text(found)),
        ("memory", f"{peak_text(memory)}{more}" if memory else ""),
        ("processes", f"at the peak {'; '.join(holders)}" if len(held) > 1 else ""),
        ("peaks", ", ".join(f"{name} {format_size(size)}" for name, size in peaks)),
        ("ranks", ranks),
        ("limited by", limit_text(time.breakdown_s) + "".join(slowest) if time else ""),
        ("parameters", f"{count(trained)} trainable" if trained else ""),
        ("input", asked if found.asked is not None else ""),
        ("took", format_duration(found.duration_s)),
    ]


def emulated_notes(found: emulation.Emulation) -> Iterator[str]:
    """Restrictions of the answer, the gravest first."""
    time = found.time
    texts = (
        _fault_text(found) if found.own_fault is not None and found.fits is not None else "",
        refusals_text(found) if found.fits is not None else "",
        engine_text(found),
        unknown_text(found),
        sizes_text(found.unknown_values),
        input_bound_text(found),
        f"steps counted by {found.steps_by}: no optimizer was seen" if found.steps_by else "",
        not_run_text(found),
        *(time.notes if time else ()),
    )
    yield from filter(None, texts)


def host_phases_text(found: emulation.Emulation) -> str:
    """The host memory of each phase, where it comes near its limit or the limit is stated."""
    host = found.host
    if host is None or not (host.is_stated or host.peak_bytes >= _NEAR * host.limit_bytes):
        return ""
    ordered = sorted(host.phases.items(), key=lambda phase: -phase[1])
    shown = ", ".join(f"{phase} {significant(size / GIB)}" for phase, size in ordered)
    whose = "" if host.is_stated else "this machine's "
    text = f"{shown} of {whose}{significant(host.limit_bytes / GIB)} GiB"
    return text if host.is_stated or not host.is_killed else f"{text}: Linux would kill it here"


def refusals_text(found: emulation.Emulation) -> str:
    """The lines that ran out of memory and did not end the run."""
    texts = []
    ways = (Afterwards.RECOVERED, "got as much or less later"), (Afterwards.SURVIVED, "trained on")
    for afterwards, what in ways:
        refused = [one for one in found.refusals if one.afterwards is afterwards]
        lines = dict.fromkeys(
            f"{one.line or 'a line of a library'}{f' (thread {one.thread})' if one.thread else ''}"
            for one in refused
        )
        times = f" {len(refused)} times" if len(refused) > 1 else ""
        if refused:
            texts.append(f"ran out of memory{times} at {', '.join(lines)}, and {what}")
    return "; ".join(texts)


def data_text(found: emulation.Emulation) -> str:
    """The rows that make the largest batch of the training, and the share of long ones."""
    data = found.training_data
    if data is None:
        return ""
    if data.of is None:
        return f"a stream: unknown beyond the {data.read:,} batches that were read"
    unread = f"{data.read:,} of {data.of:,} rows read" if data.read < data.of else ""
    if data.step <= emulation.FIRST_STEPS:
        return unread  # it is one of the first steps, or not known
    what = f"a batch of {data.size:,} {data.unit}"
    if data.row is not None:
        what = f"row {data.row:,} ({data.size:,} {data.unit})"
    text = f"{what} makes step {data.step:,} of {data.steps:,} the largest"
    shorter = [limit for limit in map(int, data.longer) if limit < data.size]
    if shorter and (share := data.longer[str(shorter[-1])]) < _FEW_ROWS:
        text += f"; {share:.2%} are longer than {shorter[-1]:,}".replace("%", " %")
    return "; ".join(filter(None, (text, unread)))


def input_bound_text(found: emulation.Emulation) -> str:
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


def not_run_text(found: emulation.Emulation) -> str:
    """The phases that did not come; of a run that ended, those of a training that goes on."""
    if not (found.whole and found.steps):
        return ""
    left = found.not_run
    if found.ended in (Ended.OOM, Ended.END):
        left = () if "save" in left else tuple(phase for phase in left if phase == "resume")
    return f"not run: {', '.join(left)}" if left else ""


def engine_text(found: emulation.Emulation) -> str:
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


def decoding_text(found: emulation.Emulation) -> str:
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


def training_text(found: emulation.Emulation) -> str:
    """Input shapes and settings, as they reached the trainer."""
    shapes = Counter(found.inputs)
    texts = [
        f"{number} x " * (number > 1) + f"{rows} x {count(tokens)} tokens"
        for (rows, tokens), number in shapes.most_common(3)
    ]
    more = f" and {len(shapes) - 3} other shapes" if len(shapes) > 3 else ""
    checkpoints = found.settings.get("gradient_checkpointing")
    settings = ", ".join(
        f"{name}={show(tuple(value) if isinstance(value, list) else value)}"
        for name, value in found.settings.items()
        # Without checkpointing, its way is one to do what is not done.
        if (checkpoints if name == "use_reentrant" else value is not False)
        or name == "gradient_checkpointing"
    )
    inputs = f"{', '.join(texts)}{more} a step" if texts else ""
    return "; ".join(filter(None, (inputs, settings)))


def unknown_text(found: emulation.Emulation) -> str:
    """Calls of CUDA's libraries that are not emulated."""
    shown = [f"{name} ({number} calls)" for name, number in found.unknown_calls.items()]
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return f"not emulated: {', '.join(shown[:8])}{more}" if shown else ""


_TAKEN = {
    "at most": "at most that large",
    "assumed": "assumed (even choices, finite floats)",
    emulation.BRANCH: "branches on made-up values",
}


def sizes_text(values: Sequence[emulation.UnknownValues]) -> str:
    """Operators whose output sizes are unknown, the sizes taken instead, and unknown branches."""
    shown: dict[str, list[str]] = {}
    for one in values:
        if one.decides_shape or one.kind == emulation.BRANCH:
            where = f" at {one.line}" if one.line else ""
            shown.setdefault(_TAKEN.get(one.kind, "unknown"), []).append(f"{one.operator}{where}")
    texts = []
    for taken, operators in shown.items():
        more = f" and {len(operators) - 4} more (--json has all)" if len(operators) > 4 else ""
        texts.append(f"{taken}: {', '.join(operators[:4])}{more}")
    return "; ".join(texts)


# -- what stands below the fields ---------------------------------------------------------------


def print_last_lines(log_tail: str, *, of: str = "the program", at_most: int = _LOG_LINES) -> None:
    """The end of what a program printed that failed."""
    echo(f"{of}'s last lines:")
    for line in log_tail.splitlines()[-at_most:]:
        echo(f"  {line[:_LINE_CHARS]}{'...' * (len(line) > _LINE_CHARS)}")


def print_lines_of_code(use: emulation.EmulatedDeviceUse) -> None:
    """A table of the lines of code that hold the memory at the peak."""
    shown = [row for row in use.allocations[:_ROWS] if row.bytes >= _LEAST * use.device_bytes]
    print_rows(
        ["", "kind", "allocated at (by your line)"],
        [(format_size(row.bytes), row.kind.replace("_", " "), _place(row)) for row in shown],
        right=("",),
    )


def _place(row: emulation.EmulatedAllocation) -> str:
    number = f", {row.count} blocks" if row.count > 1 else ""
    if not row.line or row.line == row.where:
        return f"{row.line or row.where}{number}"
    return f"{row.where} ({row.line}){number}"
