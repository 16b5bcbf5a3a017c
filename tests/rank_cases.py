"""Jobs of several ranks: what is trained and how it is spread; and one rank, which predicts itself,
trains and says what it measured.
"""

from __future__ import annotations

import gc
import json
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import functional as F
from virtual_device import is_virtual

import memcallback as mc
from memcallback.cuda.convolution import workspace
from memcallback.step.pipeline import Pipeline

NUM_STEPS = 6


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        heads = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.attention_in(self.norm(x)).chunk(3, -1)
        )
        x = x + self.dropout(
            self.attention_out(
                F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
            )
        )
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Transformer(nn.Module):
    #: An uneven number of rows: the last rank has fewer.
    def __init__(self, width=256, num_blocks=3, vocabulary=5003):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _convolution(channels_in, channels_out):
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


def convolutional():
    return nn.Sequential(
        _convolution(3, 32),
        _convolution(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 1000),
    )


def synchronized(memory_format=torch.contiguous_format):
    """Its batch norms take the statistics of all ranks: of images, and of vectors."""
    *layers, last = convolutional()
    model = nn.Sequential(*layers, nn.BatchNorm1d(64), last).to(memory_format=memory_format)
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def perceptron():
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)), nn.Linear(512, 1000)
    )


def wide_block(width, kind=nn.Sequential):
    return kind(
        nn.Linear(width, 4 * width),
        nn.GELU(),
        nn.LayerNorm(4 * width),
        nn.Linear(4 * width, width),
    )


class Layer(nn.Sequential):
    """With a forward pass of its own, which PyTorch compiles in place."""

    def forward(self, x):
        return super().forward(x)


class Perceptron(nn.Module):
    """Wide layers, more than two of whose gradients do not fit into one of DDP's buckets."""

    def __init__(self, width=1024, num_blocks=6):
        super().__init__()
        self.blocks = nn.ModuleList(wide_block(width, Layer) for _ in range(num_blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def in_sequence():
    """Modules of PyTorch's own alone."""
    return nn.Sequential(*(wide_block(1024) for _ in range(6)))


def decoder():
    """A transformer whose gradients fill several of DDP's buckets."""
    return Transformer(width=512, num_blocks=6)


def blocks_compiled(make_model):
    """A function that makes a model whose blocks are compiled one by one, as for FSDP2."""

    def make():
        model = make_model()
        for block in model.blocks:
            block.compile()
        return model

    return make


def compiled_transformer():
    """Blocks that are compiled one by one, as for FSDP2."""
    return blocks_compiled(Transformer)()


class Recurrent(nn.Module):
    """Weights of few large matrices, one of them used twice."""

    def __init__(self):
        super().__init__()
        self.embedding, self.cell = nn.Embedding(20_000, 256), nn.GRUCell(256, 256)

    def forward(self, tokens):
        state = torch.zeros_like(self.embedding(tokens[:, 0]))
        for token in tokens.unbind(1):
            state = self.cell(self.embedding(token), state)
        return state @ self.embedding.weight.T


def encoder(width=256, vocabulary=5003):
    """Layers of PyTorch's own, one after the other."""
    layers = (
        nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        for _ in range(4)
    )
    return nn.Sequential(nn.Embedding(vocabulary, width), *layers, nn.Linear(width, vocabulary))


class Opt(nn.Module):
    """A language model of transformers, which makes constants as it runs."""

    def __init__(self):
        super().__init__()
        from transformers import OPTConfig, OPTForCausalLM

        self.model = OPTForCausalLM(
            OPTConfig(
                vocab_size=5003,
                hidden_size=256,
                ffn_dim=1024,
                word_embed_proj_dim=256,
                num_hidden_layers=3,
                num_attention_heads=4,
                max_position_embeddings=256,
            )
        )

    def forward(self, tokens):
        return self.model(input_ids=tokens).logits


#: Name -> how the model is made, and its batch: inputs and classes.
MODELS = {
    "transformer": (
        Transformer,
        lambda: (torch.zeros(4, 128, dtype=torch.int64), torch.zeros(4, 128, dtype=torch.int64)),
    ),
    "convolutional": (
        convolutional,
        lambda: (torch.zeros(8, 3, 64, 64), torch.zeros(8, dtype=torch.int64)),
    ),
    "perceptron": (perceptron, lambda: (torch.zeros(64, 512), torch.zeros(64, dtype=torch.int64))),
    "encoder": (
        encoder,
        lambda: (torch.zeros(4, 96, dtype=torch.int64), torch.zeros(4, 96, dtype=torch.int64)),
    ),
    "recurrent": (
        Recurrent,
        lambda: (torch.zeros(16, 12, dtype=torch.int64), torch.zeros(16, dtype=torch.int64)),
    ),
}


_OF_PYTORCH = tuple(MODELS)
MODELS["synchronized"] = synchronized, MODELS["convolutional"][1]
MODELS["synchronized, channels last"] = (
    lambda: synchronized(torch.channels_last),
    MODELS["convolutional"][1],
)
MODELS["opt"] = Opt, MODELS["transformer"][1]
MODELS["compiled transformer"] = compiled_transformer, MODELS["transformer"][1]
for _name, _make, _batch in (
    (
        "wide perceptron",
        Perceptron,
        lambda: (torch.zeros(2048, 1024), torch.zeros(2048, dtype=torch.int64)),
    ),
    (
        "decoder",
        decoder,
        lambda: (torch.zeros(8, 256, dtype=torch.int64), torch.zeros(8, 256, dtype=torch.int64)),
    ),
):
    MODELS[_name] = _make, _batch
    MODELS[f"{_name}, compiled blocks"] = blocks_compiled(_make), _batch
    MODELS[f"{_name}, compiled"] = lambda make=_make: torch.compile(make()), _batch
MODELS["wide nn.Sequential"] = in_sequence, MODELS["wide perceptron"][1]


def loss_of(model, batch):
    inputs, classes = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), classes.flatten())


