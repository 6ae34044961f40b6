"""The configuration that a program trains, from its settings and its trainer's behaviour."""

from __future__ import annotations

import contextlib
import functools
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tuner.core.aliases import PROGRAM_NAMES
from tuner.core.errors import (
    InputError,
    Problem,
    TunerError,
    UnavailableError,
    UndecidedError,
    UnsupportedError,
    missing_extra,
)
from tuner.core.expressions import show
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
from tuner.program import releases
from tuner.program.arguments import (
    ANY,
    DTYPES,
    EMULATE,
    OWN_MODULE,
    TABLES,
    Found,
    ProgramTraining,
    Undecided,
    knob_of,
    options_of,
)
from tuner.program.edit.place import is_same
from tuner.program.launch import ranks_and_knobs, read_launch
from tuner.program.program import Program, beside, starts_of
from tuner.program.reading import (
    LOADED,
    MASKED,
    NOT_COMPARED,
    PACKED,
    PEFT_DEFAULT,
    STORED,
    WITH_SYNC,
    Schedule,
    evaluation_of,
    pack,
    schedule_of,
    with_method,
)
from tuner.program.recorded import record
from tuner.program.trainer import MALFORMED, Planned, Reading, reading_of
from tuner.program.trainers.deepspeed import AUTO, zero_of
from tuner.program.training import MODEL_KEYS, read_loops, read_trainings
from tuner.space.models.catalogue import NF4, entry_like, resolve_config, stored_format
from tuner.space.models.config_fields import table_positions
from tuner.space.models.trainable import LIGER_TYPES

WORKLOAD = "causal_lm"

MODEL = "model"
"""In place of a knob: what --model says."""

UNCOMPARED = frozenset((NOT_COMPARED, PACKED, MASKED))
"""Notes on trainings of which no published run was compared."""

ASSUMES = "prediction assumes"
"""Begins a note on a library whose arguments were read in another release."""


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """The training that is predicted in place of a program.

    `assumed` are defaults of the trainer, `left_out` settings that are not modelled, `at_most`
    those among them that save memory, `notes` remarks. `sequences` is their number in one example,
    `findings` are changes that the GPU requires, which are part of the prediction.
    """

    trainer: str
    model: str
    configuration: Configuration
    sequences: int
    assumed: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    at_most: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    evaluation: str = ""
    """The part of the evaluation that is not in the configuration."""
    at_least: tuple[str, ...] = ()
    """Settings that take memory and are not modelled, or that may."""
    read_as: str = ""
    """The training in ten words, with the release that its defaults are of."""
    where: str = ""
    """The place of its trainer."""
    schedule: Schedule = field(default_factory=Schedule)
    others: tuple[ProgramPlan, ...] = ()
    """Other trainings of the program."""

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
        return _in_own_terms(self.configuration, self.sequences)

    @property
    def loads_full_model_first(self) -> bool:
        """True if the first rank loads a whole quantised model before it is sharded."""
        is_quantised = self.configuration["precision"] in QUANTIZED
        return is_quantised and Parallelism.of(self.configuration).is_sharded


