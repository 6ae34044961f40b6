"""Unsloth's vision recipe: python unsloth_vision.py MODEL [PIXELS]."""

import sys

from unsloth import FastVisionModel  # isort: skip - it has to come before what it replaces
from unsloth.trainer import UnslothVisionDataCollator  # isort: skip

from PIL import Image
from trl import SFTConfig, SFTTrainer

folder = sys.argv[1]
pixels = int(sys.argv[2]) if len(sys.argv) > 2 else 448

model, processor = FastVisionModel.from_pretrained(
    folder, load_in_4bit=False, use_gradient_checkpointing="unsloth"
)
model = FastVisionModel.get_peft_model(
    model, finetune_vision_layers=True, finetune_language_layers=True, r=16, lora_alpha=16
)
image = Image.new("RGB", (pixels, pixels))
rows = [
    {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Write the formula."},
                    {"type": "image", "image": image},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": f"x = {i} " * 20}]},
        ]
    }
    for i in range(32)
]
FastVisionModel.for_training(model)
trainer = SFTTrainer(
    model=model,
    processing_class=processor.tokenizer,
    data_collator=UnslothVisionDataCollator(model, processor),
    train_dataset=rows,
    args=SFTConfig(
        output_dir="out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        logging_steps=1,
        max_steps=4,
        optim="adamw_8bit",
        report_to="none",
        save_strategy="no",
        remove_unused_columns=False,
        dataset_text_field="",
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=2048,
    ),
)
trainer.train()
