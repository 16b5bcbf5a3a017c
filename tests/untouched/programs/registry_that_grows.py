"""A global registry of auxiliary losses that is cleared at the end of the epoch alone."""

from parts import Small

REGISTRY = []


class Model(Small):
    def loss(self, features, classes):
        loss = super().loss(features, classes)
        REGISTRY.append(loss.detach())
        return loss + sum(REGISTRY) / len(REGISTRY)

    def on_train_epoch_end(self):
        REGISTRY.clear()
