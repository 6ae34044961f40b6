"""What a GPU can run of a space: said before a search, and not as forty failed trials.

Imports torch (through the prediction): to be imported late.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.app.target import CannotRunError
from tuner.core.errors import InputError, Problem
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, KnobValue
from tuner.core.setup.distributed_knobs import Parallelism
from tuner.cost.parallel import LINK, NETWORK, unknown_rate
from tuner.predict.predict import check_supported
from tuner.space import SearchSpace
from tuner.space.models.catalogue import architecture


@dataclass(frozen=True, slots=True)
class SupportedSpace:
    """A search space without the configurations that the GPU cannot run at all.

    `reasons` counts what was left out, by why; a configuration may have several reasons.
    """

    space: SearchSpace
    where: tuple[str, ...]
    supported: tuple[Configuration, ...]
    left_out: int
    reasons: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The space's name."""
        return self.space.name

    @property
    def knobs(self) -> Mapping[str, Any]:
        """The space's knobs."""
        return self.space.knobs

    @property
    def memory(self) -> Mapping[str, tuple[KnobValue, ...]]:
        """The space's declared order of memory."""
        return self.space.memory

    def configurations(self, where: Sequence[str] = ()) -> Iterator[Configuration]:
        """What the GPU can run, in the space's order; `where` was applied already."""
        assert tuple(where) == self.where
        return iter(self.supported)


def supported_part(space: SearchSpace, gpu: Gpu, where: tuple[str, ...]) -> SupportedSpace:
    """The part of `space` to search on `gpu`. Raises `InputError` when nothing is left.

    Trials of several GPUs whose link is not known are left out where there are others.
    """
    space.require_configurations(where)
    positions = architecture(space.predicted_model()).positions if space.predictable else None
    supported: list[Configuration] = []
    reasons: dict[str, int] = {}
    left_out = 0
    for configuration in space.configurations(where):
        # What code of the user's own needs of a GPU, nobody knows.
        problems = _problems(space, configuration, gpu, positions) if space.predictable else {}
        if not problems:
            supported.append(configuration)
            continue
        left_out += 1
        for message in problems:
            reasons[message] = reasons.get(message, 0) + 1
    if not supported:
        raise CannotRunError(
            f"{gpu.name} can run no configuration of search space {space.name!r}",
            problems=[Problem(reason) for reason in reasons],
            hint=_hint(gpu, space),
        )
    predicted = [c for c in supported if _link_known(c, gpu)] if space.predictable else supported
    if predicted and len(predicted) < len(supported):  # with none, its prediction says what to do
        lacking = LINK if gpu.link_bytes_per_s is None else NETWORK
        several = "GPUs" if lacking == LINK else "machines"
        reasons[
            f"trials of several {several}, whose time is unknown: no link rate is known for "
            f"{gpu.name}; add {lacking} to an entry `like: {gpu.id}` in your gpus.yaml"
        ] = len(supported) - len(predicted)
        left_out += len(supported) - len(predicted)
        supported = predicted
    return SupportedSpace(space, where, tuple(supported), left_out, reasons)


def _link_known(configuration: Configuration, gpu: Gpu) -> bool:
    """Whether the time of the configuration can be predicted, as to what its ranks exchange."""
    return unknown_rate(gpu, Parallelism.of(configuration)) is None


def _problems(
    space: SearchSpace, configuration: Configuration, gpu: Gpu, positions: int | None
) -> dict[str, None]:
    """What GPU and model cannot do of what the configuration asks, in any of its stages."""
    stages = [*space.stage_configurations(configuration).values()] or [configuration]
    found = (check_supported(values, gpu, positions=positions) for values in stages)
    return {problem.message: None for problems in found for problem in problems}


def require_supported(configuration: Configuration, gpu: Gpu) -> None:
    """Raise `InputError`, with everything that is wrong, if `gpu` cannot run this."""
    problems = check_supported(configuration, gpu)
    if problems:
        raise InputError(
            f"{gpu.name} cannot run this configuration",
            problems=[Problem(p.message) for p in problems],
            hint="set attention to sdpa" if _only_attention(problems) else _hint(gpu),
        )


def _only_attention(problems: Sequence[Problem]) -> bool:
    return all(problem.where == "attention" for problem in problems)


def _hint(gpu: Gpu, space: SearchSpace | None = None) -> str:
    allowed = [p for p in ("fp32", "tf32", "fp16", "bf16", "int8") if p in gpu.flops]
    text = f"{gpu.id} computes in {', '.join(allowed)}"
    fixed = space is not None and "mixed_precision" in space.fixed
    if fixed and space is not None and str(space.fixed["mixed_precision"]) not in gpu.flops:
        return f"{text}: the space holds mixed_precision at {space.fixed['mixed_precision']}"
    return f"{text}; for example --set precision=fp16 --set mixed_precision=fp16"
