"""Weights are saved in each step; of earlier ones some are renamed and some removed."""

import os

import torch
from parts import Small


class Model(Small):
    def loss(self, features, classes):
        number = len(os.listdir("weights")) if os.path.isdir("weights") else 0
        os.makedirs("weights", exist_ok=True)
        torch.save(self.net.state_dict(), f"weights/{number}.pt")
        if number == 2:
            os.rename("weights/0.pt", f"weights/{number + 1}.pt")
        if number == 5:
            os.remove("weights/1.pt")
        return super().loss(features, classes)
