"""The output of a command: read as it comes, passed on to a log, with its end kept."""

from __future__ import annotations

import os
import selectors
import time

_CHUNK_BYTES = 64 * 1024
_TAIL_BYTES = 16 * 1024


class Streams:
    """Several pipes that are read together; what comes is also written to the descriptor `log`."""

    def __init__(self, descriptors: tuple[int, ...], *, log: int) -> None:
        self._log = log
        self._selector = selectors.DefaultSelector()
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ)
        self._tail = b""

    @property
    def are_open(self) -> bool:
        """Whether one of them may still say something."""
        return bool(self._selector.get_map())

    @property
    def tail(self) -> str:
        """The last 16 KiB of them all."""
        return self._tail.decode(errors="replace")

    def read(self, within_s: float) -> list[tuple[int, bytes, float]]:
        """What comes within the time: descriptor, bytes, and when it was there (monotonic)."""
        if not self.are_open:
            time.sleep(within_s)
            return []
        chunks = []
        for key, _ in self._selector.select(within_s):
            data = os.read(key.fd, _CHUNK_BYTES)
            if not data:
                self._selector.unregister(key.fd)
                continue
            chunks.append((key.fd, data, time.monotonic()))
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            while data:
                data = data[os.write(self._log, data) :]
        return chunks
