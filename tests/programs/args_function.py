import argparse

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM


def parse_args():
    parser = argparse.ArgumentParser(description="plain fine-tuning")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--batch_size", type=int, default=8, help="per device")
    parser.add_argument("--eval_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    return parser.parse_args()


def main():
    args = parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model).cuda()
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    data = torch.load("tokens.pt").view(-1, args.seq_len)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for step, batch in enumerate(loader):
        loss = model(batch.cuda(), labels=batch.cuda()).loss
        (loss / args.gradient_accumulation_steps).backward()
        if (step + 1) % args.gradient_accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
