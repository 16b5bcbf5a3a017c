"""The parts of a run of all tests (`pytest --part 1/2`)."""

from collections import Counter

#: About what a test on a device takes of a core, in seconds, 2026-11-28; others take 1 or so.
SECONDS = {
    "integrations/test_huggingface_ranks_cuda.py": 50,
    "integrations/test_lightning_ranks_cuda.py": 25,
    "prediction/test_ranks_predicted_cuda.py": 8,
    "trace/test_compiled_cuda.py": 10,
    "trace/test_whole_update_cuda.py": 15,
}


def part(text):
    """The number of a part and of all parts, from `1/2`."""
    number, _, num_parts = text.partition("/")
    if not (number.isdigit() and num_parts.isdigit() and 1 <= int(number) <= int(num_parts)):
        raise ValueError(f"{text} is no part, such as 1/2")
    return int(number), int(num_parts)


def parts_of(items, num_parts, cost=lambda item: 1):
    """The files of each part; what the tests of one cost is about as much as of another."""
    costs = Counter()
    for item in items:
        costs[item.path] += cost(item)
    parts, sizes = [set() for _ in range(num_parts)], [0] * num_parts
    for path, size in sorted(costs.items(), key=lambda one: -one[1]):
        smallest = sizes.index(min(sizes))
        parts[smallest].add(path)
        sizes[smallest] += size
    return parts
