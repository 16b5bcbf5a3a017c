from dataclasses import replace

import numpy as np
import pytest

from memcallback.core.units import GiB, MiB
from memcallback.devices.blas import cublas_workspace_bytes
from memcallback.devices.catalogue import (
    CATALOGUE,
    CONTEXT_BYTES,
    CONTEXT_SEEN_BYTES,
    DeviceSpec,
    HostSpec,
    architectures,
    find_device,
)

#: What the CUDA runtime says of eight cards: compute capability, multiprocessors, MiB, shared
#: memory of a block that opts in, threads and blocks of a multiprocessor, L2 cache, both clocks in
#: kHz.
RUNTIME = {
    "NVIDIA H200": (9, 0, 132, 143771, 232448, 2048, 32, 62914560, 1980000, 3201000),
    "NVIDIA H100 80GB HBM3": (9, 0, 132, 81559, 232448, 2048, 32, 52428800, 1980000, 2619000),
    "NVIDIA A100-SXM4-80GB": (8, 0, 108, 81920, 166912, 2048, 32, 41943040, 1410000, 1593000),
    "NVIDIA GeForce RTX 3090": (8, 6, 82, 24576, 101376, 1536, 16, 6291456, 1695000, 9751000),
    "NVIDIA GeForce RTX 4090": (8, 9, 128, 24564, 101376, 1536, 24, 75497472, 2520000, 10501000),
    "NVIDIA L4": (8, 9, 58, 23034, 101376, 1536, 24, 50331648, 2040000, 6251000),
    "Tesla T4": (7, 5, 40, 15360, 65536, 1024, 16, 4194304, 1590000, 5001000),
    "Tesla V100-SXM2-16GB": (7, 0, 80, 16384, 98304, 2048, 32, 6291456, 1530000, 877000),
}


@pytest.mark.parametrize("name", RUNTIME)
def test_the_catalogue_agrees_with_the_cuda_runtime(name):
    card = find_device(name)
    assert card.name == name
    assert card.caveats == ()
    assert card.shared_memory_per_block_bytes == 48 << 10
    assert RUNTIME[name] == (
        *card.compute_capability,
        card.num_multiprocessors,
        card.capacity_bytes // MiB,
        card.shared_memory_per_block_optin_bytes,
        card.max_threads_per_multiprocessor,
        card.max_blocks_per_multiprocessor,
        card.l2_cache_bytes,
        card.clock_khz,
        card.memory_clock_khz,
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A100", "NVIDIA A100-SXM4-40GB"),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB"),
        ("a100 40", "NVIDIA A100-SXM4-40GB"),
        ("a100-pcie-40gb", "NVIDIA A100-PCIE-40GB"),
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("H100 SXM", "NVIDIA H100 80GB HBM3"),
        ("h100 pcie", "NVIDIA H100 PCIe"),
        ("v100-32gb", "Tesla V100-SXM2-32GB"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("3090", "NVIDIA GeForce RTX 3090"),
        ("GeForce RTX 3080", "NVIDIA GeForce RTX 3080"),
        ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation"),
        ("a6000", "NVIDIA RTX A6000"),
        ("A10", "NVIDIA A10"),
        ("A10G", "NVIDIA A10G"),
        ("l40s", "NVIDIA L40S"),
        ("H100 SXM5", "NVIDIA H100 80GB HBM3"),
        ("RTX5070Ti", "NVIDIA GeForce RTX 5070 Ti"),
        ("2080ti", "NVIDIA GeForce RTX 2080 Ti"),
        ("7900xtx", "AMD Radeon RX 7900 XTX"),
        ("rx 7900xt", "AMD Radeon RX 7900 XT"),
        ("A100-SXM4-40G", "NVIDIA A100-SXM4-40GB"),
        ("h100 94gb", "NVIDIA H100 NVL"),
        ("RTX 4090 24GB", "NVIDIA GeForce RTX 4090"),
        ("L4 24GB", "NVIDIA L4"),
        ("t4 16 GB", "Tesla T4"),
        ("A10 24GB", "NVIDIA A10"),
        ("a40 48GiB", "NVIDIA A40"),
        ("H200 141GB", "NVIDIA H200"),
        ("MI300X 192GB", "AMD Instinct MI300X"),
    ],
)
def test_a_short_name_is_enough(text, name):
    assert find_device(text).name == name


def test_of_several_cards_the_smallest_is_taken_and_the_others_are_named():
    (caveat,) = find_device("v100-16gb").caveats
    assert (
        caveat
        == "'v100-16gb' was read as Tesla V100-SXM2-16GB; it may also mean Tesla V100-PCIE-16GB."
    )


@pytest.mark.parametrize("given", ["24GiB", "24 gib", 24 * GiB, np.int64(24 * GiB), str(24 * GiB)])
def test_any_size_will_do_and_the_architecture_is_said_to_be_assumed(given):
    card = find_device(given)
    assert card.name == "a card of 24.00 GiB"
    assert card.capacity_bytes == 24 * GiB
    assert card.allocator_capacity_bytes == 24 * GiB - CONTEXT_BYTES
    assert card.compute_capability == (8, 0)
    assert "assumed to be that of NVIDIA A100-SXM4-80GB (compute capability 8.0)" in card.caveats[0]


