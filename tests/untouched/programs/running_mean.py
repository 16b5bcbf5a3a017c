"""A running mean of the features in a global variable."""

from parts import Small

mean = None


class Model(Small):
    def forward(self, features):
        global mean
        now = features.detach().mean(0)
        mean = now if mean is None else 0.9 * mean + 0.1 * now
        return self.net(features - mean)
