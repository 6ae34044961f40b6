"""Fine-tunes a detector of torchvision as its tutorial does: python detection.py MODEL [BATCH]."""

import sys

import torch
import torchvision

name = sys.argv[1]
batch = int(sys.argv[2]) if len(sys.argv) > 2 else 2
torch.manual_seed(0)
model = torchvision.models.get_model(
    name, weights=None, weights_backbone=None, num_classes=91
).cuda()
optimizer = torch.optim.SGD(
    [p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9, weight_decay=1e-4
)
model.train()
for step in range(10):
    images = [torch.rand(3, 480, 640).cuda() for _ in range(batch)]
    corner = torch.rand(7, 2) * 300
    boxes = torch.cat([corner, corner + 100], 1)
    targets = [
        {
            "boxes": boxes.cuda(),
            "labels": torch.randint(1, 91, (7,)).cuda(),
            "masks": torch.ones(7, 480, 640, dtype=torch.uint8).cuda(),
        }
        for _ in range(batch)
    ]
    losses = model(images, targets)
    loss = sum(losses.values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
