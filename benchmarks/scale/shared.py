"""Many workers of Ray Tune in few processes, so that 200 of them fit on a small machine.

Each trainable is a thread of a host, and a host is an actor of Ray's with that many threads.
Everything on the driver's side is as it is with a process per worker: Ray Tune's controller and
its manager of actors, a placement group per worker, a message to a real process for each step,
and its answer through Ray. What is left out is the start of a process per worker, and that each
of them has its own connection.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ray
from ray.tune.execution import tune_controller

HOSTS = 2
THREADS = 128


class Host:
    """A process in which trainables live, each used by one thread at a time."""

    def __init__(self) -> None:
        self._trainables: dict[int, Any] = {}

    def start(self, number: int, made: type, settings: dict[str, Any]) -> None:
        """Make a trainable, as Ray's own worker would."""
        self._trainables[number] = made(**settings)

    def call(self, number: int, name: str, *arguments: Any, **more: Any) -> Any:
        """Call a method of it."""
        return getattr(self._trainables[number], name)(*arguments, **more)

    def end(self, number: int) -> None:
        """Forget it."""
        self._trainables.pop(number, None)


class Hosts:
    """Starts the hosts, and spreads workers over them."""

    def __init__(self) -> None:
        host = ray.remote(num_cpus=0, max_concurrency=THREADS)(Host)
        self._hosts = [host.remote() for _ in range(HOSTS)]
        self._made: dict[type, Any] = {}
        self.count = 0

    def add(self, made: type, settings: dict[str, Any]) -> Worker:
        """A new worker."""
        if made not in self._made:
            self._made[made] = ray.put(made)
        self.count += 1
        host = self._hosts[self.count % HOSTS]
        return Worker(host, self.count, self._made[made], settings)


class Worker:
    """Looks like the handle of an actor to Ray Tune."""

    def __init__(self, host: Any, number: int, made: Any, settings: dict[str, Any]) -> None:
        self._host, self._number = host, number
        self._made, self._settings = made, settings

    def __getattr__(self, name: str) -> Any:
        return _Method(self, name)

    def invoke(self, name: str, *arguments: Any, **more: Any) -> Any:
        """The future of a call."""
        if name == "__ray_ready__":
            return self._host.start.remote(self._number, self._made, self._settings)
        if name == "__ray_terminate__":
            return self._host.end.remote(self._number)
        return self._host.call.remote(self._number, name, *arguments, **more)


class _Method:
    def __init__(self, worker: Worker, name: str) -> None:
        self._worker, self._name = worker, name

    def remote(self, *arguments: Any, **more: Any) -> Any:
        return self._worker.invoke(self._name, *arguments, **more)


class SharedClass:
    """Looks like an actor class to Ray Tune's manager of actors."""

    __class__ = ray.actor.ActorClass  # what that asks for; nothing of it is used

    def __init__(self, hosts: Hosts, made: type) -> None:
        self._hosts, self._made = hosts, made

    def options(self, **options: Any) -> SharedClass:
        """The placement group of a worker holds its resources; the host needs none."""
        return self

    def remote(self, **settings: Any) -> Worker:
        """Start one."""
        return self._hosts.add(self._made, settings)


class SharedActorManager(tune_controller.RayActorManager):  # type: ignore[misc]
    """Ray's manager of actors, with workers that share processes."""

    def __init__(self, resource_manager: Any) -> None:
        super().__init__(resource_manager=resource_manager)
        self._hosts = Hosts()

    def add_actor(self, cls: Any, *arguments: Any, **more: Any) -> Any:
        """As Ray's, for a class that is started in a host."""
        made = cls.__ray_metadata__.modified_class
        return super().add_actor(SharedClass(self._hosts, made), *arguments, **more)


@contextlib.contextmanager
def sharing() -> Iterator[None]:
    """Ray Tune's workers share processes inside."""
    before = tune_controller.RayActorManager
    tune_controller.RayActorManager = SharedActorManager
    try:
        yield
    finally:
        tune_controller.RayActorManager = before
