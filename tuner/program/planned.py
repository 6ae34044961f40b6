"""The configuration that a program trains, from its settings and its trainer's behaviour."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tuner.core.errors import InputError, Problem, UnsupportedError
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Doubt, KnobValue
from tuner.core.setup.common import QUANTIZED
from tuner.core.setup.distributed_knobs import (
    DISTRIBUTED,
    REDUCE_BUCKET,
    SYNC,
    Parallelism,
    gpus_per_trial,
)
from tuner.core.setup.schemas import SCHEMAS
from tuner.program.arguments import EMULATE, Arguments, ProgramTraining
from tuner.program.evaluation import evaluation_of
from tuner.program.fp16 import has_bf16, in_fp16
from tuner.program.keywords import DTYPES
from tuner.program.launch import ranks_and_knobs, read_launch
from tuner.program.program import Program
from tuner.program.reading import (
    MASKED,
    NOT_COMPARED,
    PACKED,
    PEFT_DEFAULT,
    STORED,
    WITH_SYNC,
)
from tuner.program.signatures import CannotStart, held_versions, hold_loading
from tuner.program.trainer import Planned, Reading, trainers
from tuner.program.trainers.deepspeed import AUTO, zero_of_file
from tuner.program.training import MODEL_KEYS, read_training
from tuner.space.models.catalogue import NF4, get_entry, resolve_config, stored_format

WORKLOAD = "causal_lm"

UNCOMPARED = frozenset((NOT_COMPARED, PACKED, MASKED))
"""Notes on trainings of which no published run was compared."""

ASSUMES = "prediction assumes"
"""Begins a note on a library whose arguments were read in another release."""


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """The training that is predicted in place of a program.

    `assumed` are defaults of the trainer, `left_out` settings that are not modelled, `at_most`
    those among them that save memory, `notes` remarks. `sequences` is their number in one example,
    `known` are parameters that are no defaults, `findings` changes that the GPU requires, which are
    part of the prediction.
    """

    trainer: str
    model: str
    configuration: Configuration
    sequences: int
    assumed: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    known: frozenset[str]
    at_most: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    evaluation: str = ""
    """The part of the evaluation that is not in the configuration."""

    @property
    def doubts(self) -> set[Doubt]:
        """The doubts about the memory that the program raises."""
        found = {Doubt.KERNELS} if self.at_most else set()
        if any(note.startswith(ASSUMES) for note in self.notes):
            found.add(Doubt.RELEASES)
        if self.sequences > 1 or _takes_images(self.model) or not UNCOMPARED.isdisjoint(self.notes):
            found.add(Doubt.UNCOMPARED)
        return found

    @property
    def keeps_all(self) -> bool:
        """True if an evaluation keeps the logits of an unknown number of batches."""
        return bool(self.evaluation and self.configuration.get("eval_kept"))

    @property
    def settings(self) -> dict[str, KnobValue]:
        """The knobs, in the program's own terms."""
        values = dict(self.configuration)
        values["micro_batch"] = int(str(values["micro_batch"])) // self.sequences
        return values

    @property
    def has_whole_model_first(self) -> bool:
        """True if the first rank loads a whole quantised model before it is sharded."""
        is_quantised = self.configuration["precision"] in QUANTIZED
        return is_quantised and Parallelism.of(self.configuration).is_sharded


def readings() -> tuple[Reading, ...]:
    """The trainers that can be predicted."""
    return tuple(reading for trainer in trainers() for reading in trainer.readings)


