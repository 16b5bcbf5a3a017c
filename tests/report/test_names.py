"""What a terminal would obey is printed as escapes, wherever a name comes in."""

import pytest
import torch
import training
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import memcallback as mc
from memcallback.core.document import Code, Document, Heading, Paragraph, Table

CLEAR = "a\x1b[2J\x1b[31mb"
LINES = "c\r\nd\u2028# e"
BACKWARDS = "f\u202eg"
OBEYED = ("\x1b", "\r", "\u2028", "\u202e", "\x9b")


def named(*layers):
    model = nn.Sequential()
    for name, layer in zip((CLEAR, LINES, BACKWARDS), layers, strict=True):
        model.add_module(name, layer)
    return model


def check(text):
    assert text.strip()
    assert not [letter for letter in OBEYED if letter in text]


@pytest.fixture
def model():
    return named(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


@pytest.mark.parametrize("form", ["text", "markdown", "html"])
def test_each_form_of_a_document_shows_escapes(form):
    table = Table(title=CLEAR, columns=("", "size"), rows=((CLEAR, "1"), ("two\nlines", "2")))
    document = Document(Heading(CLEAR), CLEAR, Paragraph(CLEAR, 1), Code(f"{CLEAR}\n2"), table)
    shown = getattr(document, form)()
    check(shown)
    assert shown.count(r"a\x1b[2J\x1b[31mb") == 6
    # The ends of lines in a table's cell stay.
    assert r"two\nlines" not in shown


def test_a_prediction_its_savings_and_its_layers_show_escapes(model):
    step = mc.TrainingStep(model, torch.zeros(8, 64), optimizer=torch.optim.AdamW)
    prediction = mc.predict(step, device="24GiB")
    assert r"a\x1b[2J\x1b[31mb" in prediction.modules.to_text()
    assert r"c\r\nd\u2028# e" in prediction.modules.to_text()
    layers = mc.layers(model, torch.zeros(8, 64))
    savings = mc.what_if(step, device="24GiB")
    for result in (prediction, prediction.modules, layers, savings):
        check(result.to_text())
        check(result.to_markdown())


def test_a_recorded_step_shows_escapes(model):
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = mc.MemoryRecorder(model, optimizer, per_module=True)
    with recorder.watch(per_module=True):
        for _ in range(2):
            model(torch.zeros(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert r"a\x1b[2J\x1b[31mb" in recorder.modules.to_text()
    check(recorder.modules.to_text())


def test_an_out_of_memory_report_shows_escapes(capsys):
    class Hungry(nn.Module):
        def forward(self, features):
            return torch.empty(2**60, dtype=torch.uint8)

    model = named(nn.Linear(64, 64), Hungry(), nn.ReLU())
    recorder = mc.MemoryRecorder(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(RuntimeError, match="allocate memory"), recorder.watch():
        model(torch.zeros(8, 64))
    assert r"c\\r\\nd" in recorder.out_of_memory.to_text()  # quoted as Python writes it
    check(recorder.out_of_memory.to_markdown())
    said = capsys.readouterr()
    check(said.out + said.err)


def test_a_callback_prints_and_warns_with_escapes(tmp_path, capsys):
    class Untraced(nn.Linear):
        def forward(self, features):
            if isinstance(features, FakeTensor):
                raise ValueError(CLEAR)
            return super().forward(features)

    module = training.Automatic()
    module.network.add_module(CLEAR, Untraced(training.NUM_CLASSES, training.NUM_CLASSES))
    with pytest.warns(mc.MemoryWarning) as warned:
        training.trainer(tmp_path, [mc.MemoryCallback()]).fit(module, training.loader(2))
    for warning in warned:
        check(str(warning.message))
    assert any(r"ValueError: a\x1b[2J\x1b[31mb" in str(warning.message) for warning in warned)
    check(capsys.readouterr().out)
