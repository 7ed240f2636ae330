"""Writes the archive that bench/exported_bench measures: tools/python.sh bench/exported_chain.py FILE.pt2 [NODES]

A chain of operators on four numbers. The tensors are so small that the cost of the calls dominates.
"""

import pathlib
import sys

import torch


class Chain(torch.nn.Module):
    def __init__(self, nodes):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.tensor([0.1, -0.2, 0.3, -0.4]))
        self.rounds = nodes // 4

    def forward(self, x):
        for _ in range(self.rounds):
            x = torch.tanh((x + self.shift) * 0.75) - self.shift
        return x


def main():
    nodes = int(sys.argv[2]) if len(sys.argv) > 2 else 500
    pathlib.Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(torch.export.export(Chain(nodes), (torch.ones(4),)), sys.argv[1])


if __name__ == "__main__":
    main()