def plan_program(
    program: Program,
    given: Mapping[str, Any] | None = None,
    model: str | None = None,
    *,
    gpus: int | None = None,
    gpu: Gpu | None = None,
    strict: bool = True,
) -> ProgramPlan:
    """The training of `program`; `given` parameters and `model` override it.

    `gpus` is their number if the launcher does not tell, and `gpu` their type: a training in bf16
    on one without it is planned in fp16, with a finding. Raises one `InputError` with everything

    that cannot be read or predicted; if not `strict`, that is left out.
    """
    with _malformed(program):
        training = read_training(program, has_bf16=has_bf16(gpu))
        reading = next((r for r in readings() if r.trainer == training.trainer), None)
        if reading is None:
            raise _unsupported(training, _emulated(program, gpu))
        planned = reading.plan(training)
        found = training.found
        chosen = model or _beside(program, planned.model)
        if chosen is None:
            found.problems.append(Problem("couldn't determine the model; pass --model"))
        else:
            found.problems += _misnamed_in_loading(training, chosen)
        knobs = {**planned.knobs, **_started(program, planned, training, gpus), **(given or {})}
        evaluation, unknown = evaluation_of(training, knobs)
    knobs |= evaluation
    said = _places_of_model(training) if model is not None else set()
    problems = [p for p in found.problems if p.where not in said and not _is_given(p, given or {})]
    if "max_length" not in knobs:
        text = "couldn't determine the length of the examples; pass it, e.g. --set max_length=1024"
        problems.append(Problem(text))
    if strict:
        _require_start(problems)
    if (problems and strict) or chosen is None:
        kind = UnsupportedError if any(map(_is_unsupported, problems)) else InputError
        raise kind(
            f"this program of {reading.name} cannot be predicted from its settings",
            problems=problems,
            hint=_emulated(program, gpu) if kind is UnsupportedError else None,
        )
    if knobs.get("torch_compile"):
        how = _emulated(program, gpu) or EMULATE
        found.at_most.append(f"torch.compile isn't modelled, and only saves memory; speed: {how}")
    knobs = _settled(knobs, chosen)
    findings: list[str] = []
    if gpu is not None and not has_bf16(gpu):
        halved, findings = in_fp16(training, knobs, gpu)
        knobs |= {name: value for name, value in halved.items() if name not in (given or {})}
    configuration = _configuration(knobs)
    notes = [*findings, *planned.notes, *_unsharded(configuration), *_versions(reading.versions)]
    return ProgramPlan(
        reading.name,
        chosen,
        configuration,
        planned.sequences,
        tuple(dict.fromkeys(found.assumed)),
        tuple(dict.fromkeys([*map(str, problems), *found.at_most, *found.left_out])),
        tuple(notes),
        frozenset(knobs),
        tuple(found.at_most),
        tuple(findings),
        unknown,
    )


def _started(
    program: Program, planned: Planned, training: ProgramTraining, gpus: int | None
) -> dict[str, Any]:
    found = training.found
    launch = read_launch(program)
    own = planned.knobs
    if file := training["arguments"].take("deepspeed", quietly=True):
        zero, problems = zero_of_file(program.folder / str(file), found.at_most)
        own = {**own, **zero}
        found.problems += problems
    knobs = ranks_and_knobs(launch, own, gpus)
    found.problems += launch.problems
    is_sharded = knobs.get(DISTRIBUTED) == "fsdp2"
    if is_sharded and planned.knobs.get("precision") == "nf4" and not planned.packs_codes:
        _require_packing(training["quantization"])
    # TrainingArguments take the launcher's word where they have none of their own.
    if launch.mixed_precision is not None and planned.knobs.get("mixed_precision") == "no":
        knobs["mixed_precision"] = launch.mixed_precision
        found.assumed[:] = [text for text in found.assumed if text != "mixed_precision=no"]
    return knobs


def _require_packing(quantization: Arguments) -> None:
    """FSDP shards floating parameters: the codes of 4 bits have to be packed into such."""
    name = "bnb_4bit_quant_storage"
    storage = str(quantization.take(name, quietly=True)).removeprefix("torch.")
    if storage not in DTYPES:
        text = f"is {storage}: FSDP shards no integers; set it to the dtype of the weights"
        quantization.refuse(name, text)


def _unsharded(configuration: Configuration) -> Iterator[str]:
    accumulates = int(str(configuration.get("grad_accum", 1))) > 1
    is_sharded = Parallelism.of(configuration).is_sharded
    if is_sharded and accumulates and not configuration.get(SYNC):
        yield (
            f"unsharded gradients stay between micro-steps (no_sync); without: --set {SYNC}=true, "
            f"in TrainingArguments {WITH_SYNC}"
        )


def _is_given(problem: Problem, given: Mapping[str, Any]) -> bool:
    name = (problem.where or "").rpartition(" ")[2]
    return name in given


def _places_of_model(training: ProgramTraining) -> set[str]:
    """The places at which the program names its model, which --model overrides."""
    names = {"model": ("0", *MODEL_KEYS), "arguments": MODEL_KEYS}
    groups = {group: keys for group, keys in names.items() if training.has(group)}
    return {training[group].where(key) for group, keys in groups.items() for key in keys}


def _require_start(problems: Sequence[Problem]) -> None:
    if any(isinstance(problem, CannotStart) for problem in problems):
        others = "; ".join(_versions(held_versions()))
        raise InputError(
            "the program cannot start: its libraries do not take all of its arguments",
            problems=problems,
            hint=f"{others}; {EMULATE}" if others else None,
        )


