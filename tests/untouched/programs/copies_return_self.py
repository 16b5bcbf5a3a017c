"""A module whose `__deepcopy__` returns the module itself."""

from parts import Small


class Model(Small):
    def __deepcopy__(self, memo):
        return self
