"""PYTORCH_CUDA_ALLOC_CONF read, and the sizes that follow: the expected figures were read from
PyTorch 2.11's allocator.
"""

import pytest

from memcallback.core.units import KiB, MiB
from memcallback.prediction.allocator.settings import AllocatorSettings


def test_nothing_set_means_the_defaults():
    assert AllocatorSettings.parse("") == AllocatorSettings() == AllocatorSettings.from_environ({})


def test_all_settings_that_are_simulated_are_read():
    text = (
        "expandable_segments:True, large_segment_size_mb:40, max_split_size_mb:64, "
        "max_non_split_rounding_mb:48,roundup_power2_divisions:8"
    )
    assert AllocatorSettings.parse(text) == AllocatorSettings(
        expandable_segments=True,
        large_segment_bytes=40 * MiB,
        max_split_bytes=64 * MiB,
        max_non_split_rounding_bytes=48 * MiB,
        roundup_power2_divisions=(8,) * 16,
    )


def test_settings_of_a_newer_pytorch_are_listed():
    settings = AllocatorSettings.parse(
        "expandable_segments:True,expandable_segments_reserve_by_class:[tiny:0.05,large:0.2]"
    )
    assert settings.expandable_segments
    assert settings.not_simulated == ("expandable_segments_reserve_by_class",)


def test_settings_that_make_no_difference_are_listed():
    settings = AllocatorSettings.parse(
        "backend:native,garbage_collection_threshold:0.8,pinned_use_background_threads:True"
    )
    assert settings.not_simulated == (
        "garbage_collection_threshold",
        "pinned_use_background_threads",
    )


def test_the_variable_with_cuda_in_its_name_comes_first():
    both = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
    }
    assert AllocatorSettings.from_environ(both).max_split_bytes == 32 * MiB
    assert (
        AllocatorSettings.from_environ(
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
        ).max_split_bytes
        == 64 * MiB
    )


@pytest.mark.parametrize(
    ("text", "divisions"),
    [
        ("[256:1,512:2,>:4]", (1,) * 9 + (2,) + (4,) * 6),
        ("[64:8,128:2,256:4,512:2,1024:4,>:1]", (8,) * 7 + (2, 4, 2, 4) + (1,) * 5),
        ("[1:8,4:4,>:2]", (8, 0, 4) + (2,) * 13),
        ("[>:4]", (0,) + (4,) * 15),
        ("[2048:2]", (2,) * 12 + (0,) * 4),
        ("4", (4,) * 16),
    ],
)
def test_divisions_are_read_by_size(text, divisions):
    assert (
        AllocatorSettings.parse(f"roundup_power2_divisions:{text}").roundup_power2_divisions
        == divisions
    )


@pytest.mark.parametrize(
    ("requested_bytes", "divisions", "block_bytes"),
    [
        (1, 0, 512),
        (512, 0, 512),
        (513, 0, 1024),
        (1200 * KiB, 4, 1280 * KiB),
        (1 * MiB, 4, 1 * MiB),
        (1 * MiB + 1, 4, 1280 * KiB),
        (2048, 4, 2048),
        (2049, 4, 2560),
        (1025, 1, 1536),
    ],
)
def test_a_request_is_rounded_up_to_a_block(requested_bytes, divisions, block_bytes):
    assert (
        AllocatorSettings(roundup_power2_divisions=(divisions,) * 16).block_bytes(requested_bytes)
        == block_bytes
    )


@pytest.mark.parametrize(
    ("block_mib", "large_mib", "segment_mib"),
    [
        (1, 20, 2),
        (1.5, 20, 20),
        (9, 20, 20),
        (10, 20, 10),
        (11, 20, 12),
        (21, 20, 22),
        (9, 12, 12),
        (9, 40, 40),
        (11, 40, 12),
    ],
)
def test_a_segment_is_made_for_a_block(block_mib, large_mib, segment_mib):
    assert (
        AllocatorSettings(large_segment_bytes=large_mib * MiB).segment_bytes(int(block_mib * MiB))
        == segment_mib * MiB
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size_mb", "'max_split_size_mb' is not name:value"),
        (
            "max_split_size_mb:32;foo",
            "max_split_size_mb:32;foo is not a size; write a whole number of MiB",
        ),
        ("max_split_size_mb:-1", "max_split_size_mb:-1 is not a size"),
        (
            "max_split_size_mb:19",
            "max_split_bytes is 19922944; it must be at least large_segment_bytes, 20971520",
        ),
        (
            "max_non_split_rounding_mb:5",
            "max_non_split_rounding_bytes is 5242880; it must be at least",
        ),
        ("large_segment_size_mb:10", "large_segment_bytes is 10485760; it must be"),
        (
            "expandable_segments:true",
            "expandable_segments:true is neither True nor False: write expandable_segments:True",
        ),
        ("roundup_power2_divisions:3", "'3' in roundup_power2_divisions is not a power of 2"),
        ("roundup_power2_divisions:[256:3]", "'3' in roundup_power2_divisions is not a power of 2"),
        ("roundup_power2_divisions:[3:4]", "'3' in roundup_power2_divisions is not a power of 2"),
        ("roundup_power2_divisions:[4]", "'4' in roundup_power2_divisions is not size:divisions"),
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync is another allocator"),
    ],
)
def test_a_setting_that_is_unknown_or_wrong_is_refused(text, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # messages have brackets
        AllocatorSettings.parse(text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("divisions", [(4,), (3,) * 16, (-1,) * 16])
def test_divisions_that_pytorch_has_not_are_refused(divisions):
    with pytest.raises(ValueError, match="roundup_power2_divisions has"):
        AllocatorSettings(roundup_power2_divisions=divisions)


@pytest.mark.parametrize(
    ("requested_bytes", "block_bytes"),
    [
        (512 * KiB + 1, 576 * KiB),
        (MiB + 1, MiB + 128 * KiB),
        (2 * MiB - 1, 2 * MiB),
        (2 * MiB, 2 * MiB),
        (2 * MiB + 1, 2 * MiB + 512 * KiB),
        (4 * MiB + 1, 6 * MiB),
        (8 * MiB + 1, 8 * MiB + 512),
        ((1 << 45) + 1, (1 << 45) + (1 << 41)),
    ],
)
def test_each_power_of_two_from_a_mebibyte_on_has_its_own_divisions(requested_bytes, block_bytes):
    settings = AllocatorSettings(roundup_power2_divisions=(8, 4, 2, *[1] * 12, 16))
    assert settings.block_bytes(requested_bytes) == block_bytes
