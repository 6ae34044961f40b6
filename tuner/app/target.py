"""Targets of a search: a search space, GPU types and the folders of their results.

`--gpu a6000,t4` and `--gpu all` mean several.

A journal may come from another person, or be edited: impossible records in it are set aside. A rate
that no device can reach would be recommended before all others, and an invalid value would be
written into the user's files.
"""

from __future__ import annotations

import dataclasses
import logging
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tuner.app.device import find_gpu
from tuner.core.errors import InputError, Problem, TunerError, UnavailableError
from tuner.core.gpu import Gpu
from tuner.core.records import (
    KnobValue,
    Measurement,
    MemoryBudget,
    Outcome,
    Prediction,
    Source,
    Status,
    TrialRecord,
)
from tuner.core.records.trial import PROCESSOR
from tuner.core.units import format_gib, printable
from tuner.program.export import FORMATS
from tuner.searches.facts import SpaceFacts
from tuner.searches.joining import checked_address
from tuner.searches.nodes import Need
from tuner.searches.store import ResultsFolder, shipped
from tuner.searches.view import View, build_view
from tuner.space import SearchSpace, load_space
from tuner.space.gpus import get_gpu, load_catalogue, types_named
from tuner.space.load import is_shipped
from tuner.space.models.catalogue import get_entry

DEFAULT_RESULTS = Path("results")

DRIVERS_DIFFER = 0.0005
"""Releases of the driver give the same card memory within this share: 81,079 and 81,089 MiB of an
H100."""


class CannotRunError(InputError):
    """The GPU type can't run any configuration of the search space; another type may."""


@dataclass(frozen=True, slots=True)
class Target:
    """A space whose model is known, a GPU with the user's memory and price, and their folder."""

    space: SearchSpace
    gpu: Gpu
    folder: ResultsFolder
    arguments: tuple[str, ...]
    """The arguments that select this target on a command line."""

    @property
    def known(self) -> ResultsFolder:
        """The folder to read its results from, which may be one shipped with tuner."""
        return known_folder(self.space, self.folder)

    @property
    def facts(self) -> SpaceFacts:
        """The facts of the space that are needed to write results."""
        return SpaceFacts.of(self.space)

    def use_commands(self, *words: str) -> tuple[str, ...]:
        """Commands that write the recommendation into a file of yours, or another tool's."""
        command, file = self.space.command, _file_of(self.space)
        if command is not None:
            name = ("apply",) if command.is_program else ("export", "--format", "command")
            return (self.command(name[0], *words, *name[1:]),)
        able = "trl" if self.space.workload in FORMATS["trl"].workloads else "accelerate"
        apply = [self.command("apply", *words, file)] if file is not None else []
        return (*apply, self.command("export", *words, "--format", able))

    def view(self, records: Sequence[TrialRecord], where: tuple[str, ...], **more: Any) -> View:
        """The view of `records` under the conditions in force; `more` are those of `build_view`.

        Raises `InputError` for an invalid condition.
        """
        return build_view(
            records,
            self.facts,
            self.gpu,
            where=lambda configuration: self.space.matches(configuration, where),
            conditions=check_conditions(self, where),
            use=self.use_commands(*(word for text in where for word in ("--where", text))),
            **more,
        )

    def command(self, name: str, *more: str) -> str:
        """A command line about this target, for people to copy."""
        return shlex.join(["tuner", name, *self.arguments, *more])


def _file_of(space: SearchSpace) -> str | None:
    """A file that the mappings of a space are for; None where it has none."""
    for mapping in space.apply.values():
        if mapping.is_of_script:
            return "train.py"
        plain = [name for name in mapping.files if "*" not in name]
        if plain:
            return plain[0]
    return None


def known_folder(space: SearchSpace, folder: ResultsFolder) -> ResultsFolder:
    """The folder to read results from: `folder`, or the results shipped with tuner.

    Shipped results are used if `folder` is the default and has no results, and the space is
    shipped as well.
    """
    if folder.root != DEFAULT_RESULTS or folder.has_results or not is_shipped(space):
        return folder
    return shipped(folder.space, folder.gpu) or folder


def selected_space(space: str | SearchSpace, model: str | None) -> tuple[SearchSpace, list[str]]:
    """The space with its model, and the arguments that select it on a command line."""
    read = load_space(space) if isinstance(space, str) else space
    name = space if isinstance(space, str) else str(read.path or read.name)
    return with_model(read, model), ["--space", name, *(["--model", model] if model else [])]


