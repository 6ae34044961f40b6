"""Traces of one model: from timelines of all sizes where there are such, else each its own.

A timeline is kept in memory and on disk, comes with the package, or is traced.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from functools import cached_property
from typing import Any

from tuner.core.errors import UnavailableError, install_command
from tuner.core.expressions import settings_text
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Memory, MemoryCategory
from tuner.core.setup.causal_lm import CAUSAL_LM, IN_BACKWARD, OFFLOAD_ACTIVATIONS
from tuner.core.setup.common import OPTIMIZERS
from tuner.core.setup.distributed_knobs import Parallelism
from tuner.cost.allocator import AllocatorSettings
from tuner.cost.as_arrays import to_arrays
from tuner.cost.library_memory import cublas_workspace_bytes
from tuner.cost.memory import peak_memory
from tuner.cost.sized import OptimizerSteps, SizedTimeline
from tuner.cost.traced import Training
from tuner.predict import cache
from tuner.predict.compiler.structure import (
    VARIABLE_KNOBS,
    Point,
    Structure,
    differences,
    kernels_like,
)
from tuner.predict.shipped import can_trace, memory_key, shipped
from tuner.predict.training import Workload, get_workload
from tuner.space.models.catalogue import (
    Architecture,
    architecture,
    architecture_of,
    load_catalogue,
    resolve_config,
)

MOST_TRACES = 6
"""GPUs are of three kinds (kernels, workspaces, bf16), and several GPUs need a trace of one too."""


class Subject:
    """The workload and model of a search, with the model's configuration.

    Each is looked up when it is asked for: `InputError` for a name that does not exist.
    """

    def __init__(
        self, workload: Workload | str, model: str, model_config: Any | None = None
    ) -> None:
        self._workload, self.model, self._model_config = workload, model, model_config

    @property
    def workload_name(self) -> str:
        """The name of the workload."""
        return self._workload if isinstance(self._workload, str) else self._workload.name

    @cached_property
    def workload(self) -> Workload:
        """The workload of this name."""
        given = self._workload
        return get_workload(given) if isinstance(given, str) else given

    @cached_property
    def model_config(self) -> Any:
        """The configuration of transformers."""
        given = self._model_config
        return resolve_config(self.model) if given is None else given

    @cached_property
    def architecture(self) -> Architecture:
        """The sizes of the model, for which transformers need not be installed."""
        given = self._model_config
        return architecture(self.model) if given is None else architecture_of(given)

    def resolve(self) -> Subject:
        """Look everything up now."""
        _ = self.workload, self.model_config, self.architecture
        return self


class Traces:
    """Traces of one model that are kept to price them on many GPU types.

    With `anew` no timeline that comes with the package is taken.
    """

    def __init__(self, subject: Subject, *, anew: bool = False) -> None:
        self.subject, self._anew = subject, anew
        self._traces: dict[Any, Training] = {}
        """The last ones: each has hundreds of thousands of events."""
        self._structures: dict[tuple[str, tuple[int, int]], Structure] = {}
        self._sized: dict[Structure, SizedTimeline | None] = {}
        self._optimizers: dict[str, OptimizerSteps] = {}
        self._entries: dict[tuple[SizedTimeline, int, tuple[str, bool, bool]], str] = {}
        self.replayed: dict[str, Memory] = {}
        """By `memory_key`, without a context."""

    def of(self, configuration: Configuration, gpu: Gpu) -> Training:
        """The training of a configuration, made once for all GPUs with the same kernels."""
        capability = gpu.compute_capability
        workspace = cublas_workspace_bytes(capability)
        of = (self.subject.workload_name, self.subject.architecture.digest)
        key = (*of, configuration.key, kernels_like(capability), workspace)
        if key not in self._traces:
            while len(self._traces) >= MOST_TRACES:
                del self._traces[next(iter(self._traces))]
            structure = self.structure(configuration, gpu)
            sized = None if structure is None else self.sized(structure)
            self._traces[key] = (
                _traced(self.subject, configuration, capability)
                if sized is None
                else self._at(sized, configuration, workspace)
            )
        return self._traces[key]

    def structure(self, configuration: Configuration, gpu: Gpu) -> Structure | None:
        """The structure whose timeline is the configuration's; None where all of it is traced."""
        if not is_sized(configuration):
            return None
        key, model = (configuration.key, gpu.compute_capability), self.subject.architecture
        if key not in self._structures:
            self._structures[key] = Structure.of(
                configuration,
                window=model.sliding_window,
                positions=model.positions,
                linears=model.linears,
                compute_capability=gpu.compute_capability,
            )
        return self._structures[key]

    def sized(self, structure: Structure) -> SizedTimeline | None:
        """The timeline of a structure; None where there is none for all sizes.

        Raises `UnavailableError` where none is known, and no library is installed to trace it.
        """
        if structure not in self._sized:
            found = self._known(structure)
            if found is None:
                require_tracing(self.subject, _lacking(self.subject, structure))
                from tuner.predict.compiler.deepening import sized_timeline

                found = sized_timeline(self.subject.workload, self.subject.model_config, structure)
                if found is not None:
                    cache.write_arrays(_entry(self.subject, structure), to_arrays(found))
            self.keep(structure, found)
        return self._sized[structure]

    def require(self, structure: Structure | None, configuration: Configuration) -> None:
        """Have the timeline of a configuration with this structure, and its optimizer's steps.

        Raises `UnavailableError` as `sized` does.
        """
        sized = None if structure is None else self.sized(structure)
        if sized is None:
            require_tracing(self.subject, f"these settings of {self.subject.model} are")
        else:
            self.optimizer(sized, configuration)

    def keep(self, structure: Structure, sized: SizedTimeline | None) -> None:
        """Have this as the timeline of a structure."""
        self._sized[structure] = sized

    def lacks(self, structure: Structure) -> bool:
        """True if the timeline of a structure has yet to be traced."""
        if structure not in self._sized:
            found = self._known(structure)
            if found is None:
                return True
            self.keep(structure, found)
        return False

    @property
    def timelines(self) -> dict[Structure, SizedTimeline]:
        """The timelines so far."""
        return {of: found for of, found in self._sized.items() if found is not None}

    def optimizer(self, sized: SizedTimeline, configuration: Configuration) -> OptimizerSteps:
        """The steps of a configuration's optimizer over the parameters that it trains."""
        entry = self.optimizer_entry(sized, configuration)
        if self.lacks_steps(sized, configuration):
            name, clip, scaled = _optimizer(configuration)
            rank = point_of(configuration)[2]
            of = f"optimizer={name}{f' with lora_rank={rank}' * bool(rank)} of {self.subject.model}"
            require_tracing(self.subject, f"{of} is")
            from tuner.predict.compiler.deepening import optimizer_steps

            parameters = sized.parameters(point_of(configuration))
            found = optimizer_steps(name, parameters, clip=clip, scaled=scaled)
            cache.write_arrays(entry, to_arrays(found))
            self.keep_steps(entry, found)
        return self._optimizers[entry]

    def optimizer_entry(self, sized: SizedTimeline, configuration: Configuration) -> str:
        """The name of the steps of a configuration's optimizer."""
        point, optimizer = point_of(configuration), _optimizer(configuration)
        key = sized, point[2], optimizer  # of a point, the rank decides which parameters there are
        if key not in self._entries:
            parameters = repr(sized.parameters(point))
            self._entries[key] = cache.entry_name("steps", *map(str, optimizer), parameters)
        return self._entries[key]

    def lacks_steps(self, sized: SizedTimeline, configuration: Configuration) -> bool:
        """True if the steps of an optimizer have yet to be traced."""
        entry = self.optimizer_entry(sized, configuration)
        if entry not in self._optimizers:
            found = cache.read_parsed(entry, OptimizerSteps)
            if found is None and self._takes_shipped:
                digest, rank = self.subject.architecture.digest, point_of(configuration)[2]
                name, clip, scaled = _optimizer(configuration)
                found = shipped().optimizer(digest, name, sized, rank, clip=clip, scaled=scaled)
            if found is None:
                return True
            self.keep_steps(entry, found)
        return False

    def keep_steps(self, entry: str, steps: OptimizerSteps) -> None:
        """Have these as the steps of an optimizer."""
        self._optimizers[entry] = steps

    def memory(
        self,
        traced: Training,
        *,
        context_bytes: int,
        settings: AllocatorSettings | None = None,
        short: bool = False,
    ) -> Memory:
        """`peak_memory` of one of these traces."""
        of = next(name for name, kept in self._traces.items() if kept is traced)
        key = memory_key(*of, settings, short)
        if key not in self.replayed:
            known = shipped().memory.get(key) if self._takes_shipped else None
            self.replayed[key] = (
                peak_memory(traced.course, context_bytes=0, settings=settings, short=short)
                if known is None
                else Memory(**known)
            )
        found = self.replayed[key]
        context = str(MemoryCategory.CONTEXT_AND_WORKSPACE)
        return replace(
            found,
            device_bytes=found.device_bytes + context_bytes,
            breakdown={**found.breakdown, context: found.breakdown[context] + context_bytes},
        )

    @cached_property
    def _takes_shipped(self) -> bool:
        """True if a timeline that comes with tuner is as one made here would be."""
        return not self._anew and (not can_trace() or shipped().are_installed())

    def _known(self, structure: Structure) -> SizedTimeline | None:
        found = cache.read_parsed(_entry(self.subject, structure), SizedTimeline)
        if found is None and self._takes_shipped:
            found = shipped().timeline(self.subject.architecture.digest, structure.key)
        return found

    def _at(self, sized: SizedTimeline, configuration: Configuration, workspace: int) -> Training:
        point = point_of(configuration)
        optimizer = self.optimizer(sized, configuration)
        accumulates = grad_accum_of(configuration) > 1
        trainable, total = sized.params(point)
        return Training(
            course=sized.at(point, optimizer, workspace_bytes=workspace, accumulates=accumulates),
            micro_steps=1 + accumulates,
            trainable_params=trainable,
            total_params=total,
            remarks=remarks_of(sized),
            work=sized.work(point, optimizer),
        )


