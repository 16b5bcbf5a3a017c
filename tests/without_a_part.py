"""Train with `MemoryCallback`, and a plain loop with `MemoryLog`, without a part of PyTorch.

Once for each private part, in a process of its own in which PyTorch lacks that part.

    python tests/without_a_part.py FILE PART ...    # writes a JSON line for each part to FILE
"""

import gc
import json
import os
import sys
import traceback
import warnings
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_STEPS = 3


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        features, classes = batch
        return nn.functional.cross_entropy(self.net(features), classes)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def data():
    torch.manual_seed(2)
    return TensorDataset(torch.randn(4 * NUM_STEPS, 8), torch.randint(0, 2, (4 * NUM_STEPS,)))


def fit(folder, callbacks):
    """The weights after a short training."""
    module = Module()
    trainer = L.Trainer(
        max_steps=NUM_STEPS,
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data(), batch_size=4))
    return [weight.detach().clone() for weight in module.parameters()]


def plain_loop(watched=lambda *_: nullcontext()):
    """The weights after a loop without Lightning."""
    module = Module()
    optimizer = module.configure_optimizers()
    with watched(module, optimizer):
        for batch in DataLoader(data(), batch_size=4):
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()
    return [weight.detach().clone() for weight in module.parameters()]


def loop(folder):
    """The weights after the same loop under a `MemoryLog`, and how many steps were recorded."""
    from memcallback import MemoryLog, MemoryRecorder

    recorders = []

    @contextmanager
    def watched(module, optimizer):
        recorders.append(MemoryRecorder(module.net, optimizer))
        with MemoryLog(recorders[0], log_dir=folder, warnings=False), recorders[0].watch():
            yield

    return plain_loop(watched), len(recorders[0].steps)


def hide(part):
    """Take a dotted name of PyTorch away from memcallback; say whether PyTorch still finds it.

    A name of a module is still there for PyTorch's own code, one of a class is gone for all.
    """
    owner, _, name = part.rpartition(".")
    holder = torch
    for parent in owner.split(".")[1:]:
        if not hasattr(holder, parent):
            import_module(f"{holder.__name__}.{parent}")
        holder = getattr(holder, parent)
    if not hasattr(holder, name):  # an older PyTorch
        return True
    if not isinstance(holder, ModuleType):
        delattr(holder, name)
        return False

    class Hiding(ModuleType):
        def __getattribute__(self, attribute):
            if attribute == name and sys._getframe(1).f_globals["__name__"].startswith(
                "memcallback"
            ):
                raise AttributeError(f"module {owner!r} has no attribute {name!r}")
            return super().__getattribute__(attribute)

    holder.__class__ = Hiding
    return True


def try_without(part, folder, expected):
    """What a training did in which PyTorch lacked a part."""
    if not hide(part):
        try:
            fit(folder, [])
        except Exception:
            return {"part": part, "torch_needs_it": True}
    said = {"part": part, "torch_needs_it": False}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            from memcallback import MemoryCallback
            from memcallback.report.writers import Writers

            # Pictures show what is known by then, without PyTorch, and take half of the time.
            Writers.log_image = lambda *_: None
            callback = MemoryCallback()
            trained = fit(folder, [callback])
            looped, num_looped = loop(folder)
        except BaseException:
            return said | {"failed": traceback.format_exc()[-3000:]}
    return said | {
        "is_same": same(trained, expected[0]) and same(looped, expected[1]),
        "num_recorded": [len(callback.recorder.steps), num_looped],
        "is_predicted": callback.prediction is not None
        and callback.prediction.source != "textbook estimate",
        "warnings": [
            str(one.message) for one in caught if one.category.__name__ == "MemoryWarning"
        ],
    }


def same(weights, others):
    return all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))


def import_others(folder):
    """Import what a recorded training imports of other libraries: once, and not for each part.

    Nothing of memcallback, which looks for its parts of PyTorch when it is imported.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            from memcallback import MemoryCallback

            fit(folder, [MemoryCallback()])
            loop(folder)
            names = [name for name in list(sys.modules) if name.split(".")[0] != "memcallback"]
            with open(writing, "w") as file:
                json.dump(names, file)
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as file:
        names = json.load(file)
    os.waitpid(child, 0)
    for name in names:
        # Modules that others make while they are imported cannot be imported by themselves.
        with suppress(ImportError):
            import_module(name)


def main(file, parts):
    folder = Path(file).parent
    # What both trainings do without memcallback; PyTorch has imported what it needs for them.
    expected = fit(folder, []), plain_loop()
    import_others(folder)
    # No collection in a child goes through what the imports made, which copies its pages.
    gc.collect()
    gc.freeze()
    for part in parts:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                said = try_without(part, folder, expected)
                with Path(file).open("a") as lines:
                    lines.write(json.dumps(said) + "\n")
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if status:
            print(f"{part}: the process ended with {status}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
