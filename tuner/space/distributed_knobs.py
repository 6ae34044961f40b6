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

BUCKET_CAP_MIB = 25
"""DistributedDataParallel's default `bucket_cap_mb`, which transformers' Trainer leaves alone."""

MAX_GPUS = 16
"""GPUs of the largest single machines on offer (HGX-2, p2.16xlarge): a trial stays on one."""

_EMULATE = "tuner emulate --gpu TYPE --gpus 2 --"
_NOT_PREDICTED: Mapping[str, str] = {
    **dict.fromkeys(
        ("zero1", "zero2", "zero3"),
        f"DeepSpeed itself runs on emulated GPUs: {_EMULATE} deepspeed PROGRAM",
    ),
    **dict.fromkeys(
        ("hsdp", "fsdp1", "tensor_parallel", "context_parallel"),
        f"the program itself runs on emulated GPUs: {_EMULATE} torchrun --nproc-per-node 2 PROGRAM",
    ),
}
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
        "fsdp2 (fully_shard) keeps a share of weights, gradients and optimizer state on each",
        default="ddp",
        allowed=("ddp", "fsdp2"),
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
    """How the GPUs of a configuration share the work: "ddp" or "fsdp2"."""
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
    """How many ranks train a configuration together, and how: "ddp" or "fsdp2"."""

    ranks: int = 1
    strategy: str = "ddp"

    @classmethod
    def of(cls, configuration: Mapping[str, KnobValue]) -> Parallelism:
        """That of a configuration. Raises `InputError` for what is none."""
        return cls(gpus_per_trial(configuration), strategy(configuration))

    @property
    def is_sharded(self) -> bool:
        """Whether each rank keeps a share of the model only."""
        return self.ranks > 1 and self.strategy == "fsdp2"

    def problems(self, configuration: Mapping[str, KnobValue]) -> list[Problem]:
        """What cannot be trained so, with the reason; empty on one GPU and where it works."""
        if not self.is_sharded:
            return []
        return [Problem(text, where=DISTRIBUTED) for text in _against_sharding(configuration)]

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
