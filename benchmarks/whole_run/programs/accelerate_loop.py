"""A loop of its own with Accelerate, which goes on from its best state."""

import torch
from accelerate import Accelerator
from parts import EVALUATED, LORA, full_precision, llama, planted, rows, save_on_cpu, tokenizer
from peft import get_peft_model
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq

accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
collate = DataCollatorForSeq2Seq(tokenizer(), padding=True)
model = get_peft_model(llama(), LORA)
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
train = DataLoader(rows(), batch_size=2, shuffle=True, collate_fn=collate)
test = DataLoader(
    rows(EVALUATED, trains=False), batch_size=64 if planted("evaluation") else 2, collate_fn=collate
)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

losses = []
for epoch in range(2):
    model.train()
    for batch in train:
        with accelerator.accumulate(model):
            outputs = model(**batch)  # line: longest row
            accelerator.backward(outputs.loss)  # line: longest row
            optimizer.step()
            optimizer.zero_grad()
        if planted("leak"):
            losses.append(outputs.logits.detach()[:, -8:] * 2)  # line: leak
    model.eval()
    with torch.no_grad():
        for batch in test:
            model(**batch)  # line: evaluation
    accelerator.save_state("state")
    if planted("save"):
        torch.save(full_precision(accelerator.unwrap_model(model)), "epoch.pt")  # line: save

accelerator.load_state("state")
model = accelerator.unwrap_model(model)
save_on_cpu(model)
place = "cuda" if planted("resume") else "cpu"
again = torch.load("last.pt", map_location=place)  # line: resume

model = model if planted("merge") else model.cpu()
model.merge_and_unload(safe_merge=True).save_pretrained("merged")  # line: merge
print("ended")
