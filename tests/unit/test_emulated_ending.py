"""How emulated programs end. No failure and nothing unknown is exit code 0."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.app.cli.checked_text import print_found
from tuner.core.errors import EXIT_CODES, EXIT_UNKNOWN
from tuner.core.units import GIB
from tuner.emulator.emulation import BRANCH, EmulatedDeviceUse, Emulation, UnknownValues
from tuner.emulator.ending import (
    OUT_OF_MEMORY,
    Afterwards,
    Ended,
    Ending,
    ProgramError,
    Refusal,
    find_ending,
    last_fatal,
    of_first_steps,
)
from tuner.emulator.session import Account, DevicePeak
from tuner.space.gpus import get_gpu

MAIN, OTHER = 7, 8
SECOND = 1_000_000_000


def event(kind: str, at_s: float, *, pid: int = MAIN, rank: int = 0, **more: Any) -> dict[str, Any]:
    return {"event": kind, "pid": pid, "rank": rank, "at_ns": int(at_s * SECOND), **more}


def step(at_s: float, **more: Any) -> dict[str, Any]:
    return event("step", at_s, **more)


def result(at_s: float, reason: str = "end", **more: Any) -> dict[str, Any]:
    return event("result", at_s, reason=reason, **more)


def error(at_s: float, text: str, *causes: str, how: str = "uncaught", **more: Any) -> Any:
    kind, _, message = text.partition(": ")
    told = {"type": kind, "message": message, "line": "train.py:9", "causes": list(causes)}
    return event("error", at_s, how=how, **{"on_device": True, **told, **more})


def told(at_s: float, *, line: str = "train.py:3", **more: Any) -> dict[str, Any]:
    return event("out_of_memory", at_s, line=line, requested_bytes=GIB, **more)


def refused(at_s: float, pid: int = MAIN) -> Account:
    return Account(pid, 0, 0, GIB, 0, 5 * GIB, int(at_s * SECOND))


def ended(*events: Any, accounts: tuple[Account, ...] = (), status: int = 0) -> Ending:
    return find_ending(sorted(events, key=lambda e: e["at_ns"]), accounts, status)


class TestOutOfMemory:
    @pytest.mark.parametrize("status", [0, 1, 77])
    def test_a_refusal_after_which_no_step_ends_is_one_whatever_the_program_says(self, status):
        found = ended(step(1), accounts=(refused(2),), status=status)
        assert found.ended is Ended.OOM
        assert last_fatal(found.refusals) is not None
        assert last_fatal(found.refusals).bytes == 5 * GIB

    def test_so_is_what_the_allocator_told_of_and_the_device_later_met(self):
        found = ended(step(1), told(2))
        assert (found.ended, last_fatal(found.refusals)) == (
            Ended.OOM,
            Refusal(MAIN, GIB, Afterwards.FATAL, "train.py:3"),
        )
        assert found.error is not None
        assert (found.error.type, found.error.line) == (OUT_OF_MEMORY, "train.py:3")

    @pytest.mark.parametrize(
        ("recovered", "afterwards"), [((), Afterwards.SURVIVED), ((0,), Afterwards.RECOVERED)]
    )
    def test_a_process_that_trains_on_got_as_much_there_or_goes_without(
        self, recovered, afterwards
    ):
        steps = step(3), step(4), result(4, "steps", recovered=recovered)
        found = ended(told(2, number=0), *steps, accounts=(refused(1.9),))
        assert found.ended is Ended.STEPS
        assert [one.afterwards for one in found.refusals] == [afterwards]

    def test_another_process_that_trains_takes_nothing_back(self):
        steps = [step(at, pid=OTHER) for at in (3, 4)]
        assert ended(*steps, accounts=(refused(2),)).ended is Ended.OOM
        later = result(5, "steps", pid=OTHER)
        assert ended(*steps, told(2, rank=1), later).ended is Ended.OOM

    def test_an_error_that_hides_it_is_kept_beside_it(self):
        hidden = error(3, "builtins.RuntimeError: No executable batch size found, reached zero.")
        found = ended(hidden, accounts=(refused(2),), status=1)
        assert found.ended is Ended.OOM
        assert found.error is not None
        assert found.error.type == "builtins.RuntimeError"


class TestError:
    def test_the_rank_comes_before_its_launcher(self):
        rank = error(2, "builtins.ValueError: bad data", pid=OTHER)
        launcher = error(3, "x.ChildFailedError: ", on_device=False)
        found = ended(launcher, rank, status=1)
        assert (found.ended, found.error.type) == (Ended.ERROR, "builtins.ValueError")

    def test_the_first_one_that_fails_comes_before_those_that_fail_of_it(self):
        missing = error(1, "builtins.ModuleNotFoundError: no x", pid=OTHER, on_device=False)
        launcher = error(3, "x.ChildFailedError: ", on_device=False)
        assert ended(launcher, missing, status=1).error.message == "no x"

    def test_what_was_only_printed_counts_where_the_program_failed_of_nothing_else(self):
        printed = error(1, "builtins.ValueError: a warning", how="shown")
        assert ended(printed, step(2), status=0).ended is Ended.END
        assert ended(printed, status=1).error.message == "a warning"
        assert ended(printed, error(2, "builtins.KeyError: 'a'"), status=1).error.message == "'a'"

    @pytest.mark.parametrize("text", ["the cart is out of memory cards", "CUDA out of memory"])
    def test_words_of_its_text_decide_nothing(self, text):
        found = ended(step(1), error(2, f"builtins.ValueError: {text}"), status=1)
        assert (found.ended, found.refusals) == (Ended.ERROR, ())

    def test_a_program_that_began_after_the_stop_of_another_may_have_needed_it(self):
        later = error(5, "builtins.ValueError: no file", pid=OTHER, born_ns=4 * SECOND)
        found = ended(step(3), result(3, "steps"), later, status=1)
        assert (found.ended, found.error.message) == (Ended.LATER, "no file")
        assert emulation(ended=Ended.LATER, error=found.error, steps=3).exit_code == EXIT_UNKNOWN

    def test_one_that_began_after_another_had_ended_is_no_failure_of_its_first_steps(self):
        later = error(5, "builtins.ValueError: no file", pid=OTHER, born_ns=4 * SECOND)
        assert ended(step(3), later, status=1).ended is Ended.LATER
        worker = error(5, "builtins.ValueError: no file", pid=OTHER, born_ns=2 * SECOND)
        assert ended(step(3), worker, status=1).ended is Ended.ERROR

    @pytest.mark.parametrize(
        "text",
        [
            "builtins.MemoryError: ",
            "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7 TiB",
            "builtins.RuntimeError: alloc_cpu.cpp:124 DefaultCPUAllocator: can't allocate memory",
        ],
    )
    def test_the_memory_of_this_machine_is_no_made_up_value(self, text):
        found = ended(*map(step, (1, 2, 3)), error(4, text), status=1)
        assert of_first_steps(found, 3, 3).ended is Ended.HOST
        whole = emulation(ended=Ended.HOST, error=found.error, steps=3)
        assert (whole.fits, whole.exit_code) == (None, EXIT_UNKNOWN)

    def test_what_follows_the_last_step_is_our_own_stopping(self):
        lost = error(4, "builtins.RuntimeError: NCCL", pid=OTHER, rank=1)
        assert ended(step(3), result(3, "steps"), lost, status=1).ended is Ended.STEPS

    @pytest.mark.parametrize("status", [-signal.SIGABRT, 128 + signal.SIGABRT])
    def test_a_thread_that_outlives_the_interpreter_takes_nothing_from_a_result(self, status):
        assert ended(step(1), result(2), status=status) == Ending(Ended.END)
        assert ended(step(1), status=status).ended in {Ended.CRASH, Ended.ERROR}
        assert ended(step(1), result(2), status=-signal.SIGSEGV) == Ending(Ended.CRASH)

    def test_so_is_what_follows_the_end_of_its_time(self):
        launcher = error(5, "x.ChildFailedError: ", on_device=False)
        found = find_ending([step(1), result(3, "timeout"), launcher], (), 1, timed_out=True)
        assert found == Ending(Ended.TIMEOUT)
        failed = error(2, "builtins.ValueError: bad data", pid=OTHER, rank=1)
        found = find_ending([step(1), failed, launcher], (), -9, timed_out=True)
        assert (found.ended, found.error.message) == (Ended.ERROR, "bad data")


def emulation(**fields: Any) -> Emulation:
    gpu = get_gpu("rtx4090")
    known = {"command": ("train.py",), "gpu": gpu, "gpus": 1, "torch": "2.13.0", "cuda": "13.0"}
    none = {"error": None, "refusals": (), "peaks": (), "unknown_values": (), "inputs": ()}
    ran = {"steps": 0, "margin_bytes": 0, "exit_status": 0, "devices": (), "unknown_calls": {}}
    rest = {"duration_s": 1.0, "time": None, "stands_for": 1, "settings": {}}
    return Emulation(**{**known, **none, **ran, **rest, **fields})


@st.composite
def unknown_values(draw: st.DrawFn) -> UnknownValues:
    kind = draw(st.sampled_from(("at most", "assumed", "made up", "unknown", BRANCH)))
    return UnknownValues("aten::nonzero", "train.py:3", kind, draw(st.booleans()), 1)


@st.composite
def refusals(draw: st.DrawFn) -> Refusal:
    return Refusal(MAIN, GIB, draw(st.sampled_from(list(Afterwards))), "train.py:3")


@st.composite
def emulations(draw: st.DrawFn) -> Emulation:
    gpu = get_gpu("rtx4090")
    used = draw(st.sampled_from((0, GIB, gpu.memory_bytes - 1, gpu.memory_bytes)))
    use = EmulatedDeviceUse(
        rank=0, device=0, peak_allocated_bytes=used, peak_reserved_bytes=used, device_bytes=used,
        managed_bytes=0, loaded_bytes=0, phase_peak_bytes={}, peak_phase="load", breakdown={},
        allocations=(), alloc_retries=0, ooms=0, trainable_params=0,
    )  # fmt: skip
    return emulation(
        ended=draw(st.sampled_from(Ended)),
        steps=draw(st.integers(0, 3)),
        margin_bytes=draw(st.sampled_from((0, GIB))),
        exit_status=draw(st.sampled_from((0, 1, -9))),
        devices=draw(st.sampled_from(((), (use,)))),
        peaks=(DevicePeak(0, used, (("python train.py", used),)),),
        refusals=draw(st.lists(refusals(), max_size=2).map(tuple)),
        unknown_values=draw(st.lists(unknown_values(), max_size=2).map(tuple)),
        unknown_calls=draw(st.sampled_from(({}, {"cusparseSpMM": 1}))),
    )


@given(emulations())
def test_0_is_for_what_trained_and_fits(found: Emulation) -> None:
    assert found.exit_code in EXIT_CODES
    failed = found.ended not in (Ended.STEPS, Ended.END, Ended.TIMEOUT)
    adapts = any(one.afterwards is Afterwards.RECOVERED for one in found.refusals)
    needed = found.used_bytes + (0 if adapts else found.margin_bytes)
    if found.exit_code == 0:
        assert not found.survived
        assert found.steps
        assert not failed
        assert needed <= found.gpu.memory_bytes
        assert found.sizes != "unknown"
        branches = any(one.kind == BRANCH for one in found.unknown_values)
        assert found.steps > 1 or not (branches and found.ended is Ended.END)
    if found.exit_code == 1:
        assert found.ended is Ended.OOM or needed > found.gpu.memory_bytes
        assert found.sizes == "known"
    assert (found.fits is None) == (found.exit_code > 1)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("You requested gpu: [0, 1]\n But your machine only has: [0]", "--gpus N"),
        ("CUDA error: invalid device ordinal\nGPU device may be out of range", "--gpus N"),
        (
            "couldn't connect to 'https://huggingface.co' to load the files",
            "check --predict` needs",
        ),
    ],
)
def test_a_failure_with_a_known_remedy_names_it(capsys, message: str, said: str) -> None:
    error = ProgramError("x.MisconfigurationException", message, "train.py:3")
    print_found(emulation(ended=Ended.ERROR, error=error, exit_status=1), None)
    assert said in " ".join(capsys.readouterr().out.split())
