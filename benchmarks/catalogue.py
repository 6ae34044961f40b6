"""Write the catalogue's models from configurations of transformers and published values.

    python -m benchmarks.catalogue entries.yaml    # write tuner/space/models/configs/*.json
    python -m benchmarks.catalogue                 # build every model that is there, and compare

An entry of `entries.yaml`, by the id that it gets:

    mistral-large-123b:
      hub_id: mistralai/Mistral-Large-Instruct-2407
      aliases: [mistralai/Mistral-Large-Instruct-2411]
      published: 123e9   # parameters, as a model card, a paper or the hub's metadata has them
      source: "sizes: https://github.com/Lightning-AI/litgpt, litgpt/config.py; ..."
      config: {model_type: mistral, hidden_size: 12288, ...}   # as in the hub's config.json

Fields that `config` leaves out have the defaults of the configuration class, and `source` says so
where they are what a class documents to be those of this model. An entry is written only where the
model, built without memory, has the published number of parameters, to 2 %.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tuner.space.models.catalogue import CONFIGS, auto_class, load_catalogue, resolve_config

TOLERANCE = 0.02
"""A published number such as "8 B" is a rounded one."""

_IRRELEVANT = frozenset(
    [
        "_name_or_path",
        "auto_map",
        "quantization_config",
        "transformers_version",
        "use_cache",
        "output_hidden_states",
        "output_attentions",
        "return_dict",
        "id2label",
        "label2id",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "architectures",
        "problem_type",
        "pretraining_tp",
        "ep_size",
        "seq_aux",
        "finetuning_task",
        "_attn_implementation_autoset",
        "output_router_logits",
    ]
)
"""Fields that say nothing of the architecture."""


class MismatchError(Exception):
    """A model that is not as large as it is published to be."""


def parameters(config: Any) -> tuple[str, int]:
    """The class of the model of `config`, and its parameters, a tied head counted once."""
    import torch

    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    return type(model).__name__, sum(each.numel() for each in model.parameters())


def compact(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The `fields` of a config.json that describe the architecture."""
    return {
        name: compact(value) if isinstance(value, Mapping) else value
        for name, value in fields.items()
        if name not in _IRRELEVANT and value is not None
    }


def described(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The shortest config.json that transformers reads as it reads `fields`."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[fields["model_type"]]
    whole = cls.from_dict(dict(fields))
    short = compact(whole.to_dict() if set(fields) <= {"model_type", "architectures"} else fields)
    for name, value in fields.items():  # None has a meaning where the default is another
        if value is None and name not in _IRRELEVANT and getattr(cls(), name, None) is not None:
            short[name] = None
    again = cls.from_dict(json.loads(json.dumps(short)))
    if compact(again.to_dict()) != compact(whole.to_dict()):
        raise MismatchError("the shortened configuration is read in another way")
    return short


def entry(model_id: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of the catalogue. Raises `MismatchError` where its size is not the published."""
    from transformers import CONFIG_MAPPING

    fields = described(given["config"])
    config = CONFIG_MAPPING[fields["model_type"]].from_dict(dict(fields))
    built_as, count = parameters(config)
    published = float(given["published"])
    if abs(count / published - 1) > TOLERANCE:
        raise MismatchError(f"{count:,} parameters, and published are {published:,.0f}")
    encoder = built_as.endswith("Model")
    vision = getattr(config, "vision_config", None) is not None
    return {
        "id": model_id,
        "hub_id": given["hub_id"],
        "aliases": list(given.get("aliases", ())),
        "task": "encoder" if encoder else "image-text" if vision else "causal-lm",
        "params": count,
        "published": published,
        "source": given["source"],
        **({"notes": given["notes"]} if "notes" in given else {}),
        "config": {"architectures": given["config"].get("architectures") or [built_as], **fields},
    }


def text(fields: Mapping[str, Any]) -> str:
    """The file of an entry: one field a line, lists of values on one line."""
    lines = json.dumps(fields, indent=2, ensure_ascii=False)
    flat = re.sub(r"\[\s[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), lines)
    return flat.replace("[ ", "[").replace(" ]", "]") + "\n"


def write(given: Mapping[str, Mapping[str, Any]], folder: Path = CONFIGS) -> list[str]:
    """Write the entries, and return what is wrong with those that were not written."""
    problems = []
    for model_id, values in given.items():
        try:
            fields = entry(model_id, values)
        except Exception as error:  # noqa: BLE001 - of a library, for any reason; all are listed
            problems.append(f"{model_id}: {type(error).__name__}: {error}")
        else:
            (folder / f"{model_id}.json").write_text(text(fields), encoding="utf-8")
    return problems


def check() -> list[str]:
    """Differences between the parameters that entries state and those of the models."""
    return [
        f"{model.id}: {count:,} parameters, and {model.params:,} stated"
        for model in load_catalogue().values()
        if (count := parameters(resolve_config(model.id))[1]) != model.params
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the entries of a file, or compare all; returns 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("entries", type=Path, nargs="?", help="YAML, by id")
    file = parser.parse_args(arguments).entries
    problems = write(yaml.safe_load(file.read_text(encoding="utf-8"))) if file else check()
    print(*problems, sep="\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