def remarks_of(sized: SizedTimeline) -> tuple[str, ...]:
    """The remarks of a timeline, and the releases that it is of where none is installed."""
    return sized.remarks if can_trace() else (shipped().remark, *sized.remarks)


def require_tracing(subject: Subject, what: str) -> None:
    """Raise `UnavailableError` where no library is installed to trace `what`."""
    if not can_trace():
        digests = set(shipped().models())
        known = [name for name in load_catalogue() if architecture(name).digest in digests]
        near = ", ".join(difflib.get_close_matches(subject.model, known, cutoff=0))
        raise UnavailableError(
            f"not answered without PyTorch and transformers: {what} not among the timelines that "
            "come with tuner",
            hint=f"{install_command('all')} (2 GB); without it, tuner knows common settings of "
            f"{len(known)} models, such as {near}",
        )


def _lacking(subject: Subject, structure: Structure) -> str:
    """The settings of a structure that none of its model has that ships."""
    file = shipped()
    digest = subject.architecture.digest
    keys = {*file.structures(digest), *file.structures(digest, of_spaces=True)}
    # Of those equally near, that with more defaults.
    there = sorted((said for key, said in file.said.items() if key in keys), key=len)
    known = [differences(structure.said, said) for said in there]
    if not known:
        return f"{subject.model} is"
    # What only another loss has is no setting of this one.
    found = {n: both for n, both in min(known, key=len).items() if None not in both}
    words = settings_text({n: asked for n, (asked, _) in found.items()}, between=" and ")
    are = "are" if len(found) > 1 else "is"
    instead = settings_text({n: value for n, (_, value) in found.items()}, between=" and ")
    return f"{subject.model} with {words} (with {instead} it is answered) {are}"


