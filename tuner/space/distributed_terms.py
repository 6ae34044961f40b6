"""Knobs of a training on more than one GPU: how many, and how the ranks share the work.

A configuration has them only where its space names them; without them a trial is of one GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tuner.errors import InputError
from tuner.records import KnobValue
from tuner.space.terms import Term

GPUS_PER_TRIAL = "gpus_per_trial"
DISTRIBUTED = "distributed"

MAX_GPUS = 16
"""GPUs of the largest single machines on offer (HGX-2, p2.16xlarge): a trial stays on one."""

DISTRIBUTED_TERMS: tuple[Term, ...] = (
    Term(
        GPUS_PER_TRIAL,
        "int",
        "GPUs of one machine that train one configuration together, one process each",
        default=1,
        minimum=1,
        below=MAX_GPUS + 1,
        optional=True,
    ),
    Term(
        DISTRIBUTED,
        "word",
        "with gpus_per_trial above 1: ddp keeps a whole model on each GPU and adds up gradients, "
        "fsdp2 (fully_shard) keeps a share of weights, gradients and optimizer state on each",
        default="ddp",
        allowed=("ddp", "fsdp2"),
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
