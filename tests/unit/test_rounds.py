"""Loops of a program that train end after enough steps."""

from __future__ import annotations

import ast
import builtins
import gc
import weakref
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest

from tuner.emulator.inside.rounds import MOST_VISITS, PROBES, Rounds, followed

FEW = 3
"""Steps of a training that are enough."""


FEW_OF_MANY = [0, 1, 2, 252, 500, 501, 750, 999]


class Training:
    """A training that has steps, and branches at these numbers."""

    def __init__(self, *visits: int) -> None:
        self.steps_done = self.began = 0
        self.visits = visits
        self.cuts = self.ends = 0

    @property
    def is_spent(self) -> bool:
        return self.steps_done >= self.began + FEW

    def waits(self) -> bool:
        return False

    def begin_rounds(self) -> None:
        pass

    def cut(self, frame: FrameType, left: range) -> int | None:
        self.cuts += 1
        return next((one for one in self.visits if one in left), None)

    def end_rounds(self) -> None:
        self.ends += 1


def run(
    text: str, training: Training, monkeypatch: pytest.MonkeyPatch, **names: Any
) -> dict[str, Any]:
    rounds = Rounds()
    rounds.training = cast(Any, training)
    monkeypatch.setattr(builtins, "__tuner_rounds__", rounds, raising=False)

    def step() -> None:
        training.steps_done += 1

    found = {"step": step, "seen": [], **names}
    exec(compile(followed(ast.parse(text), Path("nowhere")), "train.py", "exec"), found)
    return found


LOOPS = {
    "for i in range(1000):\n    seen.append(i)\n    step()": FEW_OF_MANY,
    "for i in bar(range(1000)):\n    seen.append(i)\n    step()": FEW_OF_MANY,
    "for i in range(4):\n    seen.append(i)\n    step()": [0, 1, 2, 3],
    "for i in range(3):\n    seen.append(i)\n    step()": [0, 1, 2],
    "for i in range(1000):\n    seen.append(i)": list(range(1000)),
    "for i in [7] * 16:\n    seen.append(i)\n    step()": [7] * 16,
    "for i in [7] * 100:\n    seen.append(i)\n    step()": [7] * (3 + MOST_VISITS + PROBES),
    "for i, n in enumerate([7] * 50 + [9] + [8] * 9):\n    seen.append(n)\n    step()": [
        *([7] * (3 + MOST_VISITS + PROBES - 1)),
        *(9, 8),
    ],
    "for i in [{'n': 7}] * 50 + [{'n': 9}] + [{'n': 8}] * 9:\n"
    "    seen.append(i['n'])\n    step()": [*([7] * (3 + MOST_VISITS + PROBES - 1)), *(9, 8)],
    "for i, n in enumerate([[7]] * 50 + [[7] * 9] + [[7, 7]] * 9):\n"
    "    seen.append(len(n))\n    step()": [*([1] * (3 + MOST_VISITS + PROBES - 1)), *(9, 2)],
    "for i in ([n] for n in range(99)):\n    seen.append(i[0])\n    step()": [
        *range(3 + MOST_VISITS)
    ],
    "i = 0\nwhile True:\n    seen.append(i)\n    step()\n    i += 1": [0, 1, 2],
    "for i in range(9):\n  n = 0\n  while True:\n    n += 1\n    look.step()\n    if n > 1: break\n"
    "  seen.append(n)\n  step()": [2] * 7,
    "for i in range(9):\n    seen.append(i)\n    step()\nelse:\n    seen.append('end')": [
        *(0, 1, 2, 4, 6, 7, 8),
        "end",
    ],
    "for a in range(5):\n  for i in range(99):\n    seen.append(100 * a + i)\n    step()": [
        *(0, 1, 2, 27, 51, 75, 98),
        *(at + i for at in (200, 300, 400) for i in (0, 25, 50, 74, 98)),
    ],
    "def train():\n    for i in range(99):\n        one(i)\n"
    "def one(i):\n    seen.append(i)\n    step()\ntrain()": [0, 1, 2, 27, 51, 75, 98],
}
"""Programs, and the rounds that they have."""


