"""Batches of fakes with another number of samples: nested tensors, and lists with an item for each
sample.
"""

import copy
from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memcallback.core.tensors import tensors_in
from memcallback.step.batch import infer_batch_size
from memcallback.step.copies.objects import fake_copy
from memcallback.step.copies.resizing import has_samples, resize_batch

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Scene:
    images: tuple
    count: int


@pytest.fixture
def mode():
    return FakeTensorMode()


def images(count):
    return [torch.zeros(3, 8 + index, 8) for index in range(count)]


def targets(count):
    return tuple({"boxes": torch.zeros(index, 4), "name": "a"} for index in range(count))


def shapes(values):
    return [tuple(value.shape) for value in values]


def test_a_list_with_an_item_for_each_sample_has_more_of_them_each_in_memory_of_its_own(mode):
    pictures, boxes = resize_batch(fake_copy((images(4), targets(4)), mode), 4, 6)
    assert shapes(pictures) == [(3, 8, 8), (3, 9, 8), (3, 10, 8), (3, 11, 8), (3, 8, 8), (3, 9, 8)]
    assert isinstance(boxes, tuple)
    assert shapes(box["boxes"] for box in boxes) == [(0, 4), (1, 4), (2, 4), (3, 4), (0, 4), (1, 4)]
    assert len({picture.untyped_storage()._cdata for picture in pictures}) == 6
    assert shapes(resize_batch(fake_copy((images(4), targets(4)), mode), 4, 3)[0]) == [
        (3, 8, 8),
        (3, 9, 8),
        (3, 10, 8),
    ]


@pytest.mark.parametrize(
    ("wrapped", "found"),
    [
        (lambda values: {"images": values, "scale": [0.5, 2.0]}, lambda batch: batch["images"]),
        (lambda values: UserDict(images=values), lambda batch: batch["images"]),
        (lambda values: Pair(x=values, y=None), lambda batch: batch.x),
        (lambda values: Scene(images=tuple(values), count=2), lambda batch: batch.images),
        (lambda values: [[values], "a"], lambda batch: batch[0][0]),
    ],
)
def test_lists_of_samples_are_found_in_containers_of_any_kind(wrapped, found, mode):
    batch = fake_copy(wrapped(images(2)), mode)
    resized = resize_batch(batch, 2, 5)
    assert type(resized) is type(batch)
    assert len(found(resized)) == 5
    assert len(found(batch)) == 2
    assert has_samples(wrapped(images(2)), 2)
    assert not has_samples(wrapped(images(2)), 4)


def test_records_of_samples_are_samples_though_each_has_as_many_boxes_as_there_are_images(mode):
    records = [{"boxes": torch.zeros(2, 4)} for _ in range(2)]
    batch = fake_copy({"images": torch.zeros(2, 3, 8, 8), "labels": records}, mode)
    resized = resize_batch(batch, 2, 5)
    assert resized["images"].shape == (5, 3, 8, 8)
    assert shapes(record["boxes"] for record in resized["labels"]) == [(2, 4)] * 5


def test_a_list_of_tensors_of_all_samples_is_none_of_samples(mode):
    x, y = resize_batch(fake_copy([torch.zeros(2, 3), torch.zeros(2)], mode), 2, 5)
    assert (x.shape, y.shape) == ((5, 3), (5,))
    views = resize_batch(fake_copy({"views": [torch.zeros(2, 3), torch.zeros(2, 4)]}, mode), 2, 5)[
        "views"
    ]
    assert shapes(views) == [(5, 3), (5, 4)]


def test_numbers_beside_the_tensors_are_as_they_were(mode):
    assert resize_batch(fake_copy({"x": torch.zeros(2, 3), "size": [224, 224]}, mode), 2, 5)[
        "size"
    ] == [224, 224]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((images(6), targets(6)), 6),
        ({"image": images(5), "label": [torch.tensor(1)] * 5}, 5),
        ({"x": [torch.zeros(8)] * 5, "y": [torch.tensor(1)] * 5}, 5),
        (([torch.zeros(6, 3), torch.zeros(6, 3)], [torch.zeros(6), torch.zeros(6)]), 6),
    ],
)
def test_a_batch_of_lists_has_as_many_samples_as_they_have_items(batch, expected):
    found = infer_batch_size(batch)
    assert (found.batch_size, found.is_ambiguous) == (expected, False)


IMAGE = torch.zeros(3, 64, 64)
BOXES = torch.zeros(3, 4)
LABELS = torch.zeros(3)


def eight(*parts):
    """Eight samples, each of them of its own tensors."""
    return [copy.deepcopy(parts[0] if len(parts) == 1 else parts) for _ in range(8)]


