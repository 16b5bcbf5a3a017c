"""Who owns memory that grows: live storages by owner, and owners and graphs compared over time."""

import sys
from collections import Counter

import pytest
import torch

from memcallback.diagnose.health.leaks import (
    LiveByOwner,
    OwnerStorages,
    growing_graph,
    growing_owners,
    is_variable,
    live_by_owner,
    program_frames,
)

CPU = torch.device("cpu")
FLOATS = ((10,), "float32")
kept_by_this_module = None


def storages(owner, *sizes, kind=FLOATS):
    made = OwnerStorages(owner)
    for size in sizes:
        made.add(size, kind, False)
    return made


def series(owner, *counts_and_bytes, **graphs):
    return [
        LiveByOwner(
            step=step,
            by_owner={owner: OwnerStorages(owner, count, num_bytes)},
            graph_sizes={name: sizes[step] for name, sizes in graphs.items()},
        )
        for step, (count, num_bytes) in enumerate(counts_and_bytes)
    ]


def test_an_owner_counts_its_storages_their_bytes_and_kinds():
    made = storages("x", 40, 40)
    made.add(7, ((7,), "uint8"), True)
    made.add(7, ((7,), "uint8"), False)
    assert (made.count, made.num_bytes, made.keeps_graph) == (4, 94, True)
    made.add(40, FLOATS, False)
    assert made.most_frequent_kind == "(10,) float32"
    assert made.kinds == Counter({FLOATS: 3, ((7,), "uint8"): 2})
    assert storages("y", 1).keeps_graph is False


def test_storages_of_nobody_and_outputs_of_operators_are_not_owned():
    live = LiveByOwner(
        step=3,
        by_owner={
            "variable 'losses' in train.py": storages("l", 10, 20),
            "": storages("", 400),
            "output of aten::mm": storages("o", 8000),
            "parameter of net": storages("p", 5),
        },
        graph_sizes={},
    )
    assert (live.num_owned, live.owned_bytes) == (3, 35)


@pytest.mark.parametrize(
    ("owner", "is_one"),
    [
        ("variable 'losses' in train.py", True),
        ("attribute 'history' of net", True),
        ("attribute 'saved_tensors' of MulBackward0", False),
        ("attribute 'x' of MulBackward0", False),
        ("output of aten::mm", False),
        ("", False),
    ],
)
def test_variables_and_attributes_are_of_the_users_program(owner, is_one):
    assert is_variable(owner) is is_one


@pytest.mark.parametrize(
    ("of_steps", "grown"),
    [
        ([(1, 10), (2, 20), (3, 35)], (2, 25)),
        # The same tensor becomes larger.
        ([(1, 10), (1, 20), (1, 30)], (0, 20)),
        # Bytes that stay, or fall once, and a count that falls, are no growth.
        ([(1, 10), (2, 10), (3, 30)], None),
        ([(1, 10), (2, 20), (3, 19)], None),
        ([(3, 10), (2, 20), (3, 30)], None),
        ([(1, 10), (2, 20), (1, 30)], None),
    ],
)
def test_an_owner_grows_if_its_bytes_rise_each_time_and_its_count_never_falls(of_steps, grown):
    found = [(one.count, one.num_bytes) for one in growing_owners(series("x", *of_steps))]
    assert found == ([] if grown is None else [grown])


def test_an_owner_that_came_later_has_grown_from_nothing_and_the_largest_comes_first():
    first, second = (LiveByOwner(step=step, by_owner={}, graph_sizes={}) for step in range(2))
    first.by_owner.update(small=storages("small", 1))
    second.by_owner.update(
        small=storages("small", 1, 1),
        large=storages("large", 50),
        many=storages("many", 25, 25),
    )
    found = growing_owners([first, second])
    assert [(one.now.owner, one.count, one.num_bytes) for one in found] == [
        ("many", 2, 50),
        ("large", 1, 50),
        ("small", 1, 1),
    ]


def test_the_largest_of_the_graphs_that_grow_is_named():
    points = [(1, 1)] * 3
    assert growing_graph(series("x", *points, a=(1, 2, 3), b=(7, 9, 12), c=(90, 90, 91))) == "b"
    assert growing_graph(series("x", *points, a=(3, 2, 4), c=(5, 5, 5))) == ""
    assert growing_graph(series("x", *points)) == ""


def test_a_graph_without_an_earlier_size_has_not_grown():
    first, second, third = series("x", *[(1, 1)] * 3)
    third.graph_sizes["new"] = 9
    assert growing_graph([first, second, third]) == ""
    second.graph_sizes["new"] = 8
    assert growing_graph([first, second, third]) == ""
    first.graph_sizes["new"] = 7
    assert growing_graph([first, second, third]) == "new"


def owners_of(module, optimizer, batch):
    return live_by_owner(4, [module], [optimizer], batch, CPU, [sys._getframe(1)])


def test_live_storages_are_grouped_by_who_keeps_them_and_the_batch_is_left_out():
    module = torch.nn.Linear(10, 3, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    batch = torch.ones(123, 10)
    losses = [module(batch[:7]).sum() for _ in range(3)]
    history = [torch.ones(50), torch.ones(50)]
    live = owners_of(module, optimizer, batch)
    assert live.step == 4
    by_variable = {
        owner: (one.count, one.num_bytes, one.keeps_graph)
        for owner, one in live.by_owner.items()
        if "'losses'" in owner or "'history'" in owner
    }
    (losses_owner,) = (owner for owner in by_variable if "'losses'" in owner)
    (history_owner,) = (owner for owner in by_variable if "'history'" in owner)
    assert by_variable[losses_owner] == (3, 12, True)
    assert by_variable[history_owner] == (2, 400, False)
    assert live.by_owner[history_owner].most_frequent_kind == "(50,) float32"
    sizes = [one.num_bytes for one in live.by_owner.values()]
    assert 123 * 10 * 4 not in sizes
    del losses, history


def test_the_graph_behind_a_variable_is_counted_in_nodes():
    module = torch.nn.Linear(10, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def nodes(live):
        (size,) = (size for owner, size in live.graph_sizes.items() if "'total'" in owner)
        return size

    total = module(torch.ones(2, 10)).sum()
    few = nodes(owners_of(module, optimizer, None))
    total = total + module(torch.ones(2, 10)).sum()
    many = nodes(owners_of(module, optimizer, None))
    assert few >= 3
    assert many > few
    total = total.detach()
    live = owners_of(module, optimizer, None)
    assert not [owner for owner in live.graph_sizes if "'total'" in owner]


def test_a_global_variable_of_the_program_owns_what_it_keeps():
    global kept_by_this_module
    module = torch.nn.Linear(2, 2)
    kept_by_this_module = torch.ones(77)
    live = owners_of(module, torch.optim.SGD(module.parameters()), None)
    kept_by_this_module = None
    (owner,) = (owner for owner in live.by_owner if "'kept_by_this_module'" in owner)
    assert owner.endswith("in test_leaks.py")
    assert live.by_owner[owner].num_bytes == 308


def test_the_users_frames_come_first_and_ours_not_at_all():
    frames = program_frames()
    files = [frame.f_code.co_filename for frame in frames]
    assert files[0] == __file__
    assert not any("memcallback/diagnose" in file for file in files)
    assert any("pluggy" in file for file in files)
    del frames