def loss_of_gathered(model, batch):
    """As in contrastive learning, every rank's features are compared: 4 MiB of each, through a
    list.
    """
    features = model(batch[0])[:, :1].expand(-1, 16_384).contiguous()
    gathered = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, features.detach())
    return features.mean() + gathered[0].mean()


def loss_of_scattered(model, batch):
    """A rank's own part, 4 MiB, of a sum over the ranks, from a list."""
    features = model(batch[0])[:, :1].expand(-1, 16_384).contiguous()
    own = torch.empty_like(features)
    dist.reduce_scatter(own, [features.detach() for _ in range(dist.get_world_size())])
    return features.mean() + own.mean()


def loss_of_differentiable(model, batch):
    """Collectives that have gradients, of 4 MiB each, in a group of the loss's own."""
    from torch.distributed.nn import functional

    group = dist.new_group(backend=dist.get_backend())
    features = model(batch[0])[:, :1].expand(-1, 16_384).contiguous()
    others = functional.all_gather(features, group)
    parts = [part.contiguous() for part in features.chunk(dist.get_world_size())]
    own = functional.reduce_scatter(torch.empty_like(parts[0]), parts, group=group)
    exchanged = functional.all_to_all_single(torch.empty_like(features), features, group=group)
    shared = functional.broadcast(functional.all_reduce(features, group=group), 0, group)
    return sum(one.square().mean() for one in (torch.cat(others), own, exchanged, shared))


def tensor_parallel(model, mesh):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    for block in model.to(mesh.device_type).blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def perceptron_in_parts(model, mesh):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    pairs = {f"{2 * pair}.0": ColwiseParallel() for pair in range(4)} | {
        f"{2 * pair + 1}.0": RowwiseParallel() for pair in range(4)
    }
    parallelize_module(model.to(mesh.device_type), mesh, pairs)


def encoder_in_parts(model, mesh):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    for layer in model.to(mesh.device_type)[1:-1]:
        parallelize_module(
            layer, mesh, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
        )


def head_in_parts(model, mesh):
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(
        model.to(mesh.device_type), mesh, {"4": ColwiseParallel(output_layouts=Replicate())}
    )


