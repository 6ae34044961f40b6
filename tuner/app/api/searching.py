"""`tuner.search`, `tuner.estimate` and `tuner.load_results`: the engine of the command line."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

from tuner.app.api import as_bytes, as_mode, as_share, as_texts
from tuner.app.api.display import listener_of
from tuner.app.api.result import SearchResult, SearchResults
from tuner.app.device import find_gpu, profile_for
from tuner.app.estimate import Estimate, asked, corrected, estimate_asked
from tuner.app.listener import quiet_libraries
from tuner.app.search.plan import make_plans
from tuner.app.search.run import run_plans
from tuner.app.target import ALL, gpu_names, load_targets, searched_targets
from tuner.core.errors import InputError, nearest
from tuner.core.records import KnobValue, parse_margin
from tuner.searches.options import OPTIONS, SearchOptions
from tuner.searches.progress import Progress
from tuner.space import SearchSpace
from tuner.space.gpus import LIMIT_OF_TYPE

OnProgress = Callable[[Mapping[str, "Progress"]], None]


class _TrialArguments(TypedDict, total=False):
    """The arguments about how trials run, and where."""

    mode: Literal["auto", "measure", "emulate", "predict"]
    address: str | None
    labels: str | Sequence[str]
    host_memory: int | str | None
    workers: int | None
    memory_limit: int | str | None
    budget_s: float | None
    timeout_s: float | None
    weights: str | None
    lengths: Literal["full", "data"] | None
    whole_steps: bool


class _BudgetArguments(TypedDict, total=False):
    """The arguments about the order of trials and the end of the search."""

    trials: int
    seed: int
    searcher: str
    time_limit_s: float | None
    gpu_hours: float | None
    max_cost_usd: float | None
    min_gain: float | None
    fresh: bool
    verify: bool


class SearchArguments(_TrialArguments, _BudgetArguments, total=False):
    """The arguments of `tuner.search` besides the space, the GPU type and the results."""

    model: str | None
    where: str | Sequence[str]
    settings: Mapping[str, KnobValue] | None
    objectives: str | Sequence[str]
    margin: float | str | None
    gpu_memory: int | str | None
    price: float | None
    study: str | Path | None
    metrics: bool
    dashboard: bool
    progress: bool | None
    on_progress: OnProgress | None


@overload
def search(
    space: str | Path | SearchSpace,
    *,
    gpu: str,
    results: str | Path | None = None,
    **arguments: Unpack[SearchArguments],
) -> SearchResult: ...


@overload
def search(
    space: str | Path | SearchSpace,
    *,
    gpu: list[str] | tuple[str, ...],
    results: str | Path | None = None,
    **arguments: Unpack[SearchArguments],
) -> SearchResults: ...


def search(
    space: str | Path | SearchSpace,
    *,
    gpu: str | list[str] | tuple[str, ...],
    results: str | Path | None = None,
    **arguments: Unpack[SearchArguments],
) -> SearchResult | SearchResults:
    """Search a space for the fastest configuration that fits a GPU: `tuner search`.

    With a GPU of that type in this machine, or with the `address` of a Ray cluster, each trial is a
    short training run in its own process; otherwise every number is predicted, and says so::

        result = tuner.search("qlora27b", gpu="a6000", trials=60, where="lora_rank >= 64")
        print(result.best().configuration)

        results = tuner.search("qlora27b", gpu=["a6000", "h100_sxm", "t4"])
        print(results.best().gpu.name)  # the cheapest epoch

    - `space` is a name (`tuner spaces` lists them), the path of a YAML file, or what
      `tuner.load_space` returned; `model` replaces the model that it names.
    - `gpu` is a type (`tuner gpus` lists them), "auto" for this machine's GPU or "cpu" for its
      processor. A list searches one type after the other or, on a cluster, all at once, and
      returns a mapping by the types' ids; so does text with commas, as on the command line.
    - `results` is the folder of the journals, reports and tables, as `--results`: a search goes
      on from what is there. By default the files are temporary, and end with the result.
    - `where` are conditions such as "lora_rank >= 64", which replace the space's minimums on the
      same knobs; `settings` hold knobs at values; `objectives` are what the front is over.
    - `margin` is the memory to keep free: a fraction, or text such as "3%" or "2GiB".
    - `mode` "measure" insists on real trials, "emulate" runs them on emulated GPUs, "predict" runs
      none, and "auto", the default, measures where there is such a GPU. `workers` trials run at
      once. `verify=False` leaves out the verification.
    - On a cluster, `labels` ("team=vision") choose nodes, and a trial reserves `host_memory` of its
      node's memory. A Ray job's `runtime_env` holds for its trials.
    - The budget: `trials` configurations of each type, by default 40, known ones included;
      `time_limit_s` for all types together; `gpu_hours`, `max_cost_usd` and `min_gain` (a
      fraction) for each. `searcher` proposes them, by default "guided", with the random `seed` 0.
    - `fresh` begins a new journal and keeps the old one; `study` is a file for optuna-dashboard;
      `metrics` and `dashboard` let others watch, as the options of the same names do.
    - `gpu_memory` and `price` (USD an hour) replace the catalogue's, of one type; `memory_limit`
      is what a real trial may use ("auto": what the type has, where a larger GPU stands in).
    - `budget_s`, `timeout_s`, `weights`, `lengths` and `whole_steps` say how a real trial runs,
      as the options of the same names do.
    - `progress` prints how far it is, by default in a notebook and in a terminal; `on_progress`
      is called with the same at each change, by GPU id. What it raises ends the search.

    Ctrl-C ends the search; results so far are returned, and `interrupted` is true.

    Raises `InputError` for wrong arguments, `UnavailableError` for what is missing here,
    `NothingFitsError` if no type can run or is predicted to fit anything, and `TypeError` for an
    unknown argument. If trials ran and none fits, the result has an empty front.
    """
    given: dict[str, Any] = dict(arguments)
    for name in given:
        if name not in SearchArguments.__annotations__:  # as Python says it
            close = nearest(name, SearchArguments.__annotations__)
            meant = f"did you mean {close!r}?" if close else "help(tuner.search) lists them"
            raise TypeError(f"search() got an unexpected keyword argument {name!r}; {meant}")
    listener = listener_of(given.pop("progress", None), given.pop("on_progress", None))
    call = _call(space, gpu, given)
    names, several = _gpu_names(gpu)
    kept = None
    if results is None:  # temporary files, removed with the result
        kept = tempfile.TemporaryDirectory(prefix="tuner-results-", ignore_cleanup_errors=True)
        results = kept.name
    folder = Path(results)
    targets = load_targets(
        _named(space),
        names,
        model=given.pop("model", None),
        results=folder,
        gpu_memory=as_bytes(given.pop("gpu_memory", None), "gpu_memory"),
        price=given.pop("price", None),
        address=given.get("address"),
    )
    options = SearchOptions(**{name: _as_option(name, value) for name, value in given.items()})
    with quiet_libraries():
        plans = make_plans(targets, options)
        found = run_plans(plans, command=call, listener=listener)
    if several:
        return SearchResults.of(found, kept=kept)
    return SearchResult.of(found[0], kept=kept)


@overload
def load_results(
    space: str | Path | SearchSpace,
    *,
    gpu: str,
    results: str | Path = ...,
    model: str | None = ...,
    where: str | Sequence[str] = ...,
) -> SearchResult: ...


@overload
def load_results(
    space: str | Path | SearchSpace,
    *,
    gpu: list[str] | tuple[str, ...],
    results: str | Path = ...,
    model: str | None = ...,
    where: str | Sequence[str] = ...,
) -> SearchResults: ...


def load_results(
    space: str | Path | SearchSpace,
    *,
    gpu: str | list[str] | tuple[str, ...],
    results: str | Path = "results",
    model: str | None = None,
    where: str | Sequence[str] = (),
) -> SearchResult | SearchResults:
    """Results of earlier searches, read from their journals; nothing is run or written.

    ::

        result = tuner.load_results("qlora27b", gpu="a6000", results="results")
        print(result.best(headroom="10%").configuration)

    The arguments are those of `tuner.search`; with `gpu="all"` or a list the result is a mapping by
    the types' ids. Raises `UnavailableError` if nothing was searched yet.
    """
    names, several = _gpu_names(gpu)
    if names == [ALL]:
        targets, several = searched_targets(_named(space), model, Path(results)), True
    else:
        targets = load_targets(_named(space), names, model=model, results=Path(results))
    found = [SearchResult.read(target, as_texts(where)) for target in targets]
    return SearchResults({one.gpu.id: one for one in found}) if several else found[0]


load = load_results


def estimate(  # noqa: PLR0913 - one argument for each option
    space: str | Path | SearchSpace | None = None,
    *,
    gpu: str,
    model: str | None = None,
    margin: float | str | None = None,
    gpu_memory: int | str | None = None,
    price: float | None = None,
    loop: str | None = None,
    results: str | Path | None = "results",
    settings: Mapping[str, KnobValue] | None = None,
    **knobs: KnobValue,
) -> Estimate:
    """Predict memory and speed of one configuration: `tuner estimate`. Nothing is run.

    ::

        found = tuner.estimate("qlora27b", gpu="a6000", micro_batch=4, lora_rank=128)
        print(found.fits, found.memory.device_bytes, found.speed.samples_per_s)

        tuner.estimate(model="mistral-7b-v0.3", gpu="rtx4090", precision="nf4")

    Give knob values by name, or in `settings` if another argument has that name. Others have the
    value of the space's baseline; without a space, the default of `loop`: "trl" (TRL's SFTTrainer),
    "transformers" (its Trainer) or "own" (that of tuner's trials). Trials of the space that ran on
    this GPU type correct the prediction (`Estimate.corrected_by`), where the folder `results` has
    some; `results=None` leaves it as predicted. The other arguments are those of `tuner.search`.
    Raises `InputError` for wrong arguments, and if the GPU cannot run the configuration at all.
    """
    memory_bytes = as_bytes(gpu_memory, "gpu_memory")
    device = find_gpu(gpu, memory_bytes=memory_bytes, price_usd_per_hour=price)
    fraction = parse_margin(as_share(margin, "margin"), device)
    given = None if space is None else _named(space)
    with quiet_libraries():
        training = asked(given, model, {**(settings or {}), **knobs}, loop=loop, gpu=device)
        profile = profile_for(device)
        found = estimate_asked(training, device, margin_fraction=fraction, profile=profile)
        if results is None or space is None:
            return found
        return corrected(found, Path(results))


def _named(space: str | Path | SearchSpace) -> str | SearchSpace:
    return str(space) if isinstance(space, Path) else space


def _gpu_names(gpu: str | Sequence[str]) -> tuple[list[str], bool]:
    """The names of GPU types, and whether the answer is a mapping."""
    if isinstance(gpu, str):
        names = gpu_names(gpu)
        return names, len(names) > 1
    names = [name for text in gpu for name in gpu_names(text)]
    if not names:
        raise InputError("gpu names no GPU type", hint="`tuner gpus` lists them")
    return names, True


def _as_option(name: str, value: Any) -> Any:
    """The value of an argument as `SearchOptions` has it. Raises `InputError` for what is none."""
    match OPTIONS[name].kind:
        case _ if name == "margin":
            value = as_share(value, name)
        case "texts" | "objective":
            value = as_texts(value)
        case "setting":
            value = dict(value or {})
        case "mode":
            value = as_mode(value)
        case "limit" if value == "auto":
            value = LIMIT_OF_TYPE
        case "limit" | "size":
            value = as_bytes(value, name)
        case "file":
            value = None if value is None else Path(value)
    return value


def _call(
    space: str | Path | SearchSpace, gpu: str | Sequence[str], given: Mapping[str, object]
) -> str:
    """The call that repeats this search, for the report."""
    path = space if isinstance(space, str) else str(getattr(space, "path", None) or space)
    parts = [repr(path), f"gpu={gpu!r}"]
    for name, value in given.items():
        parts.append(f"{name}={(str(value) if isinstance(value, Path) else value)!r}")
    return f"tuner.search({', '.join(parts)})"
