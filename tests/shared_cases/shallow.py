"""Models of the catalogue with few layers."""

import copy
import json
from pathlib import Path
from typing import Any

from tuner.space.models.catalogue import get_entry

LAYERS = 3
"""One of each kind and one between."""


def shallow(model: str, folder: Path) -> str:
    """Write the model's configuration with `LAYERS` layers of each part into `folder`."""
    entry = get_entry(model)
    assert entry is not None, model
    config: dict[str, Any] = copy.deepcopy(dict(entry.config))
    for part in (config, config.get("text_config"), config.get("vision_config")):
        for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"):
            if part and name in part:
                part[name] = min(LAYERS, int(part[name]))
        if part and isinstance(part.get("layer_types"), list):
            part["layer_types"] = part["layer_types"][:LAYERS]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)
