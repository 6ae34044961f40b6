"""What a program does with a value that it reads: a size, a branch, or nothing that counts."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from tuner.emulator.inside.transfers import Loops, Use, use_in


class Read:
    """A value whose reads note their use."""

    def __init__(self) -> None:
        self.uses: list[Use] = []

    def item(self) -> float:
        self.uses.append(use_in(sys._getframe(1)))
        return 2

    def __bool__(self) -> bool:
        self.item_in = use_in(sys._getframe(1))
        self.uses.append(self.item_in)
        return len(self.uses) > 2

    def checked(self) -> Read:
        """A call that reads for itself, as `one_hot` does."""
        self.uses.append(use_in(sys._getframe(1)))
        return self


def use_of(folder: Path, code: str) -> Use:
    """The use of the first read in the function `run(x)`."""
    file = folder / "program.py"
    file.write_text(textwrap.dedent(code))
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    read = Read()
    names["run"](read)
    return read.uses[0]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("", "loss = x.item()\n    print(loss)"),
        ("", "total = 0\n    total += x.item()\n    return total / 3"),
        ("size", "n = x.item()\n    return list(range(n))"),
        ("size", "return [1, 2, 3][: x.item()]"),
        ("size", "n = 4\n    if x.item() < 5:\n        n *= 2\n    return list(range(n))"),
        ("size", "mask = x.item() > 1\n    return [1, 2][mask]"),
        ("size", "return [one for one in (1, 2) if one < x.item()]"),
        ("size", "if x.item() < 5:\n        x.checked()"),
        (
            "branch",
            "best = 1\n    if x.item() < best:\n        best = x.item()\n        print(best)",
        ),
        ("branch", "for _ in range(9):\n        if x.item() > 1:\n            break"),
        ("", "assert x.item() < 5"),
        ("", "import math\n    if not math.isfinite(x.item()):\n        raise ValueError"),
        ("", "return ['a', 'b', 'c'][x.item()]"),
        ("", "a, n = x.item(), 2\n    return list(range(n))"),
        ("size", "a, n = 2, x.item()\n    return list(range(n))"),
        ("", "return list(range(len(str(x.checked()))))"),
        ("branch", "while not x:\n        pass"),
    ],
)
def test_the_use_of_a_value_is_found_in_the_source(tmp_path: Path, kind: str, body: str) -> None:
    assert use_of(tmp_path, f"def run(x):\n    {body}\n").kind == kind


def test_a_returned_value_is_followed_to_its_callers(tmp_path: Path) -> None:
    code = """
    def count(x):
        return int(x.item())

    def run(x):
        n = count(x) + 1
        return list(range(n))
    """
    assert use_of(tmp_path, code) == Use("size", grows=True)


@pytest.mark.parametrize(
    ("grows", "size"), [(True, "n + 1"), (True, "2 * n"), (False, "9 - n"), (False, "9 // n")]
)
def test_a_size_grows_with_the_value_unless_it_is_what_is_left(
    tmp_path: Path, grows: bool, size: str
) -> None:
    body = f"def run(x):\n    n = x.item()\n    return list(range({size}))\n"
    assert use_of(tmp_path, body) == Use("size", grows=grows)


def test_a_loop_that_waits_gets_other_values_and_one_over_data_does_not(tmp_path: Path) -> None:
    waiting = use_of(tmp_path, "def run(x):\n    while not x:\n        pass\n")
    bounded = use_of(
        tmp_path, "def run(x):\n    for _ in range(9):\n        if x.item() > 1: break\n"
    )
    loops = Loops()

    assert loops.count(bounded) == 0
    reads = [loops.count(waiting) for _ in range(Loops.ESCAPE)]
    assert loops.other(True, reads[-2]) is True
    assert loops.other(True, reads[-1]) is False
    assert loops.other(1.5, 3 * Loops.ESCAPE) == 0.0
    loops.progress()
    assert loops.count(waiting) == 1


def test_a_value_that_is_only_asked_for_decides_nothing(tmp_path: Path) -> None:
    code = """
    def run(x):
        n = x.item()
        if n is None:
            n = torch.zeros(4)
        return n
    """
    assert use_of(tmp_path, code).kind == ""


def test_a_copy_that_is_written_to_a_file_decides_no_size() -> None:
    class OnDevice:
        device = SimpleNamespace(type="cuda")

        def to(self, where: str) -> torch.Tensor:
            self.use = use_in(sys._getframe(1))
            return torch.ones(2, device=where)

    tensor: Any = OnDevice()
    safetensors.torch._to_ndarray(tensor)
    assert tensor.use.kind == ""
