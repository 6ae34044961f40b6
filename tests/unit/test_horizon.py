"""The code of a training loop that a run did not reach."""

from __future__ import annotations

import ast
import itertools
import json
import math
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tuner.emulator.inside import horizon as horizon_module
from tuner.emulator.inside.branches import value_of
from tuner.emulator.inside.horizon import Horizon
from tuner.emulator.inside.one_rank import STANDS_FOR
from tuner.emulator.inside.rounds import Rounds
from tuner.program.launch import runnable
from tuner.program.program import read_program

PROGRAM = """\
def evaluate(): allocate()
def allocate(n=1): return zeros(n)
def log(step): print(step)
def batch_at(at):
    if at < 500: return 8
    return BIG
BIG, schedule, long = 64, {500: 64}, [[1]] * 50 + [[1, 1]] * 50
def train():
    step, left, losses, phase, began, rows = 0, 500, [], "early", time(), [[1]] * 100
    samples = 0; ticks = itertools.count(1)
    for epoch in range(30):
        for i in range(100):
            note()
            step += 1
            left -= 1
            losses.append(0.0)
            {code}
            if phase == "late": evaluate()
class Every:
    count = 0
    def due(self): self.count += 1; return self.count > 500
class Late(Exception): pass
class Clock:
    n = 0
    def tick(self):
        self.n += 1
        if self.n == 500: raise Late
    @property
    def stage(self):
        for name, at in (("late", 500), ("early", 0)):
            if self.n >= at: return name
class Turns:
    n = 0
    def __next__(self): self.n += 1; return self.n > 500
def plan(n): return ("late" if n > 500 else "early"), n
def turns():
    n = 0
    while True:
        n += 1
        yield "late" if n > 500 else "early"
every, clock, turn, generator = Every(), Clock(), Turns(), turns()
train()
"""

REACHED = (
    "if step % 500 == 499: log(step)",
    "if i % 10 == 0: evaluate()",
    "if step == -1: evaluate()",
    "if i == 200: evaluate()",
    "lr = 1e-3 if step < 500 else 1e-4",
    "log(step) if step == 500 else None",
    "allocate(64 if step < 500 else 8)",
    "if time() - began > 10: log(step)",
    "allocate(max(8, 64 - step))",
    "rows[i:i + 2]",
    "samples += len(rows); log(step) if samples > 250_000 else None",
    "bar.update(); evaluate() if bar.rate < 1 else None",
    "while step > 5 and phase == 'late': evaluate()",
    "loss = bar; loss.update()\n            if loss.rest() < 0.1: evaluate()",
    "if bar.rest() < 0.1: evaluate()",
    "what, n = plan(step)\n            if what == 'late': log(step)",
    "loss = ones.mul(step)\n            if loss.sum() < 0 or loss < 0: evaluate()",
    "(log, print)[step // 500](step)",
    "step % 500 or log(step)",
)
LEFT = (
    "if step % 500 == 0: evaluate()",
    "if epoch > 25: evaluate()",
    "if i == 50: kept = zeros(9)",
    "allocate(8 if step < 500 else 64)",
    "DataLoader(rows, 8 if step < 500 else 64)",
    "evaluate() if step == 500 else None",
    "if time() - began > 1e9: evaluate()",
    "if len(losses) % 500 == 0: evaluate()",
    "if left == 0: evaluate()",
    "size = 8 if step < 500 else 64; allocate(size)",
    "if step == 500: size = BIG",
    "allocate(8 + step // 100)",
    "size = min(64, 2 ** (step // 100)); allocate(size)",
    "allocate(schedule.get(step, 8))",
    "long[i:i + 2]",
    "samples += len(rows); evaluate() if samples > 250_000 else None",
    "tick = next(ticks); evaluate() if tick % 500 == 0 else None",
    "allocate(math.ceil(2 ** (step / 100)))",
    "allocate({'stage 5': 64}.get(f'stage {step // 100}', 8))",
    "samples, began = samples + 1, 0; evaluate() if samples == 500 else None",
    "evaluate() if (samples := samples + 1) == 500 else None",
    "bar.update(); evaluate() if bar.n == 500 else None",
    "bar.update(); evaluate() if bar.rate < 0.01 else None",
    "bar.update(); allocate(8 + bar.n // 100)",
    "while step > 500: evaluate()",
    "if every.due(): evaluate()",
    "if bar.param_groups[0]['lr'] < 0.1: evaluate()",
    "samples += 1 / 3000; evaluate() if samples > 0.5 else None",
    "try: allocate(schedule[step])\n            except KeyError: pass",
    "weight = max(0, step - 500); evaluate() if weight > 0 else None",
    "step % 500 or evaluate()",
    "evaluate() if plan(step)[0] == 'late' else None",
    "for _ in {25: [1]}.get(epoch, []): evaluate()",
    "if f'{step:04d}'.endswith('500'): evaluate()",
    "if next(turn): evaluate()",
)
ELSEWHERE = {
    "all = [0] * 9000; all[500] = 1\n            if all[step]: evaluate()": 18,
    "if step == 500: phase = 'late'": 18,
    "batch_at(step)": 6,
    "bar.update()\n            if bar.rest() < 0.1: evaluate()": 18,
    "what = heap.pop()\n            if what == 'late': evaluate()": 18,
    "what = next(generator)\n            if what == 'late': evaluate()": 18,
    "what, n = plan(step)\n            if what == 'late': evaluate()": 18,
    "stage, rest = divmod(step, 500)\n            if stage == rest == 1: evaluate()": 18,
    "clock.n += 1\n            if clock.stage == 'late': evaluate()": 18,
    "try: clock.tick()\n            except Late: evaluate()": 28,
    "{0: log, 500: evaluate}.get(step, log)(0)": 1,
    "act = (log, evaluate)[step // 500]; act(step)": 1,
    "globals()['log' if step < 500 else 'evaluate'](step)": 1,
}
"""Code that changes what other lines do."""


