"""`aiodist.averager` over sockets: what members get, and what they are refused."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import aiodist

CODECS: list[Any] = [
    None,
    aiodist.codecs.bf16(),
    aiodist.codecs.int8(),
    aiodist.codecs.int4(error_feedback=True),
    aiodist.codecs.topk(0.2, error_feedback=True),
]


@asynccontextmanager
async def members(count: int, **options: Any) -> AsyncIterator[list[aiodist.Averager]]:
    """So many members, named m0, m1, …; `each`: options of single ones, by number."""
    each = options.pop("each", {})
    options = {"quorum": count, "grace": 5.0, "op_timeout": 20.0, **options}
    async with AsyncExitStack() as stack:
        coordinator = aiodist.Coordinator("tcp://127.0.0.1:0")
        await stack.enter_async_context(coordinator)
        yield [
            await stack.enter_async_context(
                aiodist.averager(
                    "outer",
                    address=coordinator.address,
                    **{"name": f"m{number}", **options, **each.get(number, {})},
                )
            )
            for number in range(count)
        ]


async def average(
    avgs: list[aiodist.Averager], trees: list[Any], weights: list[float] | None = None
) -> list[aiodist.Averaged]:
    weights = weights or [1.0] * len(avgs)
    calls = [avg.average(x, weight=w) for avg, x, w in zip(avgs, trees, weights, strict=True)]
    return list(await asyncio.gather(*calls))


@pytest.mark.parametrize("transports", [("tcp",), None])
def test_the_mean_by_weight_is_that_of_numpy(run: Any, transports: Any) -> None:
    random = np.random.default_rng(1)
    weights = [1.0, 2.5, 1000.0, 0.25]
    trees = [
        {
            "half": random.standard_normal((3, 5)).astype(np.float16),
            "single": random.standard_normal(300_001).astype(np.float32),
            "double": random.standard_normal((2, 0, 3)),
            "more": [random.standard_normal(1000), np.float64(random.standard_normal())],
        }
        for _ in weights
    ]

    async def main() -> None:
        async with members(4, transports=transports) as avgs:
            for round in (1, 2):
                found = await average(avgs, trees, weights)
                for one in found:
                    assert one.round == round
                    assert one.contributors == ("m0", "m1", "m2", "m3")
                    assert one.weights == tuple(weights)
                    assert not one.late
                    for key in ("half", "single", "double"):
                        value = one.value[key]
                        assert value.dtype == trees[0][key].dtype
                        assert value.tobytes() == found[0].value[key].tobytes()
                        exact = np.average(
                            [tree[key].astype(np.float64) for tree in trees], 0, weights
                        )
                        np.testing.assert_allclose(value, exact, rtol=2e-3, atol=1e-4)

    run(main())


@pytest.mark.parametrize("codec", CODECS[1:], ids=str)
def test_with_codecs_all_members_have_the_same_bits(run: Any, codec: Any) -> None:
    random = np.random.default_rng(2)
    trees = [
        {"w": random.standard_normal(70_000).astype(np.float32), "exact": np.full(3, number / 3)}
        for number in range(3)
    ]
    exact = np.mean([tree["w"] for tree in trees], 0)

    async def main() -> None:
        async with members(3, codec=codec) as avgs:
            total = np.zeros_like(exact)
            rounds = 12
            for _ in range(rounds):
                found = await average(avgs, trees)
                first = found[0].value
                for one in found[1:]:
                    assert one.value["w"].tobytes() == first["w"].tobytes()
                np.testing.assert_allclose(first["exact"], [1 / 3] * 3)
                total += first["w"]
            # What codings lose comes later, with error feedback.
            near = 0.35 if codec.error_feedback else 0.05
            assert np.abs(total / rounds - exact).max() < near * np.abs(exact).max()

    run(main())


class Unwritable:
    """A codec that derives from nothing, and looks whether it could write to its arguments."""

    name, error_feedback = "unwritable()", False

    def nbytes(self, count: int) -> int:
        return 4 * count

    def encode(self, values: Any, out: Any) -> int:
        out[:] = values.view(np.uint8) * (not values.flags.writeable)
        return len(out)

    def decode(self, data: Any, out: Any) -> None:
        out[:] = data.view(np.float32) * (not data.flags.writeable)


class Failing(Unwritable):
    """A codec of which one call of `decode` raises an error."""

    def __init__(self, number: int, error: type[BaseException] = OSError) -> None:
        self.left = number
        self.error = error

    def decode(self, data: Any, out: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error("the codec broke")
        super().decode(data, out)


class PanicError(BaseException):
    """What a codec in another language may raise."""


@pytest.mark.parametrize("error", [OSError, PanicError])
@pytest.mark.parametrize("number", [1, 2])
def test_an_error_of_a_codec_fails_its_call_and_no_other(
    run: Any, number: int, error: type[BaseException]
) -> None:
    """The first one is raised as a round begins, the second one when data has come."""

    async def main() -> None:
        codecs = {0: {"codec": Failing(number, error)}, 1: {"codec": Failing(0)}}
        async with members(2, each=codecs) as (first, second):
            fails, waits = (one.average(np.ones(9, np.float32)) for one in (first, second))
            with pytest.raises(error, match="the codec broke"):
                await fails
            again = first.average(np.ones(9, np.float32))
            for one in await asyncio.gather(again, waits):
                assert one.round == 1
                assert one.contributors == ("m0", "m1")

    run(main())


def test_codecs_get_read_only_arrays(run: Any) -> None:
    async def main() -> None:
        async with members(2, codec=Unwritable()) as avgs:
            for one in await average(avgs, [np.full(9, each, np.float32) for each in (1, 2)]):
                assert (one.value == 1.5).all()

    run(main())


def test_bytes_of_codecs(run: Any) -> None:
    x = np.random.default_rng(3).standard_normal(1 << 20).astype(np.float32)
    sent = {}

    async def main() -> None:
        for codec in (None, aiodist.codecs.int8(), aiodist.codecs.int4()):
            async with members(4, codec=codec, transports=("tcp",)) as avgs:
                await average(avgs, [x] * 4)
                sent[str(codec)] = sum(avg.bytes_moved[0] for avg in avgs)

    run(main())
    whole, int8, int4 = sent.values()
    assert whole < 1.01 * 4 * x.nbytes * 2 * 3 / 4
    assert int8 < 0.26 * whole
    assert int4 < 0.14 * whole


def test_the_sum_is_of_values_times_weights(run: Any) -> None:
    async def main() -> None:
        async with members(2, op=aiodist.ReduceOp.SUM) as avgs:
            # With such a weight, zeros would become NaN in float32, for all members.
            with pytest.raises(ValueError, match="made in float32, not 1e"):
                avgs[1].average([np.ones(2), np.zeros(2, np.float32)], weight=1e39)
            found = await average(avgs, [np.ones(2), np.full(2, 10.0)], [1.0, 3.0])
            assert found[0].value.tolist() == [31.0, 31.0]
            found = await average(avgs, [np.zeros(2), np.ones(2)], [1e39, 1.0])
            assert found[0].value.tolist() == [1.0, 1.0]

    run(main())


def test_a_member_of_weight_0_receives(run: Any) -> None:
    async def main() -> None:
        async with members(3, quorum=2) as avgs:
            found = await average(avgs, [np.ones(2), np.full(2, 3.0), np.ones(2)], [1, 1, 0])
            assert [one.value.tolist() for one in found] == [[2.0, 2.0]] * 3
            assert {one.contributors for one in found} == {("m0", "m1")}

    run(main())


def test_the_contribution_is_copied_within_the_call(run: Any) -> None:
    async def main() -> None:
        async with members(2) as avgs:
            x, y = np.ones(3), np.ones(3)
            calls = avgs[0].average(x), avgs[1].average(y)
            x[:] = y[:] = 7
            for one in await asyncio.gather(*calls):
                assert one.value.tolist() == [1, 1, 1]

    run(main())


THREE = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("tree", "other", "text"),
    [
        (THREE, np.ones(4, np.float32), r"float32\[3\].*float32\[4\]"),
        ({"a": THREE}, {"b": THREE}, r"\{'a': float32\[3\]\}.*\{'b': float32\[3\]\}"),
        ([THREE], (THREE,), r" \[float32\[3\]\].*\(float32\[3\],\)"),
    ],
    ids=["shape", "key", "container"],
)
def test_only_the_member_that_differs_fails(run: Any, tree: Any, other: Any, text: str) -> None:
    async def main() -> None:
        async with members(3, quorum=2, grace=0.1) as avgs:
            calls = [avgs[0].average(tree)]
            with pytest.raises(aiodist.MismatchError, match=text):
                await avgs[1].average(other)
            calls.append(avgs[2].average(tree))
            for one in await asyncio.gather(*calls):
                assert one.contributors == ("m0", "m2")
            # It can go on at once.
            calls = [avg.average(tree, timeout=10) for avg in avgs[:2]]
            for one in await asyncio.gather(*calls):
                assert one.contributors == ("m0", "m1")

    run(main())


def test_a_call_that_gets_an_earlier_result_has_its_form(run: Any) -> None:
    """The coordinator is not offered such a call, so the member compares the forms."""

    async def main() -> None:
        async with members(1, carry=True) as (avg,):
            await avg.average(THREE)
            cancelled = avg.average(THREE)
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait({cancelled})
            for other in np.ones(1, np.float32), {"a": THREE}:
                with pytest.raises(aiodist.MismatchError, match=r"are float32\[3\], but"):
                    await avg.average(other)
            for late in True, False:
                found = await avg.average(THREE)
                assert (found.late, list(found.value)) == (late, [1, 1, 1] if late else [2, 2, 2])

    run(main())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quorum": 1}, "quorum=1"),
        ({"grace": "auto"}, "grace='auto'"),
        ({"codec": aiodist.codecs.int8()}, "int8"),
        ({"op": aiodist.ReduceOp.SUM}, "op=SUM"),
    ],
)
def test_rules_must_agree(run: Any, options: Any, text: str) -> None:
    async def main() -> None:
        with pytest.raises(aiodist.MismatchError, match=text) as differs:
            async with members(2, each={1: options}):
                pass
        assert differs.value.group == "averager outer"

    run(main())


def test_a_second_member_of_a_name_is_refused_while_the_first_lives(run: Any) -> None:
    async def main() -> None:
        with pytest.raises(aiodist.JoinError, match="'outer' has a member named 'm0' already"):
            async with members(2, each={1: {"name": "m0"}}):
                pass

    run(main())


def test_members_without_names_have_names_of_their_own(run: Any) -> None:
    async def main() -> None:
        async with members(2, each={0: {"name": None}, 1: {"name": None}}) as avgs:
            assert avgs[0].name != avgs[1].name

    run(main())


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"quorum": 0}, ValueError),
        ({"quorum": 10**6}, ValueError),
        ({"grace": -1.0}, ValueError),
        ({"grace": float("nan")}, ValueError),
        ({"grace": 10**400}, ValueError),
        ({"grace": 1e300}, ValueError),
        ({"grace": True}, ValueError),
        ({"max_stale": -1}, ValueError),
        ({"max_stale": 2**31 + 1}, ValueError),
        ({"op": aiodist.ReduceOp.MAX}, ValueError),
        ({"codec": "int8"}, TypeError),
        ({"parts": "encoder"}, TypeError),
        ({"parts": ()}, ValueError),
        ({"parts": (1,)}, ValueError),
        ({"size": 3}, TypeError),
    ],
)
def test_options_that_make_no_sense(options: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        aiodist.averager("outer", address="tcp://127.0.0.1:1", **options)
    with pytest.raises(ValueError, match="1 to 128"):
        aiodist.averager("", address="tcp://127.0.0.1:1")


def test_calls_before_the_entrance_say_what_to_do(run: Any) -> None:
    async def main() -> None:
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            avg = aiodist.averager("outer", address=coordinator.address)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="async with"):
                    avg.average(np.ones(1))
            with pytest.raises(RuntimeError, match="async with"):
                avg.state()
            with pytest.raises(RuntimeError, match="async with"):
                await avg.publish_state(np.ones(1))
            with pytest.raises(RuntimeError, match="async with"):
                print(avg.name)
            async with avg:
                assert (await avg.average(np.ones(1))).round == 1

    run(main())


def test_calls_that_make_no_sense(run: Any) -> None:
    async def main() -> None:
        async with members(1, quorum=1, parts=("a",)) as [avg]:
            for weight, kind in ((-1.0, ValueError), (float("nan"), ValueError), ("x", TypeError)):
                with pytest.raises(kind):
                    avg.average(np.ones(1), weight=weight, part="a")  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="'a'"):
                avg.average(np.ones(1))
            with pytest.raises(TypeError, match="int64"):
                avg.average(np.ones(1, np.int64), part="a")
            with pytest.raises(ValueError, match="NaN"):
                avg.average(np.full(1, np.nan), part="a")
            assert (await avg.average(np.ones(1), part="a")).round == 1

    run(main())


def test_nan_travels_if_it_is_allowed(run: Any) -> None:
    async def main() -> None:
        async with members(2, allow_nonfinite=True) as avgs:
            for one in await average(avgs, [np.array([np.nan, 1.0]), np.ones(2)]):
                assert np.isnan(one.value[0])
                assert one.value[1] == 1

    run(main())


def test_one_call_a_part_at_a_time(run: Any) -> None:
    async def main() -> None:
        async with members(2, parts=("a", "b")) as avgs:
            first = avgs[0].average(np.ones(1), part="a")
            with pytest.raises(RuntimeError, match="another call for part 'a'"):
                avgs[0].average(np.ones(1), part="a")
            other = avgs[0].average(np.ones(1), part="b")
            first.cancel()
            again = avgs[0].average(np.full(1, 3.0), part="a")
            await avgs[1].average(np.ones(1), part="b")
            await avgs[1].average(np.ones(1), part="a")
            assert (await again).value == 2
            assert (await other).value == 1

    run(main())


def test_after_the_end_calls_fail(run: Any) -> None:
    async def main() -> None:
        async with members(2) as avgs:
            pending = avgs[0].average(np.ones(1))
            await asyncio.sleep(0)
            await avgs[0].__aexit__()
            with pytest.raises(aiodist.GroupClosedError):
                await pending
            with pytest.raises(aiodist.GroupClosedError):
                avgs[0].average(np.ones(1))
            with pytest.raises(aiodist.GroupClosedError):
                await avgs[0].publish_state(np.ones(1))

    run(main())


@pytest.mark.parametrize("leaves", [False, True])
def test_a_program_that_leaves_by_an_exception_is_not_warned(run: Any, leaves: bool) -> None:
    """Of a Work at which it has not looked, it is warned in all other cases."""

    async def main() -> None:
        with contextlib.suppress(ZeroDivisionError):
            async with members(1, quorum=1, grace=0.0) as avgs:
                kept = avgs[0].average(np.ones(1))
                while avgs[0].rounds != {"": 1}:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                await avgs[0].average(np.ones(1))  # so the one before has ended
                if leaves:
                    raise ZeroDivisionError
        del kept
        gc.collect()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(main())
    looked = [str(one.message) for one in told if "looked at it" in str(one.message)]
    assert len(looked) == (0 if leaves else 1)


def test_the_state_is_that_of_one_member(run: Any) -> None:
    async def main() -> None:
        async with members(3, quorum=1, grace=0.0) as avgs:
            waits = avgs[2].state()
            tree = {"w": np.ones(3), "step": 7, "names": ["a"]}
            assert await avgs[0].publish_state(tree)
            tree["w"][:] = 9
            assert not await avgs[1].publish_state({})
            found = await waits
            assert found.tree["w"].tolist() == [1, 1, 1]
            assert (found.tree["step"], found.tree["names"]) == (7, ["a"])
            assert found.rounds == {}
            await avgs[0].average(np.ones(1))
            assert await avgs[0].publish_state(1)
            assert (await avgs[1].state()).rounds == {"": 1}
            assert avgs[1].rounds == {"": 1}
            with pytest.raises(aiodist.CollectiveTimeoutError, match="its function failed"):
                await avgs[0].__aexit__()
                await avgs[1].state(timeout=0.05)

    run(main())


def test_a_member_that_waits_for_a_state_gets_one_that_it_publishes_itself(run: Any) -> None:
    async def main() -> None:
        async with members(1) as (avg,):
            for tree in 7, lambda: 7:
                waits, rounds = avg.state(timeout=5), avg.rounds
                averages = avg.average(np.ones(1))  # also if it goes on meanwhile
                await avg.publish_state(tree)
                await averages
                assert await waits == (7, rounds)
                assert avg.rounds != rounds
                assert avg._kept is not None  # so that other members can have it
                await avg.average(np.ones(1))  # so the first state is too old

    run(main())


def test_a_state_without_a_part_leaves_its_rounds_as_they_are(run: Any) -> None:
    async def main() -> None:
        each = {0: {"parts": ["a"]}, 1: {"parts": ["a", "b"]}}
        async with members(2, quorum=1, grace=0.0, each=each) as avgs:
            await avgs[1].average(np.ones(1), part="b")
            await avgs[0].publish_state(7)
            assert (await avgs[1].state()).rounds == {}
            assert avgs[1].rounds == {"b": 1}

    run(main())


def test_a_state_is_made_when_a_member_needs_it(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Every member can give it, and a function that fails harms no other member."""

    async def main() -> None:
        async with members(5, quorum=2, grace=0.0, max_stale=9) as avgs:
            asked: list[int] = []

            def state_of(number: int) -> dict[str, Any]:
                asked.append(number)
                if number == 2:
                    raise ZeroDivisionError
                return {"w": np.full(3, number)}

            await asyncio.gather(*(avg.average(np.ones(1)) for avg in avgs[:2]))
            for number, avg in enumerate(avgs[:2]):
                assert await avg.publish_state(partial(state_of, number))
            assert asked == []
            found = await avgs[3].state()
            assert found.rounds == {"": 1}
            assert [found.tree["w"][0]] == asked
            # One is a round behind, the newest cannot give it, and is not asked again.
            await avgs[1].__aexit__()
            await asyncio.gather(*(avg.average(np.ones(1)) for avg in (avgs[2], avgs[3])))
            await avgs[2].publish_state(partial(state_of, 2))
            asked.clear()
            found = await avgs[4].state()
            assert (found.rounds, asked) == ({"": 1}, [2, 0])
            assert (await avgs[4].average(np.ones(1))).late
            assert avgs[4].rounds == {"": 2}
            assert "raised this" in caplog.text
            # Its own state serves a member as long as it is of its last result.
            assert (await avgs[0].state()).tree["w"][0] == 0
            await avgs[0].average(np.ones(1))
            await avgs[3].publish_state(partial(state_of, 3))
            assert (await avgs[0].state()).tree["w"][0] == 3

    run(main())


