"""A loss that keeps a tensor of each batch for the next one."""


class AgainstTheLast:
    """The output's squares, without the output of the batch before."""

    last = None

    def __call__(self, model, batch):
        output, last = model(batch), self.last
        self.last = output.detach()
        return (output if last is None else output - last).square().mean()