class StoppedError(Exception):
    """Ends the program after its first steps."""


class Bar:
    """Counts as a library does."""

    n, rate = 0, 1.0
    param_groups = ({"lr": 1.0},)

    def update(self) -> None:
        self.n += 1
        self.rate /= 1.1

    def rest(self) -> float:
        return self.rate


@pytest.mark.parametrize("code", [*REACHED, *LEFT, *ELSEWHERE])
def test_branches_on_a_counter_that_may_allocate_are_told(code: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM.replace("{code}", code))
    horizon, found = Horizon(), []

    def note() -> None:
        horizon.note_step(sys._getframe(1))
        if horizon.steps_left == 3000 - 20:
            found.append(horizon.result(20, 1, {}))
            raise StoppedError

    def run() -> Any:
        names = {"note": note, "zeros": bytearray, "time": time.time, "DataLoader": enumerate}
        names["ones"] = torch.ones(1)
        return runpy.run_path(
            str(path),
            {**names, "bar": Bar(), "heap": [""] * 99, "itertools": itertools, "math": math},
        )

    with pytest.raises(StoppedError):
        run()
    (result,) = found
    assert result["of_steps"] == 3000
    left = ELSEWHERE.get(code, 17)
    assert [int(one.rpartition(":")[2]) for one in result["unreached"]] == [left] * (
        code not in REACHED
    )


UNRELATED = """\
def prepare(step):
    if step == 500: zeros(9)
def batches(size):
    step = 0
    while True:
        while step < size: step += len(zeros(9))
        yield step
if __name__ == "__main__": prepare(0)
rows = batches(8)
for number in range(100):
    next(rows)
    note()
"""


def test_what_only_another_program_runs_and_the_rounds_of_a_reader_are_not_told(tmp_path) -> None:
    (tmp_path / "train.py").write_text(UNRELATED)
    horizon = Horizon()

    def note() -> None:
        horizon.note_step(sys._getframe(1))
        assert horizon.result(20, 1, {}) == {"unreached": [], "of_steps": 100}

    runpy.run_path(str(tmp_path / "train.py"), {"note": note, "zeros": bytearray})


MONITOR = """\
import torch
def sample(size, number, each):
    if number % each == each - 1: torch.zeros(size)
class Monitor:
    count = 0
    @property
    def tenths(self): return self.count // 10
    def after(self, at):
        self.count += 1
        if at == 50: print(at)
        if self.tenths == 5: torch.zeros(9)
    def __call__(self, at):
        if at == 50: torch.zeros(9)
"""


