"""Jobs of several processes on CPUs, small and quick; what each rank saw of them is what `run`
gives. Used by test_ranks_exchanged.py.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memcallback as mc

#: Imports once for all jobs, what is imported on first use too.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.utils.tensorboard",
        "matplotlib.pyplot",
        "memcallback.record.memory_log",
        "memcallback.savings.what_if",
    ]
)
#: A job that hangs is ended after that long, and has failed.
_LONGEST_S = 60


@dataclass(frozen=True)
class Job:
    """What the ranks do; of what is given by rank, what is not named is the default.

    Attributes:
        num_ranks: How many there are.
        num_steps: Of each rank.
        logging: The ranks with a log.
        intervals: By rank the updates from point to point.
        capacities: By rank what the log plans for.
        batch_sizes: By rank.
        strike: Who is struck in the third step, in which phase, and by what: `kill`, `oom` or `stop
            the store`.
        group: The ranks over which the model is replicated; others train alone.
        store: `tcp`, kept by rank zero; `file`; or `elsewhere`, kept by a process that is no rank.
        trainings: How many there are, one after the other.
        is_sharded: Whether the model is sharded over all ranks, and not replicated.
        predicts: Whether the logs predict the step.
    """

    num_ranks: int = 2
    num_steps: int = 6
    logging: tuple[int, ...] = (0, 1, 2)
    intervals: dict[int, int] = field(default_factory=dict)
    capacities: dict[int, str] = field(default_factory=dict)
    batch_sizes: dict[int, int] = field(default_factory=dict)
    strike: tuple[int, str, str] | None = None
    group: tuple[int, ...] | None = None
    store: str = "tcp"
    trainings: int = 1
    is_sharded: bool = False
    predicts: bool = False


class Stricken(nn.Module):
    """Passes its input on; a strike hits in the forward or the backward pass."""

    def __init__(self):
        super().__init__()
        self.strikes = {}

    def forward(self, features):
        self.hit("forward")
        if features.requires_grad:
            features.register_hook(lambda gradient: self.hit("backward"))
        return features

    def hit(self, phase):
        self.strikes.pop(phase, lambda: None)()


def _strike(how, store_id):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop the store":
        os.kill(store_id, signal.SIGSTOP)
    if how == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def _train(job, rank, folder, store_id):
    torch.manual_seed(0)
    stricken = Stricken()
    own = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), stricken, nn.Linear(128, 10)
    )
    torch.manual_seed(rank)
    group = None if job.group is None else dist.new_group(list(job.group))
    is_replicated = dist.is_initialized() and (job.group is None or rank in job.group)
    model = (
        fully_shard(own)
        if job.is_sharded
        else DistributedDataParallel(own, process_group=group)
        if is_replicated
        else own
    )
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(job.batch_sizes.get(rank, 8), 64)
    recorder = mc.MemoryRecorder(model, optimizer, sample_every_n_steps=1)
    log = None
    if rank in job.logging:
        step = mc.TrainingStep(
            own, batch, loss=lambda model, batch: model(batch).square().mean(), optimizer=optimizer
        )
        interval, capacity = job.intervals.get(rank, 2), job.capacities.get(rank)
        log = mc.MemoryLog(
            recorder,
            step if job.predicts else None,
            log_dir=folder,
            log_every_n_steps=interval,
            device=capacity,
        )
        recorder.watch()
    try:
        with log or nullcontext():
            for number in range(job.num_steps):
                if number == 2 and job.strike and job.strike[0] == rank:
                    stricken.strikes[job.strike[1]] = lambda: _strike(job.strike[2], store_id)
                model(batch).square().mean().backward()
                stricken.hit("optimizer step")
                optimizer.step()
                optimizer.zero_grad()
    finally:
        recorder.close()
    return {
        "weights": [
            (parameter.to_local() if job.is_sharded else parameter).detach().clone()
            for parameter in own.parameters()
        ],
        "generator": torch.get_rng_state(),
        "steps": list(recorder.steps),
        "report": log and log.report,
        "prediction": log and log.prediction and log.prediction.step,
    }


def _rank(job, rank, port, store_id, folder):
    torch.set_num_threads(1)
    with (folder / f"rank{rank}.out").open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        try:
            if job.store == "elsewhere":
                store = dist.TCPStore("127.0.0.1", port, is_master=False)
                dist.init_process_group(
                    "gloo",
                    store=store,
                    rank=rank,
                    world_size=job.num_ranks,
                    timeout=timedelta(seconds=_LONGEST_S),
                )
            elif job.num_ranks > 1:
                address = (
                    f"tcp://127.0.0.1:{port}"
                    if job.store == "tcp"
                    else f"file://{folder / 'store'}"
                )
                dist.init_process_group(
                    "gloo", init_method=address, rank=rank, world_size=job.num_ranks
                )
            found = [_train(job, rank, folder / "logs", store_id) for _ in range(job.trainings)]
        except BaseException as error:
            traceback.print_exc()
            found = type(error)
        (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(found))
        if dist.is_initialized() and not isinstance(found, type) and job.store != "elsewhere":
            dist.destroy_process_group()


def _keep_store(pipe):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@dataclass(frozen=True)
class Outcome:
    """What became of a rank.

    Attributes:
        exit_code: Of its process; negative for a signal.
        found: What each of its trainings left; the type of the error that ended them; None if it
            was killed.
        output: What it printed.
    """

    exit_code: int
    found: Any
    output: str


def run(job: Job, folder: Path) -> list[Outcome]:
    """Run a job to its end, and give what became of each rank."""
    folder.mkdir(exist_ok=True)
    ours, theirs = _CONTEXT.Pipe()
    keeper = (
        _CONTEXT.Process(target=_keep_store, args=(theirs,)) if job.store == "elsewhere" else None
    )
    if keeper:
        keeper.start()
    port = ours.recv() if keeper else free_port()
    ranks = [
        _CONTEXT.Process(target=_rank, args=(job, rank, port, keeper and keeper.pid, folder))
        for rank in range(job.num_ranks)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(_LONGEST_S)
    hanging = [rank for rank in (*ranks, keeper) if rank and rank.is_alive()]
    for process in hanging:
        process.kill()
        process.join()
    outcomes = []
    for number, process in enumerate(ranks):
        left = folder / f"rank{number}.pickle"
        found = pickle.loads(left.read_bytes()) if left.exists() else None
        outcomes.append(
            Outcome(process.exitcode, found, (folder / f"rank{number}.out").read_text())
        )
    still = [ranks.index(process) for process in hanging if process in ranks]
    assert not still, f"ranks {still} hang:\n" + "\n".join(outcome.output for outcome in outcomes)
    return outcomes
