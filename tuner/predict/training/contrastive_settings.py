"""The knobs of workload `contrastive`, checked and typed."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.core.errors import InputError
from tuner.core.records import Configuration
from tuner.predict.training.encoders import EncoderSettings, Field, names, number, whole


@dataclass(frozen=True, slots=True)
class ContrastiveSettings:
    """What is embedded, and by what."""

    step: EncoderSettings
    channels: tuple[str, ...]
    lengths: tuple[int, ...]
    """Tokens of each channel."""
    n_negatives: int
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    lora_targets: tuple[str, ...]
    gradient_checkpointing: bool
    experts: int
    experts_per_sample: int
    expert_hidden: int
    geometry: str
    temperature: float
    load_balancing: float

    @classmethod
    def from_configuration(cls, values: Configuration) -> ContrastiveSettings:
        """Read the knobs. Raises KeyError for a missing one, `InputError` for contradictions."""
        step = EncoderSettings.from_configuration(values)
        channels, short = names(values["channels"]), names(values["short_channels"])
        strange = [name for name in short if name not in channels]
        if strange:
            raise InputError(
                f"short_channels {', '.join(strange)} are not channels",
                hint=f"the channels are {', '.join(channels)}",
            )
        short_length = whole(values["short_length"])
        experts, chosen = whole(values["experts"]), whole(values["experts_per_sample"])
        if experts and chosen > experts:
            raise InputError(f"experts_per_sample {chosen} is more than the {experts} experts")
        rank = whole(values["lora_rank"])
        return cls(
            step=step,
            channels=channels,
            lengths=tuple(short_length if c in short else step.max_length for c in channels),
            n_negatives=whole(values["n_negatives"]),
            lora_rank=rank,
            lora_alpha=number(values.get("lora_alpha", 2 * rank)),
            lora_dropout=number(values.get("lora_dropout", 0.0)),
            lora_targets=names(values["lora_targets"]),
            gradient_checkpointing=bool(values["gradient_checkpointing"]),
            experts=experts,
            experts_per_sample=chosen,
            expert_hidden=whole(values["expert_hidden"]),
            geometry=str(values["geometry"]),
            temperature=number(values.get("temperature", 0.07)),
            load_balancing=number(values.get("load_balancing", 0.01)),
        )

    @property
    def fields(self) -> tuple[Field, ...]:
        """The channels of the anchor, then those of the positive, then those of the negatives."""
        groups = (1, 1, self.n_negatives)
        return tuple(Field(texts, length) for texts in groups for length in self.lengths)
