"""Questions that another process asks cuDNN, so that no CUDA context is opened in this one."""

import io
import os
import pickle
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from memcallback.cuda.convolution import cudnn, workspace
from memcallback.cuda.convolution.call import Convolution, Direction
from memcallback.cuda.convolution.cudnn import CuDNNError
from memcallback.cuda.convolution.elsewhere import Elsewhere, elsewhere, serve
from memcallback.cuda.convolution.workspace import all_workspaces_bytes, workspace_bytes
from memcallback.devices.catalogue import find_device

H200 = find_device("H200")
THREE = Convolution(Direction.FORWARD, (64, 64, 3, 3), (1, 1), (1, 1), (1, 1))
SHAPE = (8, 64, 56, 56)


@pytest.fixture
def asked_elsewhere(monkeypatch):
    def no_answer(*question, **settings):
        raise AssertionError("asked in this process")

    monkeypatch.setattr(cudnn, "would_open_context", lambda: True)
    workspace._asked_elsewhere.cache_clear()
    yield lambda: (
        monkeypatch.setattr(workspace, "_workspace_bytes", no_answer),
        monkeypatch.setattr(workspace, "_all_workspaces_bytes", no_answer),
    )
    workspace._asked_elsewhere.cache_clear()


@pytest.fixture
def process():
    made = Elsewhere()
    yield made
    made.close()


def test_the_answers_are_those_of_this_process(monkeypatch, asked_elsewhere):
    shapes = [(size, *SHAPE[1:]) for size in (1, 8, 9)]
    monkeypatch.setattr(cudnn, "would_open_context", lambda: False)
    monkeypatch.setattr(cudnn, "finds_device", lambda: False)
    here = [workspace_bytes(THREE, shape, H200) for shape in shapes]
    all_here = all_workspaces_bytes(THREE, SHAPE, H200)
    monkeypatch.setattr(cudnn, "would_open_context", lambda: True)
    asked_elsewhere()
    assert [workspace_bytes(THREE, shape, H200) for shape in shapes] == here
    assert all_workspaces_bytes(THREE, SHAPE, H200) == all_here


def test_the_other_process_sees_no_device(process, monkeypatch):
    code = (
        "import os, pickle; pickle.dump(os.environ['CUDA_VISIBLE_DEVICES'], open({answers}, 'wb'))"
    )
    monkeypatch.setattr("memcallback.cuda.convolution.elsewhere._SERVE", code)
    other = Elsewhere()
    assert pickle.load(other._answers) == ""
    other.close()


def test_what_the_installation_prints_at_the_start_is_no_answer(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('hello')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    other = Elsewhere()
    assert other.ask((THREE, SHAPE, H200, 0, True)) == workspace.answer(
        THREE, SHAPE, H200, 0, is_of_all=True
    )
    other.close()


def test_where_the_other_process_has_ended_there_is_no_answer(
    asked_elsewhere, process, monkeypatch
):
    asked_elsewhere()
    process.close()
    with pytest.raises(CuDNNError, match="has ended"):
        process.ask((THREE, SHAPE, H200, 0, False))
    monkeypatch.setattr(workspace, "elsewhere", lambda: process)
    assert workspace_bytes(replace(THREE, dtype="float16"), SHAPE, H200) is None
    assert all_workspaces_bytes(replace(THREE, dtype="float16"), SHAPE, H200) == ()


def test_a_python_that_does_not_start_gives_no_answer(asked_elsewhere, monkeypatch):
    asked_elsewhere()
    monkeypatch.setattr(workspace, "elsewhere", Elsewhere)
    monkeypatch.setattr(sys, "executable", "/no/python")
    assert workspace_bytes(replace(THREE, dtype="bfloat16"), SHAPE, H200) is None


def test_questions_are_answered_until_they_end():
    questions, answers = io.BytesIO(pickle.dumps((1, 2)) + pickle.dumps((3, 4))), io.BytesIO()
    serve(lambda left, right: left + right, questions, answers)
    answers.seek(0)
    assert [pickle.load(answers), pickle.load(answers)] == [3, 7]


def test_after_a_fork_another_process_is_asked():
    mine = elsewhere()
    assert elsewhere() is mine
    child = os.fork()
    if child == 0:
        other = elsewhere()
        is_other = other is not mine and other._process.pid != mine._process.pid
        other.close()
        os._exit(0 if is_other else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mine._process.poll() is None


def test_it_ends_with_its_program():
    code = """
        from memcallback.cuda.convolution.elsewhere import elsewhere
        print(elsewhere()._process.pid)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_only_a_process_that_has_not_used_cuda_asks_elsewhere(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in (("is_cuda_refused", False), ("is_cuda_initialized", False)):
        monkeypatch.setattr(cudnn, name, lambda value=value: value)
    monkeypatch.setattr(cudnn, "_has_driver", lambda: True)
    assert cudnn.would_open_context()
    for name in ("is_cuda_refused", "is_cuda_initialized"):
        with monkeypatch.context() as one:
            one.setattr(cudnn, name, lambda: True)
            assert not cudnn.would_open_context()
    with monkeypatch.context() as one:
        one.setenv("CUDA_VISIBLE_DEVICES", "")
        assert not cudnn.would_open_context()
    monkeypatch.setattr(cudnn, "_has_driver", lambda: False)
    assert not cudnn.would_open_context()
