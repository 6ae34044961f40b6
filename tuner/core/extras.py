"""What `tuner` needs only where it predicts, emulates or searches: the extra `tuner[all]`.

Results, GPU types, models and spaces are read without it.
"""

from __future__ import annotations

from tuner.core.errors import UnavailableError

MODULES = {
    "bitsandbytes": "bitsandbytes",
    "optuna": "optuna",
    "peft": "peft",
    "ray": "ray",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "threadpoolctl": "threadpoolctl",
    "tokenizers": "transformers",
    "torch": "torch",
    "transformers": "transformers",
}
"""The package of the extra that brings each module."""


def missing_extra(error: ModuleNotFoundError) -> UnavailableError | None:
    """The answer to people where a module of the extra is missing; None for any other module."""
    package = MODULES.get((error.name or "").partition(".")[0])
    if package is None:
        return None
    return UnavailableError(
        f"this needs {package}, which is not installed: tuner predicts by tracing the training "
        "step of the real libraries, and searches with Ray",
        hint="pip install 'tuner[all]'; reading results (`tuner best`, `show`, `gpus`, `models`) "
        "needs nothing more",
    )
