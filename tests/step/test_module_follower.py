"""Values that change while autograd nodes are created, by the nodes' numbers."""

import torch

from memcallback.step.module_follower import SequenceLog


def node():
    """A new autograd node; each takes the next number of this thread."""
    return torch.zeros(1, requires_grad=True).sin().grad_fn


def test_a_node_has_the_value_that_was_current_when_it_was_created():
    before = node()
    log = SequenceLog("initial")
    log.add("replaced before any node")
    log.add("a")
    first, second = node(), node()
    log.add("b")
    third = node()
    numbers = [each._sequence_nr() for each in (before, first, second, third)]
    assert [log.at(number) for number in numbers] == ["initial", "a", "a", "b"]
    assert [log.stretch(number) for number in numbers] == [0, 1, 1, 2]


def test_a_log_with_a_limit_forgets_the_oldest_changes():
    log, nodes = SequenceLog(None, limit=4), []
    for value in range(6):
        log.add(value)
        nodes.append(node())
    remembered = [log.at(each._sequence_nr()) for each in nodes]
    assert remembered[-2:] == [4, 5]
    assert remembered[0] is None
