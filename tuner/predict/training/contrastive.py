"""Workload `contrastive`: an embedder trained on anchors, positives and negatives.

Each channel of a sample (title, description, ...) has an encoder of its own with LoRA
adapters; their pooled outputs are joined, mixed by experts and projected. One micro-step is
three calls of the encoders, and samples x (2 + n_negatives) x channels sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from tuner.core.errors import InputError
from tuner.core.records import Configuration, Phase
from tuner.core.setup.encoders import CONTRASTIVE, Comparison
from tuner.predict.training import Environment, Machine, encoders


@dataclass(frozen=True, slots=True)
class _ContrastiveSettings:
    """The texts of a sample and the model that embeds them."""

    step: encoders.EncoderSettings
    knobs: Comparison
    channels: tuple[str, ...]
    lengths: tuple[int, ...]
    """Tokens of each channel."""

    @classmethod
    def of(cls, configuration: Configuration) -> _ContrastiveSettings:
        """The settings of a configuration. Raises `InputError` for contradictions."""
        values = CONTRASTIVE.values(configuration)
        step, knobs = encoders.EncoderSettings.of(values), Comparison.of(values)
        channels, short = encoders.names(knobs.channels), encoders.names(knobs.short_channels)
        strange = [name for name in short if name not in channels]
        if strange:
            raise InputError(
                f"short_channels {', '.join(strange)} are not channels",
                hint=f"the channels are {', '.join(channels)}",
            )
        experts, chosen = knobs.experts, knobs.experts_per_sample
        if experts and chosen > experts:
            raise InputError(f"experts_per_sample {chosen} is more than the {experts} experts")
        long = step.encoder.length
        lengths = tuple(knobs.short_length if c in short else long for c in channels)
        return cls(step, knobs, channels, lengths)

    @property
    def fields(self) -> tuple[encoders.Field, ...]:
        """The channels of the anchor, then those of the positive, then those of the negatives."""
        groups = (1, 1, self.knobs.n_negatives)
        return tuple(encoders.Field(texts, length) for texts in groups for length in self.lengths)


_EXPERT_DROPOUT = 0.1
_SMALLEST_NORM = 1e-8
_SMALLEST_ARGUMENT = 1 + 1e-5
"""acosh has an infinite slope at 1, the distance of a point to itself."""


class _Routing(NamedTuple):
    """The gate's decision for each sample: probabilities (N, E) and chosen experts (N, k)."""

    probabilities: torch.Tensor
    chosen: torch.Tensor


