import pytest


@pytest.fixture(autouse=True)
def isolated(monkeypatch):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE")
