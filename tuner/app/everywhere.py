"""One training on every GPU type of the catalogue, traced once and priced on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tuner.app.estimate import Asked
from tuner.app.listener import quiet_libraries
from tuner.app.programs import ProgramOptions
from tuner.core.errors import InputError, UnavailableError, verdict_code
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Prediction, RunTime, Verdict, parse_margin
from tuner.core.units import GIB, format_duration, significant
from tuner.cost.calibrate import widened
from tuner.predict.predict import doubts_of
from tuner.predict.predictor import Predictor, SpacePredictor, predictor_of
from tuner.predict.releases import predicted_stack
from tuner.program.planned import WORKLOAD, ProgramPlan, plan_program
from tuner.program.program import read_program
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
from tuner.searches.cost import RunCost, cost_of
from tuner.searches.facts import SpaceFacts, paid_gpus, times_text
from tuner.space.gpus import load_catalogue


@dataclass(frozen=True, slots=True)
class _OnGpu:
    """The prediction for one GPU type, or why there is none.

    Without one, the type cannot run the training. The verdict `is_unknown` where what predicts is
    not installed, or a bound on the memory decides nothing. `gpus` is the number that is paid for,
    `cost` that of the data where its size is known, `run` the time of a program's training, and
    `remark` what the GPU type makes different.
    """

    gpu: Gpu
    prediction: Prediction | None
    refused: str = ""
    gpus: int = 1
    cost: RunCost | None = None
    run: RunTime | None = None
    remark: str = ""
    is_unknown: bool = False

    @property
    def verdict(self) -> Verdict:
        if self.is_unknown:
            return Verdict.UNKNOWN
        return self.prediction.verdict if self.prediction else Verdict.DOES_NOT_FIT

    @property
    def fits(self) -> bool:
        """True if it is more likely to fit than not."""
        return self.prediction is not None and self.prediction.fits and not self.is_unknown

    def to_dict(self) -> dict[str, Any]:
        values = self.prediction.to_answer() if self.prediction else {"fits": False}
        values |= {"fits": None} if self.is_unknown else {}
        refused = self.refused or None
        words = {"verdict": str(self.verdict), "refused": refused, "remark": self.remark}
        values |= {"run_time": asdict(self.run)} if self.run else {}
        return {**values, "gpu": self.gpu.id, **words}


@dataclass(frozen=True, slots=True)
class _Everywhere:
    """All GPU types, those with little memory first, then the cheap ones."""

    model: str
    configuration: Configuration
    answers: tuple[_OnGpu, ...]
    read_as: str = ""
    """The training of a program, in ten words."""
    at_least: tuple[str, ...] = ()
    """Its settings that take memory and are not modelled."""

    @property
    def fitting(self) -> list[_OnGpu]:
        """The types on which it fits; the first is the smallest."""
        return [answer for answer in self.answers if answer.fits]

    @property
    def verdict(self) -> Verdict:
        """Fits if it does on some type, tight if on those only tightly; unknown if it may fit."""
        if self.fitting:
            verdicts = {answer.verdict for answer in self.fitting}
            return Verdict.FITS if Verdict.FITS in verdicts else Verdict.TIGHT
        unknown = any(answer.verdict is Verdict.UNKNOWN for answer in self.answers)
        return Verdict.UNKNOWN if unknown else Verdict.DOES_NOT_FIT

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": "predicted",
            "model": self.model,
            "read_as": self.read_as or None,
            "configuration": self.configuration.to_dict(),
            "smallest": next((answer.gpu.id for answer in self.fitting), None),
            "gpus": [answer.to_dict() for answer in self.answers],
            "versions": predicted_stack(),
        }


def space_everywhere(asked: Callable[..., Asked], margin: str | None) -> _Everywhere:
    """The training that is asked for, in all of its stages, on every GPU type.

    `asked` takes a `gpu` type, which may change its precision.
    """
    first = asked()
    space = first.space
    predictor = predictor_of(space)
    facts = SpaceFacts.of(space)
    in_fp16: list[Asked] = []

    def on(gpu: Gpu) -> _OnGpu:
        if not gpu.has_bf16 and not in_fp16:
            in_fp16.append(asked(gpu=gpu))
        chosen = first if gpu.has_bf16 else in_fp16[0]
        configuration = chosen.configuration
        fraction = parse_margin(margin, gpu)
        at = SpacePredictor(space, gpu, margin_fraction=fraction, predictor=predictor)
        (found,) = at.trace([configuration])
        more = chosen.doubts - doubts_of(space.workload, configuration)
        prediction = widened(found.prediction, more)
        cost = cost_of(prediction, configuration, facts, gpu)
        remark = "in fp16" if configuration != first.configuration else ""
        paid = paid_gpus(configuration, gpu)
        return _OnGpu(gpu, prediction, gpus=paid, cost=cost, remark=remark)

    return _Everywhere(str(space.model), first.configuration, _on_all(on), first.read_as)


def program_everywhere(program: Sequence[str], options: ProgramOptions) -> _Everywhere:
    """A program on every GPU type, from its settings; nothing of it runs."""
    read = read_program(program, is_run=False)
    with quiet_libraries():
        plan = plan_program(read, options.given, options.model, gpus=options.gpus)
        if plan.others:
            first = next(iter(load_catalogue().values()))
            asked = replace(options, margin=None).predictions(read, first)
            asked.plan(read)
            plan = (plan, *plan.others)[: (asked.largest or 0) + 1][-1]
        predictor = Predictor(WORKLOAD, plan.model)
        in_fp16: list[ProgramPlan] = []

        def on(gpu: Gpu) -> _OnGpu:
            asked = replace(options.predictions(read, gpu), predictor=predictor)
            if not gpu.has_bf16 and not in_fp16:
                in_fp16.append(asked.plan(read))
            chosen = plan if gpu.has_bf16 else in_fp16[0]
            (found,) = asked.predicted([(read, chosen)])
            remarks = {
                "more memory than predicted": found.fits is None and found.prediction.fits,
                "no more memory than predicted": found.is_upper_bound,
                "in fp16": chosen.configuration != plan.configuration,
                "evaluation not priced": bool(found.not_priced),
            }
            remark = ", ".join(text for text, holds in remarks.items() if holds)
            paid = paid_gpus(chosen.configuration, gpu)
            return _OnGpu(
                gpu,
                found.prediction,
                gpus=paid,
                run=found.run_time,
                remark=remark,
                is_unknown=found.fits is None,
            )

        return _Everywhere(plan.model, plan.configuration, _on_all(on), plan.read_as, plan.at_least)


def _on_all(on: Callable[[Gpu], _OnGpu]) -> tuple[_OnGpu, ...]:
    """The answer for each type. Raises the last error if no type has one."""
    found: list[_OnGpu] = []
    errors: list[InputError | UnavailableError] = []
    for gpu in load_catalogue().values():
        try:
            found.append(on(gpu))
        except (InputError, UnavailableError) as error:
            errors.append(error)
            is_unknown = isinstance(error, UnavailableError)
            found.append(_OnGpu(gpu, None, error.reason, is_unknown=is_unknown))
    if len(errors) == len(found):
        raise errors[-1]
    worst = float("inf")  # a price that isn't known
    prices = {gpu.id: gpu.price_usd_per_hour for gpu in load_catalogue().values()}
    prices = {name: worst if price is None else price for name, price in prices.items()}
    return tuple(sorted(found, key=lambda one: (one.gpu.memory_bytes, prices[one.gpu.id])))


ROWS = 15
"""GPU types in a table without --verbose."""

_NUMBERS = ("GiB", "tokens/s", "time", "USD")


def show_everywhere(found: _Everywhere, *, verbose: bool, as_json: bool) -> int:
    """Print the table; the exit code: 0 if it fits on a type."""
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found, verbose=verbose)
    return verdict_code(None if found.verdict is Verdict.UNKNOWN else bool(found.fitting))


def _print(found: _Everywhere, *, verbose: bool) -> None:
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
    if run := next((answer.run for answer in found.answers if answer.run), None):
        whole = "training" if run.is_whole else "epoch"
        per = f"{whole} of {run.steps:,} steps at full length"
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
        of = [answer.gpu.id for answer in found.answers if answer.remark == remark]
        is_of_all = len(of) == number - len(refused)
        lines.append((NOTE, remark if is_of_all else f"{remark} on {', '.join(of)}"))
    why: dict[tuple[str, bool], list[str]] = {}
    for each in refused:
        reason = each.refused.replace(f" on {each.gpu.name}", "")
        why.setdefault((reason, each.is_unknown), []).append(each.gpu.id)
    for (reason, is_unknown), of in why.items():
        lines.append((NOTE, f"{'unknown' if is_unknown else 'not'} on {', '.join(of)}: {reason}"))
    print_lines(field_lines(lines))


def _best(fitting: list[_OnGpu]) -> str:
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


def _chosen(found: _Everywhere) -> list[_OnGpu]:
    """Types on which it fits, or the largest; of many the cheapest, the fastest and the smallest.

    The order stays.
    """
    fitting = found.fitting or [answer for answer in found.answers if answer.prediction][-3:]
    by_worth = (
        fitting,
        sorted(fitting, key=_usd_per_token),
        sorted(fitting, key=lambda answer: -_tokens_per_s(answer)),
    )
    kept: dict[str, _OnGpu] = {}
    for row in zip(*by_worth, strict=True):
        kept.update((answer.gpu.id, answer) for answer in row if len(kept) < ROWS)
    return [answer for answer in fitting if answer.gpu.id in kept]


def _tokens_per_s(answer: _OnGpu) -> float:
    """The speed; 0 when unknown."""
    found = answer.prediction
    return 0.0 if found is None or found.is_compiled else found.speed.tokens_per_s


def _usd_per_token(answer: _OnGpu) -> float:
    price, rate = answer.gpu.price_usd_per_hour, _tokens_per_s(answer)
    return float("inf") if price is None or not rate else price * answer.gpus / rate


def _cells(answer: _OnGpu) -> tuple[str, ...]:
    prediction = answer.prediction
    assert prediction is not None
    speed, budget = prediction.speed, prediction.budget
    spent_s = answer.cost.epoch_s if answer.cost else SAMPLES / speed.samples_per_s
    spent_s = answer.run.seconds if answer.run else spent_s
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
