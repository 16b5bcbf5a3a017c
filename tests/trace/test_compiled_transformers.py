"""Models of transformers, whose masks depend on values, in compiled code."""

import pytest
import torch
from needs import needs_compilation

import memcallback as mc

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
    needs_compilation,
]


def test_the_search_for_packed_sequences_is_compiled_with_the_rest(monkeypatch):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=64, vocab_size=100, bos_token_id=0, eos_token_id=0
    )
    step = mc.TrainingStep(
        torch.compile(transformers.GPT2Model(config), fullgraph=True),
        torch.zeros(2, 32, dtype=torch.int64),
        loss=lambda model, tokens: model(tokens).last_hidden_state.mean(),
    )
    caveats = mc.predict(step, device="NVIDIA H200").caveats
    assert any(caveat.startswith("Compiled code is predicted from") for caveat in caveats)
    assert not any("without compilation" in caveat for caveat in caveats)
