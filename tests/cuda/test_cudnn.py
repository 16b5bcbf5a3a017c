"""The workspace of a convolution: how cuDNN is asked, which plan is taken, and what is said where
there is no cuDNN.
"""

import ctypes
import json
import os
import sys
from dataclasses import replace

import pytest
import torch
from convolution_cases import CARDS, questions, recorded
from torch import nn

import memcallback as mc
from memcallback.core.units import MiB
from memcallback.cuda.convolution import cudnn, workspace
from memcallback.cuda.convolution.call import Convolution, Direction
from memcallback.cuda.convolution.cudnn import Attribute, CuDNN, Kind
from memcallback.cuda.convolution.stream_k import Knob
from memcallback.cuda.convolution.workspace import (
    all_workspaces_bytes,
    estimated_workspace_bytes,
    workspace_bytes,
    workspace_or_estimate_bytes,
)
from memcallback.isolation.isolated import run_isolated

H200, T4 = CARDS["NVIDIA H200"], CARDS["Tesla T4"]
THREE = Convolution(Direction.FORWARD, (64, 64, 3, 3), (1, 1), (1, 1), (1, 1))
TENSOR_CORE, DOWN_CONVERT, NONDETERMINISTIC = 0, 1, 4


class Function:
    """A C function; ctypes sets attributes on it."""

    def __init__(self, call):
        self.call = call

    def __call__(self, *args):
        return self.call(*args)


class Library:
    """As much of cuDNN as a question needs: engines with their notes, workspaces (None for one that
    the device cannot run) and, where it matters, numbers and knobs. With `compiles`, a plan takes a
    compiler, which nobody has.
    """

    def __init__(self, instant=(), fallback=(), version=91900, schema=4, *, compiles=False):
        self.compiles = compiles
        self.lists = {0: list(instant), 2: list(fallback)}
        self.version, self.schema = version, schema
        self.kinds, self.attributes, self.alive, self.asked = {}, {}, set(), []
        for name, call in {
            "cudnnGetVersion": lambda: self.version,
            "cudnnBackendCreateDescriptor": self.create,
            "cudnnBackendDestroyDescriptor": lambda descriptor: self.alive.remove(descriptor),
            "cudnnBackendFinalize": self.finalize,
            "cudnnBackendSetAttribute": self.set,
            "cudnnBackendGetAttribute": self.get,
        }.items():
            setattr(self, name, Function(call))

    def create(self, kind, into):
        number = len(self.kinds) + 1
        self.kinds[number] = kind
        self.attributes[number] = {}
        self.alive.add(number)
        into._obj.value = number
        return 0

    def set(self, descriptor, attribute, kind, count, values):
        self.attributes[descriptor][attribute] = (
            values if isinstance(values, bytes) else list(values)
        )
        return 0

    def finalize(self, descriptor):
        mine = self.attributes[descriptor]
        if self.kinds[descriptor] == Kind.DEVICE:
            return (
                0
                if json.loads(mine[Attribute.DEVICE_TEXT])["schemaVersion"] <= self.schema
                else 2000
            )
        if self.kinds[descriptor] == Kind.HEURISTICS:
            self.asked.append(mine[Attribute.HEURISTICS_MODE][0])
        if self.kinds[descriptor] == Kind.PLAN:
            assert not self.compiles
            return (
                0
                if self.attributes[mine[Attribute.PLAN_CONFIG][0]]["engine"][1] is not None
                else 3000
            )
        return 0

    def get(self, descriptor, attribute, kind, room, count, values):
        mine = self.attributes[descriptor]
        if attribute == Attribute.HEURISTICS_RESULTS:
            engines = self.lists[mine[Attribute.HEURISTICS_MODE][0]]
            count._obj.value = len(engines)
            for config, engine in zip(values or (), engines, strict=False):
                self.attributes[config]["engine"] = engine
        elif attribute == Attribute.CONFIG_ENGINE:
            self.attributes[values[0]]["engine"] = mine["engine"]
            count._obj.value = 1
        elif attribute == Attribute.ENGINE_NOTES:
            notes = mine["engine"][0]
            values[: len(notes)] = notes
            count._obj.value = len(notes)
        elif attribute == Attribute.ENGINE_NUMBER:
            values[0] = mine["engine"][2] if len(mine["engine"]) > 2 else 0
            count._obj.value = 1
        elif attribute == Attribute.CONFIG_KNOBS:
            knobs = mine["engine"][3] if len(mine["engine"]) > 3 else {}
            for choice, knob in zip(values, knobs.items(), strict=False):
                self.attributes[choice]["knob"] = knob
            count._obj.value = len(knobs)
        elif attribute in (Attribute.KNOB_TYPE, Attribute.KNOB_VALUE):
            values[0] = mine["knob"][attribute == Attribute.KNOB_VALUE]
            count._obj.value = 1
        elif attribute == Attribute.ENGINE_BEHAVIOR:
            values[0] = 0
            count._obj.value = int(self.compiles)
        elif attribute == Attribute.CONFIG_WORKSPACE:
            values[0] = mine["engine"][1]
            count._obj.value = 1
        elif attribute == Attribute.PLAN_WORKSPACE:
            values[0] = self.attributes[mine[Attribute.PLAN_CONFIG][0]]["engine"][1]
            count._obj.value = 1
        return 0


