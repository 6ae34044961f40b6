"""Predicts a grid of models, GPU types and ways to train, each cell a small search space.

A cell varies the length at a micro-batch of one, and micro-batch and checkpointing at one length.
Structures are compiled once for each model and method, for all GPU types. Configurations near the
limit are traced at full depth, as in a predicted search.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tuner.app.estimate import one_configuration
from tuner.app.predicting import SpacePredictor
from tuner.core.errors import InputError, UnavailableError, install_command
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, KnobValue, Memory, Prediction
from tuner.cost.library_memory import cublas_workspace_bytes
from tuner.cost.speed.profile import DeviceProfile
from tuner.predict.compiler.structure import kernels_like
from tuner.predict.compiling import in_forks
from tuner.predict.predict import check_supported
from tuner.predict.predictor import PredictionJob, Predictor
from tuner.predict.shipped import can_trace
from tuner.program.vocabulary import settings_for
from tuner.report.grid import Grid, GridCell, GridMethod, GridRun
from tuner.searches.cost import cost_of
from tuner.searches.facts import SpaceFacts
from tuner.space import configure, default_space
from tuner.space.load import DEFAULT_WORKLOAD
from tuner.space.models.catalogue import architecture, get_entry, resolve_config
from tuner.space.models.positions import configured_positions
from tuner.space.models.trainable import model_defaults
from tuner.trial.base import outcome_versions

TOLERANCE, TOLERANCE_OF_FULL = 0.08, 0.15
"""Largest errors of a compiled timeline's memory. In 90 traced runs of this grid it was 2.6 % at
most with LoRA, 5.8 % with QLoRA and 13 % in full fine-tuning."""

METHODS: Mapping[str, GridMethod] = {
    one.id: one
    for one in (
        GridMethod("qlora", "QLoRA, NF4", {"precision": "nf4"}, TOLERANCE),
        GridMethod("lora", "LoRA, bf16", {"precision": "bf16"}, TOLERANCE),
        GridMethod("full", "Full, bf16", {"precision": "bf16", "lora_rank": 0}, TOLERANCE_OF_FULL),
    )
}

MODELS = (
    "qwen3-0.6b",
    "llama-3.2-1b",
    "smollm3-3b",
    "llama-3.2-3b",
    "phi-4-mini",
    "gemma-3-4b-text",
    "qwen3-4b",
    "mistral-7b-v0.3",
    "qwen2.5-7b",
    "llama-3.1-8b",
    "qwen3-8b",
    "gemma-3-12b-text",
    "qwen3-14b",
    "phi-4",
    "gpt-oss-20b",
    "mistral-small-24b",
    "gemma-3-27b",
    "qwen3-30b-a3b",
    "qwen3-32b",
    "llama-3.3-70b",
)
"""The most fine-tuned models of the catalogue, small ones first."""

GPUS = (
    "rtx3060",
    "t4",
    "rtx4060ti_16gb",
    "l4",
    "a10g",
    "rtx4090",
    "rtx3090",
    "rtx5090",
    "a100_40gb",
    "l40s",
    "a6000",
    "h100_sxm",
    "a100_80gb",
    "rtx_pro_6000",
    "h200",
    "b200",
)
"""The most common GPU types, little memory first."""

SHORTEST = 256
"""Tokens: a model that does not fit at this length does not fit at all."""

LONGEST = 131_072
"""Tokens: the longest length, for models with more positions or an unknown number."""

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)

VARIED = ("precision", "max_length", "micro_batch")
"""Knobs that users cannot set."""


@dataclass(frozen=True, slots=True)
class GridGpu:
    """A GPU type, its device profile, and the share of memory to keep free."""

    gpu: Gpu
    profile: DeviceProfile | None = None
    margin_fraction: float | None = None


@dataclass(frozen=True, slots=True)
class GridQuestion:
    """The request for a grid.

    `length` is the tokens per example of the fastest configuration, `examples` their number in an
    epoch. `settings` hold in every cell.
    """

    models: tuple[str, ...]
    gpus: tuple[GridGpu, ...]
    methods: tuple[GridMethod, ...]
    length: int
    examples: int
    settings: Mapping[str, KnobValue] = field(default_factory=dict)


def make_grid(
    question: GridQuestion, *, workers: int, on_model: Callable[[str, int, int], None]
) -> Grid:
    """Predict every cell, and call `on_model` with each model, the number done, and all.

    Small models come first. Interrupted, it returns the grid of the models that are done. A cell
    that cannot be predicted says why. Raises `UnavailableError` where none can, for want of
    libraries, and `InputError` for unknown models and for settings that do not exist or that the
    grid varies.
    """
    given = settings_for(default_space(question.models[0]), question.settings)
    question = dataclasses.replace(question, settings=given)
    if taken := [name for name in VARIED if name in question.settings]:
        raise InputError(
            f"the grid sets {', '.join(taken)} itself",
            hint="choose --method and --length instead, or ask `tuner estimate` for one setting",
        )
    for model in question.models:
        one_configuration(None, model, question.settings)
    order = sorted(question.models, key=lambda model: _params(model) or 0)
    cells: dict[str, list[GridCell]] = {}
    try:
        for model, found in in_forks(
            _cells_of,
            [(model, question) for model in order],
            None,
            workers=workers,
            traces=can_trace(),
        ):
            cells[model] = found
            on_model(model, len(cells), len(order))
    except KeyboardInterrupt:
        if not cells:
            raise
    models = tuple(model for model in question.models if model in cells)
    reasons = [cell.refused for found in cells.values() for cell in found]
    if all(reasons) and not can_trace():
        raise UnavailableError(reasons[0], hint=install_command("all"))
    return Grid(
        models=models,
        params={model: _params(model) or _predicted_params(cells[model]) for model in models},
        gpus=tuple(one.gpu for one in question.gpus),
        methods=question.methods,
        length=question.length,
        examples=question.examples,
        cells=tuple(cell for model in models for cell in cells[model]),
        versions=outcome_versions(),
    )


def _params(model: str) -> int | None:
    entry = get_entry(model)
    return entry.params if entry else None


def _predicted_params(cells: Sequence[GridCell]) -> int | None:
    """Parameters of a model outside the catalogue, adapters included."""
    found = (cell.smallest.prediction.total_params for cell in cells if cell.smallest)
    return min(found, default=None)


def _cells_of(_: object, model: str, question: GridQuestion) -> list[GridCell]:
    """The cells of one model, from one predictor."""
    predictor = Predictor(PredictionJob(DEFAULT_WORKLOAD, model))
    traced: _Traced = {}
    cells = []
    for on in question.gpus:
        for method in question.methods:
            try:
                cell = _Asked(question, model, method, on, predictor, traced).cell()
            except (InputError, UnavailableError) as error:
                cell = GridCell(model, on.gpu.id, method.id, refused=error.reason)
            cells.append(cell)
    return cells


_Traced = dict[tuple[Configuration, tuple[int, int], int], tuple[Memory, int]]
"""Memory by configuration and kind of GPU, and the bytes of its CUDA context."""


class _Asked:
    """The configurations of one cell and their predictions."""

    def __init__(
        self,
        question: GridQuestion,
        model: str,
        method: GridMethod,
        on: GridGpu,
        predictor: Predictor,
        traced: _Traced,
    ) -> None:
        self._question, self._model, self._method = question, model, method
        self._gpu, self._traced = on.gpu, traced
        self._settings = {**question.settings, **method.settings}
        # NF4 is computed in 16 bits of either kind, and not every GPU type has bf16.
        if method.settings["precision"] == "nf4" and on.gpu.unsupported_reason("bf16"):
            self._settings.setdefault("mixed_precision", "fp16")
        self._space, self._base = one_configuration(None, model, self._settings)
        self._predictor = SpacePredictor(
            self._space,
            on.gpu,
            margin_fraction=on.margin_fraction,
            profile=on.profile,
            predictor=predictor,
        )
        self._held = {**model_defaults(model), **self._settings}

    def cell(self) -> GridCell:
        """Predict the cell. Raises `InputError` if that is impossible."""
        names = self._model, self._gpu.id, self._method.id
        problems = check_supported(self._base, self._gpu)
        if problems:
            return GridCell(*names, refused=problems[0].message)
        by_length, by_batch = self._lengths(), self._batches()
        every = list(dict.fromkeys([*by_length, *by_batch]))
        predicted = {each.configuration: each.prediction for each in self._predictor.predict(every)}
        by_batch.sort(key=lambda one: -predicted[one].speed.samples_per_s)
        shortest = by_length[-1]
        return GridCell(
            *names,
            smallest=self._run(shortest, predicted[shortest], traced=False),
            longest=self._first_that_fits(by_length, predicted),
            fastest=self._first_that_fits(by_batch, predicted),
        )

    def _lengths(self) -> list[Configuration]:
        """A micro-batch of one at every length, the longest first."""
        most = min(_positions(self._model) or LONGEST, LONGEST)
        steps = {base << power for base in (2, 3) for power in range(most.bit_length())}
        lengths = {n for n in steps if SHORTEST <= n <= most} | {most}
        return [self._configuration(1, n) for n in sorted(lengths, reverse=True)]

    def _batches(self) -> list[Configuration]:
        """Micro-batches that divide the effective batch, with and without checkpointing."""
        length, whole = self._question.length, int(str(self._base["effective_batch"]))
        if length > (_positions(self._model) or length):
            return []
        own = self._base["gradient_checkpointing"]
        held = "gradient_checkpointing" in self._question.settings
        return [
            self._configuration(batch, length, gradient_checkpointing=kept)
            for kept in ([own] if held else dict.fromkeys([own, False]))
            for batch in MICRO_BATCHES
            if whole % batch == 0
        ]

    def _configuration(self, batch: int, length: int, **more: KnobValue) -> Configuration:
        sizes = {"micro_batch": batch, "max_length": length}
        return configure(self._space, {**self._held, **sizes, **more}, strict=False)

    def _first_that_fits(
        self,
        configurations: Sequence[Configuration],
        predicted: Mapping[Configuration, Prediction],
    ) -> GridRun | None:
        """The first configuration that fits; traced when a compiled timeline cannot tell."""
        for configuration in configurations:
            prediction = predicted[configuration]
            size, budget = prediction.memory.device_bytes, prediction.budget
            if budget.fits(size * (1 + self._method.tolerance)):
                return self._run(configuration, prediction, traced=False)
            if budget.fits(size * (1 - self._method.tolerance)):
                traced = self._at_full_depth(configuration, prediction)
                if traced.fits:
                    return self._run(configuration, traced, traced=True)
        return None

    def _at_full_depth(self, configuration: Configuration, compiled: Prediction) -> Prediction:
        """The prediction with the memory of a full trace, one for all GPU types of a kind."""
        capability, context_bytes = self._gpu.compute_capability, self._gpu.context_bytes
        kind = (configuration, kernels_like(capability), cublas_workspace_bytes(capability))
        if kind not in self._traced:
            (traced,) = self._predictor.trace([configuration])
            self._traced[kind] = (traced.prediction.memory, context_bytes)
            return traced.prediction
        memory, with_context = self._traced[kind]
        size = memory.device_bytes - with_context + context_bytes
        return dataclasses.replace(compiled, memory=dataclasses.replace(memory, device_bytes=size))

    def _run(
        self, configuration: Configuration, prediction: Prediction, *, traced: bool
    ) -> GridRun:
        facts = dataclasses.replace(
            SpaceFacts.of(self._space), examples=self._question.examples, epochs=1
        )
        names = ("micro_batch", "max_length", "gradient_checkpointing")
        return GridRun(
            {**self._settings, **{name: configuration[name] for name in names}},
            prediction,
            cost_of(prediction, configuration, facts, self._gpu),
            traced,
        )


def _positions(model: str) -> int | None:
    """The longest sequence that the model's configuration allows; None if unlimited."""
    entry = get_entry(model)
    if entry is not None:
        return configured_positions(entry.text_config)
    table = architecture(model).positions
    return table or configured_positions(resolve_config(model).get_text_config().to_dict())
