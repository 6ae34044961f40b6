"""Knobs of a training on more than one GPU: how many, and how the ranks share the work.

A configuration has them only where its space names them; without them a trial is of one GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from tuner.errors import InputError, Problem
from tuner.records import KnobValue
from tuner.space.knob_schema import KnobSchema
from tuner.space.optimizers import OPTIMIZERS

GPUS_PER_TRIAL = "gpus_per_trial"
DISTRIBUTED = "distributed"
RESHARD = "reshard_after_forward"
REDUCE_BUCKET = "reduce_bucket_size"

ZERO_STAGES: Mapping[str, int] = {"zero1": 1, "zero2": 2, "zero3": 3}
"""Strategies that are stages of DeepSpeed's ZeRO."""

REDUCE_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default `reduce_bucket_size` (deepspeed/runtime/zero/config.py, 0.19), which
accelerate leaves alone unless a file of settings says "auto": the square of the hidden size."""

BUCKET_CAP_MIB = 25
"""DistributedDataParallel's default `bucket_cap_mb`, which transformers' Trainer leaves alone."""

MAX_GPUS = 16
"""GPUs of the largest single machines on offer (HGX-2, p2.16xlarge): a trial stays on one."""

_EMULATE = "tuner emulate --gpu TYPE --gpus 2 --"
_NOT_PREDICTED: Mapping[str, str] = dict.fromkeys(
    ("hsdp", "fsdp1", "tensor_parallel", "context_parallel"),
    f"the program itself runs on emulated GPUs: {_EMULATE} torchrun --nproc-per-node 2 PROGRAM",
)
"""Strategies that people use, with the way to learn what they take."""

DISTRIBUTED_TERMS: tuple[KnobSchema, ...] = (
    KnobSchema(
        GPUS_PER_TRIAL,
        "int",
        "GPUs of one machine that train one configuration together, one process each",
        default=1,
        minimum=1,
        below=MAX_GPUS + 1,
        optional=True,
    ),
    KnobSchema(
        DISTRIBUTED,
        "word",
        "with gpus_per_trial above 1: ddp keeps a whole model on each GPU and adds up gradients, "
        "fsdp2 (fully_shard) keeps a share of weights, gradients and optimizer state on each; "
        "zero1, zero2 and zero3 are DeepSpeed's, which share the optimizer state, the gradients "
        "too, and the weights too",
        default="ddp",
        allowed=("ddp", "fsdp2", *ZERO_STAGES),
        refused=_NOT_PREDICTED,
        optional=True,
    ),
    KnobSchema(
        RESHARD,
        "bool",
        "under fsdp2: false keeps the gathered weights of a layer until its backward pass has "
        "ended, which sends less and takes more memory (as ZeRO-2)",
        default=True,
        optional=True,
    ),
    KnobSchema(
        REDUCE_BUCKET,
        "int",
        "under zero1 to zero3: gradients that are exchanged at once, as numbers; a rank has room "
        "for them beside its gradients, whatever the size of the model",
        default=REDUCE_BUCKET_ELEMENTS,
        minimum=1,
        optional=True,
    ),
)

_ONE = "micro_batch * grad_accum"
_MANY = f"{_ONE} * {GPUS_PER_TRIAL}"


def gpus_per_trial(values: Mapping[str, KnobValue]) -> int:
    """How many GPUs a configuration trains on; 1 where it does not say.

    Raises `InputError` for what is no such number.
    """
    value = values.get(GPUS_PER_TRIAL, 1)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_GPUS:
        raise InputError(
            f"{GPUS_PER_TRIAL} cannot be {value!r}",
            hint=f"it is a whole number of at least 1 and at most {MAX_GPUS}",
        )
    return value


def strategy(values: Mapping[str, KnobValue]) -> str:
    """How the GPUs of a configuration share the work: a word that `distributed` allows."""
    return str(values.get(DISTRIBUTED, "ddp"))


def most_gpus_per_trial(
    choices: Mapping[str, Collection[KnobValue]], fixed: Mapping[str, KnobValue]
) -> int:
    """The GPUs of the largest trial of a space: what each of its trials is given room for."""
    values = choices.get(GPUS_PER_TRIAL) or (fixed.get(GPUS_PER_TRIAL, 1),)
    return max(gpus_per_trial({GPUS_PER_TRIAL: value}) for value in values)


def rule_with_ranks(rule: str, mentioned: Collection[str]) -> str:
    """A rule of the vocabulary about the effective batch, where a space has several GPUs.

    Every rank runs `grad_accum` micro-steps of `micro_batch` samples for one optimizer step.
    """
    if GPUS_PER_TRIAL not in mentioned:
        return rule
    if rule == "effective_batch // micro_batch":
        return f"effective_batch // (micro_batch * {GPUS_PER_TRIAL})"
    return rule.replace(_ONE, _MANY)


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How many ranks train a configuration together, and how: a word of `distributed`."""

    ranks: int = 1
    strategy: str = "ddp"

    @classmethod
    def of(cls, configuration: Mapping[str, KnobValue]) -> Parallelism:
        """That of a configuration. Raises `InputError` for what is none."""
        return cls(gpus_per_trial(configuration), strategy(configuration))

    @property
    def is_replicated(self) -> bool:
        """Whether each of several ranks keeps all of everything."""
        return self.ranks > 1 and self.strategy == "ddp"

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 leaves each rank a share of the model only."""
        return self.ranks > 1 and self.strategy == "fsdp2"

    @property
    def zero_stage(self) -> int:
        """The stage of DeepSpeed's ZeRO; 0 without it."""
        return ZERO_STAGES.get(self.strategy, 0) if self.ranks > 1 else 0

    @property
    def casts_weights(self) -> bool:
        """Whether mixed precision is a matter of the weights that run, not of autocast."""
        return self.is_sharded or self.zero_stage > 0

    @property
    def shares_weights(self) -> bool:
        """Whether no device has to hold the whole model."""
        return self.is_sharded or self.zero_stage == ZERO_STAGES["zero3"]

    def problems(self, configuration: Mapping[str, KnobValue]) -> list[Problem]:
        """What cannot be trained so, with the reason; empty on one GPU and where it works."""
        reasons = (
            _against_sharding(configuration)
            if self.is_sharded
            else _against_zero(configuration, self)
            if self.zero_stage
            else ()
        )
        return [Problem(text, where=DISTRIBUTED) for text in reasons]

    def require(self, configuration: Mapping[str, KnobValue]) -> None:
        """Raise `InputError` with every reason why this cannot be trained."""
        problems = self.problems(configuration)
        if problems:
            raise InputError(
                f"this configuration cannot be trained with {self.strategy}", problems=problems
            )


