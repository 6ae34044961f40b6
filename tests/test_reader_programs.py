"""Programs made at random are read as what they train with, or said to be unknown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import reader_oracle
import reader_truth
from reader_programs import UNKNOWN, WAYS, Generated, generate, single

ORACLE = 2**31
"""Seeds of the programs that run with the real libraries."""


def judge(programs: Sequence[Generated], folder: Path) -> Counter[str]:
    """How many are right, unknown and wrong; fails with the first program that is read wrong."""

    def one(place: int) -> tuple[str, Any]:
        (folder / str(place)).mkdir()
        told = reader_truth.read(programs[place], folder / str(place))
        return reader_truth.verdict(programs[place], told)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, range(len(programs))))
    for program, (kind, why) in zip(programs, found, strict=True):
        assert kind != "wrong", f"{program}\nsetting: (is, was read): {why}"
    return Counter(kind for kind, _ in found)


@pytest.mark.slow
def test_a_hundred_programs_and_the_ways_that_none_of_them_has(tmp_path):
    programs = [generate(seed) for seed in range(100)]
    used = {name for program in programs for name in program.used}
    programs += [single(way) for way in WAYS if way.name not in used]
    assert judge(programs, tmp_path)["right"] >= 0.97 * len(programs)


@pytest.mark.proof
@pytest.mark.parametrize("start", range(1000, 6000, 500))
def test_thousands_of_programs(start, tmp_path):
    count = 500
    right = judge([generate(seed) for seed in range(start, start + count)], tmp_path)["right"]
    assert right >= 0.97 * count


@pytest.mark.proof
def test_the_truth_is_what_the_real_libraries_train_with(tmp_path):
    programs = [single(way) for way in WAYS if "unknown" not in way.types]
    programs += [generate(ORACLE + seed) for seed in range(300)]
    programs = [one for one in programs if one.base != "unsloth"]  # which needs a GPU
    programs = [one for one in programs if UNKNOWN not in one.truth.values()]
    jobs = []
    for place, program in enumerate(programs):
        (tmp_path / str(place)).mkdir()
        main = program.write(tmp_path / str(place))
        job = {"main": str(main), "folder": str(main.parent), "argv": list(program.argv)}
        jobs.append(json.dumps({**job, "env": dict(program.env)}))
    run = subprocess.run(
        [sys.executable, reader_oracle.__file__], input="\n".join(jobs) + "\n", check=True,
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    for program, line in zip(programs, run.stdout.splitlines(), strict=True):
        answer = json.loads(line)
        assert len(answer["trainings"]) == 1, f"{program}\n{answer}"
        real = answer["trainings"][0]
        differs = {k: (v, real.get(k)) for k, v in program.truth.items() if real.get(k) != v}
        assert not differs, f"{program}\nsetting: (by its making, really): {differs}"
