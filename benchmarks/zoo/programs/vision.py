"""A model that sees, LoRA on its language part: python vision.py MODEL [PIXELS]."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

folder = sys.argv[1]
pixels = int(sys.argv[2]) if len(sys.argv) > 2 else 448

processor = AutoProcessor.from_pretrained(folder)
model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).cuda()
model.gradient_checkpointing_enable()
model.enable_input_require_grads()
model = get_peft_model(
    model, LoraConfig(r=16, target_modules=r".*language_model.*\.(q|k|v|o)_proj")
)
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
image_token = model.config.image_token_id

for step in range(4):
    conversations = [
        [
            {
                "role": "user",
                "content": [{"type": "image"}, {"type": "text", "text": f"What is this? ({i})"}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "A colour. " * (i + step)}]},
        ]
        for i in range(2)
    ]
    images = [[Image.new("RGB", (pixels + 56 * i, pixels), (50 * i, 9, 9))] for i in range(2)]
    batch = processor(
        text=[processor.apply_chat_template(c) for c in conversations],
        images=images,
        padding=True,
        return_tensors="pt",
    ).to("cuda", dtype=torch.bfloat16)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[labels == image_token] = -100
    loss = model(**batch, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(
        f"step {step}: {(batch['input_ids'] == image_token).sum().item()} image tokens,"
        f" {(labels != -100).sum().item()} of text, loss {loss.item():.3f}"
    )
