"""Trains torchvision's DeepLabV3 on crops of 480: python segmentation.py [BATCH]."""

import sys

import torch
import torchvision

batch = int(sys.argv[1]) if len(sys.argv) > 1 else 8
model = torchvision.models.segmentation.deeplabv3_resnet50(
    weights=None, weights_backbone=None, num_classes=21, aux_loss=True
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
for step in range(10):
    images = torch.randn(batch, 3, 480, 480).cuda()
    target = torch.randint(0, 21, (batch, 480, 480)).cuda()
    output = model(images)
    loss = torch.nn.functional.cross_entropy(output["out"], target, ignore_index=255)
    loss = loss + 0.5 * torch.nn.functional.cross_entropy(output["aux"], target, ignore_index=255)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
