"""The faults of `make mutations-protocol` still fit the library."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from design_faults import FAULTS, PROGRAMS, DesignFault

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_it_can_be_made_and_its_proofs_are_there(fault: DesignFault) -> None:
    source = (ROOT / fault.file).read_text()
    faulty = fault.apply(source)
    assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(source))
    assert all(proof == PROGRAMS or (ROOT / proof).exists() for proof in fault.proofs)


def test_there_are_thirty_of_them() -> None:
    assert len({fault.what for fault in FAULTS}) == len(FAULTS) >= 30