def fsdp1(model, mesh):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.cuda.current_device(), use_orig_params=True
    )


class Stage(nn.Module):
    """A part of a transformer: all have blocks, the first the embedding, the last the head."""

    def __init__(self, whole, number, num_stages):
        super().__init__()
        first, end = (len(whole.blocks) * one // num_stages for one in (number, number + 1))
        self.embedding = whole.embedding if number == 0 else None
        self.blocks = nn.ModuleList(whole.blocks[first:end])
        self.head = whole.head if number == num_stages - 1 else None

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def pipeline_of_shards(model, mesh):
    """Each stage is spread over as many ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stages, shards = mesh["stages"], mesh["shards"]
    module = Stage(model, stages.get_local_rank(), stages.size())
    for block in module.blocks:
        fully_shard(block, mesh=shards)
    fully_shard(module, mesh=shards)
    device = torch.device(mesh.device_type)
    stage = PipelineStage(
        module, stages.get_local_rank(), stages.size(), device, group=stages.get_group()
    )
    return ScheduleGPipe(
        stage,
        4,
        loss_fn=lambda output, classes: F.cross_entropy(output.flatten(0, -2), classes.flatten()),
    )


def scheduled(schedule, batch):
    """What a rank calls of a pipeline's schedule."""
    inputs, classes = batch
    schedule.step(
        *([inputs] if schedule._stage.is_first else []),
        target=classes if schedule._stage.is_last else None,
    )


def adamw(parameters):
    return torch.optim.AdamW(parameters)


def adamw_one_by_one(parameters):
    """DTensors and other tensors cannot be in one call."""
    return torch.optim.AdamW(parameters, foreach=False)


def sharded_adamw(parameters):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW)


@dataclass
class Case:
    strategy: Any
    model: str = "transformer"
    loss: Any = loss_of
    options: dict = field(default_factory=dict)
    optimizer: Any = adamw
    #: Where the model is made.
    place: str = "cpu"
    mesh: dict | None = None
    precision: str = "32-true"


def _policies():
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    ), CPUOffloadPolicy()


def of_models(models=_OF_PYTORCH):
    """The usual ways to spread each model."""
    bf16, _ = _policies()
    found = {}
    for model in models:
        found[f"{model}, ddp"] = Case("ddp", model)
        found[f"{model}, ddp, gradients in buckets"] = Case(
            "ddp", model, options={"gradient_as_bucket_view": True}
        )
        found[f"{model}, fsdp2"] = Case("fsdp2", model)
        found[f"{model}, fsdp2, gathered once"] = Case(
            "fsdp2", model, options={"reshard_after_forward": False}
        )
        if (
            model != "convolutional"
        ):  # PyTorch refuses batch norm in bfloat16 with statistics in float32
            found[f"{model}, fsdp2 in bf16"] = Case("fsdp2", model, options={"mp_policy": bf16})
    return found


def of_transformer():
    """All ways to spread one model."""
    _, offload = _policies()
    return of_models(("transformer",)) | {
        "ddp, buckets of 4 MiB": Case("ddp", options={"bucket_cap_mb": 4}),
        "ddp, static graph": Case("ddp", options={"static_graph": True}),
        "ddp, unused parameters": Case("ddp", options={"find_unused_parameters": True}),
        "ddp, compressed": Case("ddp", options={"comm_hook": fp16_compress_hook}),
        "ddp, sharded optimizer": Case("ddp", optimizer=sharded_adamw),
        "fsdp2 from meta": Case("fsdp2", place="meta"),
        "fsdp2 from the device": Case("fsdp2", place="cuda"),
        "fsdp2, offloaded": Case("fsdp2", options={"offload_policy": offload}),
        "fsdp1": Case(fsdp1),
        "tensor parallel": Case(tensor_parallel, optimizer=adamw_one_by_one),
    }


