import pytest


@pytest.fixture(autouse=True)
def isolated(monkeypatch):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE")
    # On a machine that other tests fill, a prediction takes longer than a training waits for it.
    monkeypatch.setattr("memcallback.record.monitor.PATIENCE_S", 600)
