"""The parts of a run of all tests (`pytest --part 1/2`)."""

from collections import Counter


def part(text):
    """The number of a part and of all parts, from `1/2`."""
    number, _, num_parts = text.partition("/")
    if not (number.isdigit() and num_parts.isdigit() and 1 <= int(number) <= int(num_parts)):
        raise ValueError(f"{text} is no part, such as 1/2")
    return int(number), int(num_parts)


def parts_of(items, num_parts):
    """The files of each part, with about as many tests in one as in another."""
    parts, sizes = [set() for _ in range(num_parts)], [0] * num_parts
    for path, size in sorted(Counter(item.path for item in items).items(), key=lambda one: -one[1]):
        smallest = sizes.index(min(sizes))
        parts[smallest].add(path)
        sizes[smallest] += size
    return parts
