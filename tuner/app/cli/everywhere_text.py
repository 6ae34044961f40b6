"""One training on all GPU types, as a table."""

from __future__ import annotations

from tuner.app.everywhere import Everywhere, OnGpu
from tuner.core.errors import verdict_code
from tuner.core.records import Verdict
from tuner.core.units import GIB, format_duration, significant
from tuner.predict.releases import predicted_stack
from tuner.report.terminal.render import print_json
from tuner.report.terminal.tables import print_rows
from tuner.report.terminal.verdict import (
    COLOURS,
    NOTE,
    READ_AS,
    SAMPLES,
    field_lines,
    print_answer,
    print_lines,
    source_text,
    usd_text,
    with_more,
)
from tuner.searches.facts import times_text

ROWS = 15
"""GPU types in a table without --verbose."""

_NUMBERS = ("GiB", "tokens/s", "time", "USD")


def show_everywhere(found: Everywhere, *, verbose: bool, as_json: bool) -> int:
    """Print the table; the exit code: 0 if it fits on a type."""
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found, verbose=verbose)
    return verdict_code(None if found.verdict is Verdict.UNKNOWN else bool(found.fitting))


def _print(found: Everywhere, *, verbose: bool) -> None:
    fitting, number, word = found.fitting, len(found.answers), found.verdict
    refused = [answer for answer in found.answers if answer.prediction is None]
    unknown = sum(answer.is_unknown for answer in found.answers)
    if fitting:
        tight = sum(answer.verdict is Verdict.TIGHT for answer in fitting)
        are_tight = f", {tight} of them tightly" if 0 < tight < len(fitting) else ""
        rest = f"on {len(fitting)} of {number} GPU types{are_tight}; {_best(fitting)}"
    elif unknown:
        rest = f"{unknown} of {number} GPU types are not known, and it fits on none of the others"
    else:
        rest = f"on none of {number} GPU types"
    print_answer(str(word), rest, COLOURS[word])
    print_lines(field_lines([(READ_AS, found.read_as)]))
    shown = list(found.answers) if verbose else _chosen(found)
    cost = next((answer.cost for answer in found.answers if answer.cost), None)
    per = f"epoch of {cost.examples:,} examples" if cost else f"{SAMPLES:,} samples"
    print_rows(
        ["GPU", "verdict", *_NUMBERS],
        [_cells(answer) for answer in shown if answer.prediction],
        right=_NUMBERS,
    )
    left = [answer for answer in fitting if answer not in shown]
    lines = [
        ("", f"time and USD per {per}"),
        ("source", with_more(source_text("predicted", predicted_stack()))),
        *((NOTE, each) for each in found.at_least),
        (NOTE, f"{len(left)} more types fit: --verbose" if left else ""),
    ]
    for remark in filter(None, dict.fromkeys(answer.remark for answer in found.answers)):
        names = ", ".join(answer.gpu.id for answer in found.answers if answer.remark == remark)
        lines.append((NOTE, f"{remark} on {names}"))
    for reason, is_unknown in dict.fromkeys((each.refused, each.is_unknown) for each in refused):
        names = ", ".join(answer.gpu.id for answer in refused if answer.refused == reason)
        lines.append((NOTE, f"{'unknown' if is_unknown else 'not'} on {names}: {reason}"))
    print_lines(field_lines(lines))


def _best(fitting: list[OnGpu]) -> str:
    """The smallest type, the cheapest where a price is known, and the fastest."""
    cheapest, fastest = min(fitting, key=_usd_per_token), max(fitting, key=_tokens_per_s)
    named = {"smallest": fitting[0], "cheapest": cheapest, "fastest": fastest}
    if _usd_per_token(cheapest) == float("inf"):
        del named["cheapest"]
    if not _tokens_per_s(fastest):
        del named["fastest"]
    words: dict[str, list[str]] = {}
    for word, answer in named.items():
        words.setdefault(answer.gpu.id, []).append(word)
    return ", ".join(f"{' and '.join(said)} {gpu}" for gpu, said in words.items())


def _chosen(found: Everywhere) -> list[OnGpu]:
    """Types on which it fits, or the largest; of many the cheapest, the fastest and the smallest.

    The order stays.
    """
    fitting = found.fitting or [answer for answer in found.answers if answer.prediction][-3:]
    by_worth = (
        fitting,
        sorted(fitting, key=_usd_per_token),
        sorted(fitting, key=lambda answer: -_tokens_per_s(answer)),
    )
    kept: dict[str, OnGpu] = {}
    for row in zip(*by_worth, strict=True):
        kept.update((answer.gpu.id, answer) for answer in row if len(kept) < ROWS)
    return [answer for answer in fitting if answer.gpu.id in kept]


def _tokens_per_s(answer: OnGpu) -> float:
    """The speed; 0 when unknown."""
    found = answer.prediction
    return 0.0 if found is None or found.is_compiled else found.speed.tokens_per_s


def _usd_per_token(answer: OnGpu) -> float:
    price, rate = answer.gpu.price_usd_per_hour, _tokens_per_s(answer)
    return float("inf") if price is None or not rate else price * answer.gpus / rate


def _cells(answer: OnGpu) -> tuple[str, ...]:
    prediction = answer.prediction
    assert prediction is not None
    speed, budget = prediction.speed, prediction.budget
    spent_s = answer.cost.epoch_s if answer.cost else SAMPLES / speed.samples_per_s
    price = answer.gpu.price_usd_per_hour
    size, limit = prediction.memory.device_bytes / GIB, budget.limit_bytes / GIB
    memory = (
        times_text(answer.gpus, answer.gpu.id),
        str(answer.verdict),
        f"{significant(size)} of {significant(limit)}",
    )
    if prediction.is_compiled:
        return (*memory, "?", "?", "?")
    return (
        *memory,
        significant(speed.tokens_per_s),
        format_duration(spent_s),
        "?" if price is None else usd_text(spent_s / 3600 * price * answer.gpus),
    )
