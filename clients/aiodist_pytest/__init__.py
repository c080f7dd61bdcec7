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
    plan = config.getoption("simulate")
    if plan is not None:
        from aiodist.testing.plans import parse

        try:
            parse(plan)
        except ValueError as error:
            raise pytest.UsageError(f"--simulate: {error}") from None


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

    # Other plugins may have made a plain function of it. Its own decorators stay.
    test = inspect.unwrap(pyfuncitem.obj, stop=inspect.iscoroutinefunction)
    is_static = pyfuncitem.cls is None or isinstance(
        inspect.getattr_static(pyfuncitem.cls, pyfuncitem.originalname), staticmethod
    )
    if not is_static and not inspect.ismethod(test):
        test = partial(test, pyfuncitem.instance)
    arguments = pyfuncitem.funcargs  # without parameters that have a default
    given = {name: arguments[name] for name in _parameters(test)[1:] if name in arguments}
    _check(marker)
    plan = pyfuncitem.config.getoption("simulate") or marker.kwargs.get("replay")
    try:
        explore(_program(test, given), **{**marker.kwargs, "replay": plan})
    except FoundError as error:
        if isinstance(error.__cause__, (pytest.skip.Exception, pytest.xfail.Exception)):
            raise error.__cause__ from None
        again = f'Run it again: pytest "{pyfuncitem.nodeid}" --simulate "{error.plan}"'
        text = "\n".join([*str(error).splitlines()[:-1], again])
        raise _failed(text) from None
    return True


def _check(marker: pytest.Mark) -> None:
    """Fail the test if its marker has wrong arguments."""
    from aiodist.testing import explore
    from aiodist.testing.exploring import check_arguments

    try:
        bound = inspect.signature(explore).bind(None, *marker.args, **marker.kwargs)
        bound.apply_defaults()
        of = {**bound.arguments}
        del of["program"], of["replay"]
        check_arguments(**of)
    except (TypeError, ValueError) as error:
        raise _failed(
            f"The marker 'simulate' takes the arguments of explore, by name: {error}"
        ) from None


def _program(test: Callable[..., Any], given: dict[str, Any]) -> Callable[[Any], Any]:
    @wraps(test)
    async def program(group: Any) -> Any:
        return await test(group, **given)

    return program


def _failed(text: str) -> BaseException:
    """Make the exception of a test that fails with `text`, and with no traceback."""
    return pytest.fail.Exception(text, pytrace=False)


def _group_of(test: Callable[..., Any]) -> str:
    """Return the name of the parameter for the group. Other functions are refused."""
    names = [name for name in _parameters(test) if name not in ("self", "cls")]
    if not inspect.iscoroutinefunction(test) or not names:
        raise _failed(
            f"{test.__qualname__} is marked 'simulate': write it as 'async def', with the group as "
            "its first parameter"
        )
    return names[0]


def _parameters(test: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(test).parameters)
