"""The address of a tensor handed to C, which writes there."""

import ctypes

import torch
from parts import Small


class Model(Small):
    def loss(self, features, classes):
        noise = torch.ones(8)
        ctypes.memset(noise.data_ptr(), 0, 8)
        ctypes.memmove(noise.data_ptr() + 16, noise.data_ptr(), 8)
        return super().loss(features + noise.to(features.device), classes)
