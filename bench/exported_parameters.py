"""Writes an archive for bench/growth: tools/python.sh bench/exported_parameters.py FILE.pt2 [NUMBER]

The model has NUMBER parameters of 16 elements, 4,000 if none is given, and one operator for each.
"""

import pathlib
import sys

import torch


class Many(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.full((16,), 0.5) for _ in range(number))

    def forward(self, x):
        for weight in self.weights:
            x = x + weight
        return x


def main():
    number = int(sys.argv[2]) if len(sys.argv) > 2 else 4000
    pathlib.Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(torch.export.export(Many(number), (torch.ones(16),)), sys.argv[1])


if __name__ == "__main__":
    main()
