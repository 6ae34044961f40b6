"""A configuration that keeps account of what a format has said of it, and what it has not."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.core.records import Configuration, KnobValue
from tuner.core.setup.distributed_knobs import (
    DISTRIBUTED,
    GPUS_PER_TRIAL,
    REDUCE_BUCKET,
    REDUCE_BUCKET_ELEMENTS,
    Parallelism,
)

DTYPES: Mapping[str, str] = {
    "fp32": "float32",
    "tf32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
}
"""torch's names of the precisions that are not quantised."""

_OF_ADAPTERS = (
    "adapter",
    "lora_alpha",
    "lora_dropout",
    "lora_targets",
    "modules_to_save",
    "kbit_preparation",
)


class SettingsReader:
    """Reads values for a format; whatever is never read is reported as left out.

    `left_out` gives for each name why the format does not say its value.
    """

    def __init__(self, configuration: Configuration) -> None:
        self._values = configuration
        self._expressed: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._defaults: dict[str, KnobValue] = {}

    def get(self, name: str) -> KnobValue | None:
        """The value of `name`, now expressed; None where the workload has no such name."""
        self._expressed.add(name)
        return self._values.get(name)

    def text(self, name: str) -> str:
        """The value of `name` as a word; empty where the workload has no such name."""
        value = self.get(name)
        return "" if value is None else str(value)

    def implies(
        self,
        name: str,
        value: KnobValue,
        why: str = "the tool has no setting for it",
        *,
        default: KnobValue | None = None,
    ) -> None:
        """Note that the tool does as `value` says without being told.

        `default` is what a configuration means that has no such name.
        """
        if name not in self._values and default is not None:
            self._defaults[name] = default
        if self._values.get(name, default) == value:
            self._expressed.add(name)
        else:
            self.leave(name, why)

    def leave(self, name: str, why: str) -> None:
        """Note why the format does not say the value of `name`."""
        self._reasons[name] = why

    def leave_unless_empty(self, name: str, why: str) -> None:
        """Note why, unless the value says nothing (empty text)."""
        if self._values.get(name) == "":
            self._expressed.add(name)
        else:
            self.leave(name, why)

    @property
    def left_out(self) -> dict[str, str]:
        """Why, by name, for each name that the format does not say."""
        return {name: why for name, (_, why) in self.unsaid.items()}

    @property
    def unsaid(self) -> dict[str, tuple[KnobValue, str]]:
        """Value and reason, by name, of what the format does not say of the configuration."""
        values = {**self._values, **self._defaults}
        return {
            name: (value, self._reasons.get(name, "the tool has no setting for it"))
            for name, value in values.items()
            if name in self._reasons or name not in self._expressed
        }

    @property
    def parallelism(self) -> Parallelism:
        """How ranks share the work; their number, and most strategies, are the launcher's."""
        found = Parallelism.of(self._values)
        if found.ranks > 1:
            self.leave(GPUS_PER_TRIAL, "belongs to the launcher: one process a GPU")
        else:
            self.get(GPUS_PER_TRIAL)
            self.get(DISTRIBUTED)
        return found

    @property
    def zero(self) -> dict[str, KnobValue] | None:
        """DeepSpeed's `zero_optimization`; None without ZeRO."""
        stage = self.parallelism.zero_stage
        if not stage:
            return None
        self.get(DISTRIBUTED)
        bucket = self.get(REDUCE_BUCKET)
        # What is predicted is this number, which the word "auto" would replace.
        return {"stage": stage, REDUCE_BUCKET: bucket or REDUCE_BUCKET_ELEMENTS}

    @property
    def is_quantized(self) -> bool:
        """Whether the base weights are kept in 4 or 8 bits."""
        return self.text("precision") in ("nf4", "int8")

    @property
    def dtype(self) -> str:
        """The torch dtype of weights that are not quantised, as the workload loads them."""
        precision = self.text("precision")
        if precision in DTYPES:
            self.get("compute_dtype")
            return DTYPES[precision]
        compute, mixed = self.text("compute_dtype"), self.text("mixed_precision")
        return DTYPES.get(compute) or DTYPES.get(mixed) or "bfloat16"

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained; without them no tool is told how they would be."""
        if self.get("lora_rank") != 0:
            return True
        for name in _OF_ADAPTERS:
            self.get(name)
        return False

    def kind_of_adapter(self, prefix: str = "") -> dict[str, bool]:
        """The flag of `peft.LoraConfig` that says so, behind `prefix`; none for plain LoRA."""
        kind = self.text("adapter")
        return {f"{prefix}use_{kind}": True} if kind in ("dora", "rslora") else {}

    @property
    def saved_modules(self) -> list[str] | None:
        """The modules of which a full copy is trained, None for none."""
        names = self.get("modules_to_save")
        return list(names) if isinstance(names, tuple) and names != ("none",) else None

    @property
    def targets(self) -> str | list[str] | None:
        """The modules that get an adapter, as peft takes them."""
        names = self.get("lora_targets")
        if not isinstance(names, tuple):
            return None
        return "all-linear" if names == ("all-linear",) else list(names)
