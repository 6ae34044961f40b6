"""Fine-tunes openai-whisper's small model on 30 s of sound: python openai_whisper.py [BATCH]."""

import sys

import torch
import whisper
from whisper.model import ModelDimensions, Whisper

batch = int(sys.argv[1]) if len(sys.argv) > 1 else 8
SMALL = ModelDimensions(
    n_mels=80,
    n_audio_ctx=1500,
    n_audio_state=768,
    n_audio_head=12,
    n_audio_layer=12,
    n_vocab=51865,
    n_text_ctx=448,
    n_text_state=768,
    n_text_head=12,
    n_text_layer=12,
)
model = Whisper(SMALL).cuda()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
scaler = torch.amp.GradScaler()
for step in range(10):
    audio = torch.randn(batch, 16_000 * 30)
    mel = whisper.log_mel_spectrogram(audio.cuda())[:, :, :3000]
    tokens = torch.randint(0, 50_000, (batch, 225)).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        logits = model(mel, tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(step, loss.item())
