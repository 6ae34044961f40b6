"""A launcher of several machines starts the ranks of the first one, without waiting for others.

`torchrun --nnodes 2`, and accelerate's launcher, which is the same underneath, meet the launchers
of the other machines before they start a rank. Where one process stands for all ranks
(one_rank.py), nobody else comes: this launcher meets itself, and tells its ranks of all machines.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

from tuner.emulator.inside.later import when_imported


def launch_without_others() -> None:
    """Have PyTorch's launcher start the first machine's ranks alone, once it is imported."""
    when_imported("torch.distributed.launcher.api", _replace)


def _replace(module: ModuleType) -> None:
    api: Any = module
    launch, agent = api.launch_agent, api.LocalElasticAgent

    def launch_agent(config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.max_nodes > 1:
            api.LocalElasticAgent = _agent(agent, config.max_nodes)
            # As `torchrun --standalone`: a store of its own, on a free port.
            config = dataclasses.replace(
                config,
                min_nodes=1,
                max_nodes=1,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                rdzv_configs={k: v for k, v in config.rdzv_configs.items() if k != "rank"},
                local_addr=None,
            )
        return launch(config, *args, **kwargs)

    api.launch_agent = launch_agent


def _agent(real: Any, machines: int) -> type:
    from torch.distributed.elastic.agent.server import api

    class Agent(real):  # type: ignore[misc]
        """PyTorch's, for the first of so many machines, which all start as many ranks."""

        def _assign_worker_ranks(self, store: Any, rank: int, number: int, spec: Any) -> Any:
            for other in range(1, machines):
                role = api._RoleInstanceInfo(spec.role, other, spec.local_world_size)
                store.set(f"torchelastic/role_info/{other}", role.serialize())
            return super()._assign_worker_ranks(store, 0, machines, spec)

        def _rendezvous(self, worker_group: Any) -> None:
            super()._rendezvous(worker_group)
            worker_group.group_world_size = machines

        def _exit_barrier(self) -> None:
            """No other launcher has anything to wait for."""

    return Agent
