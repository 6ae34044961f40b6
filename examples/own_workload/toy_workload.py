"""A workload of one's own: everything that a trial needs of it."""

from __future__ import annotations

import torch
from torch import nn

from tuner.core.records import Configuration, Phase
from tuner.predict.training import Counts, Environment

FEATURES = 64


class Toy:
    """Regression with a small network; `open` is all that a workload has to have."""

    name = "toy"

    def open(self, model_config, configuration: Configuration, environment: Environment):
        return ToySession(configuration, environment)


class ToySession:
    def __init__(self, configuration: Configuration, environment: Environment) -> None:
        environment.enter(Phase.LOAD, 0)
        self.environment, self.device = environment, environment.device
        self.micro_batch = configuration["micro_batch"]
        width = configuration["width"]
        self.model = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, 1)).to(
            self.device
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.total_params = sum(p.numel() for p in self.model.parameters())
        self.trainable_params = self.total_params
        self.counts = Counts(model_flops=None)  # the FLOPs of this model are not known
        self.loss = None

    def optimizer_step(self, micro_steps: int) -> None:
        for micro_step in range(micro_steps):
            self.micro_step(micro_step)
        self.environment.enter(Phase.OPTIMIZER, micro_steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def micro_step(self, micro_step: int) -> None:
        self.environment.enter(Phase.FORWARD, micro_step)
        inputs = torch.randn(self.micro_batch, FEATURES, device=self.device)
        loss = (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        self.environment.enter(Phase.BACKWARD, micro_step)
        loss.backward()
        self.loss = loss.detach()
        self.counts.samples += self.micro_batch

    def close(self) -> None:
        """Nothing runs beside this session: a data loader's processes would end here."""