@pytest.fixture
def installed(monkeypatch):
    def clear():
        workspace._workspace_bytes.cache_clear()
        workspace._all_workspaces_bytes.cache_clear()

    def install(library):
        found = None if library is None else CuDNN(library)
        monkeypatch.setattr(cudnn, "load", lambda: found)
        clear()
        return library

    yield install
    clear()


def ask(convolution=THREE):
    return workspace_bytes(convolution, (8, 64, 56, 56), H200)


def test_the_first_plan_that_the_device_can_run_is_taken(installed):
    installed(Library(instant=[([], None), ([], 77), ([], 5)]))
    assert ask() == 77


def test_an_engine_that_would_be_compiled_is_asked_without_a_plan(installed):
    installed(Library(instant=[([DOWN_CONVERT], 5), ([], 77)], compiles=True))
    assert ask() == 77


def test_an_engine_whose_workspace_is_beyond_what_cudnn_counts_is_passed_over(installed):
    installed(Library(instant=[([], -7924240384), ([], 77)], compiles=True))
    assert ask() == 77


def test_the_fallback_list_is_asked_when_the_heuristics_have_no_plan(installed):
    library = installed(Library(instant=[([], None)], fallback=[([], 3)]))
    assert ask() == 3
    assert library.asked == [0, 2]


def test_no_plan_at_all_is_no_answer(installed):
    installed(Library(instant=[([], None)]))
    assert ask() is None


def test_where_one_plan_fails_the_others_are_tried_in_order(installed):
    installed(
        Library(instant=[([], None), ([], 77), ([DOWN_CONVERT], 9), ([], 5)], fallback=[([], 0)])
    )
    assert all_workspaces_bytes(THREE, (8, 64, 56, 56), H200) == (77, 5, 0)


def test_without_cudnn_no_other_plan_is_known(installed):
    installed(None)
    assert all_workspaces_bytes(THREE, (8, 64, 56, 56), H200) == ()
    installed(Library(instant=[([], 9)], schema=0))
    assert all_workspaces_bytes(THREE, (8, 64, 56, 56), H200) == ()


def test_engines_that_round_their_inputs_down_are_passed_over(installed):
    installed(Library(instant=[([DOWN_CONVERT], 1), ([TENSOR_CORE], 2)]))
    assert ask() == 2


def test_without_tf32_float32_stays_off_the_tensor_cores(installed):
    installed(Library(instant=[([TENSOR_CORE], 1), ([], 2)]))
    assert ask(replace(THREE, allow_tf32=False)) == 2
    assert ask(replace(THREE, allow_tf32=False, dtype="float16")) == 1


def test_a_deterministic_training_passes_nondeterministic_engines_over(installed):
    installed(Library(instant=[([TENSOR_CORE, NONDETERMINISTIC], 1), ([TENSOR_CORE], 2)]))
    assert [ask(), ask(replace(THREE, deterministic=True))] == [1, 2]


def test_an_answer_is_kept_and_all_descriptors_but_the_device_are_destroyed(installed):
    library = installed(Library(instant=[([], 9)]))
    assert ask() == ask() == 9
    assert library.asked == [0]
    assert [library.kinds[one] for one in library.alive] == [Kind.DEVICE]


def test_an_older_cudnn_reads_an_older_writing_of_the_device(installed):
    library = installed(Library(instant=[([], 9)], schema=2))
    assert ask() == 9
    (device,) = library.alive
    text = json.loads(library.attributes[device][Attribute.DEVICE_TEXT])
    assert (text["deviceVer"], text["multiProcessorCount"], text["schemaVersion"]) == (900, 132, 2)


def test_a_cudnn_that_refuses_the_device_has_no_answer(installed):
    installed(Library(instant=[([], 9)], schema=0))
    assert ask() is None


