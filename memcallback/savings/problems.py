"""Why a saving does not work with a model, as one short plain sentence."""

from __future__ import annotations

import re
import textwrap

_WIDTH = 100
#: What PyTorch says, and what that means for someone who reads a table of savings.
_MEANINGS = (
    (
        r"modified by an inplace operation|leaf Variable .* in-place|changes its own input",
        "it would overwrite a tensor that the backward pass needs",
    ),
    (
        r"same dtype|should be the same|expected scalar type|have dtype|found dtype",
        "the model, its input or its loss then mix data types",
    ),
    (
        r"shapes? cannot be multiplied|size mismatch|must match the size|"
        r"Sizes of tensors must match|is invalid for input of size|Kernel size can't be greater",
        "the model does not take inputs of this size",
    ),
)


def plain_reason(error: Exception) -> str:
    """The reason in words, for an error that is not known its first sentence, in 100 columns."""
    cause = error.__cause__ or error
    text = str(cause).strip()
    for pattern, meaning in _MEANINGS:
        if re.search(pattern, text):
            return meaning
    first = (text.splitlines() or [type(cause).__name__])[0]
    sentence = re.split(r"(?<=[a-z)\d])\. (?=[A-Z])", first)[0].rstrip(".")
    return textwrap.shorten(sentence, _WIDTH, placeholder=" ...")
