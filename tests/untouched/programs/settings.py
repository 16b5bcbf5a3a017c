"""The step changes settings of PyTorch, of the process and of Python by and by."""

import os
import sys
import warnings

import torch
from parts import Small

NUM_STEPS = []


class Model(Small):
    def loss(self, features, classes):
        NUM_STEPS.append(1)
        os.environ["STEPS"] = str(len(NUM_STEPS))
        torch.set_num_threads(1 + len(NUM_STEPS) % 2)
        torch.manual_seed(len(NUM_STEPS))
        sys.setrecursionlimit(2000 + len(NUM_STEPS))
        warnings.filterwarnings("ignore", message=f"of step {len(NUM_STEPS)}")
        os.makedirs(f"step{len(NUM_STEPS)}")
        os.chdir(f"step{len(NUM_STEPS)}")
        os.chdir("..")
        return super().loss(features + torch.rand(8).to(features.device), classes)