@pytest.mark.parametrize("text", ["24GB", "24 gb", " 24 GB "])
def test_a_size_of_cards_as_they_are_sold_means_gib(text):
    card = find_device(text)
    assert (card.name, card.capacity_bytes) == ("a card of 24.00 GiB", 24 * GiB)
    assert card.caveats[0] == f"{text!r} was read as 24 GiB: vendors of cards write GB for GiB."
    assert card.caveats[1].startswith("Only the size of the card is known, 24.00 GiB")
    other = architectures(card)[1]
    assert other.caveats[0] == card.caveats[0]
    assert "assumed to be that of NVIDIA H100" in other.caveats[1]


@pytest.mark.parametrize("text", ["25GB", "24.5GB", "24000MB"])
def test_another_size_in_gb_is_what_it_says(text):
    card = find_device(text)
    assert card.capacity_bytes % 10**6 == 0
    assert len(card.caveats) == 1


@pytest.mark.parametrize("text", ["cpu", "CPU", "cpu:0"])
def test_a_cpu_has_no_caching_allocator_and_an_unknown_capacity(text):
    host = find_device(text)
    assert isinstance(host, HostSpec)
    assert (host.name, host.capacity_bytes, host.allocator_capacity_bytes, host.context_bytes) == (
        "CPU",
        None,
        None,
        0,
    )
    assert "without rounding and without scratch memory" in host.caveats[0]
    assert find_device(host) is host


def test_a_card_is_itself():
    card = replace(find_device("T4"), name="mine")
    assert find_device(card) is card


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rtx 9090", "'rtx 9090' is not a known card. Similar names: NVIDIA GeForce RTX 5090"),
        ("nvidia", "'nvidia' is not a known card. Known names: NVIDIA B200"),
        ("80", "'80' is neither a card nor a card's size: a plain number means bytes"),
        ("16", "'16' is neither a card nor a card's size"),
        ("RTX 40", "'RTX 40' is not a known card. Similar names: NVIDIA GeForce RTX 4090, NVIDIA "),
        ("rtx 9999", "'rtx 9999' is not a known card. Similar names: NVIDIA GeForce RTX"),
        ("RTX 3080 12GB", "'RTX 3080 12GB' is not a known card. Similar names: NVIDIA GeForce RTX"),
        ("a40 64gb", "'a40 64gb' is not a known card. Similar names: .*NVIDIA A40"),
        ("ada", "'ada' is not a known card"),
        ("blackwell", "'blackwell' is not a known card"),
        ("A100 80GB H100", "'A100 80GB H100' is not a known card"),
        ("", "'' is not a known card. Known names: NVIDIA B200"),
        ("24 gigs", "'24 gigs' is not a size. Write a number and a unit of B, KB"),
        ("24G", "'24G' is not a size. Write a number and a unit"),
        ("-1GiB", "'-1GiB' is not a size: a size cannot be negative. Give"),
        (-1, "-1 is not a size: a size cannot be negative. Give"),
        (
            0,
            "0 is neither a card nor a card's size: a plain number means bytes, and must be at "
            "least 1 MiB. Give the size with its unit, such as '24GiB'",
        ),
        (
            "0",
            "'0' is neither a card nor a card's size: a plain number means bytes, and must be at "
            "least 1 MiB. .* 'cuda:0' to predict for a device of",
        ),
        ("0 GiB", "'0 GiB' is neither a card nor a card's size"),
        ("100 KiB", "'100 KiB' is neither a card nor a card's size"),
        (
            "cuda:1",
            "'cuda:1' is a device of this machine, .* Give the name of a card or the size of its",
        ),
    ],
)
def test_what_is_neither_a_card_nor_a_size_is_refused_with_the_nearest_names(text, message):
    with pytest.raises(ValueError, match=message):
        find_device(text)


@pytest.mark.parametrize("given", [True, 1.5, 24e9, b"A100", ["A100"], None, DeviceSpec])
def test_what_is_of_another_kind_is_refused(given):
    with pytest.raises(
        TypeError,
        match=r"device must be the name of a card, a size of memory or 'cpu', got .* Give one such "
        r"as 'NVIDIA A100",
    ):
        find_device(given)


def test_every_card_is_found_by_its_own_name_and_no_name_comes_twice():
    assert [find_device(card.name).name for card in CATALOGUE] == [card.name for card in CATALOGUE]
    assert len({card.name for card in CATALOGUE}) == len(CATALOGUE)


@pytest.mark.parametrize("text", ["RTX 5070", "5070", "rtx 2080"])
def test_a_card_is_not_taken_for_its_larger_sibling(text):
    with pytest.raises(ValueError, match=f"'{text}' is .*24GiB"):
        find_device(text)


def test_a_card_smaller_than_its_context_has_nothing_for_the_allocator():
    assert find_device(MiB).allocator_capacity_bytes == 0


