"""A global list of losses that is cleared only at the end of the epoch."""

from parts import Small

KEPT = []


class Model(Small):
    def loss(self, features, classes):
        loss = super().loss(features, classes)
        KEPT.append(loss.detach())
        return loss + sum(KEPT) / len(KEPT)

    def on_train_epoch_end(self):
        KEPT.clear()
