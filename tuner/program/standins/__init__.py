"""Runs a program with stand-ins for its heavy libraries, and records what reaches `train()`.

The process of one reading: `python -P -m tuner.program.standins`, with a request on its input. The
record is one JSON document of

- `trainings`: T = {trainer: O, arguments: O, model: M or V, reference, lora, compiled, evaluates,
  loader: V, calls: [O] on the model, its parts, the trainer and tokenizers}
- `loops`: L = {where: W, batch: V of the loader, backwards, steps, rounds: backward passes before
  each step, is_split, model: M or V, accelerator: O}
- `asked`: questions that an oracle answered, {what, where: W}; `ended`: {kind, text, where} or null
- `files`, `standins`, `absent` libraries, and `dropped`: what did not happen, {what, where}

O = {class, bases, where: W, given: {name: V}, assigned: {name: [V, W]}, values: {name: V}}, with
`methods` that your own class has; M = O with made, prepared, enabled, quantization.
V = JSON, {"$unknown": what, "where": [W]}, {"$object": O} or {"$name": "torch.bfloat16"}.
W = {file, line, end, column, end_column} of your own call.
"""

import json
import os

with open(os.path.join(os.path.dirname(__file__), "names.json"), encoding="utf-8") as _file:
    NAMES = {kind: " ".join(lines).split() for kind, lines in json.load(_file).items()}
"""Names of libraries, and names in them, by what is made of them."""

PLACEHOLDER = "placeholder-for-a-secret"
"""Takes the place of tokens and passwords in the environment of the program."""

MARK = "<unknown:"
"""Begins the text of a value that is unknown."""

NOT_INSTALLED = ", which is not installed here"
"""Ends what a call of a library did not do."""
