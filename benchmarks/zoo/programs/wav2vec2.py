"""Trains torchaudio's wav2vec2 base with CTC on 10 s of speech: python wav2vec.py [BATCH]."""

import sys

import torch
import torchaudio

batch = int(sys.argv[1]) if len(sys.argv) > 1 else 8
model = torchaudio.models.wav2vec2_base(aux_num_out=32).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
loss_of = torch.nn.CTCLoss(zero_infinity=True)
for step in range(10):
    waves = torch.randn(batch, 160_000).cuda()
    lengths = torch.full((batch,), 160_000).cuda()
    targets = torch.randint(1, 32, (batch, 120)).cuda()
    emissions, frames = model(waves, lengths)
    scores = emissions.log_softmax(-1).transpose(0, 1)
    loss = loss_of(scores, targets, frames, torch.full((batch,), 120).cuda())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(step, loss.item())
