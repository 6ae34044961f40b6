"""The accuracy benchmark: which published rows are expressed, how, and how errors are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.accuracy.harnesses import GIB, Case, Measured, express
from benchmarks.accuracy.predictions import Predicted
from benchmarks.accuracy.report import Comparison, groups, markdown, summarise, verdicts
from benchmarks.accuracy.rows import Row, read_rows
from tuner.space.models.catalogue import get_entry


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return read_rows()


@pytest.fixture(scope="module")
def cases(rows: list[Row]) -> dict[int, Case]:
    return {row.number: case for row in rows if isinstance(case := express(row), Case)}


def test_every_row_is_expressed_or_has_a_reason(rows: list[Row], cases: dict[int, Case]) -> None:
    assert len(rows) == 447
    assert len(cases) == 130
    reasons = [express(row) for row in rows if row.number not in cases]
    assert all(isinstance(reason, str) and len(reason) > 20 for reason in reasons)
    assert not any(str(reason).startswith("no harness") for reason in reasons)


def test_every_case_can_be_predicted_offline(cases: dict[int, Case]) -> None:
    assert {case.model for case in cases.values() if get_entry(case.model) is None} == set()


def test_configurations_hold_no_measured_value(cases: dict[int, Case]) -> None:
    # Rows of one program that differ only in what was measured get the same configuration.
    assert cases[13].row.throughput != cases[14].row.throughput
    assert cases[13].configuration == cases[14].configuration


def test_row_values(rows: list[Row]) -> None:
    row = rows[11]
    assert (row.micro_batch, row.length, row.lora_rank) == (2, 1024, 32)
    assert row.note("peak_forward_gib") == 6.0741
    assert row.note("nothing") is None
    assert row.grade == "A"
    assert row.tokens == 2048


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (10, {"precision": "nf4", "double_quant": False, "attention": "repeated_heads"}),
        (52, {"gradient_checkpointing": False, "training_loop": "loop"}),
        (103, {"loss": "transformers_4_46", "mixed_precision": "no", "fused_loss": False}),
        (106, {"kbit_preparation": "trl", "mixed_precision": "bf16"}),
        (112, {"kbit_preparation": "none"}),
        (124, {"loss": "transformers_4_45", "fused_loss": True}),
        (128, {"loss": "transformers", "fused_loss": False}),
        (387, {"loss": "unwidened", "training_loop": "trainer", "compute_dtype": "fp32"}),
    ],
)
def test_harnesses(cases: dict[int, Case], number: int, expected: dict[str, object]) -> None:
    configuration = cases[number].configuration
    assert {name: configuration[name] for name in expected} == expected


def _comparison(case: Case, measured: float, predicted: float) -> Comparison:
    case = Case(
        case.row,
        case.group,
        case.gpu,
        case.model,
        case.configuration,
        Measured(allocated=measured * GIB),
    )
    size = predicted * GIB
    return Comparison(case, Predicted(size, size, size, size, size, 1.0, "backward"))


def test_summary(cases: dict[int, Case]) -> None:
    pairs = [(10.0, 9.0), (20.0, 20.0), (40.0, 44.0), (5.0, 5.25)]
    comparisons = [_comparison(cases[10], *pair) for pair in pairs]
    summary = summarise(comparisons, "allocated")
    assert summary is not None
    assert summary.rows == 4
    assert summary.median == pytest.approx(0.075)
    assert summary.mean == pytest.approx(0.0625)
    assert abs(summary.worst) == pytest.approx(0.1)
    assert summary.mean_signed == pytest.approx(0.0125)
    assert summary.rank == pytest.approx(1.0)
    assert summarise(comparisons, "step_s") is None


def test_verdicts(cases: dict[int, Case]) -> None:
    fitted = _comparison(cases[10], 4.0, 4.0)
    failed = Comparison(cases[118], replace(fitted.predicted, fits=False))
    missed = Comparison(cases[119], fitted.predicted)
    assert cases[118].ran_out
    assert cases[118].measured == Measured()
    assert verdicts([fitted, failed, missed]) == (
        "1 runs fitted: 1 were predicted to fit. 2 ran out of memory: 1 were predicted to run out "
        "(not rows 119)."
    )


def test_rank_correlation_shares_ranks_of_equal_values(cases: dict[int, Case]) -> None:
    pairs = [(1.0, 1.0), (2.0, 3.0), (3.0, 2.0), (3.0, 4.0)]
    summary = summarise([_comparison(cases[10], *pair) for pair in pairs], "allocated")
    assert summary is not None
    # Spearman by hand: ranks 1, 2, 3.5, 3.5 against 1, 3, 2, 4.
    assert summary.rank == pytest.approx(3.0 / (4.5 * 5) ** 0.5)


def test_markdown_lists_rows_and_reasons(rows: list[Row], cases: dict[int, Case]) -> None:
    comparisons = [_comparison(cases[10], 4.0, 3.0)]
    refused = [(row, str(express(row))) for row in rows if row.number not in cases]
    text = markdown(comparisons, refused)
    assert "| 10 | Qwen2.5-1.5B-Instruct |" in text
    assert "-25.00%" in text
    assert "Lit-GPT has model code of its own" in text
    assert list(groups(comparisons)) == ["T4, transformers 5 + peft (A)"]