class Fields(NamedTuple):
    w: Any


@pytest.mark.parametrize("value", [{1, 2}, object(), Fields(1)], ids=["set", "object", "named"])
def test_a_state_that_does_not_travel_harms_no_member(
    run: Any, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    async def main() -> None:
        async with members(3) as avgs:
            for avg in avgs:
                with pytest.raises(TypeError, match=r"travel to new members.*\['o'\]"):
                    await avg.publish_state({"w": np.ones(2), "o": value})
            # If a function makes it, it is known when a member needs it.
            await avgs[0].publish_state(lambda: {"o": value})
            waits = avgs[2].state()
            while "raised this" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await avgs[1].publish_state({"w": np.ones(2)})
            assert (await waits).tree["w"].tolist() == [1, 1]
            assert {one.round for one in await average(avgs, [np.ones(1)] * 3)} == {1}

    run(main())


def test_a_member_gets_a_copy_of_its_own_state(run: Any) -> None:
    tree = {"w": Fields(np.ones(2)), "more": (np.ones(1), "text")}

    async def main() -> None:
        async with members(1) as [avg]:
            await avg.publish_state(lambda: tree)
            found = (await avg.state()).tree
            assert type(found["w"]) is Fields
            assert not np.shares_memory(found["w"].w, tree["w"].w)
            assert found["more"][1] == "text"

    run(main())


def test_status_shows_rounds(run: Any) -> None:
    async def main() -> None:
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            options: Any = {"address": coordinator.address, "quorum": 1, "grace": 0.0}
            async with aiodist.averager("outer", name="m0", **options) as avg:
                await avg.average(np.ones(1), weight=2.0)
                [found] = coordinator.status()["averagers"]
                assert found["members"][0]["name"] == "m0"
                [part] = found["parts"]
                [round] = part["rounds"]
                assert round["contributors"] == ["m0"]
                assert round["weights"] == [2.0]

    run(main())


def test_a_survey_says_what_a_codec_has_saved(run: Any) -> None:
    x = np.random.default_rng(3).standard_normal(1 << 16).astype(np.float32)
    codec = aiodist.codecs.int8()

    async def main() -> None:
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            options: Any = {"address": coordinator.address, "quorum": 2, "transports": ("tcp",)}
            async with (
                aiodist.averager("outer", name="m0", codec=codec, **options) as first,
                aiodist.averager("outer", name="m1", codec=codec, **options) as second,
            ):
                await average([first, second], [x, x])
                [found] = (await coordinator.survey())["averagers"]
                for one in found["members"]:
                    # Each sends half of its values, and the mean of the other half.
                    assert one["said"]["saved"] == x.nbytes - codec.nbytes(x.size)
                    assert one["said"]["sent"] + one["said"]["saved"] >= x.nbytes

    run(main())


def test_calls_from_another_event_loop_are_refused(run: Any) -> None:
    async def main() -> None:
        async with members(1) as (avg,):

            async def called() -> None:
                for call in (
                    lambda: avg.average(np.ones(3), timeout=1.0),
                    lambda: avg.state(timeout=1.0),
                    lambda: avg.publish_state(1.0),
                ):
                    with pytest.raises(RuntimeError, match="'outer' belongs to the event loop"):
                        await call()

            await asyncio.to_thread(asyncio.run, called())
            assert (await avg.average(np.ones(3))).round == 1

    run(main())