def target_of(
    space: SearchSpace,
    gpu_name: str,
    *,
    selected: Sequence[str],
    results: Path,
    gpu_memory: int | None = None,
    price: float | None = None,
) -> Target:
    """The target of a space whose model is known; `selected` are the arguments that select it."""
    gpu = find_gpu(gpu_name, memory_bytes=gpu_memory, price_usd_per_hour=price)
    arguments = [*selected[:2], "--gpu", gpu_name, *selected[2:]]
    arguments += ["--gpu-memory", f"{gpu_memory}B"] if gpu_memory else []
    arguments += ["--results", str(results)] if results != DEFAULT_RESULTS else []
    return Target(space, gpu, ResultsFolder(results, space.name, gpu.id), tuple(arguments))


def with_model(space: SearchSpace, model: str | None) -> SearchSpace:
    """`space` with `model` in place of its own, if one is given.

    The model becomes part of the name: results of two models must not end up in one journal.
    Raises `InputError` if neither the user nor the space names a model.
    """
    if space.command is not None and model is not None:
        raise InputError(f"--model {model} has no meaning here: the space runs a command")
    if model is None:
        if space.model is None and space.predictable:
            raise InputError(
                f"search space {space.name!r} names no model",
                hint="say which with --model; `tuner models` lists those that work offline",
            )
        return space
    wanted, own = (get_entry(name) if name else None for name in (model, space.model))
    if model == space.model or (wanted is not None and wanted == own):
        return space
    chosen = wanted.id if wanted else model
    return dataclasses.replace(space, model=chosen, name=f"{space.name}-{chosen}")


def comparable(records: tuple[TrialRecord, ...], target: Target) -> tuple[TrialRecord, ...]:
    """The comparable records of `target`: for this GPU memory, with the newest versions.

    A trial with other library versions, on another device, under another limit or of a model that
    the space no longer names isn't comparable with the newest trial of its source.
    """
    return sorted_by_use(records, target).comparable


class _Sorted(NamedTuple):
    """Records grouped by their use.

    `stale` records differ from `comparable` ones in library versions only. Records `aside` are
    impossible, each with the reason.
    """

    comparable: tuple[TrialRecord, ...]
    stale: tuple[TrialRecord, ...]
    aside: list[Excluded]


def sorted_by_use(records: Iterable[TrialRecord], target: Target) -> _Sorted:
    """The records of this space, GPU and memory by their use; `aside` holds any memory size."""
    here = (r for r in records if (r.space, r.gpu) == (target.space.name, target.gpu.id))
    possible, aside = sorted_out(here, target.space)
    own = [judged for r in possible if (judged := _with_memory(r, target)) is not None]
    newest = {record.source: record for record in own}
    kept: list[TrialRecord] = []
    old: list[TrialRecord] = []
    for record in own:
        if record.alike(newest[record.source], versions=False):
            (kept if record.alike(newest[record.source]) else old).append(record)
    return _Sorted(tuple(kept), tuple(old), aside)


def stale_text(old: tuple[TrialRecord, ...], kept: tuple[TrialRecord, ...]) -> str:
    """The number of stale trials and their library versions; empty if none is stale."""
    if not old:
        return ""
    now = kept[-1].versions if kept else {}
    changed = sorted({f"{k} {v}" for r in old for k, v in r.versions.items() if now.get(k) != v})
    plural = "s" if len(old) > 1 else ""
    return f"{len(old)} trial{plural} of other versions ({', '.join(changed)})"


def _with_memory(record: TrialRecord, target: Target) -> TrialRecord | None:
    """`record` if it applies to the memory of `target`, adapted where necessary; else None.

    A GPU type can have variants with different memory, which are searched apart; drivers differ by
    less. A processor's memory is what the machine has now; in a container it can differ at each
    start.
    """
    before, now = record.gpu_memory_bytes, target.gpu.memory_bytes
    if before == now:
        return record
    is_alike = target.gpu.id == PROCESSOR or abs(before - now) <= DRIVERS_DIFFER * now
    if before <= 0 or not is_alike:
        return None
    outcome = record.outcome
    if outcome.ran is None and record.source is not Source.PREDICTED and before < now:
        return None  # it may have failed for lack of memory that is available now
    if outcome.prediction is not None:
        was, share = outcome.prediction.budget, now / before  # of ranks, which may share it
        budget = MemoryBudget(round(was.limit_bytes * share), round(was.margin_bytes * share))
        judged = dataclasses.replace(outcome.prediction, budget=budget)
        status = Outcome.predicted(judged).status if record.source is Source.PREDICTED else None
        outcome = dataclasses.replace(outcome, prediction=judged, status=status or outcome.status)
    return dataclasses.replace(record, gpu_memory_bytes=now, outcome=outcome)


