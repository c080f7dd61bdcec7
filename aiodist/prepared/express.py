"""Prepared collectives: a call like an earlier one is done within the call, if it need not wait.

This module has what all of them have in common. Ranks that share memory use `lane_express`, or
`post_express` for calls with a tag. Groups that span hosts use `multihost_express`, or
`link_express` for calls with a tag. Other groups use `link_express` for all calls.

The first call of a kind takes the *ordinary way*: it is planned and launched as an `Operation`. It
also makes a `Recipe`, which keeps all that is the same each time. That is the text that ranks
compare, and the one phase that the ordinary way has chosen. A later call lends its array to that
phase and runs it. The executor of all phases can do that. For small arrays, one function does all
steps in one go, because that is faster (in shared memory `all_at_once`). If the call has to wait
for more than a moment, or meets anything unusual, it becomes an operation, which continues it.

**Why the first steps may be done already.** When a call becomes an operation, it has entered the
lane. It may have written to its area and published, and may have reduced into the user's array.
None of that may happen twice, because the array is both input and result, and a second publish
would be counted. So finished steps stay finished, and the operation begins with the next one::

    in the call:        enters │ copy │ publish │ await: not there yet
                               │      │         │   │ the executor, with this await as its next step
    as an operation:                                └─> await │ reduce │ end │ finished

This is safe for these reasons:

* Other ranks see the same as ever. The lane counts number, phase and publishes during the call, so
  the next publish writes the next stamp, no matter which code does it. The operation finds the lane
  entered (`Lane.enter` returns at once) and its first phase begun (`Operation.carry_on`).
* The remaining steps belong to the plan that was begun, on the same memory. Nothing chooses them
  again: whatever could change the choice is checked before the first step (`Executor.run`), and
  only once.
* Only a wait can stop the steps. A wait that fails has changed nothing, so it can be repeated. The
  end is such a wait, too: `Lane.end` refuses if another rank has given up. The operation asks it
  again, and reduces nothing again.
* No message about this collective is lost. Before the call enters, nothing may have arrived for
  collectives that this rank has not called yet (`Arrivals`), least of all a verdict. After that no
  link is read until the end or until `take_over` has listed the operation, because the call never
  yields and polls look at memory alone. A later message finds the operation. If the call is done,
  the message has a number that was counted, and is dropped.
* The number is taken once, by `_done` or by `take_over`. It is the same in both cases, because no
  other call comes in between. Meanwhile its tag is not forgotten (`TagCounts.begin`).
* Errors in the call (a kernel that raises, places that make no sense) make an operation that fails
  at once. So other ranks hear of it, the abort word is written, and the lane is left in the one way
  that exists.
* Only one call at a time uses a recipe's memory. A call is done on a lane only if nothing else is
  under way there, and over links only if nothing is pending at all. The code that finishes the
  phase gives back what was lent (`Executor.close`).

`link_express` reads links during the call, so two of these have other reasons there: see the
comment above `Calls.take_over`. In groups that span hosts (`multihost_express`), both sets of
reasons hold.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers import arrays, tensors
from aiodist.buffers.descriptions import KnownCall, described, has_tensors, word
from aiodist.buffers.kernels import Kernel
from aiodist.buffers.reductions import DtypeGroup
from aiodist.buffers.vector import Vector
from aiodist.collectives.forms import Form
from aiodist.collectives.reductions import all_reduce_where, goes_on_berths, reduce_where
from aiodist.compiled import core
from aiodist.engine import tags
from aiodist.engine.calls import Calls
from aiodist.engine.operation import Program, Running
from aiodist.engine.phase import Phase
from aiodist.links.endpoint import Endpoint
from aiodist.phases.base import Call, Place
from aiodist.phases.memories import Blobs
from aiodist.prepared import plain
from aiodist.prepared.joined import JoinedCalls, learn
from aiodist.prepared.kinds import kind_of
from aiodist.shared_memory.board import ON_DEVICE, digest_of
from aiodist.transports.surroundings import is_virtual
from aiodist.types import ReduceOp
from aiodist.work import UnseenWork, Work

Flat = NDArray[Any]

KEPT = 32 << 20
"""The most bytes of all recipes of a group, estimated by `A_RECIPE` and `A_STEP`."""
A_RECIPE = 9_000
"""Bytes of a recipe without the steps of its plan, measured with thousands of them."""
A_STEP = 500
"""Bytes of a step and its views. Plans for small arrays have four."""
FORMS = 4
"""The most forms of one operation, because each is tried in turn."""
SEEN = 512
"""Of so many kinds of calls with values it is kept how often they came. Values may look different
in each call, so the first one is not learnt."""
PLAIN_BEFORE = 8
"""So many calls with plain values of one kind come before one is learnt, because that takes as long
as some 20 calls."""
AGAIN = 64
"""A recipe whose form was dropped gets a new one after so many calls."""


class Recipe:
    """What calls of one collective with one kind of array have in common."""

    __slots__ = (
        "call", "digest", "finish", "joined", "keeps", "nbytes", "op", "phase", "returns",
        "tapes", "unformed", "vector", "weight",
    )  # fmt: skip

    def __init__(self, op: str, call: bytes, phase: Phase, vector: Vector, keeps: object) -> None:
        self.op = op  # its name
        # Makes the result from what is known when the call begins. None: that is the result.
        self.finish: Callable[[Any], Any] | None = None
        self.call = call  # what was called, as text: all ranks must agree on it
        self.digest = digest_of(call)  # on a lane, ranks compare it with that of the others
        self.phase = phase._replace(lent=(vector,))  # the whole work
        self.vector = vector  # stands for the user's array in the memory of that phase
        vector.lend(None)
        self.nbytes = vector.nbytes  # bytes of the array
        # How many steps of its plan are kept in memory. Other memory counts as steps, too.
        self.weight = phase.prepared.weight
        self.keeps = keeps  # keeps this object alive, because recipes are found by its id
        self.returns = True  # whether this rank has a result
        self.joined: JoinedCalls | None = None  # joins the arrays of a call
        # What the compiled part runs, for calls with even and with odd numbers.
        self.tapes: tuple[Any, Any] = (None, None)
        self.unformed = 0  # so many calls are laid out before one becomes a form; 0: never

    def form(self, args: tuple[Any, ...]) -> Form | None:
        """Make a form from a call that was laid out, for calls like it. None: it has no form."""
        return None

    def known(self, args: tuple[Any, ...]) -> KnownCall | None:
        """Describe a call that was laid out to the compiled part. None: Python does such calls."""
        return None

    @property
    def template(self) -> object:
        """What this rank shows, if the recipe is of values."""
        return None

    def lay_out(
        self, args: tuple[Any, ...], flats: list[Flat], words: list[Any]
    ) -> tuple[Any, Any] | None:
        """Return the result as far as it is known now, and the memory or arguments to work with.

        None: the ordinary way has to do this call. `flats` and `words`: see `kind_of`.
        """
        if self.joined is not None:
            return self.joined.lay_out(args, flats, words)
        return args[0] if self.returns else None, flats[0]

    def join(self, joined: JoinedCalls) -> None:
        """Let each call join its arrays, and copy the result to its places."""
        self.joined = joined
        self.returns = joined.returns
        self.finish = spread if joined.returns else None

    def release(self) -> None:
        """Let go of the memory of other ranks, because the group has ended."""


class ExpressGroup(Place, Protocol):
    """A group whose collectives may be done within the call.

    `calls` numbers all calls, and takes over those that cannot finish within the call.
    """

    endpoint: Endpoint
    calls: Calls


G = TypeVar("G", bound=ExpressGroup)
R = TypeVar("R", bound=Recipe)


class Express(ABC, Generic[G, R]):
    """Keeps the recipes, of type `R`, of one group of type `G`.

    `_on_lane` says whether they run on a lane.
    """

    _on_lane: bool

    def __init__(self, context: G) -> None:
        self._context = context
        self._loop = context.loop  # the group's loop: all calls come from its thread
        self._progress = context.endpoint.progress  # says when the loop is due for a turn
        self._calls = context.calls  # the ordinary way
        self._records = context.calls.records  # gets a record of each call
        # None: calls of this kind are not prepared. `JoinedCalls`: operations do them.
        self._recipes: dict[tuple[Any, ...], R | JoinedCalls | None] = {}
        self._forms: dict[str, list[tuple[R, Form]]] = {}  # the latest ones of each operation
        # By the hash of a kind that was not learnt yet: how many more calls are not.
        self._seen: dict[int, int] = {}
        self._weight = 0  # bytes of all recipes
        self._caller: Any = None  # the compiled part, if there is one

    @abstractmethod
    def _run(
        self, recipe: R, x: Any, flat: Flat, seconds: float, tag: object = None, /
    ) -> Work[Any] | None:
        """Run `recipe` with `x`, whose memory is `flat`. None: nothing has happened."""

    @abstractmethod
    def _prepare(
        self, op: str, call: bytes, phase: Phase, vector: Vector, keeps: object
    ) -> R | None:
        """Make the recipe of `op` for arrays like `vector`, if `phase` is all that it does.

        None: calls of this kind cannot be done within the call.
        """

    def _prepare_large(self, call: bytes, group: DtypeGroup, op: ReduceOp) -> R | None:
        """Make the recipe of an all_reduce that uses berths (`reductions.goes_on_berths`)."""
        return None

    # -- the compiled part ------------------------------------------------------------------------

    def _use_compiled(
        self, empty: tuple[Any, ...], unset: tuple[tuple[object, str], ...], **more: Any
    ) -> None:
        """Let the compiled part start the calls that it can do.

        It calls the Python code for the others: for example, if a container is not `empty`, or an
        attribute not `unset`. `more` has what else `core.Caller` needs: `unfinished` continues a
        call that has to wait, and `broke` fails a call that raised an error.
        """
        if core is None or is_virtual(self._loop):
            return
        calls, records = self._calls, self._records
        self._caller = core.Caller(
            empty=(calls.arrivals.early, calls.arrivals.verdicts, *empty),
            unset=((calls, "deferred"), (records, "trace"), *unset),
            next=calls.tags.numbers,
            idle=calls.tags.idle,
            many=tags.MANY,
            passed=self._passed,
            records=records,
            progress=self._progress,
            loop={"loop": self._loop},
            nothing=(),
            time=self._loop.time,
            work=UnseenWork,
            ordinary=Work,
            unseen=records.unseen,
            where=records.where,
            heap=self._context.heap,
            run=self._run,
            start=self.start,
            all_reduce=self._all_reduce,
            lay=self._lay_out,
            **more,
        )
        vars(self).update({name: getattr(self._caller, to) for name, to in _COMPILED.items()})

    def _all_reduce(self, x: Any, op: Any, seconds: float, tag: object = None) -> Work[Any] | None:
        """Reduce an array of a kind that the compiled part does not know, and teach it if
        possible."""
        work = Express.all_reduce(self, x, op, seconds, tag)
        if work is not None:
            recipe = self._recipes.get((id(op), x.dtype, x.shape))
            part = described(x, is_place=True)
            if isinstance(recipe, Recipe) and recipe.tapes[0] is not None and part is not None:
                self._caller.know(
                    "all_reduce", recipe, [part, word(op)], 0, False, None, recipe.finish
                )
        return work

    def _know(self, op: str, recipe: R, known: KnownCall) -> bool:
        """Let the compiled part find `recipe` for calls of `op` like this one, if it can."""
        finish = written if known.result >= 0 and has_tensors(known.args) else None
        return bool(self._caller.know(op, recipe, *known, recipe.template, finish))

    def _passed(self, tag: object) -> None:
        """Count a finished call whose tag was not idle before."""
        self._calls.tags.passed(tag)
        if self._calls.tags.many:
            self._calls.forget_tags()

    # -- finding recipes --------------------------------------------------------------------------

    def all_reduce(self, x: Any, op: Any, seconds: float, tag: object = None) -> Work[Any] | None:
        """Reduce `x` in place. None: it cannot be done within the call, and nothing has
        happened."""
        cls = type(x)
        if cls is not np.ndarray and cls is not tensors.plain_type():
            return None
        try:
            key = (id(op), x.dtype, x.shape)
        except RuntimeError:  # a nested tensor has no shape
            return None  # the ordinary way refuses it
        try:
            recipe, is_new = self._recipes[key], False
        except KeyError:
            if arrays.plain(x) is None:
                return None
            try:
                recipe, is_new = self._learn(x, op), True
            except Exception as error:  # such as no memory
                self._calls.forgo("all_reduce", tag, error)
                raise
            self._keep(key, recipe)
        if not isinstance(recipe, Recipe) or (flat := flat_of(recipe, x)) is None:
            return None
        work = self._run(recipe, x, flat, seconds, tag)
        return work.for_user(self._records.unseen) if is_new and work is not None else work

    def _learn(self, x: Any, op: Any) -> R | None:
        """Make the recipe of an all_reduce of arrays like `x`, if that is one phase."""
        if not isinstance(op, ReduceOp) or op.function:
            return None
        try:
            item = arrays.view(x, "x")
            if item is None or not item.is_flat:
                return None
            kernel = Kernel.of(op, item.name)
        except TypeError:
            return None  # the ordinary way raises it again
        vector = Vector.of(np.empty(item.base.size, kernel.dtype))
        group = DtypeGroup(kernel.name, kernel, vector, vector, [0, vector.length])
        call = f"all_reduce({op}, {item})".encode()
        if goes_on_berths(self._context, [group], self._on_lane):
            recipe = self._prepare_large(call, group, op)
        else:
            phases = list(all_reduce_where(self._context, [group], self._on_lane))
            if len(phases) != 1 or not isinstance(phase := phases[0], Phase):
                return None
            recipe = self._prepare("all_reduce", call, phase, vector, op)
        if recipe is not None and item.kind == "torch":
            recipe.finish = marked
        return recipe

    def start(
        self,
        op: str,
        make: Callable[..., Call],
        args: tuple[Any, ...],
        seconds: float,
        tag: object = None,
    ) -> Work[Any] | None:
        """Start the collective `op`, which ``make(context, *args)`` describes.

        All calls of one `op` have the same `make`. None: nothing has happened.
        """
        recipe: R | JoinedCalls
        try:
            for known, form in self._forms.get(op, ()):
                if (laid := form(args, *args)) is not None:
                    recipe, is_new = known, False
                    break
            else:
                found = self._find(op, make, args)
                if found is None:
                    return None
                recipe, laid, is_new = found
        except Exception as error:  # such as no memory
            self._calls.forgo(op, tag, error)
            raise
        if isinstance(recipe, JoinedCalls):
            return self._launch(recipe, make, args, *laid, seconds, tag)
        work = self._run(recipe, *laid, seconds, tag)
        if work is None and recipe.joined is not None:
            return self._launch(recipe.joined, make, args, *laid, seconds, tag)
        return work.for_user(self._records.unseen) if is_new and work is not None else work

    def _find(
        self, op: str, make: Callable[..., Call], args: tuple[Any, ...]
    ) -> tuple[R | JoinedCalls, tuple[Any, Any], bool] | None:
        """Return the recipe of a call, the call laid out for it, and whether the recipe is new.

        None: this call has no recipe, or does not fit it.
        """
        flats: list[Flat] = []
        words: list[Any] = []
        key, seen = kind_of(op, args, flats, words), self._seen
        recipe, is_new, laid = None, False, None
        if key is not None:
            try:
                recipe = self._recipes[key]
            except KeyError:
                is_new = op not in plain.OPS or args[0] is None or seen.get(hash(key)) == 1
                if is_new:
                    seen.pop(hash(key), None)
                    recipe = self._learn_other(op, make, args)
                    self._keep(key, recipe)
            laid = None if recipe is None else recipe.lay_out(args, flats, words)
        if recipe is not None and laid is not None:
            if not isinstance(recipe, JoinedCalls):
                self._learn_form(recipe, args)
            return recipe, laid, is_new
        if op not in plain.OPS:
            return None
        recipe, is_new = self._plain_for(op, make, args)
        laid = None if recipe is None else recipe.lay_out(args, [], [])
        if key is not None and key not in self._recipes:
            # Count down to the call that is learnt.
            kind = hash(key)  # a key may be large
            before = 1 if laid is None else PLAIN_BEFORE
            if kind not in seen and len(seen) == SEEN:
                del seen[next(iter(seen))]
            seen[kind] = max(1, seen.get(kind, before + 1) - 1)
        return None if recipe is None or laid is None else (recipe, laid, is_new)

    def _plain_for(
        self, op: str, make: Callable[..., Call], args: tuple[Any, ...]
    ) -> tuple[R | None, bool]:
        """Return the recipe for plain values of any form, and whether it is new.

        None: this is no such call.
        """
        if not plain.may_be_plain(args[0]):
            return None, False
        for each in args[1:]:
            if each is not None and type(each) is not int:
                return None, False  # it may have a place for the result
        key = op, "plain", *args[1:]
        if key in self._recipes:
            return cast("R | None", self._recipes[key]), False
        recipe = self._learn_plain(op, make, args)
        self._keep(key, recipe)
        return recipe, True

    def _learn_plain(self, op: str, make: Callable[..., Call], args: tuple[Any, ...]) -> R | None:
        """Make the recipe of `op` for plain values of any form. None: there is none."""
        return None

    def _launch(
        self,
        joined: JoinedCalls,
        make: Callable[..., Call],
        args: tuple[Any, ...],
        x: Any,
        flat: Flat,
        seconds: float,
        tag: object,
    ) -> Work[Any]:
        """Start a call the ordinary way, but with its arrays joined."""
        try:
            one = make(self._context, joined.array(flat), *args[1:-1], None)
        except Exception as error:  # such as no memory
            self._calls.forgo(joined.op, tag, error)
            raise

        def program(on_lane: bool) -> Program:
            yield from one.start(on_lane)
            return None if x is None else spread(x)

        call = one._replace(text=joined.text, start=program)
        work = self.begin(call, args, seconds, tag)
        if work is None:
            work = self._calls.launch(
                call.op, call.text, program, tag=tag, timeout=seconds, nbytes=call.nbytes
            )
        return work.for_user(self._records.unseen)

    def _lay_out(self, recipe: R, args: tuple[Any, ...]) -> tuple[Any, Any] | None:
        """Lay out a call that the compiled part has found, because it has to wait."""
        for known, form in self._forms.get(recipe.op, ()):
            if known is recipe and (found := form(args, *args)) is not None:
                return found
        flats: list[Flat] = []
        words: list[Any] = []
        kind_of(recipe.op, args, flats, words)
        laid = recipe.lay_out(args, flats, words)
        self._learn_form(recipe, args)
        return laid

    def _learn_form(self, recipe: R, args: tuple[Any, ...]) -> None:
        """Find `recipe` faster for calls like one that was laid out."""
        recipe.unformed -= 1
        if recipe.unformed:
            return
        op = recipe.op
        known = None if self._caller is None else recipe.known(args)
        if known is not None and self._know(op, recipe, known):
            recipe.unformed = AGAIN  # the compiled part keeps the latest ones
        if (made := recipe.form(args)) is not None:
            others = [each for each in self._forms.get(op, ()) if each[0] is not recipe]
            self._forms[op] = [(recipe, made), *others[: FORMS - 1]]
            for dropped, _ in others[FORMS - 1 :]:
                dropped.unformed = AGAIN

    def _learn_other(
        self, op: str, make: Callable[..., Call], args: tuple[Any, ...]
    ) -> R | JoinedCalls | None:
        """Make the recipe of the collective `op` for arguments like these."""
        return None

    def _learn_joined(
        self, op: str, make: Callable[..., Call], args: tuple[Any, ...]
    ) -> R | JoinedCalls | None:
        """Prepare a reduction that joins its arrays. `JoinedCalls`: operations do such calls."""
        joined = learn(self._context, op, make, args)
        if joined is None:
            return None
        if op in ("all_reduce", "reduce"):
            where = all_reduce_where if op == "all_reduce" else partial(reduce_where, dst=args[1])
            group = joined.group()
            phase = next(where(self._context, [group], self._on_lane))
            if isinstance(phase, Phase) and type(phase.memory) is not Blobs:
                recipe = self._prepare(op, joined.text.encode(), phase, group.x, args[-2])
                if recipe is not None:
                    recipe.join(joined)
                    return recipe
        return joined if joined.are_small else None

    def begin(
        self, call: Call, args: tuple[Any, ...], seconds: float, tag: object = None
    ) -> Work[Any] | None:
        """Start a collective of a kind that has no recipe, called with `args`.

        None: nothing has happened.
        """
        return None

    def _may_begin(self, call: Call, args: tuple[Any, ...]) -> bool:
        """Say whether the program of a call may run within it: it may if it runs no code of the
        user.

        Such code could call the next collective before this one has taken its number.
        """
        for x in args:
            if x.function is not None if type(x) is ReduceOp else callable(x):
                return False
        return call.place != ON_DEVICE and not self._runs_others()

    def _runs_others(self) -> bool:
        """Say whether any program may run code of the user: pickles, or hooks."""
        return self._context.allow_pickle or self._records.trace is not None

    def _keep(self, key: tuple[Any, ...], recipe: R | JoinedCalls | None) -> None:
        # The key has the id of an operator. A recipe keeps its operator alive, so no other one gets
        # this id. If another operator gets the id of a None, its calls take the ordinary way, which
        # is correct.
        self._recipes[key] = recipe
        self._weight += _weight(key, recipe)
        if isinstance(recipe, Recipe):
            self._records.planned(recipe.call, recipe.phase.prepared.plan.name)
        while self._weight > KEPT and len(self._recipes) > 1:
            oldest = next(iter(self._recipes))
            self._weight -= _weight(oldest, self._recipes.pop(oldest))
            for known, _ in itertools.chain.from_iterable(self._forms.values()):
                known.unformed = 1
            self._forms.clear()  # else they would keep the recipe alive
            if self._caller is not None:
                self._caller.forget()

    def close(self) -> None:
        """Let go of all memory, because the group has ended."""
        # Tapes and recipes refer to each other. Break these cycles here, because otherwise the
        # memory that they look at stays mapped until the garbage collector runs.
        for recipe in self._recipes.values():
            if isinstance(recipe, Recipe):
                recipe.tapes = (None, None)
                recipe.release()
        self._recipes.clear()
        self._forms.clear()
        self._seen.clear()
        if self._caller is not None:
            self._caller.forget()
            self._caller = None
            for name in _COMPILED:
                vars(self).pop(name)

    # -- the two ends of a call -------------------------------------------------------------------

    def _done(self, work: Work[Any], recipe: Recipe, x: Any) -> None:
        """Finish `work` with `x`, or with what `finish` makes of it."""
        if recipe.finish is not None:
            x = recipe.finish(x)
        self._finish(work, recipe.op, recipe.call, recipe.nbytes, x)

    def _finish(self, work: Work[Any], op: str, call: bytes, nbytes: int, result: Any) -> None:
        """Finish `work`, a call of `op` that is done, with this result."""
        tags = self._calls.tags
        tags.pass_over(work.tag)
        if work.tag is not None and tags.many:
            self._calls.forget_tags()
        ended = self._note(work, op, call, nbytes)
        if self._records.trace is not None:
            self._records.started(work)
        self._progress.finish(work, result, ended)

    def _finish_waiting(
        self, work: Work[Any], op: str, call: bytes, nbytes: int, result: Any
    ) -> None:
        """Finish a collective that has waited (`aiodist.engine.waiting_calls`)."""
        self._calls.ended(work.tag)
        work.finish(result, self._note(work, op, call, nbytes) if work.record is None else None)

    def _note(self, work: Work[Any], op: str, call: bytes, nbytes: int) -> float:
        """Record a call that ends now, and return the loop's time."""
        records, ended = self._records, self._loop.time()
        records.add(
            (records.where, op, work.tag, work.seq, call, None, nbytes, work._started, ended)
        )
        return ended


