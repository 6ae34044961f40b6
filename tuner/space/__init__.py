"""Search spaces: the YAML format, the vocabulary of knobs, and the valid configurations."""

from tuner.space.apply import ApplyTarget
from tuner.space.data import DataFacts, TokenLengths
from tuner.space.knobs import Knob
from tuner.space.load import SpaceInfo, default_space, list_spaces, load_space
from tuner.space.rules import Stage
from tuner.space.searchspace import Objective, SearchSpace
from tuner.space.settings import configure, parse_settings, pin
from tuner.space.vocabulary import VOCABULARIES, Term, Vocabulary

__all__ = [
    "VOCABULARIES",
    "ApplyTarget",
    "DataFacts",
    "Knob",
    "Objective",
    "SearchSpace",
    "SpaceInfo",
    "Stage",
    "Term",
    "TokenLengths",
    "Vocabulary",
    "configure",
    "default_space",
    "list_spaces",
    "load_space",
    "parse_settings",
    "pin",
]