def of_parts():
    """Other models with tensor parallel layers."""
    spread = {
        "perceptron": perceptron_in_parts,
        "encoder": encoder_in_parts,
        "convolutional": head_in_parts,
    }
    return {
        f"{model}, tensor parallel": Case(function, model, optimizer=adamw_one_by_one)
        for model, function in spread.items()
    }


def of_lists():
    """Collectives in the loss; over lists of tensors they go through one flat buffer."""
    return {
        "ddp, differentiable collectives": Case("ddp", "perceptron", loss_of_differentiable),
        "ddp, features gathered": Case("ddp", "perceptron", loss_of_gathered),
        "ddp, features scattered": Case("ddp", "perceptron", loss_of_scattered),
    }


def of_norms():
    """Batch norms of all ranks."""
    return {
        "ddp, synchronized": Case("ddp", "synchronized"),
        "ddp, synchronized, channels last": Case("ddp", "synchronized, channels last"),
        "ddp, synchronized, bf16": Case(
            "ddp", "synchronized, channels last", precision="bf16-mixed"
        ),
    }


def of_libraries():
    """Models of transformers, whose layers are those that have parameters of their own."""
    return {
        "opt, fsdp2": Case("fsdp2", "opt"),
        "opt, fsdp2 from meta": Case("fsdp2", "opt", place="meta"),
        "opt, ddp": Case("ddp", "opt"),
    }


def of_compiled():
    """Compiled blocks. A process that compiles them allocates more than one that finds its code."""
    return {
        f"compiled transformer, {strategy}": Case(strategy, "compiled transformer")
        for strategy in ("ddp", "fsdp2")
    }


def of_compiled_whole():
    """Compiled models and wrappers, whose graphs end where buckets of gradients do."""
    compiled, bf16 = {"compile": torch.compile}, "bf16-mixed"
    policy, _ = _policies()
    found = {}
    for model in ("wide perceptron", "decoder"):
        blocks, whole = f"{model}, compiled blocks", f"{model}, compiled"
        found[f"{blocks}, ddp"] = Case("ddp", blocks)
        found[f"{blocks}, ddp, bf16"] = Case("ddp", blocks, precision=bf16)
        found[f"{blocks}, fsdp2"] = Case("fsdp2", blocks)
        found[f"{model}, not compiled, fsdp2"] = Case("fsdp2", model)
        found[f"{model}, not compiled, fsdp2 in bf16"] = Case(
            "fsdp2", model, options={"mp_policy": policy}
        )
        found[f"{blocks}, fsdp2 in bf16"] = Case("fsdp2", blocks, options={"mp_policy": policy})
        found[f"{model}, DDP(torch.compile(model))"] = Case("ddp", whole)
        found[f"{model}, DDP(torch.compile(model)), bf16"] = Case("ddp", whole, precision=bf16)
        found[f"{model}, torch.compile(DDP(model))"] = Case("ddp", model, options=compiled)
        found[f"{model}, torch.compile(DDP(model)), bf16"] = Case(
            "ddp", model, options=compiled, precision=bf16
        )
    name = "wide nn.Sequential"
    found[f"{name}, torch.compile(DDP(model))"] = Case("ddp", name, options=compiled)
    return found


def of_pipelines(world_size):
    """Models in stages, one or two of them on each rank; each stage has parameters."""

    def case(model, **options):
        return Case(
            "pipeline",
            model,
            options={
                "n_microbatches": 4,
                **({"split": Stage} if model == "transformer" else {}),
                **options,
            },
        )

    found = {}
    for model in (
        "transformer",
        *(["convolutional"] if world_size == 2 else []),
        "perceptron",
        "encoder",
    ):
        found[f"{model}, pipeline 1F1B"] = case(model)
        found[f"{model}, pipeline GPipe"] = case(model, schedule="GPipe")
    for schedule in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"):
        found[f"perceptron, pipeline {schedule}"] = case("perceptron", schedule=schedule)
    return found | {
        "transformer, pipeline, outputs apart": case(
            "transformer", n_microbatches=8, return_outputs=False
        )
    }