def usable(target: Target) -> _Sorted:
    """The records of `target` by their use; logs a warning about those set aside.

    Raises `UnavailableError` if no record is comparable.
    """
    found = target.known.read_all()
    known = sorted_by_use(found, target)
    warn_of(aside := known.aside)
    if known.comparable:
        return known
    sizes = sorted({r.gpu_memory_bytes for r in found if r.gpu == target.gpu.id})
    if aside and (target.gpu.id == PROCESSOR or target.gpu.memory_bytes in sizes):
        raise UnavailableError(
            f"{str(target.known.journal)!r} has no usable record: {excluded_text(aside)}",
            hint=f"move it away, and run `{target.command('search')}`",
        )
    if sizes:
        raise UnavailableError(
            f"{str(target.known.journal)!r} has results for "
            f"{' and '.join(format_gib(size) for size in sizes)} of memory, none for "
            f"{format_gib(target.gpu.memory_bytes)}",
            hint="say how much memory is meant with --gpu-memory, or run "
            f"`{target.command('search')}`",
        )
    raise UnavailableError(
        f"no results of {target.space.name!r} on {target.gpu.id!r} in "
        f"{str(target.folder.path)!r} yet",
        hint=f"run `{target.command('search')}`",
    )


def with_margin(record: TrialRecord, margin_bytes: int) -> TrialRecord:
    """`record` as it would be if `margin_bytes` had to stay free."""
    if record.source is not Source.PREDICTED:
        record = dataclasses.replace(record, margin_bytes=margin_bytes)
    if record.verified_by is not None:
        check = with_margin(record.verified_by, margin_bytes)
        record = dataclasses.replace(record, verified_by=check)
    prediction = record.outcome.prediction
    if prediction is None:
        return record
    # Ranks that share a processor's memory also share the margin to keep free.
    limit_bytes = prediction.budget.limit_bytes
    budget = MemoryBudget(limit_bytes, round(margin_bytes * limit_bytes / record.gpu_memory_bytes))
    changed = dataclasses.replace(prediction, budget=budget)
    return dataclasses.replace(
        record, outcome=dataclasses.replace(record.outcome, prediction=changed)
    )


def check_conditions(target: Target, where: tuple[str, ...]) -> tuple[str, ...]:
    """The conditions in force: minimums and `where`. Raises `InputError` for an invalid one."""
    errors: list[TunerError] = []
    for text in where:
        try:
            target.space.condition(text)
        except InputError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return target.space.conditions(where)


ALL = "all"


