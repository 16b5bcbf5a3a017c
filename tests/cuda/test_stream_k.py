"""Plans that share tiles among multiprocessors, beside what an H200 and an H100 took for them."""

import gzip
import json
from dataclasses import replace

import pytest
from convolution_plans import KNOBS, RECORDED, SETS, first_plans, product, questions

from memcallback.core.units import MiB
from memcallback.cuda.convolution.call import Convolution, Direction
from memcallback.cuda.convolution.stream_k import (
    Knob,
    stream_k_bytes,
    workspace_on_device_bytes,
)
from memcallback.devices.catalogue import find_device

H200 = find_device("H200")
#: What a plan that shares tiles chooses, as cuDNN lists it.
CHOSEN = {
    Knob.TILE_SIZE: 0,
    Knob.TILE_K: 1,
    Knob.WORKSPACE: 0,
    Knob.CLUSTER_M: 8,
    Knob.CLUSTER_N: 1,
}
ENGINE = 62
SHAPE = (16, 384, 112, 112)


def convolution(**changes):
    """A convolution that leaves 16 of 3,136 tiles over, for 120 multiprocessors."""
    usual = Convolution(
        Direction.FORWARD, (240, 384, 3, 3), (1, 1), (1, 1), (1, 1), "float16", channels_last=True
    )
    return replace(usual, **changes)


def products(card):
    """Convolution, input, engine, knobs, workspace if tiles may be shared and if they may not."""
    recorded = json.loads(
        gzip.decompress((RECORDED.parent / "stream_k" / f"{card}.json.gz").read_bytes())
    )
    for direction, dtype, engine, *knobs, rows, columns, sums, shared, alone in recorded[
        "products"
    ]:
        asked = product(Direction[direction], dtype, rows, columns, sums)
        yield *asked, engine, dict(zip(KNOBS, knobs, strict=True)), shared, alone


@pytest.mark.parametrize(("card", "num_exact"), [("H200", 10753), ("H100", 10770)])
def test_products_take_what_is_predicted_to_the_byte(card, num_exact):
    device, num_products, exact, most, wrong_alone = find_device(card), 0, 0, 0, []
    for *asked, knobs, shared_bytes, alone_bytes in products(card):
        shared = {**knobs, Knob.WORKSPACE: 0}
        alone = {**knobs, Knob.WORKSPACE: 1}
        num_products += 1
        error = stream_k_bytes(*asked[:2], device, asked[2], shared) - shared_bytes
        exact += error == 0
        most = max(most, abs(error))
        if stream_k_bytes(*asked[:2], device, asked[2], alone) != alone_bytes:
            wrong_alone.append(asked)
    assert (exact, num_products, wrong_alone) == (num_exact, 10792, [])
    assert most < 4 * MiB


@pytest.mark.parametrize(
    ("card", "which", "counts"),
    [
        ("H200", SETS[0], (182, 478, 481)),
        ("H200", SETS[1], (102, 267, 269)),
        ("H100", SETS[0], (183, 481, 481)),
        ("H100", SETS[1], (102, 269, 269)),
        ("H200", SETS[2], (370, 1158, 1168)),
    ],
)
def test_first_plans_take_what_is_predicted_to_the_byte(card, which, counts):
    device, exact, exact_as_described, num_plans = find_device(card), 0, 0, 0
    both = zip(
        questions(which),
        first_plans(card, "without", which),
        first_plans(card, "handle", which),
        strict=True,
    )
    for asked, told, true in both:
        if not told or not true or (told[0], told[2]) != (true[0], true[2]):
            continue  # another plan
        engine, told_bytes, knobs = told[0], told[1], dict(told[2])
        if stream_k_bytes(*asked, device, engine, knobs) is None:
            continue
        num_plans += 1
        exact_as_described += told_bytes == true[1]
        found = workspace_on_device_bytes(*asked, device, engine, knobs, told_bytes)
        exact += found == true[1]
    assert (exact_as_described, exact, num_plans) == counts


def test_partial_sums_are_one_for_each_that_shares_a_tile():
    # Of 1,568 x 2 tiles 16 are left over. 7 share each, to sum 54 steps of 64.
    found = stream_k_bytes(convolution(), SHAPE, H200, ENGINE, CHOSEN)
    sums = 16 * 7 * 128 * 128 * 4
    assert sums < found < sums + 1024


def test_on_other_numbers_of_multiprocessors_other_tiles_are_left_over():
    # 98 tiles, one at a time: all at once on 132 multiprocessors; on 66 there are 32 left over,
    # which two share.
    asked, shape = convolution(weight_shape=(128, 384, 3, 3)), (1, 384, 112, 112)
    knobs = {**CHOSEN, Knob.CLUSTER_M: 1}
    assert stream_k_bytes(asked, shape, H200, ENGINE, knobs) == 0
    sums, counters = 32 * 2 * 128 * 128 * 4, 32 * 4 + 32 + 127
    half = replace(H200, num_multiprocessors=66)
    assert stream_k_bytes(asked, shape, half, ENGINE, knobs) == sums + counters


@pytest.mark.parametrize(
    ("asked", "shape", "card", "engine", "knobs"),
    [
        (convolution(), SHAPE, find_device("A100"), ENGINE, CHOSEN),
        (convolution(), SHAPE, find_device("B200"), ENGINE, CHOSEN),
        (convolution(), SHAPE, H200, 63, CHOSEN),
        (convolution(), SHAPE, H200, ENGINE, {}),
        (convolution(), SHAPE, H200, ENGINE, {**CHOSEN, Knob.TILE_SIZE: 2}),
        (convolution(), SHAPE, H200, ENGINE, {**CHOSEN, Knob.TILE_K: 2}),
        (convolution(weight_shape=(240, 192, 3, 3)), SHAPE, H200, ENGINE, CHOSEN),
        (convolution(dtype="float64"), SHAPE, H200, ENGINE, {**CHOSEN, Knob.TILE_SIZE: 2}),
        (convolution(), SHAPE, H200, ENGINE, {**CHOSEN, Knob.CLUSTER_N: 0}),
        (convolution(direction=Direction.BACKWARD_FILTER), (0, *SHAPE[1:]), H200, 65, CHOSEN),
    ],
    ids=[
        "before Hopper",
        "after Hopper",
        "engine",
        "no knobs",
        "tile",
        "step",
        "groups",
        "dtype",
        "cluster",
        "empty batch",
    ],
)
def test_other_plans_keep_what_cudnn_says(asked, shape, card, engine, knobs):
    assert stream_k_bytes(asked, shape, card, engine, knobs) is None
    assert workspace_on_device_bytes(asked, shape, card, engine, knobs, 5 * MiB) == 5 * MiB


def test_what_cudnn_says_stands_where_the_rule_takes_more_for_the_described_card():
    # 25 clusters of 8 tiles: 1 is left over, for two clusters.
    leftover = convolution(weight_shape=(128, 384, 3, 3))
    shape = (4, 384, 56, 56)
    described = stream_k_bytes(leftover, shape, H200, ENGINE, CHOSEN, is_described=True)
    assert described > MiB
    assert workspace_on_device_bytes(leftover, shape, H200, ENGINE, CHOSEN, 131) == 131
