"""Frozen values passed between the layers.

Sizes are in bytes and times in seconds; every physical quantity carries its unit in its
name. A `Prediction` comes from a model of a GPU, a `Measurement` from a device or an emulated one
and says from which; a `TrialRecord` holds one or more of them, each in its own field.
"""

from tuner.core.kinds import Doubt, Exhausted, MemoryCategory, Phase, Source, Status, Verdict
from tuner.core.records.configuration import Configuration, KnobValue
from tuner.core.records.evidence import (
    DEFAULT_MARGIN_FRACTION,
    Measurement,
    Memory,
    MemoryBudget,
    Prediction,
    RankMemory,
    RunTime,
    Speed,
    StageNumbers,
    hardest_stage,
    most_known,
    parse_margin,
)
from tuner.core.records.trial import JOURNAL_SCHEMA, Outcome, TrialRecord

__all__ = [
    "DEFAULT_MARGIN_FRACTION", "JOURNAL_SCHEMA", "Configuration", "Doubt", "Exhausted", "KnobValue",
    "Measurement", "Memory", "MemoryBudget", "MemoryCategory", "Outcome", "Phase", "Prediction",
    "RankMemory", "RunTime", "Source", "Speed", "StageNumbers", "Status", "TrialRecord", "Verdict",
    "hardest_stage", "most_known", "parse_margin",
]  # fmt: skip