def is_sized(configuration: Configuration) -> bool:
    """True if a timeline of all sizes has the configuration: of text, on one GPU."""
    return Parallelism.of(configuration).ranks == 1 and has_polynomial_sizes(configuration)


def has_polynomial_sizes(configuration: Configuration) -> bool:
    """True if sizes are polynomials, and the update is one of all gradients after the passes."""
    optimizer = OPTIMIZERS.get(str(configuration.get("optimizer")))
    needs_shapes = optimizer is not None and optimizer.needs_shapes
    others = ("images", OFFLOAD_ACTIVATIONS, IN_BACKWARD)
    return not (needs_shapes or any(configuration.get(name) for name in others))


def point_of(configuration: Configuration) -> Point:
    """Micro-batch, length, rank, and negatives or the batch of an evaluation; 0 for none."""
    last = "eval_batch" if configuration.get("eval_batch") else "n_negatives"
    return tuple(int(str(configuration.get(name, 0))) for name in (*VARIABLE_KNOBS, last))


def grad_accum_of(configuration: Configuration) -> int:
    """Micro-steps of an optimizer step."""
    return int(str(configuration.get("grad_accum", 1)))


def _optimizer(configuration: Configuration) -> tuple[str, bool, bool]:
    """Its name, and whether gradients are clipped and scaled."""
    default = CAUSAL_LM.terms["max_grad_norm"].default
    clip = float(str(configuration.get("max_grad_norm", default))) > 0
    return str(configuration["optimizer"]), clip, configuration.get("mixed_precision") == "fp16"


def _entry(subject: Subject, structure: Structure) -> str:
    digest = subject.architecture.digest
    return cache.entry_name("sized", subject.workload_name, digest, structure.key)


def _traced(
    subject: Subject, configuration: Configuration, capability: tuple[int, int]
) -> Training:
    require_tracing(subject, f"these settings of {subject.model} are")
    from tuner.predict.tracing.trace import trace

    traced = trace(
        subject.workload, subject.model_config, configuration, compute_capability=capability
    )
    return Training.of(traced)
