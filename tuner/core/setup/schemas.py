"""The vocabulary of each workload, and which of its knobs can only add memory.

Space files, `tuner estimate --set` and the workloads read the same tables, so that a name means
one thing everywhere and a misspelt one is never silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tuner.core.records import Configuration, KnobValue
from tuner.core.setup.causal_lm import CAUSAL_LM
from tuner.core.setup.encoders import CONTRASTIVE, MULTITASK
from tuner.core.setup.schema import ALL_LINEAR, NO_NAMES, KnobSchema, WorkloadSchema, is_pattern

__all__ = [
    "ALL_LINEAR", "NO_NAMES", "SCHEMAS", "KnobSchema", "WorkloadSchema", "is_pattern", "unmodelled",
]  # fmt: skip

SCHEMAS: Mapping[str, WorkloadSchema] = {
    schema.workload: schema for schema in (CAUSAL_LM, CONTRASTIVE, MULTITASK)
}
"""By workload. A workload without a table here cannot be searched."""


def unmodelled(workload: str, configuration: Configuration) -> tuple[str, ...]:
    """The knobs that `configuration` sets to something whose effect no prediction knows.

    Those that have their default are not among them: predictions are of the default.
    """
    return tuple(
        name
        for name, term in SCHEMAS[workload].terms.items()
        if configuration.get(name, term.default) != term.default
        and (not term.modelled or (name == "liger" and workload != CAUSAL_LM.workload))
    )


Order = tuple[KnobValue, ...] | None
"""The values of a knob from little to much memory; None for numbers in their own order. Values
that are not named can be compared with themselves only."""


@dataclass(frozen=True, slots=True)
class MemoryOrder:
    """The settings of a workload that order memory, and those without effect on it."""

    knobs: Mapping[str, Order] = field(default_factory=dict)
    of_adapters: frozenset[str] = frozenset()
    """Members of `knobs` that order memory only if nothing but adapters is trained. Whole weights
    have states in their own dtype, and those of embeddings in fp32 with 8-bit optimizers."""
    without_effect: frozenset[str] = frozenset()

    def split(
        self, configuration: Configuration
    ) -> tuple[dict[str, float], tuple[tuple[str, KnobValue], ...]]:
        """The places of the ordered knobs, and all other values, which must be equal.

        A value outside its knob's order is among the others.
        """
        places: dict[str, float] = {}
        others: list[tuple[str, KnobValue]] = []
        saved = configuration.get("modules_to_save", NO_NAMES)
        trains_weights = configuration.get("lora_rank") == 0 or saved != NO_NAMES
        unordered = self.of_adapters if trains_weights else frozenset()
        for name, value in configuration.items():
            order = () if name in unordered else self.knobs.get(name, ())
            if order is None and isinstance(value, int | float):
                places[name] = float(value)
            elif order and value in order:
                places[name] = float(order.index(value))
            elif name == "grad_accum" and isinstance(value, int):
                # Gradients that are kept over the next micro-step add memory; how often does not.
                places[name] = float(value > 1)
            elif name not in self.without_effect:
                others.append((name, value))
        return places, tuple(others)


MEMORY_ORDERS: Mapping[str, MemoryOrder] = {
    "causal_lm": MemoryOrder(
        knobs={
            "micro_batch": None,
            "lora_rank": None,
            "max_length": None,
            "gradient_checkpointing": (True, False),
            # State on the host, in one byte, in four bytes.
            "optimizer": ("paged_adamw_8bit", "adamw_8bit", "adamw_torch"),
            # Smaller shares under fsdp2 and hsdp, the same under ddp. Not 1, which gathers nothing
            # and has no buckets; nor one way to share against another
            # (docs/notebook/guided-search.md).
            # Buffers of NCCL go the other way: 128 MiB less on 4 H100 than on 8, 480 on 2.
            "gpus_per_trial": (8, 4, 2),
            "reshard_after_forward": (True, False),
        },
        of_adapters=frozenset({"lora_rank", "optimizer"}),
        without_effect=frozenset({"lora_alpha", "effective_batch"}),
    ),
    # Not max_length, rank or negatives: longer inputs were predicted with up to 3.5 % less
    # memory in 10 of 56 pairs of multi-task configurations, and of the others no pairs were seen.
    "contrastive": MemoryOrder(
        knobs={
            "micro_batch": None,
            "gradient_checkpointing": (True, False),
            "optimizer": ("adamw_8bit", "adamw_torch"),
        },
        without_effect=frozenset({"effective_batch"}),
    ),
    # Code of the user's own: what the names mean, unless its space says otherwise. A trial that
    # fits although it should not is believed, and takes back what was concluded.
    "command": MemoryOrder(
        knobs={"micro_batch": None, "max_length": None, "gradient_checkpointing": (True, False)}
    ),
    "multitask": MemoryOrder(
        knobs={"micro_batch": None, "optimizer": ("adamw_8bit", "adamw_torch")},
        without_effect=frozenset({"effective_batch"}),
    ),
}
"""By workload; one that is not here orders nothing."""


def memory_order(
    workload: str, declared: Mapping[str, tuple[KnobValue, ...]] | None = None
) -> MemoryOrder:
    """The memory order of the workload, with the changes that its space declares."""
    known = MEMORY_ORDERS.get(workload, MemoryOrder())
    return replace(known, knobs={**known.knobs, **(declared or {})})
