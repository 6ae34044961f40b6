"""Workload `multitask`: task heads, LoRA sets and a router on one frozen encoder, in phases.

Phase "adapters" trains the heads (and LoRA sets) of some tasks, "router" the network that
weights the tasks, with everything else frozen but every head run, and "joint" both.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tuner.core.errors import InputError
from tuner.core.records import Configuration, Phase
from tuner.core.setup.encoders import MULTITASK, Tasks
from tuner.predict.training import Environment, Machine, encoders


@dataclass(frozen=True, slots=True)
class Task:
    """One task: its `kind` is "classification", "extraction" or "generation"."""

    name: str
    kind: str
    lora_rank: int
    targets: int
    """Target numbers a sample: a class, two positions, or the tokens to generate."""


@dataclass(frozen=True, slots=True)
class _MultiTaskSettings:
    """The tasks, and their parts that a step trains."""

    step: encoders.EncoderSettings
    knobs: Tasks
    tasks: tuple[Task, ...]
    trained: tuple[str, ...]
    """Tasks that run in a step."""

    @classmethod
    def of(cls, configuration: Configuration) -> _MultiTaskSettings:
        """The settings of a configuration. Raises `InputError` for contradictions."""
        values = MULTITASK.values(configuration)
        knobs = Tasks.of(values)
        tasks = _tasks(knobs)
        known = [task.name for task in tasks]
        trained = encoders.names(knobs.trained_tasks)
        if trained == ("all",) or knobs.phase != "adapters":
            trained = tuple(known)
        strange = [name for name in trained if name not in known]
        if strange or not trained:
            raise InputError(
                f"trained_tasks {', '.join(strange) or 'none'}: no such tasks",
                hint=f"the tasks are {', '.join(known)}",
            )
        return cls(encoders.EncoderSettings.of(values), knobs, tasks, trained)

    @property
    def adapted(self) -> bool:
        """The LoRA sets are inside the encoder."""
        return self.knobs.backbone == "adapted"

    @property
    def running(self) -> tuple[Task, ...]:
        """The tasks that run in a step, in their order."""
        return tuple(task for task in self.tasks if task.name in self.trained)

    @property
    def routed(self) -> bool:
        """True if the router weights the tasks' outputs."""
        return self.knobs.phase != "adapters"

    @property
    def fields(self) -> tuple[encoders.Field, ...]:
        """The sample's tokens, then the targets of each task that runs."""
        return (
            encoders.Field(1, self.step.encoder.length),
            *(encoders.Field(1, task.targets) for task in self.running),
        )


def _tasks(knobs: Tasks) -> tuple[Task, ...]:
    short = encoders.names(knobs.short_target_tasks)
    generated = encoders.names(knobs.generation_tasks)
    strange = [name for name in short if name not in generated]
    if strange:
        raise InputError(f"short_target_tasks {', '.join(strange)} are not generation tasks")
    lengths = {
        name: knobs.short_target_length if name in short else knobs.target_length
        for name in generated
    }
    tasks = (
        *(
            Task(name, "classification", knobs.classification_rank, 1)
            for name in encoders.names(knobs.classification_tasks)
        ),
        *(
            Task(name, "extraction", knobs.extraction_rank, 2)
            for name in encoders.names(knobs.extraction_tasks)
        ),
        *(Task(name, "generation", knobs.lora_rank, lengths[name]) for name in generated),
    )
    known = [task.name for task in tasks]
    twice = sorted({name for name in known if known.count(name) > 1})
    if twice or not tasks:
        raise InputError(f"a task is named twice: {twice[0]}" if twice else "there is no task")
    return tasks


CLASSES = 2
_HEAD_DROPOUT = 0.1
_ROUTER_HIDDEN = (512, 256)


class _ClassificationHead(nn.Module):
    """One of two classes from the vector of the first token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, width // 2),
            nn.ReLU(),
            nn.Dropout(_HEAD_DROPOUT),
            nn.Linear(width // 2, CLASSES),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (samples, classes) from hidden states (samples, length, width)."""
        logits: torch.Tensor = self.layers(hidden[:, 0])
        return logits


