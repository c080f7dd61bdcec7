"""The faults of `make mutations-protocol` still fit the library."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from copies import Copy
from design_faults import FAULTS, PROGRAMS, DesignFault
from protocol import find

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_it_can_be_made_and_its_proofs_are_there(fault: DesignFault) -> None:
    source = (ROOT / fault.file).read_text()
    faulty = fault.apply(source)
    assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(source))
    assert all(proof == PROGRAMS or (ROOT / proof).exists() for proof in fault.proofs)


def test_there_are_thirty_of_them() -> None:
    assert len({fault.what for fault in FAULTS}) == len(FAULTS) >= 30


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("copy"))


@pytest.mark.parametrize(
    "what",
    [
        "a member of a group that has ended brings it back to life",
        "one vote for yes is enough",
        "the verdicts of a rank that dies are not told for it",
    ],
)
def test_the_first_proof_finds_it(copy: Copy, what: str) -> None:
    (fault,) = [one for one in FAULTS if one.what == what]
    quick = replace(fault, proofs=fault.proofs[:1])
    assert ".py" in find(copy, quick)
    assert (copy.folder / fault.file).read_text() == (ROOT / fault.file).read_text()
