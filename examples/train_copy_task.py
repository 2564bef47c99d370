# SPDX-License-Identifier: Apache-2.0
"""Training with qkv.torch.MQA: one layer learns to copy the token that stands three places back.

    pip install qkv[torch]
    python examples/train_copy_task.py [steps]
"""

import sys

import torch
from torch import nn

import qkv.torch

VOCABULARY, LENGTH, BACK, WIDTH = 16, 24, 3, 64


class Copier(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.attention = qkv.torch.MQA(8, WIDTH, WIDTH, 16, 16, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("visible", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def forward(self, ids):
        x = self.token(ids) + self.place.weight
        return self.head(x + self.attention(x, x, x, self.visible, need_weights=False))


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    torch.manual_seed(0)
    model = Copier()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(1, steps + 1):
        ids = torch.randint(VOCABULARY, (32, LENGTH))
        logits = model(ids)[:, BACK:]
        target = ids[:, :-BACK]
        loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), target.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == steps:
            right = (logits.argmax(-1) == target).float().mean()
            print(f"step {step:4d}  loss {loss.item():.3f}  right {right.item():.0%}")


if __name__ == "__main__":
    main()
