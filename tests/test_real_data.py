"""Public data sets, where parts of them are next to the repository: which rows environments take."""

import pytest
from conftest import ROOT
from toy import rows_of

import envs

DATA = ROOT.parent / "shared" / "data"
# Environment | file | rows for training | for tests
SETS = """
humaneval     | humaneval      | 50 | 15
coophumaneval | coophumaneval  | 25 | 8
mbpp          | mbpp_sanitized | 60 | 127
classeval     | classeval      | 21 | 8
arxiv         | arxiv          | 23 | 2
"""


@pytest.mark.skipif(not DATA.exists(), reason="no ../shared/data")
@pytest.mark.parametrize("name, file, train, test", rows_of(SETS))
def test_public_rows_load(name, file, train, test, monkeypatch, tmp_path):
    """Fails if a set is refused for one of its rows, or tasks are left out without need."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    env = envs.make(name, dataset=f"{DATA}/{file}.jsonl")
    # some references need root, or pass by chance
    assert -2 <= len(env.tasks("train")) - int(train) <= 6
    assert -2 <= len(env.tasks("test")) - int(test) <= 6