@pytest.mark.parametrize("text", LOOPS)
def test_a_loop_that_trains_ends_after_enough_steps(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bar:
        def __init__(self, iterable: Any) -> None:
            self.iterable = iterable

        def __iter__(self) -> Any:
            return iter(self.iterable)

    training = Training(500)
    look = SimpleNamespace(step=lambda: None)
    found = run(text, training, monkeypatch, bar=Bar, look=look)
    assert found["seen"] == LOOPS[text]
    assert (training.ends > 0) == (training.cuts > 0)


def test_a_generator_has_larger_numbers_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "def batches():\n"
        "    for length, name in [(8, 'a'), (64, 'b'), (16, 'c')]:\n"
        "        for n in range(99): yield [length]\n"
        "for rows in batches():\n    seen.append(rows[0])\n    step()"
    )
    found = run(text, Training(), monkeypatch)
    assert found["seen"] == [8] * (FEW + MOST_VISITS)
    larger = builtins.__tuner_rounds__.larger  # type: ignore[attr-defined]
    assert larger == {("train.py", 2): True}
    assert [*found["batches"]()] == [[8]] * 99 + [[64]] * 99 + [[16]] * 99
    assert larger == {("train.py", 2): False}


def test_larger_numbers_beside_a_loader_that_ends_early_are_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "for one, (size, name) in zip(loader, sizes): step()\nlarger = __tuner_rounds__.larger"
    for sizes, is_larger in ([8] * 9, False), ([8, 8, 8, 64], True), ([8, 64, 8], False):
        names = {"loader": iter([0, 0]), "sizes": [(size, "a") for size in sizes]}
        found = run(text, Training(), monkeypatch, **names)
        assert found["larger"] == {("train.py", 1): is_larger}


def test_each_training_of_a_sweep_has_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()

    def begin() -> None:
        training.began = training.steps_done

    text = "for size in (8, 64, 16):\n    begin()\n    for i in range(99):\n        step()\n"
    found = run(text + "        seen.append((size, i))\n", training, monkeypatch, begin=begin)
    assert found["seen"] == [(size, i) for size in (8, 64, 16) for i in (0, 1, 2, 27, 51, 75, 98)]


def test_a_loop_keeps_no_item_and_is_known_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Batch:
        pass

    alive = weakref.WeakSet[Batch]()

    def batches() -> Any:
        for _ in range(2):
            one = Batch()
            alive.add(one)
            yield one
            del one

    known = []

    def look(frame: FrameType) -> None:
        gc.collect()
        known.append((len(alive), builtins.__tuner_rounds__.enclose(frame)))  # type: ignore[attr-defined]

    text = "import sys\nfor one in batches():\n    del one\n    step()\n    look(sys._getframe())\n"
    run(text + "look(sys._getframe())", Training(), monkeypatch, batches=batches, look=look)
    assert [is_known for _, is_known in known] == [True, True, False]
    assert known[-1][0] == 0


def test_branches_of_loops_that_train_tell_their_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "for one in range(2):\n    step()\n    if one: pass\n    elif [one]: pass\n"
        "if step: pass\nfor one in [1]:\n    if one: pass\n"
    )
    run(text, Training(), monkeypatch)
    decided = builtins.__tuner_rounds__.decided  # type: ignore[attr-defined]
    assert {(line, outcome) for _, line, outcome in decided} == {(3, 0), (3, 1), (4, 1)}


def test_models_are_left_as_they_are_and_places_stay(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text("")
    text = (
        "from engine import work\n"
        "class Net(Module):\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers: x = work(layer, x)\n"
        "for one in things:\n    print(one)\n"
        "for one in things:\n    work(one)\n"
    )
    tree = followed(ast.parse(text), tmp_path)
    loops = [one for one in ast.walk(tree) if isinstance(one, ast.For)]
    asked = {one.lineno for one in loops if isinstance(one.iter, ast.Call)}
    assert asked == {7}
    plain = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.For)]
    assert [one.iter.col_offset for one in loops] == [one.iter.col_offset for one in plain]
    assert ast.unparse(tree).count("__tuner_rounds__") == 1
