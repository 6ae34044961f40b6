import torch
from torch.utils.data import DataLoader

from mydata import TestSet, TrainSet
from mymodel import Net

grad_accum_steps = 8


def loaders():
    test_loader = DataLoader(TestSet(), batch_size=128, pin_memory=True)
    train_loader = DataLoader(TrainSet(), batch_size=16, shuffle=True, drop_last=True)
    return train_loader, test_loader


net = Net().cuda()
optim = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
train, test = loaders()
for i, (x, y) in enumerate(train):
    loss = torch.nn.functional.cross_entropy(net(x.cuda()), y.cuda()) / grad_accum_steps
    loss.backward()
    if (i + 1) % grad_accum_steps == 0:
        optim.step()
        optim.zero_grad()