def _misnamed_in_loading(training: ProgramTraining, model: str) -> Iterator[Problem]:
    if training.trainer.startswith("Unsloth"):
        return  # which takes arguments of its own
    own = training.has("model")
    group, prefix = ("model", "") if own else ("arguments", "model_init_kwargs.")
    try:
        yield from hold_loading(training[group], prefix, model)
    except InputError as error:  # the settings of the model are unknown
        yield Problem(error.message, "the model")


def _is_unsupported(problem: Problem) -> bool:
    return any(text in problem.message for text in (EMULATE, "not predicted", "by --predict"))


@contextlib.contextmanager
def _malformed(program: Program) -> Iterator[None]:
    """Inside, values of another kind than the trainer's are an `InputError`, like endless ones."""
    try:
        yield
    except (
        ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError
    ) as error:  # fmt: skip
        name = program.main or next(iter(program.files), shlex.join(program.command))
        raise InputError(f"{name}: cannot be read: {error}") from error


def _emulated(program: Program, gpu: Gpu | None) -> str | None:
    """The command that runs the program on an emulated GPU; None if no GPU is named."""
    if gpu is None:
        return None
    command = shlex.join(["tuner", "check", "--gpu", gpu.id, "--", *program.command])
    return f"run it on an emulated GPU: {command}"


def _unsupported(training: ProgramTraining, emulated: str | None) -> UnsupportedError:
    names = ", ".join(dict.fromkeys(r.name for r in readings()))
    starts = [p for p in training.found.problems if isinstance(p, CannotStart)]
    _require_start(starts)
    return UnsupportedError(
        f"unsupported trainer (found: {training.trainer or 'a training loop of its own'})",
        hint=f"supported: {names}; {emulated or EMULATE}",
    )


def _beside(program: Program, model: str | None) -> str | None:
    """A model's folder is meant from the folder that the program runs in."""
    if model is None:
        return None
    folder = program.folder / model
    return str(folder) if folder.is_dir() else model


def _settled(knobs: Mapping[str, Any], model: str) -> dict[str, Any]:
    values = dict(knobs)
    for name in ("precision", "compute_dtype"):
        if values.get(name) == STORED:
            values[name] = _stored_dtype(model, name)
    if stored_format(model) == NF4 and values.get("precision") not in QUANTIZED:
        # transformers loads what is stored in 4 bits as it is, with nested scales.
        dtype = values.get("precision", "bf16")
        values |= {"precision": NF4, "compute_dtype": dtype, "double_quant": True}
    if values.get(REDUCE_BUCKET) == AUTO:
        # As Trainer fills it in (`trainer_config_finalize`).
        values[REDUCE_BUCKET] = resolve_config(model).get_text_config().hidden_size ** 2
    if values.get("lora_targets") == PEFT_DEFAULT:
        values["lora_targets"] = _default_targets(model)
    return values


def _stored_dtype(model: str, knob: str) -> str:
    dtype = str(getattr(resolve_config(model), "dtype", None)).removeprefix("torch.")
    if dtype not in DTYPES:
        raise InputError(
            f"the configuration of model {model} does not say in which dtype its weights are",
            hint=f"say it: --set {knob}=bf16",
        )
    return DTYPES[dtype]


def _default_targets(model: str) -> tuple[str, ...]:
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    kind = resolve_config(model).model_type
    found = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind)
    if found is None:
        raise InputError(
            f"no modules for an adapter are named, and peft has no default for {kind} models",
            hint="name them: --set lora_targets=all-linear",
        )
    return tuple(sorted(found))


def _configuration(knobs: Mapping[str, Any]) -> Configuration:
    terms = SCHEMAS[WORKLOAD].terms
    values: dict[str, KnobValue] = {}
    problems = []
    for name, term in terms.items():
        if name not in knobs:
            if not term.optional:
                values[name] = term.default
            continue
        try:
            values[name] = term.read(knobs[name])
        except InputError as error:
            problems.append(Problem(error.message))
    if problems:
        raise InputError("the program has values that cannot be predicted", problems=problems)
    size, rounds = int(str(values["micro_batch"])), int(str(values["grad_accum"]))
    return Configuration({**values, "effective_batch": size * rounds * gpus_per_trial(values)})


def _versions(held: Mapping[str, str]) -> list[str]:
    notes = []
    for package, read in held.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        if installed.split(".")[:2] != read.split(".")[:2]:
            notes.append(f"{ASSUMES} the defaults of {package} {read} (you have {installed})")
    return notes


def _takes_images(model: str) -> bool:
    """True if the model takes images; of the catalogue's, without transformers."""
    entry = get_entry(model)
    if entry is not None:
        return entry.config.get("vision_config") is not None
    return getattr(resolve_config(model), "vision_config", None) is not None
