"""The training data of a space: the number of examples, epochs, and lengths."""

from __future__ import annotations

from dataclasses import dataclass

from yaml.nodes import Node

from tuner.core.errors import InputError
from tuner.core.setup.schemas import KnobSchema
from tuner.space.document import Entry, Problems, mapping, sequence
from tuner.space.knobs import read_value
from tuner.space.lengths import TokenLengths

PADDING = ("longest", "max_length")


@dataclass(frozen=True, slots=True)
class DataFacts:
    """Facts about the training data; None is unknown.

    `padding` is "longest" (to the longest example of each micro-batch) or "max_length".
    """

    examples: int | None = None
    epochs: float | None = None
    token_lengths: TokenLengths | None = None
    padding: str | None = None


_COUNT = KnobSchema("examples", "int", "training examples", default=1, minimum=1)
_EPOCHS = KnobSchema("epochs", "float", "passes over the data", default=1, minimum=0)
_PADDING = KnobSchema(
    "padding", "word", "what a batch is padded to", default="longest", allowed=PADDING
)
_TOKENS = KnobSchema("token_lengths", "float", "tokens of an example", default=0, minimum=0)
_FRACTION = KnobSchema(
    "quantile", "float", "fraction of examples", default=0, minimum=0, below=1 + 1e-9
)
_WHOLE = KnobSchema("count", "int", "examples in a bin", default=0, minimum=0)


def read_data(node: Node, problems: Problems) -> DataFacts:
    """The `data` mapping of a space."""
    allowed = ("examples", "epochs", "token_lengths", "padding")
    entries = mapping(node, problems, "data", allowed=allowed)
    facts = {
        name: read_value(entries[name].value, term, problems, entries[name].at)
        for name, term in (("examples", _COUNT), ("epochs", _EPOCHS), ("padding", _PADDING))
        if name in entries
    }
    lengths = entries.get("token_lengths")
    return DataFacts(
        **facts,  # type: ignore[arg-type]  # each was read by the term of its type
        token_lengths=_read_lengths(lengths, problems) if lengths else None,
    )


def _read_lengths(entry: Entry, problems: Problems) -> TokenLengths | None:
    """Lengths from {mean, max}, {quantiles: {0.5: 129, ...}} or {histogram: {edges, counts}}."""
    allowed = ("mean", "max", "quantiles", "histogram")
    entries = mapping(entry.value, problems, entry.at, allowed=allowed)
    given = set(entries)
    with problems.noting(entry.value, entry.at):
        if given == {"mean", "max"}:
            return _summary(entries, problems)
        if given == {"quantiles"}:
            points = _quantile_points(entries["quantiles"], problems)
            return TokenLengths.from_points(points) if points else None
        if given == {"histogram"}:
            return TokenLengths.from_points(_histogram_points(entries["histogram"], problems))
        raise InputError(
            "token_lengths needs {mean, max}, {quantiles: {0.5: 129, 1: 933}} or "
            "{histogram: {edges: [0, 128, 512], counts: [10, 3]}}"
        )
    return None


def _summary(entries: dict[str, Entry], problems: Problems) -> TokenLengths | None:
    mean = _numbers([entries["mean"].value], _TOKENS, problems, entries["mean"].at)
    top = _numbers([entries["max"].value], _WHOLE, problems, entries["max"].at)
    if not mean or not top:
        return None
    return TokenLengths.from_summary(mean=mean[0], longest=int(top[0]))


def _quantile_points(entry: Entry, problems: Problems) -> list[tuple[float, float]]:
    pairs = mapping(entry.value, problems, entry.at)
    fractions = _numbers([e.key for e in pairs.values()], _FRACTION, problems, entry.at)
    tokens = _numbers([e.value for e in pairs.values()], _TOKENS, problems, entry.at)
    if len(fractions) != len(pairs) or len(tokens) != len(pairs):
        return []
    by_fraction = sorted(zip(fractions, tokens, strict=True))
    points = [(length, fraction) for fraction, length in by_fraction]
    if not points or points[-1][1] != 1:
        raise InputError("the quantiles must include 1, the longest example")
    return points if points[0][1] == 0 else [(0.0, 0.0), *points]


def _histogram_points(entry: Entry, problems: Problems) -> list[tuple[float, float]]:
    lists = mapping(entry.value, problems, entry.at, allowed=("edges", "counts"))
    if set(lists) != {"edges", "counts"}:
        raise InputError("a histogram needs edges and counts")
    nodes = {n: sequence(e.value, problems, e.at) or [] for n, e in lists.items()}
    edges = _numbers(nodes["edges"], _TOKENS, problems, lists["edges"].at)
    counts = _numbers(nodes["counts"], _WHOLE, problems, lists["counts"].at)
    if len(edges) != len(counts) + 1:
        raise InputError(f"{len(edges)} edges need {max(len(edges) - 1, 0)} counts")
    total = sum(counts)
    if not total:
        raise InputError("the histogram counts no example")
    cumulative = [sum(counts[:i]) / total for i in range(len(edges))]
    return list(zip(edges, cumulative, strict=True))


def _numbers(nodes: list[Node], term: KnobSchema, problems: Problems, at: str) -> list[float]:
    values = [read_value(node, term, problems, at) for node in nodes[:1000]]
    return [value for value in values if isinstance(value, int | float)]
