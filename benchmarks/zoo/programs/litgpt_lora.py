"""LitGPT's `convert_to_litgpt` and `finetune_lora`, Pythia-160M: python litgpt_lora.py MODEL."""

import shutil
import subprocess
import sys

folder = "checkpoints/pythia-160m"
shutil.copytree(sys.argv[1], folder)
litgpt = [sys.executable, "-m", "litgpt"]
subprocess.run([*litgpt, "convert_to_litgpt", folder], check=True)
said = "--precision bf16-true --train.micro_batch_size 4 --train.global_batch_size 8"
command = [*litgpt, "finetune_lora", folder, "--data", "JSON", "--data.json_path", "alpaca.json"]
command += ["--data.val_split_fraction", "0.1", "--train.max_seq_length", "512", *said.split()]
subprocess.run(command, check=True)
