"""Trace and emulator count the same memory of the same training step."""

from __future__ import annotations

import pytest
from emulating import needs_emulator

from benchmarks.emulated import LEAST_BYTES, Pair, compare, page
from benchmarks.emulated_cases import Case, all_cases

TINY = "tiny-llama-3m"
SIZES = {"micro_batch": 8, "max_length": 512, "lora_rank": 16, "grad_accum": 3}
QUANTISED = Case(
    "NF4, paged 8-bit optimizer",
    "a6000",
    model=TINY,
    settings={
        **SIZES,
        "precision": "nf4",
        "optimizer": "paged_adamw_8bit",
        "gradient_checkpointing": True,
    },
)
EAGER = Case(
    "eager, not checkpointed",
    "h100_sxm",
    model=TINY,
    settings={
        **SIZES,
        "precision": "bf16",
        "attention": "eager",
        "gradient_checkpointing": False,
    },
)


@needs_emulator
@pytest.mark.parametrize("case", [QUANTISED, EAGER], ids=lambda case: case.name)
def test_trace_and_emulator_agree(case, tmp_path):
    answer = compare(case, None, tmp_path)
    assert not answer.failure
    found = {pair.name: pair for pair in answer.pairs}
    allocated = found["allocated"]
    assert allocated.emulated > 20 * LEAST_BYTES
    assert not allocated.differs, (allocated.traced, allocated.emulated)
    for name in ("loaded", "forward", "backward", "optimizer"):
        assert not found[name].differs, found[name]


def test_a_small_difference_is_none():
    assert not Pair("allocated", 1000, 1500).differs
    assert Pair("allocated", 1010 << 20, 1000 << 20).differs
    assert not Pair("allocated", 1004 << 20, 1000 << 20).differs


def test_a_case_that_fails_stays_in_the_table(tmp_path):
    case = Case("no such model", "a6000", model="no-such-model")
    answer = compare(case, None, tmp_path)
    assert "no-such-model" in answer.failure
    text = page([answer], None)
    assert "1 failed" in text
    assert "| no such model | a6000 | failed:" in text


def test_the_cases_are_configurations_of_their_spaces(tmp_path):
    for case in all_cases():
        space, configuration = case.opened(3, tmp_path)
        assert space.predictable
        assert configuration