def test_counters_go_on_to_callbacks_and_to_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "monitor.py").write_text(MONITOR)
    path = tmp_path / "train.py"
    path.write_text(
        "import functools\nfrom monitor import Monitor, sample\nmonitor = Monitor()\n"
        "hooks = [functools.partial(sample, 9, each=60), monitor]\n"
        "for n in range(100):\n    note()\n    monitor.after(n)\n"
        "    for hook in hooks: hook(n)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    horizon = Horizon()

    def note() -> None:
        frame = sys._getframe(1)
        horizon.note_step(frame)
        if frame.f_locals["n"] == 3:
            raise StoppedError

    with pytest.raises(StoppedError):
        runpy.run_path(str(path), {"note": note})
    unreached = horizon.result(4, 0, {})["unreached"]
    assert [Path(one).name for one in unreached] == [f"monitor.py:{line}" for line in (3, 11, 13)]


@pytest.mark.parametrize(
    ("code", "is_left"),
    [
        ("calls += 1\n    if calls % 100 == 0: zeros(9)", True),
        ("if calls % 100 == 0: zeros(9)\n    calls += 1", False),
        ("left -= 1\n    if left == 0: zeros(9)", True),
    ],
)
def test_a_hook_counts_from_its_first_call_on(code: str, is_left: bool, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        f"calls, left = 0, 900\ndef hook():\n    global calls, left\n    {code}\n"
        "hooks = [hook]\nfor batch in [1] * 3:\n    note()\n    hooks[0]()\n"
    )
    horizon, found = Horizon(), []

    def note() -> None:
        horizon.note_step(sys._getframe(1))
        found[:] = horizon.result(3, 0, {})["unreached"]

    runpy.run_path(str(path), {"note": note, "zeros": bytearray})
    assert bool(found) is is_left


CELLS = ("def log(): print(1)\n", "for step in range(100):\n    note()\n    {code}\n")
"""A training in the second cell of a notebook."""


@pytest.mark.parametrize(
    ("code", "left"), [("log()", []), ("if step == 50: zeros(64)", ["run.ipynb[2]:3"])]
)
def test_the_cells_of_a_notebook_are_one_file(code: str, left: list[str], tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": one.replace("{code}", code)} for one in CELLS]
    (tmp_path / "run.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}}))
    program = read_program(["python", "run.ipynb"], folder=tmp_path)
    horizon, found = Horizon(), []

    def note() -> None:
        horizon.note_step(sys._getframe(1))
        found.append(horizon.result(1, 1, {}))
        raise StoppedError

    with runnable(program) as command, pytest.raises(StoppedError):
        runpy.run_path(command[-1], {"note": note, "zeros": bytearray})
    assert [Path(one).name for one in found[0]["unreached"]] == left


def test_a_loop_that_is_cut_goes_on_where_a_branch_waits(tmp_path: Path) -> None:
    """What it leaves out was not seen: a branch on another counter is told all the same."""
    path = tmp_path / "train.py"
    path.write_text(
        "def train():\n"
        "    total = 0\n"
        "    for step in range(1000):\n"
        "        note()\n"
        "        total += 1\n"
        "        if step in (300, 500): evaluate()\n"
        "        if step % 100 == 99: evaluate()\n"
        "        if total == 400: zeros(64)\n"
        "        if step == 999: print(step)\n"
        "train()\n"
    )
    horizon, found = Horizon(), []

    def note() -> None:
        frame = sys._getframe(1)
        horizon.note_step(frame)
        at = frame.f_locals["step"]
        if at >= 2:
            head = SimpleNamespace(f_code=frame.f_code, f_lineno=3, f_back=None)
            head.f_globals, head.f_locals = frame.f_globals, {}
            found.append(horizon.cut(head, range(at + 1, 1000), 3, 0, ()))  # type: ignore[arg-type]
            raise StoppedError

    with pytest.raises(StoppedError):
        runpy.run_path(str(path), {"note": note, "zeros": bytearray, "evaluate": print})
    assert found == [99]
    unreached = horizon.result(3, 0, {})["unreached"]
    assert {int(one.rpartition(":")[2]) for one in unreached} == {6, 7, 8}


def test_a_counter_that_comes_to_a_branch_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "total = 0\n"
        "for batch in stream():\n"
        "    note()\n"
        "    total += 1\n"
        "    if total % 90 == 0: evaluate()\n"
        "    if total == 40: print(total)\n"
    )
    horizon, waits = Horizon(), []

    def note() -> None:
        horizon.note_step(sys._getframe(1))
        waits.append([horizon.waits(steps) for steps in (50, 100)])
        if len(waits) == 95:
            raise StoppedError

    with pytest.raises(StoppedError):
        runpy.run_path(str(path), {"note": note, "evaluate": print, "stream": itertools.count})
    assert waits[0] == [False, True]
    assert waits[60] == [True, True]
    assert waits[-1] == [False, False]


def test_a_counter_is_set_to_what_a_later_branch_waits_for(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def train():\n"
        "    global calls\n"
        "    total, state, self.left = 0, {'n': 0}, 900\n"
        "    while total < 1000:\n"
        "        note()\n"
        "        total += 1; state['n'] += 8; self.left -= 1\n"
        "        if total % 300 == 0: evaluate(total)\n"
        "        if state['n'] == 4000: evaluate(state['n'])\n"
        "        if self.left == 1: evaluate(self.left)\n"
        "        if total == 2000: evaluate(total)\n"
        "        if total == 990: print(total)\n"
        "        calls += 1\n"
        "        if calls == 500: evaluate(calls)\n"
        "def hook():\n"
        "    if calls == 400: evaluate(calls)\n"
        "calls, hooks = 0, [hook]\n"
        "train()\n"
    )
    horizon, seen, waits = Horizon(), [], []

    def note() -> None:
        horizon.note_step(sys._getframe(1))
        next(following)()

    def stop() -> None:
        raise StoppedError

    following = iter([int, int, int, *[lambda: waits.append(horizon.waits(50))] * 5, stop])
    with pytest.raises(StoppedError):
        runpy.run_path(
            str(path), {"note": note, "evaluate": seen.append, "self": SimpleNamespace()}
        )
    assert sorted(seen) == [1, 300, 500, 4000]
    assert waits == [True, True, True, True, False]
    unreached = horizon.result(7, 0, {})["unreached"]
    assert [Path(one).name for one in unreached] == ["train.py:10", "train.py:15"]


def test_a_branch_that_keeps_memory_each_time_is_told(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def keep(): kept.append(zeros(9))\n"
        "step, kept, table, bank = 0, [], {}, output\n"
        "for i in range(1000):\n"
        "    note()\n"
        "    step += 1\n"
        "    if step % 25 == 0: keep()\n"
        "    if i % 40 == 0: kept.append(output)\n"
        "    if i % 30 == 0: kept[:] = []; kept.append(output)\n"
        "    if i % 35 == 0: table[i] = output\n"
        "    if i % 45 == 0: bank = torch.cat([bank, output])\n"
        "    if i % 44 == 0: bank = torch.cat([bank, output])[-9:]\n"
    )
    horizon, waits = Horizon(), []

    def note() -> None:
        waits.append(horizon.waits(100))
        horizon.note_step(sys._getframe(1))
        if len(waits) == 90:
            raise StoppedError

    with pytest.raises(StoppedError):
        runpy.run_path(
            str(path), {"note": note, "zeros": bytearray, "output": torch.ones(1), "torch": torch}
        )
    assert (waits[26], waits[-1]) == (True, False)
    held = {6: {25, 50, 75}, 7: {1, 41, 81}, 8: {61}, 9: {1, 36, 71}, 10: {46}, 11: {89}}
    ran = {
        (str(path), line): {("train.py:1", step) for step in steps} for line, steps in held.items()
    }
    unreached = horizon.result(90, 0, ran)["unreached"]
    assert [Path(one).name for one in unreached] == [f"train.py:{line}" for line in (6, 7, 9, 10)]


@pytest.mark.parametrize(
    ("code", "is_left"),
    [
        ("if epoch == 2: kept.append(output.detach())", True),
        ("if epoch == 2: kept.append(output.item())", False),
        ("if n == 2: kept.append(output)", False),
    ],
)
def test_what_each_batch_of_an_epoch_keeps_is_told(
    code: str, is_left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "kept = []\nfor epoch in range(3):\n    for n, output in enumerate(outputs):\n"
        f"        note()\n        {code}\n"
    )
    monkeypatch.setattr(horizon_module, "is_on_device", lambda one: one is not None)
    horizon = Horizon()
    names = {"note": lambda: horizon.note_step(sys._getframe(1)), "outputs": [torch.ones(2)[0]] * 4}
    runpy.run_path(str(path), names)
    unreached = horizon.result(12, 0, {(str(path), 5): set()})["unreached"]
    assert [Path(one).name for one in unreached] == ["train.py:5"] * is_left


@pytest.mark.parametrize(("held", "is_left"), [({1, 41}, True), ({81}, False)])
def test_what_a_branch_keeps_may_be_made_before_it(
    held: set[int], is_left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "kept = []\nfor n, output in enumerate(outputs):\n"
        "    note()\n    if n % 40 == 0: kept.append(output)\n"
    )
    monkeypatch.setattr(horizon_module, "is_on_device", lambda one: one is not None)
    horizon = Horizon()
    outputs = itertools.chain([torch.ones(1)] * 90, iter(float, 1))
    following = iter([*[int] * 90, lambda: 1 / 0])

    def note() -> None:
        horizon.note_step(sys._getframe(1))
        next(following)()

    with pytest.raises(ZeroDivisionError):
        runpy.run_path(str(path), {"note": note, "outputs": outputs})
    ran = {(str(path), 2): {("train.py:2", step) for step in held}}
    unreached = horizon.result(90, 0, ran)["unreached"]
    assert [Path(one).name for one in unreached] == ["train.py:4"] * is_left


@pytest.mark.parametrize(
    ("used", "left"), [("zeros(length)", ["train.py:2"]), ("rows[length]", [])]
)
def test_larger_sizes_that_a_generator_has_to_come_are_told(
    used: str, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        f"def batches():\n    for length, name in lengths:\n        yield {used}\n"
        "rows, lengths = [0] * 9, []\nfor batch in [1, 2]: note()\n"
    )
    rounds = Rounds()
    rounds.larger[str(path), 2] = True
    monkeypatch.setattr(horizon_module, "loops", lambda: rounds)
    horizon = Horizon()
    runpy.run_path(str(path), {"note": lambda: horizon.note_step(sys._getframe(1))})
    assert [Path(one).name for one in horizon.result(2, 0, {})["unreached"]] == left


def test_what_other_ranks_do_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "rank, lora_rank = 0, 8\n"
        "for step in range(1000):\n"
        "    note()\n"
        "    if rank == 0 and step == 2: zeros(9)\n"
        "if rank == 0: print(zeros(9))\n"
        "if rank != 0: dist.broadcast_object_list([9], src=0)\n"
        "if rank == 9: zeros(9)\n"
        "if lora_rank == 4: zeros(9)\n"
        "if dist.get_rank() == 1: zeros(9)\n"
        "if rank == dist.get_world_size() - 1: zeros(9)\n"
    )

    def left() -> list[str]:
        horizon = Horizon()

        def note() -> None:
            horizon.note_step(sys._getframe(1))

        names = {"note": note, "zeros": bytearray}
        monkeypatch.setitem(sys.modules, "train", SimpleNamespace(__file__=str(path), rank=0))
        with pytest.raises(NameError):
            runpy.run_path(str(path), names)
        horizon.is_whole = True
        ran: dict[Any, Any] = {(str(path), line): set() for line in (4, 5)}
        return [Path(one).name for one in horizon.result(1000, 0, ran)["unreached"]]

    assert left() == []
    monkeypatch.setitem(STANDS_FOR, "ranks", 4)
    assert left() == ["train.py:9", "train.py:10"]


def test_steps_are_counted_from_the_first_on(tmp_path: Path) -> None:
    """A replay memory is filled before the first step."""
    path = tmp_path / "train.py"
    path.write_text("for frame in range(1000):\n    if frame >= 31: note()\n")
    horizon, left = Horizon(), []

    def note() -> None:
        horizon.note_step(sys._getframe(1))
        left.append(horizon.steps_left)

    runpy.run_path(str(path), {"note": note})
    assert left[1:] == [*reversed(range(968))]


@pytest.mark.parametrize(
    ("loops", "end", "of"),
    [
        ("while step < 50:", "if step >= 50: break", 50),
        ("while True:", "if step >= 50: return", 50),
        ("for epoch in range(9):", "if step >= 50: return", 50),
        ("for epoch in range(4):", "if step >= 50: return", 40),
        ("for epoch in range(4):", "if i == 5: break", 20),
        ("for epoch in range(4):", "if bad == 3: return", 40),
        ("while True:", "if step >= 50 and stops(): return", 50),
        ("while True:", "if stops(): return", None),
    ],
)
def test_a_counter_of_an_inner_loop_ends_the_training(
    loops: str, end: str, of: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        f"def train():\n    step = bad = 0\n    {loops}\n"
        f"        for i, batch in enumerate([1] * 10):\n            {end}\n            note()\n"
        "            step += 1; bad += 1\n            if i % 2: bad = 0\ntrain()\n"
    )
    horizon = Horizon()

    def note() -> None:
        horizon.note_step(sys._getframe(1))
        raise StoppedError

    with pytest.raises(StoppedError):
        runpy.run_path(str(path), {"note": note, "stops": bool})
    assert horizon.result(1, 0, {})["of_steps"] == of


def test_the_outcomes_that_a_program_had_itself_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a test that can't be evaluated, and a branch in the line of its test."""
    path = tmp_path / "train.py"
    path.write_text(
        "for i in range(3000):\n    note()\n    if i and str(i).endswith('00'): zeros(9)\n"
        "    if i % 500 == 1 and str(i): zeros(9)\n    if bar.rest() < i: zeros(9)\n"
        "    bar.update()\n"
    )
    rounds = Rounds()
    outcomes = {(3, False), (4, True), (5, False)}
    rounds.decided = {(str(path), *one) for one in outcomes}
    monkeypatch.setattr(horizon_module, "loops", lambda: rounds)
    horizon = Horizon()

    def note() -> None:
        horizon.note_step(sys._getframe(1))
        if horizon._done == 9:
            raise StoppedError

    with pytest.raises(StoppedError):
        runpy.run_path(str(path), {"note": note, "zeros": bytearray, "bar": Bar()})
    ran: dict[Any, Any] = {(str(path), 5): set()}
    unreached = horizon.result(9, 0, ran)["unreached"]
    assert [Path(one).name for one in unreached] == ["train.py:3", "train.py:5"]


def test_the_batches_of_a_step_set_a_counter_once(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "step = 0\nfor i, batch in enumerate([1] * 4000):\n    ask()\n"
        "    if i % 4 == 3:\n        note(); step += 1\n"
        "        if step % 500 == 0: evaluate(step)\n"
    )
    horizon = Horizon()
    seen: list[int] = []
    names = {
        "note": lambda: horizon.note_step(sys._getframe(1)),
        "ask": lambda: horizon._done and horizon.waits(50),
        "evaluate": seen.append,
    }
    runpy.run_path(str(path), names)
    assert seen[:1] == [500]
    assert horizon._done < 1010


@pytest.mark.parametrize(
    ("below", "is_left"),
    [
        ("size(losses, device='cuda')", True),
        ("rows = [size(losses[:-1]).cuda()]", True),
        ("size(losses)", False),
        ("size(outputs)", True),
        ("n = len(by_step); size(n, n, device='cuda')", True),
        ("n = len(by_step); print(size(n))", False),
        ("print(sum(losses) / len(losses))", False),
        ("tensor(losses).mean()", False),
        ("size(others)", False),
    ],
)
def test_what_is_as_long_as_a_loop_that_was_cut_is_told(
    below: str, is_left: bool, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    text = (
        "losses, outputs, others, by_step = [], [], [], {}\nfor _ in range(1000):\n    note()\n"
        "    losses.append(loss.item()); outputs.append(loss.detach()); by_step[_] = 1\n"
    )
    path.write_text(f"{text}{below}\n")
    horizon = Horizon()

    def note() -> None:
        frame = sys._getframe(1)
        horizon.note_step(frame)
        head = SimpleNamespace(f_code=frame.f_code, f_lineno=2, f_back=None)
        head.f_globals, head.f_locals = frame.f_globals, {}
        horizon.cut(head, range(1, 1000), 1, 0, ())  # type: ignore[arg-type]
        raise StoppedError

    with pytest.raises(StoppedError):
        runpy.run_path(str(path), {"note": note})
    unreached = horizon.result(1, 0, {})["unreached"]
    assert [Path(one).name for one in unreached] == ["train.py:5"] * is_left


def test_a_function_of_the_program_that_is_called_log_does_not_run_for_its_value() -> None:
    written: list[int] = []
    names = {"log": written.append, "self": SimpleNamespace(log=written.append), "math": math}
    for called, value in (("log(8)", None), ("self.log(8)", None), ("math.log(1)", 0.0)):
        assert value_of(ast.parse(called, mode="eval").body, names) == value
    assert not written
