"""Knobs of a training on more than one GPU: how many, and how the ranks share the work.

A configuration has them only where its space names them; without them a trial is of one GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from tuner.core.errors import InputError, Problem
from tuner.core.records import KnobValue
from tuner.core.setup.common import OPTIMIZERS, QUANTIZED
from tuner.core.setup.schema import Group, knob

GPUS_PER_TRIAL = "gpus_per_trial"
DISTRIBUTED = "distributed"
RESHARD = "reshard_after_forward"
SYNC = "sync_each_batch"
MACHINES = "machines"
SHARD_SIZE = "dp_shard_size"
REDUCE_BUCKET = "reduce_bucket_size"

ZERO_STAGES: Mapping[str, int] = {"zero1": 1, "zero2": 2, "zero3": 3}
"""Strategies that are stages of DeepSpeed's ZeRO."""

REDUCE_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default `reduce_bucket_size` (deepspeed/runtime/zero/config.py, 0.19), which
accelerate leaves alone unless a file of settings says "auto": the square of the hidden size."""

BUCKET_CAP_MIB = 25
"""DistributedDataParallel's default `bucket_cap_mb`, which transformers' Trainer leaves alone."""

MAX_GPUS = 16
"""GPUs of the largest single machines on offer (HGX-2, p2.16xlarge)."""

MAX_MACHINES = 128
"""2,048 GPUs: a trace stands in for all of them, and nothing larger was compared with anything."""

_NOT_PREDICTED: Mapping[str, str] = dict.fromkeys(
    ("fsdp1", "tensor_parallel", "context_parallel"),
    "the program itself runs on emulated GPUs, started by torchrun behind `tuner emulate`",
)
"""Strategies that people use, with the way to learn what they take."""


@dataclass(frozen=True, slots=True)
class Ranks(Group):
    """The GPUs of a training, and how they share the work."""

    # fmt: off
    count: int = knob("gpus_per_trial", 1,
        "GPUs that train one configuration together, one process each: of one machine, or of all "
        "`machines` together",
        minimum=1, below=MAX_GPUS * MAX_MACHINES + 1, optional=True)
    machines: int = knob("machines", 1,
        "machines that the GPUs of a configuration stand in, as many in each: predicted, and no "
        "trial runs",
        minimum=1, below=MAX_MACHINES + 1, optional=True)
    strategy: str = knob("distributed", "ddp",
        "with gpus_per_trial above 1: ddp keeps a whole model on each GPU and adds up gradients, "
        "fsdp2 (fully_shard) keeps a share of weights, gradients and optimizer state on each, "
        "hsdp does so inside groups of dp_shard_size GPUs and adds up gradients between them; "
        "zero1, zero2 and zero3 are DeepSpeed's, which share the optimizer state, the gradients "
        "too, and the weights too",
        allowed=("ddp", "fsdp2", "hsdp", *ZERO_STAGES), optional=True, refused=_NOT_PREDICTED)
    reshard: bool = knob("reshard_after_forward", True,
        "under fsdp2 and hsdp: false keeps the gathered weights of a layer until its backward "
        "pass has ended, which sends less and takes more memory (as ZeRO-2)",
        optional=True)
    sync: bool = knob(SYNC, False,
        "under fsdp2 and hsdp with accumulation: true exchanges gradients after each micro-step, "
        "where false keeps whole ones until the last (accelerate's no_sync)",
        optional=True)
    shard_size: int = knob("dp_shard_size", 0,
        "under hsdp: GPUs that share one copy of the model (accelerate's dp_shard_size); 0 is "
        "those of a machine, with several machines",
        minimum=0, below=MAX_GPUS * MAX_MACHINES, optional=True)
    bucket: int = knob("reduce_bucket_size", REDUCE_BUCKET_ELEMENTS,
        "under zero1 to zero3: gradients that are exchanged at once, as numbers; a rank has room "
        "for them beside its gradients, whatever the size of the model",
        minimum=1, optional=True)
    # fmt: on


_ONE = "micro_batch * grad_accum"
_MANY = f"{_ONE} * {GPUS_PER_TRIAL}"


def gpus_per_trial(values: Mapping[str, KnobValue]) -> int:
    """The number of GPUs of a configuration, in all its machines; 1 by default.

    Raises `InputError` for what is no such number.
    """
    return _count(values, GPUS_PER_TRIAL, MAX_GPUS * machines(values))


def machines(values: Mapping[str, KnobValue]) -> int:
    """The number of machines of a configuration; 1 by default.

    Raises `InputError` for what is no such number.
    """
    return _count(values, MACHINES, MAX_MACHINES)


def _count(values: Mapping[str, KnobValue], name: str, most: int) -> int:
    value = values.get(name, 1)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        several = f": {MAX_GPUS} for each of `{MACHINES}`" if name == GPUS_PER_TRIAL else ""
        raise InputError(
            f"{name} cannot be {value!r}",
            hint=f"it is a whole number of at least 1 and at most {most}{several}",
        )
    return value


def strategy(values: Mapping[str, KnobValue]) -> str:
    """The strategy by which GPUs share the work: a word that `distributed` allows."""
    return str(values.get(DISTRIBUTED, "ddp"))


def most_gpus_per_trial(
    choices: Mapping[str, Collection[KnobValue]], fixed: Mapping[str, KnobValue]
) -> int:
    """The GPUs of the largest trial of a space: what each of its trials is given room for."""
    values = choices.get(GPUS_PER_TRIAL) or (fixed.get(GPUS_PER_TRIAL, 1),)
    number = most_machines(choices, fixed)
    return max(gpus_per_trial({GPUS_PER_TRIAL: value, MACHINES: number}) for value in values)


def most_machines(
    choices: Mapping[str, Collection[KnobValue]], fixed: Mapping[str, KnobValue]
) -> int:
    """The machines of the trial of a space that has the most."""
    values = choices.get(MACHINES) or (fixed.get(MACHINES, 1),)
    return max(machines({MACHINES: value}) for value in values)


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
    """The number of ranks and machines of a training, and the strategy.

    `strategy` is a word of `distributed`; under hsdp `dp_shard_size` ranks share a copy of the
    model (0: those of a machine). Ranks are numbered machine by machine, as torchrun does it.
    """

    ranks: int = 1
    strategy: str = "ddp"
    machines: int = 1
    dp_shard_size: int = 0

    @classmethod
    def of(cls, configuration: Mapping[str, KnobValue]) -> Parallelism:
        """The parallelism of a configuration. Raises `InputError` for invalid numbers."""
        return cls(
            _count(configuration, GPUS_PER_TRIAL, MAX_GPUS * MAX_MACHINES),
            strategy(configuration),
            machines(configuration),
            int(str(configuration.get(SHARD_SIZE, 0))),
        )

    @property
    def per_machine(self) -> int:
        """Ranks of each machine."""
        return self.ranks // self.machines

    @property
    def group(self) -> int:
        """The number of ranks that share one copy of the model under fsdp2 and hsdp."""
        return (self.dp_shard_size or self.per_machine) if self.strategy == "hsdp" else self.ranks

    @property
    def is_replicated(self) -> bool:
        """True if each of several ranks keeps the whole model."""
        return self.ranks > 1 and self.strategy == "ddp"

    @property
    def is_sharded(self) -> bool:
        """True if FSDP2 leaves each rank only a share of the model."""
        return self.ranks > 1 and self.strategy in ("fsdp2", "hsdp")

    @property
    def zero_stage(self) -> int:
        """The stage of DeepSpeed's ZeRO; 0 without it."""
        return ZERO_STAGES.get(self.strategy, 0) if self.ranks > 1 else 0

    @property
    def shares_weights(self) -> bool:
        """True if no device holds the whole model."""
        return self.is_sharded or self.zero_stage == ZERO_STAGES["zero3"]

    def problems(self, configuration: Mapping[str, KnobValue]) -> list[Problem]:
        """Reasons why the configuration can't be trained with this strategy; empty if it can."""
        found = [Problem(text, where=MACHINES) for text in self._against_machines()]
        if self.is_sharded:
            reasons = [*self._against_groups(), *_against_sharding(configuration)]
            found += [Problem(text, where=DISTRIBUTED) for text in reasons]
        if self.zero_stage:
            found += [Problem(t, where=DISTRIBUTED) for t in _against_zero(configuration, self)]
        return found

    def _against_machines(self) -> Iterator[str]:
        if self.ranks % self.machines:
            yield (
                f"{self.ranks} GPUs cannot stand in {self.machines} machines with as many in each: "
                f"{GPUS_PER_TRIAL} is that of all machines together"
            )
        elif self.per_machine > MAX_GPUS:
            yield (
                f"{self.per_machine} GPUs are more than any machine has ({MAX_GPUS}): set "
                f"{MACHINES} to at least {-(-self.ranks // MAX_GPUS)}"
            )

    def _against_groups(self) -> Iterator[str]:
        if self.strategy != "hsdp":
            return
        if not 1 < self.group < self.ranks or self.ranks % self.group:
            yield (
                f"hsdp cannot divide {self.ranks} GPUs into groups of {self.group}: set "
                f"{SHARD_SIZE} to a divisor of {self.ranks} between the two, or use fsdp2 (one "
                "group) or ddp (groups of one)"
            )
        elif self.group % self.per_machine and self.per_machine % self.group:
            yield (
                f"groups of {self.group} GPUs and machines of {self.per_machine} do not fit into "
                f"each other: set {SHARD_SIZE} to a divisor or a multiple of {self.per_machine}"
            )

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


def _against_zero(
    configuration: Mapping[str, KnobValue], parallelism: Parallelism
) -> Iterator[str]:
    precision = str(configuration.get("precision"))
    optimizer = OPTIMIZERS.get(str(configuration.get("optimizer")))
    if optimizer is not None and optimizer.rest is not None:
        yield (
            f"{configuration['optimizer']} updates whole matrices, and DeepSpeed keeps flat "
            "shares: use another optimizer, or ddp"
        )
    mixed = configuration.get("mixed_precision", "no")
    emulate = "a program of yours can be emulated, with `tuner emulate`"
    if mixed == "fp16":
        yield f"fp16 under DeepSpeed is not predicted: use bf16; {emulate}"
    elif mixed == "no" and precision not in ("fp32", "tf32"):
        yield (
            f'DeepSpeed refuses weights of {precision} without mixed precision ("fp32 is enabled '
            'but the following parameters have dtype that is not fp32"): set mixed_precision bf16'
        )
    if precision in QUANTIZED and parallelism.shares_weights:
        yield f"{precision} under zero3 is not predicted: use zero2 or fsdp2; {emulate}"
    if configuration.get("offload"):
        yield f"offload with DeepSpeed is not predicted: leave it out; {emulate}"
