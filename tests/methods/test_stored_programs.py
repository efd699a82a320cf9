"""Every program of every method is known by what shapes it, so that it can be stored ready to run."""

import pytest
from method_cases import BASIC, case_id, models_of

from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.runtime.store import folder, program_files
from jaxspec.sampling.processors import GREEDY


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(program_files, "disabled", False)
    folder.enable_compile_cache(str(tmp_path / "cache"))
    yield
    program_files.use(None)


@pytest.mark.parametrize("case", BASIC, ids=case_id)
def test_all_programs_have_a_digest(case):
    for method in (case.method, Autoregressive()):
        programs = method.bind(models_of(case), 64).programs
        assert programs and [one.name for one in programs if one.digest(one.fit(GREEDY)) is None] == []
