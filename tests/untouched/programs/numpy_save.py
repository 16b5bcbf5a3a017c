"""`np.save` of the outputs, and a line of text for each step."""

import numpy as np
from parts import Small


class Model(Small):
    def loss(self, features, classes):
        output = self(features)
        np.save("outputs.npy", output.detach().cpu().numpy())
        with open("log.txt", "a") as file:
            file.write(f"{tuple(output.shape)}\n")
        return super().loss(features, classes)
