"""Stands for vLLM, which generates for TRL's trainers and is not emulated.

A colocated engine takes its declared share of the device's memory (`gpu_memory_utilization`), and
gives it back while it sleeps. A server's own memory is elsewhere. Completions are made up, and have
the longest length that was asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tuner.emulator.inside.failing import send

_FIRST = 32
"""Made-up tokens begin here: special ones are often the first of a vocabulary."""

_TOKENS = 64
"""Different made-up tokens."""


class Engines:
    """The engines of this process, which generate in a context of `phase`."""

    def __init__(self, phase: Callable[[], AbstractContextManager[None]]) -> None:
        self._phase = phase

    def follow(self, module: Any) -> None:
        """Stand for the engines of `trl.generation.vllm_generation`."""
        generation, engines = module.VLLMGeneration, self

        def start(of: Any) -> None:
            engines._start(of)

        def generate(of: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
            return engines._generate(of, prompts)

        generation._init_vllm, generation.generate = start, generate

    def _start(self, of: Any) -> None:
        of.llm = of.vllm_client = _Anything()
        of._llm_weights_sleeping = False  # nothing is lost while it sleeps
        of._tuner_engine = _Reserved(0)
        size = 0
        if of.mode == "colocate":
            size = int(of.gpu_memory_utilization * _device_bytes())
            with self._phase():
                of._tuner_engine = _Reserved(size)
                if of.enable_sleep_mode:
                    of._tuner_engine = _Reserved(0)
        send(
            {
                "event": "engine",
                "mode": of.mode,
                "share": of.gpu_memory_utilization,
                "bytes": size,
                "sleeps": bool(of.enable_sleep_mode),
            }
        )

    def _generate(self, of: Any, prompts: list[list[int]]) -> tuple[Any, ...]:
        with self._phase():
            if of.mode == "colocate" and of.enable_sleep_mode:
                of._tuner_engine = _Reserved(int(of.gpu_memory_utilization * _device_bytes()))
                of._tuner_engine = _Reserved(0)
        length = int((of.generation_kwargs or {}).get("max_tokens", of.max_completion_length))
        tokens = [
            [_FIRST + (row + n) % _TOKENS for n in range(length)] for row, _ in enumerate(prompts)
        ]
        chances = [[[-1.0]] * length for _ in prompts]
        return prompts, tokens, chances, [[[one] for one in row] for row in tokens]


class _Reserved:
    """Memory of an engine, in a pool of its own: no other tensor gets it."""

    def __init__(self, size: int) -> None:
        import torch

        self._block = None
        if size:
            self._pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(self._pool):
                self._block = torch.empty(size, dtype=torch.uint8, device="cuda")


class _Anything:
    """An object with every attribute, which does nothing when it is called."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __getitem__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


def _device_bytes() -> int:
    """The memory of the GPU that is asked about: a run may have a larger one."""
    import torch

    settings = json.loads(os.environ.get("TUNER_EMULATOR_SETTINGS") or "{}")
    return int(torch.cuda.mem_get_info()[1]) // int(settings.get("room", 1))
