"""A PyG example with a made-up graph: python pyg.py NODES FEATURES EXAMPLE ..."""

import runpy
import sys

import torch
import torch_geometric.datasets
from torch_geometric.data import Data

nodes, features, example = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


class Citations:
    """In place of a download: four edges a node."""

    num_features, num_classes, num_node_features = features, 7, features

    def __init__(self, root, name, transform=None, **_):
        torch.manual_seed(0)
        half = torch.randint(0, nodes, (2, 2 * nodes))
        edges = torch.cat([half, half.flip(0)], 1)
        kinds = torch.arange(nodes) % 3
        self.data = Data(
            x=torch.rand(nodes, features),
            edge_index=edges,
            y=torch.arange(nodes) % 7,
            train_mask=kinds == 0,
            val_mask=kinds == 1,
            test_mask=kinds == 2,
        )
        if transform:
            self.data = transform(self.data)

    def __getitem__(self, i):
        return self.data


torch_geometric.datasets.Planetoid = Citations
sys.argv = sys.argv[3:]
runpy.run_path(example, run_name="__main__")
