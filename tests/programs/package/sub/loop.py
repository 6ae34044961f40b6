from torch.utils.data import DataLoader


def fit(data, batch, steps):
    loader = DataLoader(data, batch_size=batch, shuffle=True)
    for number, item in enumerate(loader):
        item.loss.backward()
        if (number + 1) % steps == 0:
            item.optimizer.step()