def _in_own_terms(knobs: Mapping[str, Any], sequences: int) -> dict[str, Any]:
    batch = knobs["micro_batch"]
    return {**knobs, "micro_batch": batch if batch == "?" else int(str(batch)) // sequences}


def plan_program(
    program: Program,
    given: Mapping[str, Any] | None = None,
    model: str | None = None,
    *,
    gpus: int | None = None,
    gpu: Gpu | None = None,
) -> ProgramPlan:
    """The training of `program`; `given` parameters and `model` override it.

    `gpus` is their number if the launcher does not tell, and `gpu` their type: a training in bf16
    on one without it is planned in fp16, with a finding. Its `others` are further trainings of the
    program. Raises one `InputError` with everything that cannot be read or predicted.
    """
    planner = _Planner(program, given or {}, model, gpus, gpu)
    read: list[tuple[Program, ProgramTraining, Reading | None, Planned | None]] = []
    with _malformed(program):
        for start in starts_of(program):
            for found in read_trainings(start, gpu=gpu):
                training = with_method(found, planner.given)
                reading = reading_of(training.trainer)
                planned = reading.plan(training) if reading is not None else None
                read.append((start, training, reading, planned))
    plans: dict[tuple[str, str], ProgramPlan] = {}
    errors: dict[str, TunerError] = {}  # by the note on a training that isn't predicted
    for start, training, reading, planned in read:
        try:
            if reading is None or planned is None:
                raise planner.unsupported(training)
            plan = planner.plan(start, training, reading, planned)
            plans.setdefault((plan.model, plan.configuration.key), plan)
        except TunerError as error:
            errors[not_predicted(training.where, error)] = error
    if not plans:
        raise next(iter(errors.values()), None) or planner.own_loop()
    first, *others = (replace(p, at_least=(*p.at_least, *errors)) for p in plans.values())
    return replace(first, others=tuple(others))


def not_predicted(where: str, error: TunerError) -> str:
    """The note on the training there beside others, which are predicted."""
    return f"{where}: the training there isn't predicted: {error.reason.partition(chr(10))[0]}"


def plan_training(
    training: ProgramTraining, given: Mapping[str, Any], model: str, *, gpu: Gpu | None = None
) -> ProgramPlan:
    """The plan of a training on one process that no program starts.

    `given` parameters override it. Raises `InputError` as `plan_program` does.
    """
    reading, program = reading_of(training.trainer), Program(())
    assert reading is not None
    planner = _Planner(program, given, model, None, gpu)
    return planner.plan(program, training, reading, reading.plan(training))


_NO_MODEL = "couldn't determine the model; pass --model"
_NO_LENGTH = "couldn't determine the length of the examples; pass it, e.g. --set max_length=1024"
_LITTLE_BYTES = 64 * 2**20
"""Rows of embeddings that take no more are below what a prediction tells."""
_LOGGERS = ("wandb", "mlflow", "swanlab", "trackio", "comet_ml", "tensorboard", "neptune")
"""Libraries that decide nothing of a training."""


@dataclass(frozen=True, slots=True)
class _Planner:
    """Plans the trainings of one program, whose words people typed."""

    program: Program
    given: Mapping[str, Any]
    model: str | None
    gpus: int | None
    gpu: Gpu | None

    def plan(
        self, program: Program, training: ProgramTraining, reading: Reading, planned: Planned
    ) -> ProgramPlan:
        """The plan of a training that `program` starts."""
        found, given, gpu = training.found, self.given, self.gpu
        with _malformed(program):
            chosen = self.model or beside(program, planned.model)
            if chosen is None and not {MODEL, OWN_MODULE} & {*map(_knob, found.problems)}:
                found.problems.append(Undecided(_NO_MODEL, "", MODEL))
            said = dict(given)
            if "micro_batch" in said:
                said["micro_batch"] = int(str(said["micro_batch"])) * planned.sequences
            own = _started(program, planned, training, self.gpus)
            if program.main and len(known := record(program, gpu=gpu).allocators) == 1:
                own["allocator"] = known[0]
            knobs = {**planned.knobs, **own, **said}
            knobs |= _rounds(knobs, said)
            if said.get("padding") == "packed":
                del knobs["padding"]
                pack(knobs, found.notes)
            evaluation, unknown = evaluation_of(training, knobs)
        knobs |= evaluation
        self._limit_length(chosen, knobs, found)
        summary = functools.partial(_summary, reading, sequences=planned.sequences)
        as_read = functools.partial(knows, chosen, lambda: summary(knobs))
        with as_read():
            self._check_products(training, chosen, knobs)
        noted = [p for p in dict.fromkeys(found.problems) if not self._is_given(p, training)]
        bounds = [p for p in noted if isinstance(p, Undecided) and p.effect]
        problems = [p for p in noted if p not in bounds]
        if any(p.knob == "images" for p in bounds) and chosen and not problems:
            # An unknown model, of which a prediction tells.
            with contextlib.suppress(InputError), as_read():
                takes = _takes_images(chosen)
                bounds = [p for p in bounds if takes or p.knob != "images"]
        if problems or chosen is None:
            raise self._refused(reading, problems, summary(_with_unknowns(knobs, problems)))
        if knobs.get("torch_compile"):
            text = "torch.compile isn't modelled, and only saves memory; speed: "
            found.at_most.append(text + (self._emulated or EMULATE))
        bounds += _resized(training, chosen, knobs)
        with as_read():
            knobs = _settled(_with_known_liger(knobs, chosen, found), chosen)
        if "attention" not in given and _lacks_sdpa(chosen, knobs, found):
            found.assumed.append("attention=eager: transformers has no sdpa for this model")
            knobs["attention"] = "eager"
        findings: list[str] = []
        if gpu is not None and not gpu.has_bf16:
            halved, findings = _in_fp16(training, knobs, gpu)
            knobs |= {name: value for name, value in halved.items() if name not in given}
        configuration = _configuration(knobs)
        found.at_most += [str(p) for p in bounds if p.effect == "saves"]
        left_out = [text for text in found.left_out if not self._sets(text)]
        return ProgramPlan(
            reading.name,
            chosen,
            configuration,
            planned.sequences,
            assumed=tuple(t for t in dict.fromkeys(found.assumed) if not self._sets(t)),
            left_out=tuple(dict.fromkeys([*found.at_most, *left_out])),
            notes=(
                *findings, *found.notes, *_unsharded(configuration),
                *(
                    f"{ASSUMES} the defaults of {package} {read} (you have {there})"
                    for package, read in reading.versions.items()
                    if (there := releases.installed(package)[1])
                    and there.split(".")[:2] != read.split(".")[:2]
                ),
                *self._other_options(program, _in_own_terms(configuration, planned.sequences)),
            ),
            at_most=tuple(found.at_most),
            findings=tuple(findings),
            evaluation=unknown,
            at_least=tuple(str(p) for p in bounds if p.effect == "adds"),
            read_as=summary(configuration),
            where=training.where,
            schedule=schedule_of(training),
        )  # fmt: skip

    def _limit_length(self, model: str | None, knobs: dict[str, Any], found: Found) -> None:
        """Rows of an unknown length have at most the positions that the model looks up."""
        unknown = [p for p in found.problems if _knob(p) == "max_length"]
        if "max_length" in knobs and not unknown:
            return
        entry = entry_like(model) if model is not None else None
        positions = None if entry is None else table_positions(entry.config)
        if positions is not None and "max_length" not in self.given:
            knobs["max_length"] = positions
            is_cut = unknown and all("model_max_length" in p.message for p in unknown)
            found.problems = [p for p in found.problems if p not in unknown]
            text = f"max_length={positions}, the positions of the model: rows may be shorter"
            (found.assumed if is_cut else found.at_most).append(text)
        elif "max_length" not in knobs and not unknown:
            found.problems.append(Undecided(_NO_LENGTH, "", "max_length"))

    def _check_products(
        self, training: ProgramTraining, model: str | None, knobs: dict[str, Any]
    ) -> None:
        """Note products in another dtype than the weights beside 4-bit ones are `LOADED` in."""
        stored = loaded = knobs.pop(LOADED, None)
        computed = knobs.get("compute_dtype")
        if loaded == STORED and model is not None and "precision" not in self.given:
            try:
                stored = _stored_dtype(model, "compute_dtype")
            except UndecidedError:
                raise
            except TunerError:  # an unknown model, of which a prediction tells
                return
            if "fp32" not in (stored, computed):
                return  # as large as each other
        if stored not in (None, STORED, computed):
            why = f"is {computed} beside weights in {stored}, and is not predicted: {EMULATE}"
            training["quantization"].refuse("bnb_4bit_compute_dtype", why)

    def _sets(self, text: str) -> bool:
        """True if --set decides what "train.py:14 max_length" or "bf16=no" names."""
        name = text.partition("=")[0].rpartition(" ")[2]
        if name in PROGRAM_NAMES["packing"]:
            return "padding" in self.given
        return knob_of(name) in self.given

    def _is_given(self, problem: Problem, training: ProgramTraining) -> bool:
        """True for a problem that --set or --model decides."""
        name = problem.where.rpartition(" ")[2]
        knob = _knob(problem) or knob_of(name)
        if self.model is not None:
            keys = {"model": ("0", *MODEL_KEYS), "arguments": MODEL_KEYS}
            places = {training[g].where(key) for g in keys if training.has(g) for key in keys[g]}
            if knob == MODEL or problem.where in places:
                return True
        return name in self.given or (knob != "" and knob in self.given)

    def _other_options(self, program: Program, settings: Mapping[str, Any]) -> Iterator[str]:
        """Options of a script for settings that have another value in its training."""
        start = program.command.index(program.main) if program.main else len(program.command)
        for name, value in options_of(program.command[start:]).items():
            knob = next((k for k, names in PROGRAM_NAMES.items() if name in names), "")
            said = (value, *value[:1]) if isinstance(value, tuple) else (value,)  # words behind it
            is_told = knob in settings and knob not in self.given
            if is_told and not any(is_same(each, settings[knob]) for each in said):
                its = f"{knob}={show(settings[knob])}"
                yield f"--{name} is {show(value)}, and the training has {its}"

    # -- answers without numbers -------------------------------------------------------------

    def _refused(self, reading: Reading, problems: Sequence[Problem], how: str) -> InputError:
        kind, hint = InputError, None
        known = [problem for problem in problems if not isinstance(problem, Undecided)]
        text = f"this program of {reading.name} cannot be predicted from its settings"
        words = (EMULATE, "not predicted", "by --predict")
        if any(word in p.message for p in known for word in words):
            kind, hint = UnsupportedError, self._emulated
        elif len(known) < len(problems):
            kind, hint = UndecidedError, self._emulated
            text = f"this program of {reading.name} depends on what is known only when it runs"
            text += self._absent
        return kind(f"{text}\n  read as {how}", problems=problems, hint=hint)

    def unsupported(self, training: ProgramTraining) -> UndecidedError:
        """The answer for a trainer that isn't predicted."""
        at = f"{training.where}: " if training.where else ""
        text = f"{at}unsupported trainer (found: {training.trainer}), whose memory only a run tells"
        return UndecidedError(text, hint=self._emulated or EMULATE)

    def own_loop(self) -> UndecidedError:
        """The answer for a program in which no training of a library is seen."""
        text = f"no training is seen in {self.program.main or shlex.join(self.program.typed)}"
        for start in starts_of(self.program):
            if start.main and (loops := read_loops(start, gpu=self.gpu)):
                where, has_loader = loops[0].where, loops[0].has("loader")
                text = f"{where}: a training loop of its own, whose memory only a run tells"
                text += "" if has_loader else "; it has no DataLoader that says its batch"
                break
        how = f"run it on an emulated GPU: {self._check('GPU')}"
        return UndecidedError(text + self._absent, hint=how)

    @property
    def _absent(self) -> str:
        """The libraries that the program imports and that aren't installed, with the command."""
        starts = [start for start in starts_of(self.program) if start.main]
        names = dict.fromkeys(n for s in starts for n in record(s, gpu=self.gpu).absent)
        if not (shown := [name for name in names if name not in _LOGGERS]):
            return ""
        known = [TABLES["packages"][name] for name in shown if name in TABLES["packages"]]
        how = f" (pip install {' '.join(known)})" if known else ""
        return f"; unknown for want of {', '.join(shown)}, not installed here{how}"

    @property
    def _emulated(self) -> str | None:
        """The command that runs the program on an emulated GPU; None if no GPU is named."""
        return f"run it on an emulated GPU: {self._check()}" if self.gpu is not None else None

    def _check(self, unnamed: str = "") -> str:
        gpu = self.gpu.id if self.gpu is not None else unnamed
        return shlex.join(["tuner", "check", "--gpu", gpu, "--", *self.program.typed])


@contextlib.contextmanager
def knows(model: str | None, read_as: Callable[[], str]) -> Iterator[None]:
    """Says of which training an answer needs what isn't installed."""
    try:
        yield
    except UnavailableError as error:
        text = f"{error.message}\n  read as {read_as()}"
        raise UnavailableError(text, hint=error.hint) from error
    except ModuleNotFoundError as error:
        if (needed := missing_extra(error)) is None:
            raise
        text = f"the configuration of {model} isn't known without transformers"
        raise UnavailableError(f"{text}\n  read as {read_as()}", hint=needed.hint) from error


def _resized(training: ProgramTraining, model: str, knobs: Mapping[str, Any]) -> list[Undecided]:
    """The rows that `resize_token_embeddings` adds, where they may take much memory."""
    size, new = training.resized, training.new_tokens
    if size is None:
        return []
    text = f"rows that it may add to the embeddings aren't predicted: {EMULATE}"
    if isinstance(size.value, int) or not any(one.is_unknown for one in new):
        entry = entry_like(model)  # needs no transformers
        config: Any = entry if entry and entry.hidden_size and entry.vocab_size else None
        config = config or resolve_config(model).get_text_config()
        # A tokenizer as it is published has no more tokens than the model has rows.
        tokens = (1 if isinstance(one.value, str) else len(one.value or ()) for one in new)
        known = size.value if isinstance(size.value, int) else config.vocab_size + sum(tokens)
        rows = max(0, known - config.vocab_size)
        # Two tables; where they are trained, in fp32 with the gradient and two states of each.
        added = rows * config.hidden_size * 2 * 4 * (1 if knobs.get("lora_rank") else 4)
        if added <= _LITTLE_BYTES:
            return []
        text = f"{rows:,} more rows of embeddings aren't predicted: up to {added / 2**30:.2f} GiB"
    return [Undecided(text, size.where, "", "adds")]


def _knob(problem: Problem) -> str:
    return problem.knob if isinstance(problem, Undecided) else ""


_OF_ARGUMENTS = ("micro_batch", "grad_accum", "max_length", "gradient_checkpointing", "optimizer")
"""Parameters of a trainer's arguments that `read_as` shows."""


def _with_unknowns(knobs: Mapping[str, Any], problems: Sequence[Problem]) -> dict[str, Any]:
    unknown = {_knob(problem) for problem in problems}
    if ANY in unknown:
        unknown |= {*_OF_ARGUMENTS}
    return {**knobs, **dict.fromkeys(unknown, "?")}


def _summary(reading: Reading, knobs: Mapping[str, Any], sequences: int) -> str:
    """The training in ten words, with the release that its defaults are of."""
    package, own = next(iter(reading.versions.items()))
    library = releases.library(package)
    title = library.title if library else f"{reading.name} {releases.installed(package)[1] or own}"
    name = reading.name.rpartition(" ")[2]
    loop = name.removesuffix("Trainer") or name  # SFT for TRL SFTTrainer
    return f"{read_as(_in_own_terms(knobs, sequences), loop)}; defaults of {title}"


def read_as(values: Mapping[str, Any], loop: str) -> str:
    """A training in ten words: "bf16, LoRA 16, batch 2 x 8, length 2048, adamw_8bit, SFT".

    Of an emulated one, without `loop`, settings that are not known are left out.
    """
    if loop:
        asked = ("micro_batch", "grad_accum", "max_length", "optimizer")
        values = {**dict.fromkeys(asked, "?"), **values}
    precision, mixed = values.get("precision"), values.get("mixed_precision")
    is_mixed = precision in ("fp32", STORED) and mixed not in (None, "no")
    rank = values.get("lora_rank")
    batch = " x ".join(
        str(values[name]) for name in ("micro_batch", "grad_accum") if name in values
    )
    words = {
        f"{precision} with {mixed}" if is_mixed else f"{precision}": precision is not None,
        f"LoRA {rank}": bool(rank),
        f"batch {batch}": batch != "",
        f"length {values.get('max_length')}": "max_length" in values,
        "checkpointing": values.get("gradient_checkpointing") is True,
        f"{values.get('optimizer')}": "optimizer" in values,
        loop: bool(loop),
        f"{values.get('loss')} loss": "loss" in values,
        "Liger's kernels": values.get("liger") is True,
    }
    return ", ".join(word for word, holds in words.items() if holds)


def _started(
    program: Program, planned: Planned, training: ProgramTraining, gpus: int | None
) -> dict[str, Any]:
    found = training.found
    launch = read_launch(program)
    own = planned.knobs
    arguments = training["arguments"]
    if said := arguments.take("deepspeed", quietly=True):
        inner = [name for name in arguments.values if name.startswith("deepspeed.")]
        values = {n.partition(".")[2]: arguments.take(n, quietly=True) for n in inner}
        zero, problems = zero_of(values or program.folder / str(said), found.at_most)
        own = {**own, **zero}
        found.problems += problems
    knobs = ranks_and_knobs(launch, own, gpus)
    found.problems += launch.problems
    is_sharded = knobs.get(DISTRIBUTED) == "fsdp2"
    if is_sharded and planned.knobs.get("precision") == "nf4" and not planned.packs_codes:
        # FSDP shards floating parameters: the codes of 4 bits have to be packed into such.
        quantization, name = training["quantization"], "bnb_4bit_quant_storage"
        storage = str(quantization.take(name, quietly=True)).removeprefix("torch.")
        if storage not in DTYPES:
            text = f"is {storage}: FSDP shards no integers; set it to the dtype of the weights"
            quantization.refuse(name, text)
    # TrainingArguments take the launcher's word where they have none of their own.
    if launch.mixed_precision is not None and planned.knobs.get("mixed_precision") == "no":
        knobs["mixed_precision"] = launch.mixed_precision
        found.assumed[:] = [text for text in found.assumed if text != "mixed_precision=no"]
    return knobs


def _rounds(knobs: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, int]:
    """The accumulation that an effective batch asks for, where it is given and the other is not."""
    if "effective_batch" not in said or "grad_accum" in said:
        return {}
    terms = SCHEMAS[WORKLOAD].terms
    asked = int(str(terms["effective_batch"].read(said["effective_batch"])))
    at_once = int(str(terms["micro_batch"].read(knobs["micro_batch"]))) * gpus_per_trial(knobs)
    if asked % at_once:
        text = f"effective_batch {asked} is no multiple of the {at_once} samples of a micro-step"
        raise InputError(text, hint="set micro_batch to a divisor of it")
    return {"grad_accum": asked // at_once}


def _unsharded(values: Configuration) -> Iterator[str]:
    keeps = int(str(values.get("grad_accum", 1))) > 1 and not values.get(SYNC)
    if keeps and Parallelism.of(values).is_sharded:
        how = f"--set {SYNC}=true, in TrainingArguments {WITH_SYNC}"
        yield f"unsharded gradients stay between micro-steps (no_sync); without: {how}"


@contextlib.contextmanager
def _malformed(program: Program) -> Iterator[None]:
    """Inside, values of another kind than the trainer's are an `InputError`, like endless ones."""
    try:
        yield
    except MALFORMED as error:
        name = program.main or next(iter(program.files), shlex.join(program.command))
        raise InputError(f"{name}: cannot be read: {error}") from error


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


HALVED = ("precision", "compute_dtype", "mixed_precision")
"""Parameters that are in fp16 where a GPU type has no bf16."""


def _in_fp16(
    training: ProgramTraining, knobs: Mapping[str, Any], gpu: Gpu
) -> tuple[dict[str, Any], list[str]]:
    """The knobs with fp16 for bf16, and the changes to the program that make them so.

    No knobs where nothing is in bf16.
    """
    found = {name: "fp16" for name in HALVED if knobs.get(name) == "bf16"}
    if not found:
        return {}, []
    changes = list(dict.fromkeys(_changes(training)))
    if knobs.get("mixed_precision") == "bf16" and not any("fp16=True" in text for text in changes):
        changes.append(f"{training['arguments'].title}: add fp16=True")
    is_quantised, rank = knobs.get("precision") in QUANTIZED, knobs.get("lora_rank")
    if not rank and found.get("precision") and knobs.get("mixed_precision") == "bf16":
        # Gradients of fp16 weights cannot be scaled.
        found["precision"] = "fp32"
        changes = [text.replace("torch.float16", "torch.float32") for text in changes]
    if rank and is_quantised and knobs.get("adapter_dtype") == "bf16":
        found["adapter_dtype"] = "fp32"
        changes.append(
            "widen the adapters, whose bf16 gradients fp16 cannot scale, before trainer.train(): "
            "for p in trainer.model.parameters(): p.data = p.data.float() if p.requires_grad "
            "else p.data"
        )
    why = gpu.unsupported_reason("bf16") or f"{gpu.name} has no bf16"
    return found, [f"predicted in fp16, which takes changes: {why}. {'; '.join(changes)}"]


def _changes(training: ProgramTraining) -> Iterator[str]:
    for arguments in training.groups.values():
        for name, argument in arguments.values.items():
            last = name.rpartition(".")[2]
            if last == "bf16" and argument.value in (True, "true", "auto"):
                yield f"{argument.where}: bf16=True -> fp16=True"
            elif str(argument.value).removeprefix("torch.") == "bfloat16" and "dtype" in last:
                yield f"{argument.where}: {last}=torch.bfloat16 -> {last}=torch.float16"


_NO_WORD_ON_ATTENTION = ("attn_implementation=sdpa", "flash_attn=auto")


def _lacks_sdpa(model: str, knobs: Mapping[str, Any], found: Found) -> bool:
    """True for a model that transformers runs with eager attention unless it is told another."""
    is_default = any(text.endswith(_NO_WORD_ON_ATTENTION) for text in found.assumed)
    (folder, _), kind = releases.installed("transformers"), ""
    if not is_default or knobs["attention"] != "sdpa" or folder is None:
        return False  # the timelines that ship are of models that have it
    with contextlib.suppress(InputError):  # an unknown model, of which a prediction tells
        kind = _config_of(model)["model_type"]
    file = folder / "models" / kind / f"modeling_{kind}.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    first = re.search(r"^    _supports_sdpa = (\w+)", text, re.MULTILINE)
    return first is not None and first[1] != "True"


def _with_known_liger(knobs: dict[str, Any], model: str, found: Found) -> dict[str, Any]:
    """The knobs without Liger's kernels, as an upper bound, where they are not modelled."""
    if not knobs.get("liger"):
        return knobs
    known = _config_of(model)["model_type"] in LIGER_TYPES and not knobs.get("num_labels")
    if not known:
        found.at_most.append("Liger's kernels of this model aren't modelled, and only save memory")
    if known and knobs["loss"] == "liger" and "eval_batch" in knobs:
        found.at_most.append("Liger's loss, beside an evaluation, isn't modelled, and saves memory")
    is_kept = known and "eval_batch" not in knobs
    loss = "transformers" if knobs["loss"] == "liger" and not is_kept else knobs["loss"]
    return {**knobs, "liger": known, "loss": loss}


def _config_of(model: str) -> Mapping[str, Any]:
    """The configuration of a model; of the catalogue's, without transformers."""
    entry = entry_like(model)
    return resolve_config(model).to_dict() if entry is None else entry.config


def _stored_dtype(model: str, knob: str) -> str:
    config = _config_of(model)
    said = config.get("dtype") or config.get("torch_dtype")  # as of a file of the hub
    dtype = str(said or getattr(resolve_config(model), "dtype", None)).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UndecidedError(
            f"the configuration of {model} doesn't say the dtype of its weights",
            hint=f"--set {knob}=fp32 or another value decides",
        )
    return DTYPES[dtype]


def _default_targets(model: str) -> tuple[str, ...]:
    kind = _config_of(model)["model_type"]
    if releases.installed("peft")[0] is None:
        table = TABLES["peft_targets"].items()
        found = next((names.split() for names, kinds in table if kind in kinds.split()), None)
    else:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

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


def _takes_images(model: str) -> bool:
    return _config_of(model).get("vision_config") is not None
