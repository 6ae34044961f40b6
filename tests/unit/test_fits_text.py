"""The verdict with the arithmetic behind it, and the changes that go with it."""

from types import SimpleNamespace
from typing import Any

import pytest
from results_samples import make_prediction

from tuner.app import checking
from tuner.app.cli.checked_text import change_texts
from tuner.app.everywhere import _Everywhere, _OnGpu, show_everywhere
from tuner.core.records import Configuration, MemoryBudget, Prediction
from tuner.report.terminal.evidence import verdict_text
from tuner.report.terminal.verdict import difference_lines
from tuner.space.gpus import get_gpu

GIB = 1 << 30
BUDGET = MemoryBudget(24 * GIB, GIB)


def prediction(high_bytes: int) -> Prediction:
    intervals = {"device_bytes": (20.0 * GIB, float(high_bytes))}
    return make_prediction(22 * GIB, budget=BUDGET, intervals=intervals)


@pytest.mark.parametrize(("high", "words"), [(25, "tight (likely fits)"), (23, "fits")])
def test_an_interval_that_reaches_past_the_card_makes_it_tight(high, words):
    rest = "22.00 GiB of 24.00 GiB, 2.00 GiB free, headroom 1.00 GiB"
    assert verdict_text(prediction(high * GIB), BUDGET) == f"{words}: {rest}"


class _Runs:
    """A program of one micro-batch with checkpointing, and `changed` without it."""

    doing, log_tail, count, given = "predicting", "", 0, {}
    changeable = ("gradient_checkpointing",)

    def __init__(self, own: Any, changed: Any) -> None:
        self.own, self.changed, self.settings = own, changed, self
        self.tried: list[Any] = []

    def as_it_is(self) -> Any:
        return self.own

    def with_values(self, wanted: list[Any], **how: Any) -> list[Any]:
        self.tried += wanted
        return [self.changed for _ in wanted]

    def smaller_evaluation(self, found: Any) -> tuple[()]:
        return ()

    def other_methods(self, found: Any) -> tuple[()]:
        return ()

    def get(self, knob: str) -> None: ...

    def items(self) -> list[Any]:
        return []

    def can_change(self, knob: str) -> bool:
        return knob in self.changeable


def found(step_s: float, high: int, *, checkpointing: bool, compares: str = "") -> Any:
    of = prediction(high * GIB)
    settings = {"micro_batch": 1, "gradient_checkpointing": checkpointing}
    time = SimpleNamespace(step_s=step_s, updating_s=0.0)
    return SimpleNamespace(
        fits=True, verdict=of.verdict, budget=BUDGET, used_bytes=of.memory.device_bytes,
        memory=None, time=time, settings=settings, inputs=(), ended="predicted", compares=compares,
        generates=False, host_is_full=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("high", "step_s", "given", "is_suggested"),
    [
        (23, 0.5, (), True), (25, 0.5, (), False), (23, 0.95, (), False),
        (23, 0.5, ["gradient_checkpointing"], False),
    ],
)  # fmt: skip
def test_a_faster_change_must_fit_be_clearly_faster_and_count(
    high, step_s, given, is_suggested, monkeypatch
):
    monkeypatch.setattr(checking, "change", lambda settings, values: SimpleNamespace(values=values))
    runs: Any = _Runs(found(1.0, 23, checkpointing=True), found(step_s, high, checkpointing=False))
    runs.given = dict.fromkeys(given, True)
    assert (checking.check_program(runs).suggestion is not None) is is_suggested


def test_a_micro_batch_whose_samples_are_taken_together_is_kept():
    own = found(1.0, 23, checkpointing=True, compares="BatchNorm1d")
    own.settings |= {"micro_batch": 8, "grad_accum": 2}
    runs: Any = _Runs(own, own)
    runs.changeable = ("micro_batch", "grad_accum", "gradient_checkpointing")
    notes = checking.check_program(runs).notes
    assert any("BatchNorm1d takes all samples of a micro-batch together" in note for note in notes)
    assert runs.tried
    assert {values.get("micro_batch", 8) for values in runs.tried} == {8}


@pytest.mark.parametrize(
    ("settings", "can_be_older"),
    [
        ({"mixed_precision": "fp16"}, True),
        ({"mixed_precision": "bf16"}, False),
        ({"mixed_precision": "fp16", "attention": "flash_attention_2"}, False),
    ],
)
def test_a_type_with_room_can_run_the_settings(settings, can_be_older):
    found: Any = SimpleNamespace(fits=False, budget=BUDGET, settings=settings)
    checked = checking.CheckedProgram(found, least_bytes=28 * GIB)
    assert ("v100_32gb_pcie" in change_texts(checked)[1]) is can_be_older


def test_types_that_lack_the_same_share_a_note(capsys):
    gpus = [get_gpu(name) for name in ("t4", "titan_rtx")]
    answers = tuple(_OnGpu(gpu, None, f"flash on {gpu.name}: too old") for gpu in gpus)
    found = _Everywhere("qwen3-8b", Configuration({}), answers)
    show_everywhere(found, verbose=False, as_json=False)
    assert capsys.readouterr().out.endswith("note    not on t4, titan_rtx: flash: too old\n")


def test_every_changed_word_of_a_long_line_is_shown(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    line = "args = Arguments('out', batch=2, epochs=3, {}lr=1e-4, checkpointing={}, packing=False)"
    texts = [line.format("warmup_ratio=0.1, " * 4, value) for value in (True, False)]
    texts[1] = texts[1].replace("batch=2", "batch=4")
    shown = difference_lines(f"--- t.py\n+++ t.py\n@@ -3 +3 @@\n-{texts[0]}\n+{texts[1]}\n", 9)
    assert shown == [
        " t.py:3",
        "-... batch=2, ... checkpointing=True, ...",
        "+... batch=4, ... checkpointing=False, ...",
    ]
