"""Lets one process stand for all ranks of a training: only rank 0 runs.

The other ranks are assumed to have the same data and to do the same as rank 0. The stand-in for
NCCL answers for them (device/nccl.c). This module replaces the other parts of PyTorch that wait for
them: its store, gloo, and communicators that are split off. If rank 0 needs data that it cannot
know, such as a message from another rank alone, an error suggests `--all-ranks`.

Other ranks that a launcher starts end at once (path/sitecustomize.py); other ranks that the program
starts end when they join their group.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

from tuner.emulator.inside.process import replaces, when_imported

STANDS_FOR: dict[str, int] = {}
"""The number of ranks that this process stands for, as "ranks", once it has joined a group."""

# Waiting for a store key that only another rank would write fails after this, not half an hour.
WAIT = timedelta(seconds=60)


def stand_for_all_ranks() -> None:
    """Have PyTorch's process groups start and work without the other ranks."""
    from torch.distributed import distributed_c10d as c10d

    if not hasattr(c10d, "init_process_group"):  # a PyTorch that was built without it
        return
    _replace(c10d.init_process_group, _joining(c10d))
    _replace(c10d.split_group, _splitting(c10d))
    # The module: torch.distributed has a function of this name. Launchers keep their own store.
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
    rendezvous.TCPStore = _store(rendezvous.TCPStore)
    c10d._store_based_barrier = lambda *_, **__: None
    c10d._get_split_source = lambda _: None  # type: ignore[assignment]
    if c10d.is_gloo_available():
        _replace(c10d.ProcessGroupGloo, _gloo())


def _replace(original: Any, ours: Any) -> None:
    """Replace `original` in every loaded module of torch.distributed that has it by its name."""
    own_name = original.__name__
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed") and vars(module).get(own_name) is original:
            setattr(module, own_name, ours)


def _joining(c10d: Any) -> Any:
    join = c10d.init_process_group
    signature = inspect.signature(join)

    @functools.wraps(join)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        rank = given.get("rank", -1)
        if int(os.environ.get("RANK", "0")) if rank is None or rank < 0 else rank:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        join(*args, **kwargs)
        c10d._get_default_store().set_timeout(WAIT)
        STANDS_FOR["ranks"] = c10d.get_world_size()

    return init_process_group


def _store(real: Any) -> type:
    class TCPStore(real):  # type: ignore[misc]
        """PyTorch's store, with a server that does not wait for the other ranks."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            waits = 5  # the place of wait_for_workers
            if len(args) > waits:
                args = (*args[:waits], False, *args[waits + 1 :])
            else:
                kwargs["wait_for_workers"] = False
            super().__init__(*args, **kwargs)

    return TCPStore


def _splitting(c10d: Any) -> Any:
    split = c10d.split_group

    @functools.wraps(split)
    def split_group(
        parent_pg: Any = None,
        split_ranks: Any = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        **_: Any,
    ) -> Any:
        """Create a new communicator, since a split one would learn its ranks from the others."""
        parent = c10d.get_process_group_ranks(parent_pg)
        groups = [[parent[rank] for rank in ranks] for ranks in split_ranks or []]
        mine = next((ranks for ranks in groups if c10d.get_rank() in ranks), None)
        if mine is None:
            return None
        return c10d.new_group(mine, timeout=timeout, pg_options=pg_options, group_desc=group_desc)

    return split_group


def _gloo() -> type:
    from torch._C import _distributed_c10d

    fake: Any = _distributed_c10d.FakeProcessGroup
    # PyTorch numbers the collectives of a gloo group, which the fake one refuses.
    fake._set_sequence_number_for_group = lambda _: None

    class _IsFake(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, fake)

    class ProcessGroupGloo(metaclass=_IsFake):
        """PyTorch's fake group: gathers return this rank's data, without any connection."""

        def __new__(cls, store: Any, rank: int, size: int, *_: Any, **__: Any) -> Any:
            """A fake group of `size` ranks."""
            return fake._create_internal(rank, size, fake.Options())

    return ProcessGroupGloo


def launch_without_others() -> None:
    """Have PyTorch's launcher, once imported, start only the first machine's ranks."""
    when_imported("torch.distributed.launcher.api", _replace_launcher)


def _replace_launcher(module: ModuleType) -> None:
    api: Any = module
    agent = api.LocalElasticAgent

    @replaces(api, "launch_agent")
    def launch_agent(launch: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.max_nodes > 1:
            api.LocalElasticAgent = _agent(agent, config.max_nodes)
            # As in `torchrun --standalone`: its own store, on a free port.
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


def _agent(real: Any, machines: int) -> type:
    from torch.distributed.elastic.agent.server import api

    class Agent(real):  # type: ignore[misc]
        """PyTorch's agent on the first of `machines` machines with the same number of ranks."""

        def _assign_worker_ranks(self, store: Any, rank: int, number: int, spec: Any) -> Any:
            for other in range(1, machines):
                role = api._RoleInstanceInfo(spec.role, other, spec.local_world_size)
                store.set(f"torchelastic/role_info/{other}", role.serialize())
            return super()._assign_worker_ranks(store, 0, machines, spec)

        def _rendezvous(self, worker_group: Any) -> None:
            super()._rendezvous(worker_group)
            worker_group.group_world_size = machines

        def _exit_barrier(self) -> None:
            """Return at once: there are no other launchers to wait for."""

    return Agent
