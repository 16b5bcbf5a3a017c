"""What one operator allocates, as data: what a kernel leaves out is added in PyTorch's order."""

from memcallback.core.kernel import (
    FIRST_TEMPORARY,
    AllocOutput,
    AllocTemp,
    FreeTemp,
    KernelCall,
    KernelRule,
    OpenBlasHandles,
    completed,
)


def test_outputs_handles_and_frees_are_added_at_the_end():
    assert completed((AllocTemp(8), AllocTemp(16)), 2) == (
        AllocTemp(8),
        AllocTemp(16),
        AllocOutput(0),
        AllocOutput(1),
        OpenBlasHandles(),
        FreeTemp(0),
        FreeTemp(1),
    )


def test_what_a_kernel_says_itself_stays_where_it_is():
    kernel = (AllocOutput(1, 640), OpenBlasHandles(), AllocTemp(8), AllocTemp(16), FreeTemp(0))
    assert completed(kernel, 2) == (*kernel, AllocOutput(0), FreeTemp(1))


def call(outputs, handles):
    rule = KernelRule(lambda: (), (), ())
    return KernelCall(0, 3, rule, outputs, handles, "aten::mm", "net")


def test_what_stays_is_named_once_without_outputs_that_are_none():
    assert call((5, None, 3, 5), (9, 3)).kept == (5, 3, 9)
    assert call((), ()).kept == ()
    assert call((1,), ()).stream == 0


def test_ids_of_temporaries_are_above_those_of_tensors():
    # A trace of a million operators a second for twelve days.
    assert FIRST_TEMPORARY >= 10**12
