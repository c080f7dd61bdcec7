"""The plugin of pytest that runs tests on simulated ranks. pytest finds it if aiodist is installed.

A test with the marker ``simulate`` is an async function whose first parameter is a group. It runs
once for each seed, as `aiodist.testing.explore` runs a program::

    @pytest.mark.simulate(ranks=3, seeds=200, faults="kill cut delay")
    async def test_the_sum(group):
        assert await group.all_reduce(1) == group.size

The marker takes the arguments of `explore`. ``pytest --simulate PLAN TEST`` runs one plan, as the
text of a failure gives it. aiodist is imported when the first such test runs, because that takes a
while and most runs of pytest have none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest

MARKER = "simulate"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("aiodist").addoption(
        "--simulate",
        metavar="PLAN",
        help="the one run of tests marked 'simulate', as the text of a failure gives it",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "simulate(ranks=3, seeds=200, faults='', …): run the test on simulated ranks, once for "
        "each seed, with the arguments of aiodist.testing.explore",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the test its parameter for the group, which is no fixture."""
    if metafunc.definition.get_closest_marker(MARKER) is not None:
        group = _group_of(metafunc.function)
        hidden = getattr(pytest, "HIDDEN_PARAM", "simulated")  # since pytest 8.4
        metafunc.parametrize(group, [None], ids=[hidden])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the test on simulated ranks in place of the way that it would run."""
    marker = pyfuncitem.get_closest_marker(MARKER)
    if marker is None:
        return None
    from aiodist.testing import FoundError, explore

    test = inspect.unwrap(pyfuncitem.obj)  # other plugins may have made a plain function of it
    if pyfuncitem.cls is not None and not inspect.ismethod(test):
        test = partial(test, pyfuncitem.instance)
    given = {name: pyfuncitem.funcargs[name] for name in _parameters(test)[1:]}
    plan = pyfuncitem.config.getoption("simulate")
    try:
        explore(_program(test, given), *marker.args, replay=plan, **marker.kwargs)
    except FoundError as error:
        if isinstance(error.__cause__, (pytest.skip.Exception, pytest.xfail.Exception)):
            raise error.__cause__ from None
        again = f'Run it again: pytest "{pyfuncitem.nodeid}" --simulate "{error.plan}"'
        text = "\n".join([*str(error).splitlines()[:-1], again])
        pytest.fail(text, pytrace=False)
    return True


def _program(test: Callable[..., Any], given: dict[str, Any]) -> Callable[[Any], Any]:
    @wraps(test)
    async def program(group: Any) -> Any:
        return await test(group, **given)

    return program


def _group_of(test: Callable[..., Any]) -> str:
    """Return the name of the parameter for the group. Raises UsageError for other functions."""
    names = [name for name in _parameters(test) if name not in ("self", "cls")]
    if not inspect.iscoroutinefunction(test) or not names:
        raise pytest.UsageError(
            f"{test.__qualname__} is marked 'simulate': write it as 'async def', with the group as "
            "its first parameter"
        )
    return names[0]


def _parameters(test: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(test).parameters)
