"""Nothing but a module: what every program does."""

from parts import Small


class Model(Small):
    pass
