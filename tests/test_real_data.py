"""Public data sets, where parts of them are next to the repository: which rows environments take."""

import pytest
from conftest import ROOT

import envs

DATA = ROOT.parent / "shared" / "data"


@pytest.mark.skipif(not DATA.exists(), reason="no ../shared/data")
@pytest.mark.parametrize(
    "name, file, train, test",
    [
        ("humaneval", "humaneval", 50, 15),
        ("coophumaneval", "coophumaneval", 25, 8),
        ("mbpp", "mbpp_sanitized", 60, 127),
        ("classeval", "classeval", 21, 8),
        ("arxiv", "arxiv", 23, 2),
    ],
)
def test_public_rows_load(name, file, train, test, monkeypatch, tmp_path):
    """Fails if a set is refused for one of its rows, or tasks are left out without need."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    env = envs.make(name, dataset=str(DATA / f"{file}.jsonl"))
    # some references need root, or pass by chance
    assert -2 <= len(env.tasks("train")) - train <= 6
    assert -2 <= len(env.tasks("test")) - test <= 6