def _against_sharding(configuration: Mapping[str, KnobValue]) -> Iterator[str]:
    precision = configuration.get("precision")
    if precision == "int8":
        yield (
            "fsdp2 shards floating parameters only, and bitsandbytes' int8 layers keep integers: "
            "use nf4, whose codes can be packed into bf16 (bnb_4bit_quant_storage), or ddp"
        )
    optimizer = OPTIMIZERS.get(str(configuration.get("optimizer")))
    if optimizer is not None and not optimizer.can_shard:
        others = ", ".join(name for name, each in OPTIMIZERS.items() if each.can_shard)
        yield (
            f"{configuration['optimizer']} does not know sharded parameters (its kernels take no "
            f"DTensor): use one of {others}, or ddp"
        )
    if configuration.get("mixed_precision") == "fp16":
        yield (
            "fp16 needs a gradient scaler that agrees between ranks, which is not supported: use "
            "bf16, or ddp"
        )
    if configuration.get("offload"):
        yield (
            "offload moves whole layers, and fsdp2 shards them: use one of the two; a program with "
            "FSDP2's own CPUOffloadPolicy can be emulated (tuner emulate)"
        )
    if configuration.get("torch_compile"):
        yield "torch_compile with fsdp2 is not predicted: emulate the program, or use ddp"


def _against_zero(
    configuration: Mapping[str, KnobValue], parallelism: Parallelism
) -> Iterator[str]:
    precision = str(configuration.get("precision"))
    mixed = configuration.get("mixed_precision", "no")
    emulate = f"a program can be emulated: {_EMULATE} deepspeed PROGRAM"
    if mixed == "fp16":
        yield f"fp16 under DeepSpeed is not predicted: use bf16; {emulate}"
    elif mixed == "no" and precision not in ("fp32", "tf32"):
        yield (
            f'DeepSpeed refuses weights of {precision} without mixed precision ("fp32 is enabled '
            'but the following parameters have dtype that is not fp32"): set mixed_precision bf16'
        )
    if precision in ("nf4", "int8") and parallelism.shares_weights:
        yield f"{precision} under zero3 is not predicted: use zero2 or fsdp2; {emulate}"
    for name in ("offload", "torch_compile"):
        if configuration.get(name):
            yield f"{name} with DeepSpeed is not predicted: leave it out; {emulate}"
