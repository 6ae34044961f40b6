"""A contract for the user's own workloads, as tests to inherit.

    class TestMine(WorkloadContract):
        workload = "my_package.training:Mine"
        configuration = {"micro_batch": 2, "grad_accum": 2}

pytest then runs the methods below on the processor; use a tiny model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from tuner.core.records import Configuration, Phase, Status
from tuner.predict.training import get_workload
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import resolve_config
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.device import RealEnvironment
from tuner.trial.isolated import IsolatedRunner

_STEPS = 2


class WorkloadContract:
    """Tests of everything a trial relies on. A subclass sets `workload` and `configuration`."""

    workload: ClassVar[str]
    """"package.module:object", as in a space."""
    configuration: ClassVar[Mapping[str, Any]]
    """A value for each name that the workload reads, small ones."""
    model: ClassVar[str | None] = None
    """A model of `tuner models`, or a path, where the workload takes one."""

    def test_session_has_what_it_says(self) -> None:
        """`trainable_params` and `total_params` are those of the model."""
        session, _ = self._opened()
        parameters = list(session.model.parameters())
        assert session.total_params == sum(p.numel() for p in parameters)
        trained = [p for p in parameters if p.requires_grad]
        assert session.trainable_params == sum(p.numel() for p in trained) > 0
        session.close()

    def test_optimizer_has_exactly_what_is_trained(self) -> None:
        """The optimizer's parameters are those of the model that require a gradient."""
        session, _ = self._opened()
        groups = session.optimizer.param_groups
        held = {id(p) for group in groups for p in group["params"]}
        trained = {id(p) for p in session.model.parameters() if p.requires_grad}
        assert held == trained
        session.close()

    def test_a_step_changes_what_is_trained_and_nothing_else(self) -> None:
        """Some trained value moves, and no frozen one does."""
        session, _ = self._opened()
        before = [(p, p.detach().clone()) for p in session.model.parameters()]
        for _ in range(_STEPS):
            session.optimizer_step(self._micro_steps)
        changed = [p for p, old in before if not bool((p.detach() == old).all())]
        assert changed, "no parameter has changed: is there an optimizer step?"
        assert all(p.requires_grad for p in changed), "a frozen parameter has changed"
        session.close()

    def test_gradients_are_gone_after_a_step(self) -> None:
        """Remaining gradients would add to those of the next step, and take memory."""
        session, _ = self._opened()
        session.optimizer_step(self._micro_steps)
        left = [p for p in session.model.parameters() if p.grad is not None and bool(p.grad.any())]
        assert not left, "call optimizer.zero_grad() at the end of a step"
        session.close()

    def test_loss_is_a_finite_number(self) -> None:
        """`loss` is that of the last micro-step."""
        session, _ = self._opened()
        session.optimizer_step(self._micro_steps)
        assert math.isfinite(float(session.loss))
        session.close()

    def test_samples_are_counted(self) -> None:
        """`counts.samples` grows by as much in each step, and so do tokens if there are any."""
        session, _ = self._opened()
        seen = []
        for _ in range(_STEPS):
            session.optimizer_step(self._micro_steps)
            seen.append(session.counts.samples)
        assert seen[0] > 0, "counts.samples stays 0: nothing could be said of the speed"
        assert seen == [seen[0] * (step + 1) for step in range(_STEPS)]
        session.close()

    def test_phases_are_announced(self) -> None:
        """Each phase is entered in its order, so that memory is known by phase."""
        session, phases = self._opened()
        session.optimizer_step(1)
        expected = [Phase.LOAD, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
        assert phases == expected, "call environment.enter(phase, micro_step) where each begins"
        session.close()

    def test_runs_as_a_trial(self) -> None:
        """A trial in its own process measures it."""
        # The GPU type has no meaning on the processor, but for its name.
        job = TrialJob(self.workload, self.model, get_gpu("a6000"))
        with IsolatedRunner(job, MeasureOptions(device="cpu", budget_s=0.2)) as runner:
            outcome = runner.run(Configuration(self.configuration))
        assert outcome.status is Status.OK, outcome.message
        assert outcome.measurement is not None
        assert outcome.measurement.speed.samples_per_s > 0

    @property
    def _micro_steps(self) -> int:
        return int(self.configuration.get("grad_accum", 1))

    def _opened(self) -> tuple[Any, list[Phase]]:
        """A session on the processor, and the phases that it has entered so far."""
        import torch

        torch.manual_seed(0)
        phases: list[Phase] = []
        environment = RealEnvironment("cpu", on_phase=phases.append)
        config = None if self.model is None else resolve_config(self.model)
        workload = get_workload(self.workload)
        session = workload.open(config, Configuration(self.configuration), environment)
        return session, phases
