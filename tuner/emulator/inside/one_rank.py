"""One process stands for all ranks of a training: it runs as rank 0, and the others are not there.

The other ranks are taken to have what this one has and to do what it does. The stand-in for NCCL
answers for them (device/nccl.c); here is what PyTorch would wait for besides: its store, gloo, and
communicators that are split off. What rank 0 cannot know by itself, as what another rank alone
sends, is an error that names `--all-ranks`.

Ranks that a launcher starts end at once (path/sitecustomize.py), others where they join theirs.
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

from tuner.emulator.inside.process import when_imported

STANDS_FOR: dict[str, int] = {}
"""How many ranks this process stands for: "ranks", once it has joined a group of them."""

# A key of the store that only another rank would write: an error after so long, not half an hour.
WAIT = timedelta(seconds=60)


def stand_for_all_ranks() -> None:
    """Have PyTorch's process groups begin, and go on, without the other ranks."""
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
    """In every module that has it by its name; `import torch` has loaded those that matter."""
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
        """PyTorch's, whose server does not wait for the other ranks to come."""

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
        """A communicator of its own: one that is split off learns its ranks from the others."""
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
        """PyTorch's fake group: gathers give what this rank has, and nobody is connected to."""

        def __new__(cls, store: Any, rank: int, size: int, *_: Any, **__: Any) -> Any:
            """A group of so many ranks."""
            return fake._create_internal(rank, size, fake.Options())

    return ProcessGroupGloo


def launch_without_others() -> None:
    """Have PyTorch's launcher start the first machine's ranks alone, once it is imported."""
    when_imported("torch.distributed.launcher.api", _replace_launcher)


def _replace_launcher(module: ModuleType) -> None:
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
