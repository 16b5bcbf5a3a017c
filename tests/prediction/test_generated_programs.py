"""Training programs drawn at random by hypothesis: a prediction for a CPU is the real run's bytes
at every boundary, watching changes nothing.

In the tests the same programs are drawn each time. A long run draws others:

    python -m pytest tests/prediction/test_generated_programs.py
        --hypothesis-seed=1 --num-programs=10000

`benchmarks/generated_run.py` does so for many seeds and keeps what came of each.
"""

import generated
import pytest
from generated import Layer, Program
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.filterwarnings("error::memcallback.MemoryWarning")


@st.composite
def programs(draw):
    family = draw(st.sampled_from(list(generated.LAYERS)))
    layer = st.builds(
        Layer,
        kind=st.sampled_from(list(generated.LAYERS[family])),
        around=st.sampled_from(generated.AROUND),
        is_frozen=st.sampled_from([False, False, False, True]),
    )
    return draw(
        st.builds(
            Program,
            family=st.just(family),
            layers=st.lists(layer, min_size=1, max_size=6).map(tuple),
            width=st.sampled_from([4, 6, 16, 34]),
            batch_size=st.integers(2, 9),
            batch=st.sampled_from(generated.BATCHES),
            loss=st.sampled_from(generated.LOSSES),
            optimizer=st.sampled_from(list(generated.OPTIMIZERS)),
            accumulate=st.sampled_from([1, 1, 2, 3]),
            clips=st.booleans(),
        )
    )


def drawn(check, number, request):
    """Check as many programs, and say in the test's properties how many; the first that fails is
    made as small as it can be.
    """
    num_checked = 0

    def counted(program):
        nonlocal num_checked
        num_checked += 1
        check(program)

    long = request.config.getoption("--num-programs")
    limits = settings(
        max_examples=long or number,
        derandomize=not long,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    limits(given(programs())(counted))()
    request.node.user_properties.append(("num_programs", num_checked))


def test_on_a_cpu_bytes_alive_at_every_boundary_are_those_of_the_real_run(request):
    def check(program):
        assert generated.predicted(program) == generated.measured(program)

    drawn(check, 150, request)


def test_watching_a_training_changes_no_bit_of_it(request):
    drawn(generated.check_observer, 60, request)


def test_a_prediction_for_a_card_holds_together(request):
    drawn(generated.check_card, 20, request)
