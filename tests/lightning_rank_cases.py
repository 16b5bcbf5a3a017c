"""One rank of a Lightning job on CUDA devices: what its callback predicts and measures; run by
test_lightning_ranks_cuda.py.
"""

from __future__ import annotations

import json
import os
import warnings

import torch
from rank_cases import Block, Transformer, figures, loss_of, wait_until_seen
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.utils.data import DataLoader, TensorDataset

NUM_STEPS, BATCH_SIZE, LENGTH = 6, 4, 128
STRATEGIES = ("ddp", "fsdp", "model_parallel")
#: With features of all ranks in the loss.
GATHERED = "ddp, gathered"
#: With manual optimization, whose backward pass comes before the end of DDP's forward.
MANUAL = "ddp, manual"
#: Parameters stay gathered from the forward to the backward pass.
GRADIENTS_SHARDED = "fsdp, gradients sharded"
#: Gradients are sent in half precision, by a hook that allocates in the stream of DDP's setup.
COMPRESSED = "ddp, compressed"
#: A layer of the model has no gradient, and DDP looks for those: it keeps its first buckets.
UNUSED = "ddp, unused"
#: With a module that `torch.compile` has compiled.
COMPILED = "ddp, compiled"


def run(rank, world_size, folder, name, port, validates=False, predicts=True):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODE_RANK": "0",
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

    import memcallback as mc

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Transformer()
            if name == UNUSED:
                self.unused = torch.nn.Linear(1024, 1024)
            self.automatic_optimization = name != MANUAL

        def configure_model(self):
            from torch.distributed.fsdp import fully_shard

            if name == "model_parallel":
                for part in (*self.net.blocks, self.net):
                    fully_shard(part, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, batch_idx):
            if not self.automatic_optimization:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss_of(self.net, batch))
                optimizer.step()
                return None
            if name == GATHERED:
                features = self.net(batch[0]).flatten(1)
                of_all = self.all_gather(features, sync_grads=True).flatten(0, 1)
                return (features @ of_all.T).logsumexp(1).mean()
            return loss_of(self.net, batch)

        def validation_step(self, batch, batch_idx):
            self.kept = [*getattr(self, "kept", []), self.net(batch[0])]

        def on_validation_epoch_end(self):
            self.kept.clear()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self):
            tokens = torch.zeros(NUM_STEPS * BATCH_SIZE * world_size, LENGTH, dtype=torch.int64)
            return DataLoader(TensorDataset(tokens, tokens), BATCH_SIZE)

        def val_dataloader(self):
            return self.train_dataloader() if validates else []

    class Waits(Callback):
        def on_train_batch_end(self, *args):
            torch.cuda.synchronize()
            wait_until_seen()

    strategy = {
        "ddp": DDPStrategy,
        COMPILED: DDPStrategy,
        GATHERED: DDPStrategy,
        MANUAL: DDPStrategy,
        COMPRESSED: lambda: DDPStrategy(ddp_comm_hook=bf16_compress_hook),
        UNUSED: lambda: DDPStrategy(find_unused_parameters=True),
        GRADIENTS_SHARDED: lambda: FSDPStrategy(
            auto_wrap_policy={Block}, use_orig_params=True, sharding_strategy="SHARD_GRAD_OP"
        ),
        "fsdp": lambda: FSDPStrategy(auto_wrap_policy={Block}, use_orig_params=True),
        "model_parallel": lambda: ModelParallelStrategy(
            data_parallel_size=world_size, tensor_parallel_size=1
        ),
    }[name]()
    callback = mc.MemoryCallback(predict=predicts, wait_for_prediction=name == COMPILED)
    if name == COMPILED:
        warnings.simplefilter("ignore")  # of PyTorch's compiler
    warnings.simplefilter("error", mc.MemoryWarning)
    trainer = Trainer(
        strategy=strategy, devices=world_size, accelerator="gpu", max_steps=NUM_STEPS,
        callbacks=[callback, Waits()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(torch.compile(Module()) if name == COMPILED else Module())
    if not predicts:
        return
    found = {
        "predicted": figures(callback.prediction.step),
        "measured": figures(callback.recorder.steps[-1]),
        "caveats": callback.prediction.caveats,
    }
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)
