"""Why a saving does not work, in words."""

import pytest
import torch
from torch import nn

from memcallback.savings.problems import plain_reason


def failed(function):
    with pytest.raises(RuntimeError) as raised:
        function()
    return plain_reason(raised.value)


def overwritten():
    exp = torch.ones(3, requires_grad=True).exp()
    exp.relu_()
    exp.sum().backward()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (overwritten, "it would overwrite a tensor that the backward pass needs"),
        (
            lambda: torch.ones(3, requires_grad=True).relu_(),
            "it would overwrite a tensor that the backward pass needs",
        ),
        (
            lambda: nn.Linear(4, 4).bfloat16()(torch.ones(2, 4)),
            "the model, its input or its loss then mix data types",
        ),
        (
            lambda: nn.Linear(4, 4)(torch.ones(2, 3)),
            "the model does not take inputs of this size",
        ),
    ],
)
def test_what_pytorch_says_is_told_in_words(function, reason):
    assert failed(function) == reason


def test_of_another_error_the_first_sentence_is_told():
    error = ValueError("Adagrad has no fused form. Take Adam.\nMore of it.")
    assert plain_reason(error) == "Adagrad has no fused form"
    assert plain_reason(KeyError()) == "KeyError"
    assert len(plain_reason(ValueError("word " * 100))) <= 100


def test_the_cause_of_an_error_is_told():
    error = ValueError("the step could not be traced")
    error.__cause__ = ValueError("a cause")
    assert plain_reason(error) == "a cause"