_COMPILED = {"all_reduce": "all_reduce", "start": "start", "_run": "run"}
"""The methods of `Express` for which the compiled part has a function, and its name."""


def flat_of(recipe: Recipe, x: Any) -> Flat | None:
    """Return the memory of `x`, an array that `recipe` is for.

    None: this array has to take the ordinary way.
    """
    # Each call looks at the array again, because its memory may have moved since the last one.
    if type(x) is np.ndarray:
        return x.reshape(-1) if x.flags.carray else None
    return arrays.flat(x, recipe.vector.dtype, recipe.vector.length)


def marked(x: Any) -> Any:
    """Mark `x`, a tensor, as written, and return it."""
    tensors.mark_written(x)
    return x


def written(x: Any) -> Any:
    """Mark `x`, an array or a list of arrays, as written, and return it."""
    for each in x if isinstance(x, (list, tuple)) else (x,):
        if type(each) is not np.ndarray:
            tensors.mark_written(each)
    return x


def spread(found: tuple[Any, Flat, list[Flat]]) -> Any:
    """Copy arrays that were joined to their places, and return the result."""
    result, flat, places = found
    at = 0
    for place in places:
        place[:] = flat[at : at + len(place)]
        at += len(place)
    return written(result)


def rest_of(recipe: Recipe, x: Any) -> Program:
    """Return the program that follows the one phase of `recipe`."""
    yield from ()
    return x if recipe.finish is None else recipe.finish(x)


def before(phase: Phase | Running, program: Program) -> Program:
    """Run `phase`, and then the rest of the program that yielded it."""
    yield phase
    return (yield from program)


def returning(result: Any) -> Program:
    """Return a program that only returns `result`."""
    yield from ()
    return result


def failing(error: Exception) -> Program:
    """Return a program that only raises `error`."""
    yield from ()
    raise error


def _weight(key: tuple[Any, ...], recipe: Recipe | JoinedCalls | None) -> int:
    """Return the bytes of a recipe and of its key."""
    kinds = sum([len(kind) for kind in key if type(kind) is tuple])
    steps = A_RECIPE + A_STEP * recipe.weight if isinstance(recipe, Recipe) else A_STEP
    return steps + A_STEP * kinds
