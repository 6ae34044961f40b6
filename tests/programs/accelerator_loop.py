import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from data import collate, test_set, train_set

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
model = AutoModelForCausalLM.from_pretrained("gpt2-xl")
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

loader = DataLoader(train_set, shuffle=True, collate_fn=collate, batch_size=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
schedule = get_cosine_schedule_with_warmup(optimizer, 100, 1000)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
accelerator.print(len(DataLoader(test_set, batch_size=32)))