class _ExtractionHead(nn.Module):
    """The start and end of an answer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (samples, length, 2) of start and end at each token."""
        logits: torch.Tensor = self.layer(hidden)
        return logits


class _GenerationHead(nn.Module):
    """Logits over the vocabulary at each target position, all positions at once.

    A position is told from the others by one number beside the vector of the first token.
    """

    def __init__(self, width: int, vocab_size: int, positions: int) -> None:
        super().__init__()
        self._positions = positions
        self.layers = nn.Sequential(
            nn.Linear(width + 1, width),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, vocab_size),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (samples, positions, vocabulary)."""
        samples, device = hidden.shape[0], hidden.device
        places = torch.arange(self._positions, device=device, dtype=torch.float32)
        places = (places / self._positions).view(1, -1, 1).expand(samples, -1, -1)
        pooled = hidden[:, :1].expand(-1, self._positions, -1)
        logits: torch.Tensor = self.layers(torch.cat([pooled.float(), places], dim=-1))
        return logits


class _MultiTaskModel(nn.Module):
    """The loss of the tasks that a step trains; see `forward`.

    `backbone` is the encoder, with the LoRA sets of all tasks inside or, where the encoder runs
    under no_grad, with the sets beside it in `lora_sets`: they then get no gradient. `outputs` are
    what the heads said of the last batch, for a loop that holds them.
    """

    def __init__(self, model_config: Any, settings: _MultiTaskSettings) -> None:
        super().__init__()
        self._settings = settings
        width = model_config.hidden_size
        self.backbone = encoders.build_encoder(model_config, settings.step.encoder.attention)
        self._init_weights = encoders.initialiser([self.backbone])
        self.backbone.requires_grad_(False)
        self.lora_sets = nn.ModuleList(
            [] if settings.adapted else [_lora_set(model_config, task) for task in settings.tasks]
        ).requires_grad_(False)
        self.heads = nn.ModuleDict(
            {task.name: _head(task, width, model_config.vocab_size) for task in settings.tasks}
        )
        sizes = (width, *_ROUTER_HIDDEN)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(_HEAD_DROPOUT)]
        self.router = nn.Sequential(*layers, nn.Linear(sizes[-1], len(settings.tasks)))
        self._flags: list[tuple[nn.Parameter, bool]] = []
        self.outputs: dict[str, torch.Tensor] = {}

    def set_trained(self) -> None:
        """Let the parameters that the phase trains, and no others, take gradients."""
        settings = self._settings
        names = {task.name for task in settings.tasks}
        trained = set(settings.trained) if settings.knobs.phase != "router" else set()
        for name, head in self.heads.items():
            head.requires_grad_(name in trained)
        self.router.requires_grad_(settings.routed)
        if settings.adapted:
            for name, parameter in self.backbone.named_parameters():
                owner = names.intersection(name.split(".")) if "lora_" in name else set()
                parameter.requires_grad_(bool(owner & trained))
        self._flags = [(p, p.requires_grad) for p in self.backbone.parameters()]

    def train(self, mode: bool = True) -> _MultiTaskModel:
        """As of any module, but a backbone that is not adapted stays without dropout."""
        super().train(mode)
        if not self._settings.adapted:
            self.backbone.eval()
        return self

    def forward(self, fields: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of the running tasks' losses on one batch of samples.

        `fields` are the samples' tokens (samples, length) and each task's targets. Where there
        is a router, it weights the output of each task's head before the loss.
        """
        tokens, targets = fields[0], fields[1:]
        mask = encoders.attention_mask(tokens, padded=self._settings.step.padded)
        adapted, routed = self._settings.adapted, self._settings.routed
        plain = self._plain(tokens, mask) if routed or not adapted else None
        weights = self.router(plain[:, 0]).softmax(dim=-1) if routed and plain is not None else None
        loss = torch.zeros((), device=tokens.device)
        order = [task.name for task in self._settings.tasks]
        outputs: dict[str, torch.Tensor] = {}
        for task, wanted in zip(self._settings.running, targets, strict=True):
            hidden = self._adapted(task, tokens, mask) if adapted or plain is None else plain
            output = self.heads[task.name](hidden)
            if weights is not None:
                share = weights[:, order.index(task.name)]
                output = output * share.view(-1, *[1] * (output.dim() - 1))
            if self._settings.knobs.training_loop != "frees":
                outputs[task.name] = output
            loss = loss + _task_loss(task, output, wanted)
        # Those of the batch before are held until here, as a variable of a loop does.
        self.outputs = outputs
        return loss

    def free_outputs(self) -> None:
        """Let go of what the heads said."""
        self.outputs = {}

    def _plain(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Hidden states of the encoder as it was pretrained; no gradient can reach it."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self._settings.adapted:
                stack.enter_context(self.backbone.disable_adapter())
            hidden: torch.Tensor = self.backbone(
                input_ids=tokens, attention_mask=mask
            ).last_hidden_state
        self._restore()
        return hidden

    def _adapted(self, task: Task, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Hidden states of the encoder with the LoRA set of a task."""
        self.backbone.set_adapter(task.name)
        self._restore()
        learns = self._settings.knobs.phase != "router"
        with contextlib.nullcontext() if learns else torch.no_grad():
            hidden: torch.Tensor = self.backbone(
                input_ids=tokens, attention_mask=mask
            ).last_hidden_state
        return hidden

    def _restore(self) -> None:
        # peft lets the active set take gradients and stops the others.
        for parameter, flag in self._flags:
            parameter.requires_grad_(flag)


def _head(task: Task, width: int, vocab_size: int) -> nn.Module:
    if task.kind == "classification":
        return _ClassificationHead(width)
    if task.kind == "extraction":
        return _ExtractionHead(width)
    return _GenerationHead(width, vocab_size, task.targets)


def _lora_set(model_config: Any, task: Task) -> nn.ModuleList:
    """The matrices of adapters for each layer's query, key, value, dense and both MLP layers."""
    width, wide = model_config.hidden_size, model_config.intermediate_size
    shapes = [(width, width)] * 4 + [(width, wide), (wide, width)]
    return nn.ModuleList(
        nn.Linear(before, after, bias=False)
        for _ in range(model_config.num_hidden_layers)
        for inner, outer in shapes
        for before, after in ((inner, task.lora_rank), (task.lora_rank, outer))
    )


def _task_loss(task: Task, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy. Targets are any tokens, folded into the range of the task's classes."""
    cross_entropy = nn.functional.cross_entropy
    if task.kind == "classification":
        return cross_entropy(output, targets[:, 0] % CLASSES)
    if task.kind == "extraction":
        start, end = output.unbind(dim=-1)
        places = targets % output.shape[1]
        return (cross_entropy(start, places[:, 0]) + cross_entropy(end, places[:, 1])) / 2
    return cross_entropy(output.reshape(-1, output.shape[-1]), targets.reshape(-1))


class MultiTask:
    """Opens sessions that train several tasks on one encoder."""

    name = "multitask"

    def open(
        self, model_config: Any, configuration: Configuration, environment: Environment
    ) -> encoders.LossSession:
        """Build encoder, LoRA sets, heads, router and optimizer on the environment's device.

        Raises `InputError` for what cannot be built or trained as the configuration says.
        """
        settings = _MultiTaskSettings.of(configuration)
        encoders.require_positions(model_config, settings.step.encoder.length)
        environment.enter(Phase.LOAD, 0)
        with torch.device("meta"):
            model = _MultiTaskModel(model_config, settings)
        environment.materialize(model)
        if isinstance(environment, Machine):
            encoders.initialise_positions(model.backbone)
        for task in settings.tasks if settings.adapted else ():
            adapters = {**settings.step.adapters, "r": task.lora_rank}
            model.backbone = encoders.add_adapter(
                model.backbone, adapters, environment, name=task.name, skip_pooler=True
            )
        model.set_trained()
        model.train()
        # The variables of a function are gone when it returns, those of a loop's body are not.
        returns = settings.knobs.training_loop == "function"
        return encoders.LossSession(
            model,
            settings.step,
            environment,
            vocab_size=model_config.vocab_size,
            fields=settings.fields,
            sample_tokens=settings.step.encoder.length,
            after_backward=model.free_outputs if returns else lambda: None,
        )
