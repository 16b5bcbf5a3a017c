"""Records what operators ask of PyTorch's caching allocator, on a real or virtual CUDA device:
python tests/recorded/record_kernels.py NAME [COUNT].

At most COUNT calls of every operator are kept, evenly chosen; without it all are, gzipped.

Every call of `tests/kernel_zoo.py` is made once to warm up and once with the allocator's history
on. The file has one line for each: its allocations and frees in order (`+1024` asks for 1,024 B,
`-0` frees the first), then its outputs as dtype[shape]strides@allocation.
"""

import datetime
import gzip
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import kernel_zoo


def history(call):
    """What a call asks of the allocator: its events, and which allocation is at which address at
    its end.
    """
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=100000)
    try:
        result = call()
    finally:
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
    events, alive, count = [], {}, 0
    for entry in trace:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = count
            events.append(f"+{entry['size']}")
            count += 1
        elif entry["action"] == "free_requested" and entry["addr"] in alive:
            events.append(f"-{alive.pop(entry['addr'])}")
    return result, " ".join(events), alive


def describe(tensor, alive):
    """An output: dtype, shape, strides where not contiguous, number of its allocation."""
    strides = "" if tensor.is_contiguous() else f":{','.join(map(str, tensor.stride()))}"
    place = alive.get(tensor.untyped_storage().data_ptr())
    kind = kernel_zoo.SHORT.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    device = "" if tensor.is_cuda else "cpu"
    return f"{device}{kind}[{','.join(map(str, tensor.shape))}]{strides}" + (
        "" if place is None else f"@{place}"
    )


def record(case):
    """One line for a case: events, outputs, and what only the first call takes."""
    args, kwargs = case.build("cuda")
    torch._C._cuda_clearCublasWorkspaces()
    with torch._C._AutoDispatchBelowAutograd():
        first = history(lambda: case.overload(*args, **kwargs))[1]
        result, events, alive = history(lambda: case.overload(*args, **kwargs))
    line = [events, " ".join(describe(t, alive) for t in kernel_zoo.tensors(result))]
    return line if first == events else [*line, first]


def attempt(case):
    """Its line, or why the device refuses it."""
    try:
        return record(case)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        return str(error).splitlines()[0]


def main():
    properties = torch.cuda.get_device_properties(0)
    lines, failed = {}, {}
    name_of_file, *count = sys.argv[1:]
    chosen = kernel_zoo.sample(int(count[0])) if count else kernel_zoo.cases()
    for name, case in chosen.items():
        line = attempt(case)
        if isinstance(line, str):
            failed[name] = line
        elif sum(map(len, line)) < 1500:
            lines[name] = line
    head = {
        "device": properties.name,
        "compute_capability": [properties.major, properties.minor],
        "num_multiprocessors": properties.multi_processor_count,
        "max_threads_per_multiprocessor": properties.max_threads_per_multi_processor,
        "l2_cache_bytes": properties.L2_cache_size,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    body = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(line)}" for name, line in sorted(lines.items())
    )
    text = json.dumps(head)[:-1] + ',\n"cases": {\n' + body + "\n}}\n"
    path = Path(__file__).parent / "kernels" / f"{name_of_file}.json"
    if count:
        path.write_text(text, encoding="utf-8")
    else:
        path.with_suffix(".json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    for name, error in failed.items():
        print(name, "::", error)
    print(len(lines), "recorded", len(failed), "failed")


if __name__ == "__main__":
    main()