class Experts(nn.Module):
    """A mixture of experts: each sample goes through the `top_k` that its gate scores highest."""

    def __init__(self, width: int, hidden: int, *, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, hidden),
                nn.ReLU(),
                nn.Dropout(_EXPERT_DROPOUT),
                nn.Linear(hidden, width),
            )
            for _ in range(experts)
        )

    def forward(self, samples: torch.Tensor) -> tuple[torch.Tensor, _Routing]:
        """`samples` (N, width) to the same shape, weighted by a softmax over the chosen."""
        scores = self.gate(samples)
        best, chosen = scores.topk(self.top_k, dim=1)
        shares = best.softmax(dim=1)
        mixed = torch.zeros_like(samples)
        for number, expert in enumerate(self.experts):
            rows, places = self._assigned(chosen, number)
            output = expert(samples[rows]) * shares[rows, places].unsqueeze(1)
            mixed.index_add_(0, rows, output.to(mixed.dtype))
        return mixed, _Routing(scores.softmax(dim=1), chosen)

    def _assigned(self, chosen: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The samples that go to an expert, and which of their choices it is.

        Without data the first `top_k` experts take all samples. However they are spread, the
        number of rows in all experts together is the same.
        """
        if chosen.is_meta:
            size = chosen.shape[0] if number < self.top_k else 0
            rows = torch.empty(size, dtype=torch.long, device="meta")
            return rows, torch.empty_like(rows)
        rows, places = (chosen == number).nonzero(as_tuple=True)
        return rows, places


class _ContrastiveModel(nn.Module):
    """Embeds anchors, positives and negatives, and compares them; see `forward`."""

    def __init__(self, model_config: Any, settings: _ContrastiveSettings) -> None:
        super().__init__()
        self._settings = settings
        towers = [
            encoders.build_encoder(model_config, settings.step.encoder.attention)
            for _ in settings.channels
        ]
        self._init_weights = encoders.initialiser(towers)
        self.encoders = nn.ModuleList(towers)
        width, joined = model_config.hidden_size, model_config.hidden_size * len(towers)
        self.experts = (
            Experts(
                joined,
                settings.knobs.expert_hidden,
                experts=settings.knobs.experts,
                top_k=settings.knobs.experts_per_sample,
            )
            if settings.knobs.experts
            else None
        )
        self.projection = (
            nn.Linear(joined, width) if joined > width or settings.knobs.experts else None
        )
        self.head = nn.Linear(width, width + 1) if settings.knobs.geometry == "lorentz" else None

    def forward(self, fields: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss of anchors, positives and negatives: of each the tokens of all channels.

        Three calls of the encoders, as trainers of triplets make them: autograd keeps what each
        of them saved until the backward pass.
        """
        settings = self._settings
        channels = len(settings.channels)
        groups = (fields[place : place + channels] for place in range(0, len(fields), channels))
        embedded = [self._embed(group) for group in groups]
        anchors, positives, negatives = (points for points, _ in embedded)
        # InfoNCE over the positive and the anchor's own negatives (van den Oord et al. 2018).
        candidates = negatives.view(len(anchors), self._settings.knobs.n_negatives, -1)
        distance = _lorentz_distance if self.head is not None else _cosine_distance
        apart = torch.cat(
            [distance(anchors, positives).unsqueeze(1), distance(anchors.unsqueeze(1), candidates)],
            dim=1,
        )
        first = torch.zeros(len(anchors), dtype=torch.long, device=anchors.device)
        loss = nn.functional.cross_entropy(-apart / self._settings.knobs.temperature, first)
        routed = [routing for _, routing in embedded if routing is not None]
        if routed:
            loss = loss + settings.knobs.load_balancing * _imbalance(routed)
        return loss

    def _embed(self, texts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, _Routing | None]:
        """Tokens (N, length) of each channel to points: (N, width) or, on the hyperboloid, more."""
        pooled = []
        for encoder, text in zip(self.encoders, texts, strict=True):
            mask = encoders.attention_mask(text, padded=self._settings.step.padded)
            hidden = encoder(input_ids=text, attention_mask=mask).last_hidden_state
            pooled.append(encoders.mean_pooled(hidden, mask))
        points = torch.cat(pooled, dim=1) if len(pooled) > 1 else pooled[0]
        routing = None
        if self.experts is not None:
            points, routing = self.experts(points)
        if self.projection is not None:
            points = self.projection(points)
        if self.head is not None:
            return _on_hyperboloid(self.head(points).float()), routing
        return nn.functional.normalize(points.float(), dim=1), routing


def _on_hyperboloid(tangents: torch.Tensor) -> torch.Tensor:
    """The exponential map at the origin of the Lorentz model: (N, n) to (N, 1 + n).

    exp(v) = (cosh |v|, sinh |v| v / |v|) (Nickel and Kiela 2018, section 3), in fp32 as
    autocast runs these functions on CUDA.
    """
    norm = tangents.norm(dim=1, keepdim=True).clamp(min=_SMALLEST_NORM)
    return torch.cat([norm.cosh(), norm.sinh() * tangents / norm], dim=1)


def _lorentz_distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Acosh of minus the Lorentz product, over the last dimension (same source)."""
    products = left * right
    inner = products[..., 1:].sum(dim=-1) - products[..., 0]
    return (-inner).clamp(min=_SMALLEST_ARGUMENT).acosh()


def _cosine_distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return 1 - (left * right).sum(dim=-1)


def _imbalance(routed: Sequence[_Routing]) -> torch.Tensor:
    """Experts times the sum over experts of their share of samples times their mean probability.

    Smallest where all are equally busy (Fedus et al. 2022, Switch Transformers, section 2.2).
    """
    probabilities = torch.cat([routing.probabilities for routing in routed])
    chosen = torch.cat([routing.chosen for routing in routed])
    experts = probabilities.shape[1]
    numbers = torch.arange(experts, device=chosen.device)
    busy = (chosen.unsqueeze(-1) == numbers).any(dim=1).float().mean(dim=0)
    return experts * (busy * probabilities.mean(dim=0)).sum()


class Contrastive:
    """Opens sessions that train an embedder by comparison."""

    name = "contrastive"

    def open(
        self, model_config: Any, configuration: Configuration, environment: Environment
    ) -> encoders.LossSession:
        """Build encoders, adapters, heads and optimizer on the environment's device.

        Raises `InputError` for what cannot be built or trained as the configuration says.
        """
        settings = _ContrastiveSettings.of(configuration)
        encoders.require_positions(model_config, max(settings.lengths))
        environment.enter(Phase.LOAD, 0)
        with torch.device("meta"):
            model = _ContrastiveModel(model_config, settings)
        environment.materialize(model)
        if isinstance(environment, Machine):
            encoders.initialise_positions(model)
        adapters = {**settings.step.adapters, "r": settings.knobs.lora_rank}
        for number, encoder in enumerate(model.encoders):
            if settings.knobs.checkpointing:
                encoders.enable_checkpointing(encoder, environment, settings.step.autocast_dtype)
            # Poolers are among all linear layers; their adapters never get a gradient.
            model.encoders[number] = encoders.add_adapter(encoder, adapters, environment)
        model.train()
        return encoders.LossSession(
            model,
            settings.step,
            environment,
            vocab_size=model_config.vocab_size,
            fields=settings.fields,
            sample_tokens=sum(field.texts * field.length for field in settings.fields),
        )
