"""Search spaces: the YAML format, the knob schemas, and the valid configurations."""

from tuner.core.setup.schemas import SCHEMAS, KnobSchema, WorkloadSchema
from tuner.space.apply import ApplyTarget
from tuner.space.data import DataFacts
from tuner.space.knobs import Knob
from tuner.space.lengths import TokenLengths
from tuner.space.load import SpaceInfo, default_space, list_spaces, load_space
from tuner.space.rules import Stage
from tuner.space.searchspace import ObjectiveName, SearchSpace
from tuner.space.settings import configure, parse_settings, pin

__all__ = [
    "SCHEMAS", "ApplyTarget", "DataFacts", "Knob", "KnobSchema", "ObjectiveName", "SearchSpace",
    "SpaceInfo", "Stage", "TokenLengths", "WorkloadSchema", "configure", "default_space",
    "list_spaces", "load_space", "parse_settings", "pin",
]  # fmt: skip