def gpu_names(text: str) -> list[str]:
    """["a6000", "t4"] of "a6000,t4". Raises `InputError` where a name is missing."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise InputError(
            f"--gpu {text!r} lacks a name", hint="write GPU types with commas between: a6000,t4"
        )
    if len(names) > 1 and ALL in names:
        raise InputError(f"--gpu {text!r} names all types and some", hint="name one or the other")
    return names


def load_targets(
    space: str | SearchSpace,
    names: Sequence[str],
    *,
    model: str | None = None,
    results: Path = DEFAULT_RESULTS,
    gpu_memory: int | None = None,
    price: float | None = None,
    address: str | None = None,
) -> list[Target]:
    """A target for each GPU type, in their order; a type that is named twice counts once.

    A name that several types answer to ("h100") means the one that the Ray cluster at `address`
    offers. Raises `InputError` with everything that is wrong with the names.
    """
    if len(names) > 1 and (gpu_memory is not None or price is not None):
        raise InputError(
            f"--gpu-memory and --price are about one GPU type, and --gpu names {len(names)}"
        )
    settled, selected = selected_space(space, model)
    found: dict[str, Target] = {}
    wrong: list[InputError] = []
    for gpu in names:
        try:
            target = target_of(
                settled,
                gpu if address is None else offered_type(gpu, address),
                selected=selected,
                results=results,
                gpu_memory=gpu_memory,
                price=price,
            )
        except InputError as error:
            wrong.append(error)
        else:
            found.setdefault(target.gpu.id, target)
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        problems = [Problem(f"{e.message} ({e.hint})" if e.hint else e.message) for e in wrong]
        raise InputError("these GPU types cannot be told", problems=problems)
    return list(found.values())


def offered_type(name: str, address: str) -> str:
    """The id of the GPU type that `name` means in the Ray cluster at `address`.

    The cluster is only asked where several types answer to the name; the name stays as it is
    where that does not tell one of them.
    """
    ids = types_named(name)
    if len(ids) < 2:
        return name
    checked_address(address)
    from tuner.searches.ray.cluster import survey  # Ray: seconds to import

    needs = [Need({"GPU": 1.0}, get_gpu(gpu)).asking() for gpu in ids]
    there = [need.gpu.id for need in survey(address, needs).met if need.gpu]
    return there[0] if len(there) == 1 else name


def searched_targets(space: str | SearchSpace, model: str | None, results: Path) -> list[Target]:
    """The GPU types on which the space was searched. Raises `UnavailableError` for none."""
    settled, selected = selected_space(space, model)
    found = [
        target_of(settled, gpu, selected=selected, results=results)
        for gpu in (*load_catalogue(), "cpu")
        if known_folder(settled, ResultsFolder(results, settled.name, gpu)).has_results
    ]
    if not found:
        raise UnavailableError(
            f"no results of {settled.name!r} in {str(results)!r} yet",
            hint="search it with `tuner search` on each GPU type to compare",
        )
    return found


MAX_DEVICE_BYTES = 1 << 46
"""64 TiB: a hundred times the largest processor's memory, and even more times a GPU's."""

MAX_RATE = 1e12
"""Samples or tokens per second: the rate of a million parameters at one exaFLOP/s."""

MIN_STEP_S = 1e-7
"""A GPU takes more than this to start a single kernel."""

SHOWN = 3

Excluded = tuple[TrialRecord, str]
"""A record, and the reason why it is ignored."""


def sorted_out(
    records: Iterable[TrialRecord], space: SearchSpace
) -> tuple[list[TrialRecord], list[Excluded]]:
    """The possible records, and the impossible ones with the reason for each."""
    kept, excluded = [], []
    knobs = _Knobs(space)
    for record in records:
        reason = _beyond_physics(record) or knobs.problem(record)
        if reason:
            excluded.append((record, reason))
        else:
            kept.append(record)
    return kept, excluded


def excluded_text(excluded: Sequence[Excluded]) -> str:
    """The number of records set aside, and the reasons of the first ones; empty if none was."""
    if not excluded:
        return ""
    told = "; ".join(f"{record.trial_id[:40]}: {why}" for record, why in excluded[:SHOWN])
    more = f"; and {len(excluded) - SHOWN} more" if len(excluded) > SHOWN else ""
    plural = "s" if len(excluded) > 1 else ""
    return printable(f"{len(excluded)} impossible record{plural} set aside ({told}{more})")


def warn_of(excluded: Sequence[Excluded]) -> None:
    """Log a warning about records that were set aside."""
    if text := excluded_text(excluded):
        logging.getLogger("tuner").warning("note: %s", text)


def _beyond_physics(record: TrialRecord) -> str:
    outcome = record.outcome
    if record.gpu_memory_bytes <= 0:
        return "its GPU has no memory"
    for numbers in (outcome.measurement, outcome.emulation, outcome.prediction):
        if numbers is not None and outcome.status is Status.OK and (found := _wrong(numbers)):
            return found
    return ""


def _wrong(numbers: Measurement | Prediction) -> str:
    """The first number of a successful trial that no device can reach, or an empty string."""
    speed, size = numbers.speed, numbers.memory.device_bytes
    if size > MAX_DEVICE_BYTES:
        return f"device_bytes of {size}"
    if speed.step_s < MIN_STEP_S:
        return f"a step of {speed.step_s:g} s"
    for name, rate in (("samples", speed.samples_per_s), ("tokens", speed.tokens_per_s)):
        if rate > MAX_RATE or (name == "samples" and rate <= 0):
            return f"{rate:g} {name} a second"
    for name, (low, high) in numbers.intervals.items():
        if low > high:
            return f"{name} from {low:g} to {high:g}"
    return ""


class _Knobs:
    """The knobs of a space; each value is checked once."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._names = tuple(space.knobs)
        self._possible: list[set[object]] = [set() for _ in self._names]

    def problem(self, record: TrialRecord) -> str:
        """The reason why the configuration can't belong to the space; empty if it can."""
        values = record.configuration.values_of(self._names)
        for name, value, possible in zip(self._names, values, self._possible, strict=True):
            key = (type(value), value)
            if key in possible:
                continue
            problem = f"no value of {name}" if value is None else _refused(self._space, name, value)
            if problem:
                return problem
            possible.add(key)
        return ""


def _refused(space: SearchSpace, name: str, value: KnobValue) -> str:
    """The reason why a knob can't have this value. Values not listed in the space may be valid."""
    if value in space.knobs[name].values and type(value) in map(type, space.knobs[name].values):
        return ""
    try:
        read = space.terms[name].read(value)
    except InputError as error:
        return error.message
    if isinstance(value, bool) != isinstance(read, bool) or read != value:
        return f"{name} cannot be {str(value)[:60]!r}"
    return ""