def test_the_graph_tells_shapes_strides_and_geometry(installed):
    library = installed(Library(instant=[([], 9)]))
    strided = replace(THREE, stride=(2, 2), channels_last=True, dtype="bfloat16")
    assert ask(strided) == 9
    by_kind = {
        kind: [library.attributes[n] for n, k in library.kinds.items() if k == kind]
        for kind in library.kinds.values()
    }
    x, y, w = by_kind[Kind.TENSOR]
    assert [x[Attribute.TENSOR_SHAPE], y[Attribute.TENSOR_SHAPE]] == [
        [8, 64, 56, 56],
        [8, 64, 28, 28],
    ]
    assert w[Attribute.TENSOR_STRIDES] == [576, 1, 192, 64]
    assert {tensor[Attribute.TENSOR_DTYPE][0] for tensor in (x, y, w)} == {9}
    (geometry,) = by_kind[Kind.CONVOLUTION]
    assert geometry[Attribute.CONVOLUTION_STRIDES] == [2, 2]
    assert geometry[Attribute.CONVOLUTION_DTYPE] == [0]


def test_without_cudnn_there_is_no_answer_but_an_estimate(installed):
    installed(None)
    assert (ask(), cudnn.is_available(), cudnn.version()) == (None, False, None)
    assert (
        workspace_or_estimate_bytes(THREE, (8, 64, 56, 56), H200)
        == (2 * 8 * 64 * 56 * 56 + 64 * 64 * 9) * 4
    )


@pytest.fixture
def paths(monkeypatch):
    def set_paths(*found, **loaded):
        monkeypatch.setattr(cudnn, "_package_libraries", lambda: iter(found))
        monkeypatch.setattr(
            ctypes,
            "CDLL",
            lambda path: loaded[path] if path in loaded else (_ for _ in ()).throw(OSError(path)),
        )
        cudnn.load.cache_clear()

    yield set_paths
    cudnn.load.cache_clear()


def test_a_library_that_is_too_old_or_none_of_cudnn_is_passed_over(paths):
    paths(
        "none",
        "old",
        "good",
        none=object(),
        old=Library(version=90100),
        good=Library(version=91000),
    )
    assert cudnn.load().version == 91000


def test_a_library_that_can_describe_no_device_is_passed_over(paths):
    # cuDNN 9.28 without a CUDA driver.
    paths("lame", "good", lame=Library(version=92801, schema=0), good=Library(version=91900))
    assert (cudnn.is_available(), cudnn.version()) == (True, 91900)
    paths("lame", lame=Library(version=92801, schema=0))
    assert (cudnn.is_available(), cudnn.version()) == (False, None)


def test_no_library_is_no_cudnn(paths):
    paths("gone")
    assert cudnn.load() is None


def test_the_library_of_the_python_package_is_found(tmp_path, monkeypatch):
    lib = tmp_path / "with [brackets]" / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    lib.parent.mkdir(parents=True)
    lib.touch()
    monkeypatch.setattr("sys.path", ["/nowhere", str(tmp_path / "with [brackets]")])
    assert list(cudnn._package_libraries()) == [str(lib)]


def test_the_estimate_is_as_good_as_it_says():
    pairs = [
        (estimated_workspace_bytes(convolution, shape, CARDS[record["meta"]["device"]]), answer)
        for record in recorded()
        for convolution, shape, answer in questions(record)
        if answer is not None
    ]
    short = sorted((answer - estimate) / MiB for estimate, answer in pairs)
    assert len(pairs) == 1969
    assert round(sum(one <= 1 for one in short) / len(short), 2) == 0.84
    assert (round(short[int(0.99 * len(short))]), round(short[-1])) == (25, 128)
    assert (
        round(sum(estimate for estimate, _ in pairs) / sum(answer for _, answer in pairs), 2)
        == 1.18
    )


@pytest.mark.parametrize(
    ("card", "dtype", "channels_last", "copies"),
    [
        (H200, "float32", False, True),
        (H200, "float32", True, False),
        (CARDS["NVIDIA L4"], "float32", True, True),
        (T4, "float16", False, True),
        (T4, "float32", False, False),
        (H200, "float64", False, False),
    ],
)
def test_the_estimate_is_of_copies_where_the_layout_is_not_that_of_the_kernels(
    card, dtype, channels_last, copies
):
    convolution = replace(THREE, dtype=dtype, channels_last=channels_last)
    assert (estimated_workspace_bytes(convolution, (8, 64, 56, 56), card) > MiB) is copies


def test_an_installed_cudnn_answers_as_recorded(as_the_virtual_device):
    answering = cudnn.version()
    records = [record for record in recorded() if record["meta"]["cudnn"] == answering]
    if not records:
        pytest.skip("needs the cuDNN whose answers are recorded")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip("needs a CUDA driver: without one cuDNN leaves out some engines")
    for record in records:
        for convolution, shape, answer in questions(record)[::10]:
            assert workspace_bytes(convolution, shape, CARDS[record["meta"]["device"]]) == answer


def test_a_prediction_names_the_version_that_was_asked(installed):
    installed(Library(instant=[([], 9)], version=90800))
    step = mc.TrainingStep(
        nn.Conv2d(3, 4, 3), torch.zeros(2, 3, 8, 8), loss=lambda m, x: m(x).sum()
    )
    caveats = mc.predict(step, device="A100", isolate=False, progress=lambda *_: None).caveats
    assert any("are what the installed cuDNN 9.8.0 answers" in caveat for caveat in caveats)