def of_mesh():
    """Over a mesh of two dimensions, of four ranks."""
    return {
        "hsdp": Case("fsdp2", mesh={"replicate": 2, "shard": 2}),
        "pipeline of shards": Case(
            pipeline_of_shards, mesh={"stages": 2, "shards": 2}, loss=scheduled
        ),
    }


def cases(world_size):
    """All ways to spread a model."""
    return (
        of_models()
        | of_transformer()
        | of_parts()
        | of_pipelines(world_size)
        | (of_mesh() if world_size == 4 else {})
    )


def figures(step):
    return [
        {
            "label": window.label,
            "allocated": window.peak_allocated_bytes,
            "reserved": window.peak_reserved_bytes,
            "start": window.start.allocated_bytes,
        }
        for window in step.windows
    ]


def wait_until_seen():
    """Until the watchdog of NCCL's process group has seen the end of all collectives, as it has in
    steps that take longer than 0.1 s.
    """
    from torch._C import _distributed_c10d

    while True:
        status = json.loads(_distributed_c10d._dump_nccl_trace_json(includeCollectives=False))[
            "pg_status"
        ].values()
        if all(
            group["last_completed_collective"] == group["last_enqueued_collective"]
            for group in status
        ):
            return
        time.sleep(0.005)  # the watchdog looks every 0.1 s; meanwhile other processes have the core


def autocast(case):
    return torch.autocast("cuda", torch.bfloat16, enabled=case.precision == "bf16-mixed")


def train(case, ranks, device_type, predicts=True):
    """What a rank predicts for itself, and what it then measures: figures of the steady step."""
    make_model, make_batch = MODELS[case.model]
    torch.manual_seed(0)
    with torch.device(case.place):
        model = make_model()
    on_host = make_batch()
    step = mc.TrainingStep(
        model,
        on_host,
        loss=case.loss,
        optimizer=case.optimizer,
        ranks=ranks,
        precision=case.precision,
    )
    predicted = mc.predict(step) if predicts else None
    model = ranks.parallelize(model, device_type)
    optimizer = case.optimizer(model.parameters())
    is_pipeline = isinstance(model, Pipeline)
    recorder = mc.MemoryRecorder(
        [*model.stages] if is_pipeline else model, optimizer, device=device_type
    )
    num_parts = model.num_microbatches if is_pipeline else 1
    with recorder.watch() if is_pipeline else nullcontext():
        for _ in range(NUM_STEPS):
            batch = tuple(torch.cat([tensor] * num_parts).to(device_type) for tensor in on_host)
            with recorder.step(batch):
                optimizer.zero_grad()
                if is_pipeline:
                    model.step(case.loss, batch)
                else:
                    with recorder.phase(mc.Phase.FORWARD), autocast(case):
                        loss = case.loss(model, batch)
                    with recorder.phase(mc.Phase.BACKWARD):
                        loss.backward()
                    del loss
                with nullcontext() if is_pipeline else recorder.phase(mc.Phase.OPTIMIZER_STEP):
                    optimizer.step()
            del batch
            torch.cuda.synchronize()
            # Of a pipeline's sends and receives, which are all waited for, it does not tell.
            if not is_pipeline:
                wait_until_seen()
    return {
        "predicted": predicted and figures(predicted.step),
        "measured": figures(recorder.steps[-1]),
        "caveats": predicted and predicted.caveats,
    }


def run(rank, world_size, folder, names, predicts=True):
    """One rank: all cases of those names, one after the other, predicted or trained alone."""
    if is_virtual():  # as `as_a_virtual_device` in conftest.py
        workspace.workspace_on_device_bytes = lambda *plan: plan[-1]
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    every, found = cases(world_size) | of_lists() | of_norms() | of_libraries(), {}
    every |= of_compiled() | of_compiled_whole()
    for name in names:
        case = every[name]
        # The process group holds what the case before left to its last collective until another one
        # begins.
        dist.all_reduce(torch.zeros(1, device="cuda"))
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.compiler.reset()
        ranks = mc.Ranks(world_size, case.strategy, rank=rank, mesh=case.mesh, **case.options)
        found[name] = train(case, ranks, "cuda", predicts)
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()
