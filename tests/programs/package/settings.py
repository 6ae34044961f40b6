import os
from dataclasses import dataclass

MICRO = 8
LENGTH = int(os.environ.get("LENGTH", "512"))


@dataclass
class Hyper:
    accumulation: int = 4
    checkpoint: bool = False
