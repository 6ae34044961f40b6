"""Data for the files beside this one: python make_data.py writes the folder data."""

import json
from pathlib import Path

answer = " ".join(f"This is sentence {number} of the answer." for number in range(100))
rows = [{"instruction": f"Question {n}", "input": "", "output": answer} for n in range(256)]
turns = ("user", "Question"), ("assistant", answer)
chat = {"messages": [{"role": role, "content": text} for role, text in turns]}

data = Path("data")
(data / "chat").mkdir(parents=True, exist_ok=True)
for name, lines in (("alpaca.jsonl", rows), ("chat/train.jsonl", [chat] * 256)):
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (data / name).write_text(text, encoding="utf-8")
(data / "dataset_info.json").write_text(json.dumps({"alpaca": {"file_name": "alpaca.jsonl"}}))