@pytest.mark.parametrize(
    ("batch", "is_ambiguous"),
    [
        (eight({"image": IMAGE, "height": 64}), False),
        (eight({"image": IMAGE, "label": torch.tensor(1)}), False),
        (eight({"image": IMAGE}), True),
        (eight(IMAGE, torch.tensor(1)), False),
        (eight(IMAGE, 1), False),
        (eight(IMAGE, LABELS, "a.png"), False),
        (eight(IMAGE), True),
        (eight(torch.zeros(1, 28, 28)), True),
        ((eight(IMAGE), eight(torch.tensor(1))), False),
        ((eight(IMAGE), torch.zeros(8)), False),
        ((eight(IMAGE), eight(torch.zeros(1, 64, 64))), True),
        ((eight(IMAGE), eight({"boxes": BOXES})), True),
        ((eight(IMAGE), eight({"boxes": BOXES, "labels": LABELS, "image_id": 5})), False),
        ((torch.zeros(8, 3, 64, 64), eight({"boxes": BOXES, "labels": LABELS})), False),
        ({"input_ids": torch.zeros(8, 128), "spans": eight(torch.zeros(3, 2))}, False),
    ],
)
def test_a_list_with_an_item_for_each_sample_has_one_vote(batch, is_ambiguous, mode):
    found = infer_batch_size(batch)
    assert (found.batch_size, found.is_ambiguous) == (8, is_ambiguous)
    resized = resize_batch(fake_copy(batch, mode), 8, 10)
    assert has_samples(batch, 8)
    again = infer_batch_size(resized)
    assert (again.batch_size, again.is_ambiguous) == (10, is_ambiguous)
    assert {tuple(tensor.shape[1:]) for tensor in tensors_in(resized)} == {
        tuple(tensor.shape[1:]) for tensor in tensors_in(batch)
    }


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ([torch.zeros(6, 3), torch.zeros(6, 3)], 6),
        ((torch.zeros(1, 9), torch.zeros(1, 9), torch.zeros(1, 9)), 1),
        ((torch.zeros(1, 9, 4), torch.zeros(1, 9, 4)), 1),
        ([torch.zeros(2, 9, 4), torch.zeros(2, 9, 4), torch.zeros(2, 9, 4)], 2),
        ([torch.zeros(6, 3, 8, 8)] * 2 + [torch.zeros(6, 3, 4, 4)] * 8, 6),
        ([(torch.zeros(6, 3), torch.zeros(6)), (torch.zeros(6, 3), torch.zeros(6))], 6),
        ([{"x": torch.zeros(6, 3), "y": torch.zeros(6)}] * 2, 6),
        ({"x": torch.zeros(6, 3), "states": [torch.zeros(6, 4, 5)] * 12}, 6),
        ({"x": torch.zeros(3, 5), "states": [torch.zeros(3, 4, 5)] * 12}, 3),
    ],
)
def test_a_list_of_parts_with_all_samples_is_none_of_samples(batch, expected, mode):
    found = infer_batch_size(batch)
    assert (found.batch_size, found.is_ambiguous) == (expected, False)
    resized = resize_batch(fake_copy(batch, mode), expected, 7)
    assert {tensor.shape[0] for tensor in tensors_in(resized)} == {7}


def jagged(lengths, **options):
    return torch.nested.nested_tensor(
        [torch.zeros(length, 8) for length in lengths], layout=torch.jagged, **options
    )


@pytest.mark.parametrize(
    ("count", "ends"), [(3, [0, 2, 5, 6]), (5, [0, 2, 5, 6, 8, 10]), (2, [0, 2, 4])]
)
def test_further_sequences_of_a_nested_tensor_are_as_long_as_the_mean(count, ends, mode):
    resized = resize_batch(fake_copy(jagged([2, 3, 1]), mode), 3, count)
    assert resized.shape[0] == count
    assert resized._offsets.constant.tolist() == ends
    assert resized._values.shape == (ends[-1], 8)


def test_nested_tensors_that_share_their_lengths_still_do(mode):
    x = jagged([2, 3, 1])
    first, second = resize_batch(fake_copy([x, x * 2], mode), 3, 4)
    assert first.shape == second.shape
    assert first.shape != resize_batch(fake_copy(x, mode), 3, 4).shape
    with mode:
        assert (first + second).shape == first.shape


def test_a_nested_tensor_with_gaps_is_named_with_the_way_out(mode):
    with pytest.raises(
        ValueError,
        match=r"NestedTensor of shape unknown and layout torch.jagged cannot become a fake tensor"
        r".*\.contiguous\(\)",
    ):
        fake_copy(
            torch.nested.narrow(
                torch.zeros(3, 5, 8),
                1,
                torch.tensor([0, 1, 2]),
                torch.tensor([2, 3, 1]),
                layout=torch.jagged,
            ),
            mode,
        )