@pytest.mark.parametrize("visible", [None, "1"])
def test_the_child_that_predicts_hides_the_device_from_cudnn(monkeypatch, visible):
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with cudnn.device_hidden():
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert not cudnn.finds_device()


@pytest.mark.skipif(sys.platform != "linux", reason="predictions run in this process elsewhere")
def test_a_child_hides_the_device_and_its_parent_sees_it(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    def asked(_):
        with cudnn.device_hidden():
            inside = os.environ["CUDA_VISIBLE_DEVICES"]
        return inside, os.environ["CUDA_VISIBLE_DEVICES"], cudnn.finds_device()

    assert run_isolated(asked) == ("", "0", False)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_in_another_process_the_devices_stay_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with cudnn.device_hidden():
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_each_question_is_asked_with_the_device_hidden(installed, monkeypatch):
    seen = []
    installed(Library(instant=[([], 9)], version=90800))
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    ask = workspace._Query.graph

    def graph(query, *asked):
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        return ask(query, *asked)

    monkeypatch.setattr(workspace._Query, "graph", graph)
    assert workspace_bytes(THREE, (8, 64, 56, 56), H200) == 9
    assert seen == [""]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_plan_that_needs_a_device_comes_first_where_cudnn_finds_none(installed, monkeypatch):
    pointwise, shape = replace(THREE, weight_shape=(64, 64, 1, 1), padding=(0, 0)), (8, 64, 56, 56)
    installed(Library(instant=[([], 9), ([], 7)], version=90800))
    monkeypatch.setattr(cudnn, "finds_device", lambda: False)
    assert all_workspaces_bytes(pointwise, shape, H200)[:3] == (0, 9, 7)
    assert workspace_bytes(pointwise, shape, H200) == 0
    monkeypatch.setattr(cudnn, "finds_device", lambda: True)
    assert all_workspaces_bytes(pointwise, shape, H200)[:2] == (9, 7)
    assert workspace_bytes(pointwise, shape, H200) == 9


def test_a_process_that_uses_cuda_is_known_to_have_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    assert cudnn.finds_device()
    monkeypatch.setattr(torch.cuda, "_initialized", False)
    assert not cudnn.finds_device()


def test_a_convolution_that_cudnn_refuses_has_no_plan_by_rule_either(installed, monkeypatch):
    pointwise = replace(THREE, weight_shape=(64, 64, 1, 1), padding=(0, 0))
    installed(Library(instant=[([], 9)], version=90800))

    def refuse(*_):
        raise cudnn.CuDNNError("refused")

    monkeypatch.setattr(workspace._Query, "graph", refuse)
    assert all_workspaces_bytes(pointwise, (8, 64, 56, 56), H200) == ()
    assert workspace_bytes(pointwise, (8, 64, 56, 56), H200) is None


def test_a_plan_that_shares_tiles_takes_what_the_device_needs_for_it(installed):
    # 3,136 tiles in clusters of 8: an H200 has 16 left over, which 7 share, the described card 0.
    knobs = {Knob.TILE_SIZE: 0, Knob.TILE_K: 1, Knob.WORKSPACE: 0, Knob.CLUSTER_M: 8}
    convolution = replace(THREE, weight_shape=(240, 384, 3, 3), dtype="float16")
    installed(Library([([TENSOR_CORE], MiB + 131, 62, knobs)]))
    found = workspace_bytes(convolution, (16, 384, 112, 112), H200)
    counters = 4 + 127 + 32 + 4 * 16 * (4 + 2 + 1)
    assert found == MiB + 16 * 7 * 128 * 128 * 4 + counters
    installed(Library([([TENSOR_CORE], MiB + 131, 62, knobs)]))
    assert workspace_bytes(convolution, (16, 384, 112, 112), T4) == MiB + 131


def test_plans_after_the_first_take_what_the_device_needs_for_them_too(installed):
    knobs = {Knob.TILE_SIZE: 0, Knob.TILE_K: 1, Knob.WORKSPACE: 0, Knob.CLUSTER_M: 8}
    convolution = replace(THREE, weight_shape=(240, 384, 3, 3), dtype="float16")
    installed(Library([([TENSOR_CORE], 7), ([TENSOR_CORE], MiB + 131, 62, knobs)]))
    first, second = all_workspaces_bytes(convolution, (16, 384, 112, 112), H200)
    assert (first, second > 8 * MiB) == (7, True)


def test_knobs_are_read_only_where_they_matter(installed):
    library = installed(Library(instant=[([], 9, 61, {Knob.TILE_SIZE: 0})]))
    assert ask() == 9
    assert Kind.KNOB_CHOICE not in library.kinds.values()
