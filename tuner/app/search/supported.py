"""The part of a search space that can be predicted and run, and code of the user's own."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.app.device import is_cpu
from tuner.app.measuring import Measuring, Predicting
from tuner.app.target import CannotRunError
from tuner.core.errors import InputError, Problem, UnavailableError
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, KnobValue
from tuner.core.setup.distributed_knobs import Parallelism
from tuner.cost.speed.profile import DeviceProfile
from tuner.emulator.toolchain import unavailable
from tuner.space import SearchSpace
from tuner.space.models.catalogue import architecture
from tuner.trial.base import TrialJob


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
    from tuner.cost.parallel import LINK, NETWORK, unknown_rate  # numpy

    space.require_configurations(where)
    positions = architecture(space.predicted_model()).positions if space.predictable else None
    supported: list[Configuration] = []
    reasons: dict[str, int] = {}
    left_out = 0
    for configuration in space.configurations(where):
        # The needs of the user's own code are unknown.
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
    predicted = supported
    if space.predictable:
        predicted = [c for c in supported if unknown_rate(gpu, Parallelism.of(c)) is None]
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


def _problems(
    space: SearchSpace, configuration: Configuration, gpu: Gpu, positions: int | None
) -> dict[str, None]:
    """What GPU and model cannot do of what the configuration asks, in any of its stages."""
    from tuner.predict.predict import check_supported  # numpy

    stages = [*space.stage_configurations(configuration).values()] or [configuration]
    found = (check_supported(values, gpu, positions=positions) for values in stages)
    return {problem.message: None for problems in found for problem in problems}


def require_supported(configuration: Configuration, gpu: Gpu) -> None:
    """Raise `InputError`, with everything that is wrong, if `gpu` cannot run this."""
    from tuner.predict.predict import check_supported  # numpy

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


GUIDED = "guided"


def has_predictions(space: SearchSpace, gpu: Gpu) -> bool:
    """Whether a search of `space` starts from predictions, and not from nothing."""
    return space.predictable or has_program_prior(space, gpu)


def has_program_prior(space: SearchSpace, gpu: Gpu) -> bool:
    """Whether a few emulated runs of the space's program say what all of it would take."""
    return space.command is not None and space.command.is_program and can_emulate(gpu)


def can_emulate(gpu: Gpu) -> bool:
    """Whether programs run here on an emulated device of this type; processors are not emulated."""
    return not is_cpu(gpu) and unavailable() is None


def require_trials(space: SearchSpace, trials_on: Measuring | Predicting) -> None:
    """Raise `UnavailableError` where the space can be measured only, and nothing measures."""
    if space.predictable or isinstance(trials_on, Measuring):
        return
    raise UnavailableError(
        f"search space {space.name!r} runs your own code, which can be measured but not predicted: "
        f"{trials_on.why}",
        hint="--gpu auto uses this machine's GPU, --gpu cpu its processor, --mode emulate an "
        "emulated GPU",
    )


def trial_job(
    space: SearchSpace, gpu: Gpu, margin_fraction: float | None, profile: DeviceProfile | None
) -> TrialJob:
    """What is the same for all trials of `space`."""
    own = not space.predictable
    return TrialJob(
        space.workload,
        space.model,
        gpu,
        margin_fraction,
        profile,
        data=space.data,
        command=space.command,
        code_path=str(_folder(space)) if own and space.command is None else None,
    )


def require_lengths(space: SearchSpace) -> None:
    """Raise `InputError` unless single examples of the data are known to have which lengths."""
    lengths = space.data.token_lengths
    if lengths is None or not lengths.points:
        known = "mean and maximum of the token lengths only" if lengths else "no token lengths"
        raise InputError(
            f"search space {space.name!r} states {known}, and --lengths data draws examples",
            hint="give data.token_lengths as quantiles or a histogram; `tuner data` reads a file",
        )


def model_version(space: SearchSpace, lengths: str | None = None) -> str:
    """What a trial trained, as a version: trials of something else say nothing of this.

    `lengths` is "data" where it trained on those of the space's data. Of code of the user's own
    it is the file that is named, not what that imports.
    """
    if space.command is not None:
        return f"command {space.command.digest}"
    parts = [] if space.predictable else [f"{space.workload} {_source_digest(space)}"]
    if space.model is not None:
        parts.append(f"{space.model} {architecture(space.model).digest}")
    if lengths == "data":
        digest = hashlib.sha256(repr(space.data).encode()).hexdigest()[:12]
        parts.append(f"on lengths {digest}")
    return " ".join(parts)


def _folder(space: SearchSpace) -> Path:
    """Where the user's code is looked for first: beside the space."""
    return space.path.parent.resolve() if space.path is not None else Path.cwd()


def _source_digest(space: SearchSpace) -> str:
    """12 hexadecimal digits of the workload's file; empty where it is no plain file."""
    module = Path(*space.workload.partition(":")[0].split("."))
    for folder in (_folder(space), *map(Path, sys.path)):
        for path in (folder / module.with_suffix(".py"), folder / module / "__init__.py"):
            if path.is_file():
                return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return ""
