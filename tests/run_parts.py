"""The parts of a run of all tests (`pytest --part 1/2`)."""

from collections import Counter

from slow_files import SLOW_FILES

#: About what a test on a device takes of a core, in seconds, 2026-11-28; others take 1 or so.
SECONDS_ON_DEVICE = {
    "integrations/test_huggingface_ranks_cuda.py": 50,
    "integrations/test_lightning_ranks_cuda.py": 25,
    "prediction/test_ranks_predicted_cuda.py": 8,
    "trace/test_compiled_cuda.py": 10,
    "trace/test_whole_update_cuda.py": 15,
}
#: What a test of a file that is not slow takes.
_SECONDS = 0.04


def part(text):
    """The number of a part and of all parts, from `1/2`."""
    number, _, num_parts = text.partition("/")
    if not (number.isdigit() and num_parts.isdigit() and 1 <= int(number) <= int(num_parts)):
        raise ValueError(f"{text} is no part, such as 1/2")
    return int(number), int(num_parts)


def seconds_of(paths, *, on_device):
    """About how long each file takes, from the path of each test's file below this folder."""
    counts = Counter(paths)
    if on_device:
        return {path: count * SECONDS_ON_DEVICE.get(path, 1) for path, count in counts.items()}
    return {path: SLOW_FILES.get(path, count * _SECONDS) for path, count in counts.items()}


def parts_of(seconds, num_parts):
    """The files of each part, which take about as long as those of another."""
    parts, sums = [set() for _ in range(num_parts)], [0] * num_parts
    for path, of_file in sorted(seconds.items(), key=lambda one: -one[1]):
        least = sums.index(min(sums))
        parts[least].add(path)
        sums[least] += of_file
    return parts