@pytest.mark.parametrize(
    ("torch_version", "with_32_mib"),
    [
        ((2, 8), {(9, 0)}),
        ((2, 11), {(9, 0)}),
        ((2, 12), {(9, 0), (10, 0), (10, 3), (12, 0)}),
        ((2, 13), {(9, 0), (10, 0), (10, 3), (12, 0)}),
        ((2, 14), {(9, 0), (10, 0), (10, 3), (11, 0), (12, 0)}),
    ],
)
def test_a_cublas_workspace_has_the_size_of_the_pytorch_version(torch_version, with_32_mib):
    capabilities = [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0)]
    sizes = {
        capability: cublas_workspace_bytes(capability, torch_version) for capability in capabilities
    }
    assert {
        capability for capability in capabilities if sizes[capability] == 32 * MiB
    } == with_32_mib
    assert set(sizes.values()) == {32 * MiB, 8_519_680}


def test_a_pro_6000_has_the_workspace_of_the_installed_pytorch(monkeypatch):
    card = find_device("RTX PRO 6000")
    monkeypatch.setattr("torch.__version__", "2.11.0+cu130")
    assert card.cublas_workspace_bytes == 8_519_680
    monkeypatch.setattr("torch.__version__", "2.13.0+cu130")
    assert card.cublas_workspace_bytes == 32 * MiB


@pytest.mark.parametrize(
    ("torch_version", "workspace"),
    [
        ("2.6.0", "each call"),
        ("2.8.0", "each call"),
        ("2.9.1", "each handle"),
        ("2.11.0", "each handle"),
        ("2.12.1", "shared"),
        ("2.14.1", "shared"),
    ],
)
def test_cublaslt_has_its_workspace_as_the_installed_pytorch_gives_it(
    torch_version, workspace, monkeypatch
):
    monkeypatch.setattr("torch.__version__", f"{torch_version}+cu130")
    assert find_device("A100").cublaslt_workspace == workspace


def test_a_card_of_a_named_pytorch_takes_that_ones_workspaces(monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.13.0+cu130")
    installed = find_device("B200")
    named = replace(installed, torch_version=(2, 11))
    assert (installed.cublas_workspace_bytes, named.cublas_workspace_bytes) == (32 * MiB, 8_519_680)
    assert (installed.cublaslt_workspace, named.cublaslt_workspace) == ("shared", "each handle")


@pytest.mark.parametrize(
    ("name", "num_multiprocessors", "mib", "l2_mib"),
    [("5090", 170, 32_607, 96), ("5080", 84, 16_303, 64), ("5070 Ti", 70, 16_303, 48)],
)
def test_consumer_blackwell_is_as_its_whitepaper_says(name, num_multiprocessors, mib, l2_mib):
    card = find_device(f"RTX {name}")
    assert card.name == f"NVIDIA GeForce RTX {name}"
    assert card.compute_capability == (12, 0)
    assert card.num_multiprocessors == num_multiprocessors
    assert card.capacity_bytes == mib * MiB
    assert card.l2_cache_bytes == l2_mib * MiB
    assert card.shared_memory_per_block_bytes == 48 << 10
    assert card.shared_memory_per_block_optin_bytes == 99 << 10
    assert (card.max_threads_per_multiprocessor, card.max_blocks_per_multiprocessor) == (1536, 24)


@pytest.mark.parametrize(
    ("text", "mib", "capability"),
    [
        ("rtx 3060", 12_288, (8, 6)),
        ("RTX4060", 8_188, (8, 9)),
        ("5070 ti", 16_303, (12, 0)),
        ("rtx 5080", 16_303, (12, 0)),
        ("pro 6000 server", 97_887, (12, 0)),
        ("B300", 275_040, (10, 3)),
        ("gb200", 189_471, (10, 0)),
        ("h20", 97_871, (9, 0)),
        ("h800", 81_559, (9, 0)),
        ("a800 pcie", 81_920, (8, 0)),
        ("l20", 46_068, (8, 9)),
    ],
)
def test_cards_that_people_rent_are_known(text, mib, capability):
    card = find_device(text)
    assert (card.capacity_bytes, card.compute_capability) == (mib * MiB, capability)


def test_where_the_context_is_assumed_a_suggestion_leaves_the_largest_seen_free():
    card = find_device("RTX 3090")
    assert card.outside_bytes == CONTEXT_BYTES
    assert card.most_outside_bytes == CONTEXT_SEEN_BYTES[1]
    ranked = replace(card, communication_bytes=MiB)
    assert ranked.most_outside_bytes == CONTEXT_SEEN_BYTES[1] + MiB
    assert find_device("cpu").most_outside_bytes == 0


def test_a_small_card_has_a_small_context():
    assert find_device("8GiB").most_outside_bytes == GiB
    assert find_device("2GiB").most_outside_bytes == CONTEXT_BYTES


def test_a_context_that_is_given_is_all_that_is_left_free():
    assert replace(find_device("24GiB"), context_bytes=GiB).most_outside_bytes == GiB
    assert replace(find_device("24GiB"), context_bytes=0).most_outside_bytes == 0


def test_the_context_of_a_device_of_this_machine_is_assumed_until_it_is_measured():
    named = find_device("24GiB")
    assert replace(named, local_index=0).most_outside_bytes == named.most_outside_bytes
