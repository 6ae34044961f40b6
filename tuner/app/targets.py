"""Several GPU types: what `--gpu a6000,t4` and `--gpu all` mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tuner.app.target import DEFAULT_RESULTS, Target, known_folder, selected_space, target_of
from tuner.core.errors import InputError, Problem, UnavailableError
from tuner.searches.joining import checked_address
from tuner.searches.store import ResultsFolder
from tuner.space import SearchSpace
from tuner.space.gpus import get_gpu, load_catalogue, types_named

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
    from tuner.searches.nodes import Need
    from tuner.searches.ray.nodes import survey  # Ray: seconds to import

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
