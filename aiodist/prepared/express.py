"""Prepared collectives: calls of kinds that were seen before, done within the call where they can.
What is in here holds for all of them; `lane_express` and `link_express` have those of ranks that
share memory, and of ranks that are joined by links. Those with a tag are in `post_express`.

Everything about a call that is the same each time is made once and kept as a `Recipe`: its words,
which the others compare with theirs, and its one phase, that the ordinary way has chosen. What is
left for a call is to lend its array to the memory of that phase, and to run it: by the executor
that runs all phases, or where arrays are small by a function that does all steps in one go (in
shared memory `all_at_once`). Where it has to wait longer, or finds anything out of the ordinary, it
becomes an operation, which goes on with it.

**Why the first steps may be done already.** When the call turns into an operation, it has entered,
has perhaps written to its area and published, and has perhaps reduced into the user's array. None
of that can be done twice: the array is input and result, and a second publish would be counted. So
the steps that are done stay done, and the operation begins with those that are left::

    in the call:        enters │ copy │ publish │ await: not there yet
                               │      │         │   │ the executor, with this await as its next step
    as an operation:                                └─> await │ reduce │ end │ finished

That is safe because:

* What the others see is the same. The lane has kept number, phase and publishes while the call
  ran, so the next publish is the next stamp, whoever writes it. The operation finds the lane
  entered (`Lane.enter` returns at once), and its first phase begun (`Operation.carry_on`).
* The steps that are left are those of the plan that was begun, on the memory that was used. They
  are never chosen anew: what could change the choice is looked at before the first step
  (`Executor.run`), and that is passed once.
* Only a wait can stop the row, and a wait that did not succeed has changed nothing, so to begin
  with it again is right. The end of the row is such a wait, too: `Lane.end` refuses where another
  rank has given up; it is asked again then, and nothing is reduced again.
* No word about this collective can have been missed. Before it enters, nothing may have come of
  collectives that were not called here yet (`Arrivals`), a verdict least of all. From there to the
  end, or until `take_over` has listed the operation, no link is read: all of it is one call, and
  polls look at memory alone. What arrives later finds the operation; or, if all was done, a number
  that has been counted, and is dropped.
* The number is taken at one of the two ends, by `_done` or by `take_over`, and is the same, for no
  other call comes in between.
* Whatever goes wrong in the call (a kernel that raises, places that make no sense) goes the same
  way, as an operation that fails first of all: so the others hear of it, the abort word is written,
  and the lane is left by the one way there is.
* What is kept is used by one call at a time. On a lane, a call is done within itself only where
  nothing else is under way there; over links, where nothing is pending at all. Whoever goes on with
  the phase gives back what was lent when it has ended (`Executor.close`).

Over links (`link_express`), where links are read meanwhile, two of these have other reasons: see
the comment above `Calls.take_over`. In groups that span hosts (`multihost_express`) both hold.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers import arrays, tensors
from aiodist.buffers.kernels import Kernel
from aiodist.buffers.reductions import DtypeGroup
from aiodist.buffers.vector import Vector
from aiodist.collectives.forms import WORDS, Form, said
from aiodist.collectives.reductions import goes_on_berths, phases_of_all_reduce
from aiodist.compiled import core
from aiodist.engine import tags
from aiodist.engine.calls import Calls
from aiodist.engine.operation import Program, Running
from aiodist.engine.phase import Phase
from aiodist.links.endpoint import Endpoint
from aiodist.phases.base import Call, Place
from aiodist.schedules.script import written_down
from aiodist.shared_memory.board import ON_DEVICE, digest_of
from aiodist.transports.surroundings import is_virtual
from aiodist.types import ReduceOp
from aiodist.work import Work

Flat = NDArray[Any]

KEPT = 32 << 20
"""Most bytes of all recipes of a group, by `A_RECIPE` and `A_STEP`."""
A_RECIPE = 9_000
"""Bytes of a recipe without the steps of its plan, measured with thousands of them."""
A_STEP = 500
"""Bytes of a step, with the views that it needs. Plans of small arrays have four."""
FORMS = 4
"""Most forms of one operation: each is tried in turn."""
AGAIN = 64
"""Calls after which there is a form again of what had to make room for others."""


class Recipe:
    """One collective that is called with one kind of array, prepared."""

    __slots__ = (
        "call", "digest", "finish", "keeps", "nbytes", "op", "phase", "returns", "tapes",
        "unformed", "vector", "weight",
    )  # fmt: skip

    def __init__(self, op: str, call: bytes, phase: Phase, vector: Vector, keeps: object) -> None:
        self.op = op  # its name
        # Makes the result of what is known of it when it begins; None: that is the result.
        self.finish: Callable[[Any], Any] | None = None
        self.call = call  # what was called, in words: all ranks must agree on it
        self.digest = digest_of(call)  # that of `call`: on a lane the others compare it with theirs
        self.phase = phase._replace(lent=(vector,))  # all that there is to do
        self.vector = vector  # the array of the user, in the memory of that phase
        vector.lend(None)
        self.nbytes = vector.nbytes  # bytes of the array
        # The steps of its plan that are in memory.
        self.weight = written_down(phase.prepared.plan.steps)
        self.keeps = keeps  # recipes are found by the identity of this, so it has to stay
        self.returns = True  # whether this rank has a result
        # By parity of the number of the call, what the compiled part does it with.
        self.tapes: tuple[Any, Any] = (None, None)
        self.unformed = 0  # so many calls are laid out until a form is made of one; 0: none is

    def form(self, args: tuple[Any, ...]) -> Form | None:
        """What lays out further calls like this one, which was laid out. None: nothing does."""
        return None

    def lay_out(
        self, args: tuple[Any, ...], flats: list[Flat], words: list[Any]
    ) -> tuple[Any, Any] | None:
        """Its result, as far as there is one before it is done, and what it is done with; None:
        this call is not for here. `flats` and `words`: see `kind_of`."""
        return args[0] if self.returns else None, flats[0]

    def release(self) -> None:
        """The group has ended: let go of the memory of its ranks."""


class ExpressGroup(Place, Protocol):
    """A group whose collectives are done within the call. `calls` takes over those for which that
    does not do, and has the numbers of all."""

    endpoint: Endpoint
    calls: Calls


G = TypeVar("G", bound=ExpressGroup)
R = TypeVar("R", bound=Recipe)


class Express(ABC, Generic[G, R]):
    """The recipes, of type `R`, of one group, of type `G`. `_on_lane` says where they run."""

    _on_lane: bool

    def __init__(self, context: G) -> None:
        self._context = context
        self._loop = context.loop  # that of the group, which all calls are made from
        self._progress = context.endpoint.progress  # says when the loop is due for a turn
        self._calls = context.calls  # the ordinary way
        self._records = context.calls.records  # hear of what was done
        self._recipes: dict[tuple[Any, ...], R | None] = {}  # None: not to be prepared
        self._forms: dict[str, list[tuple[R, Form]]] = {}  # by operation, the last ones
        self._weight = 0  # of all of them
        self._caller: Any = None  # the compiled part of it

    @abstractmethod
    def _run(
        self, recipe: R, x: Any, flat: Flat, seconds: float, tag: object = None, /
    ) -> Work[Any] | None:
        """Do `recipe` with `x`, whose memory is `flat`. None: nothing has happened."""

    @abstractmethod
    def _prepare(
        self, op: str, call: bytes, phase: Phase, vector: Vector, keeps: object
    ) -> R | None:
        """The recipe of `op` with arrays like `vector`, where it is done by `phase` alone. None:
        that is nothing to be done within a call."""

    def _prepare_large(self, call: bytes, group: DtypeGroup, op: ReduceOp) -> R | None:
        """The recipe of an all_reduce that has berths (`reductions.goes_on_berths`)."""
        return None

    # -- the compiled part ------------------------------------------------------------------------

    def _use_compiled(
        self, empty: tuple[Any, ...], unset: tuple[tuple[object, str], ...], **more: Any
    ) -> None:
        """Have the compiled part start the calls that it can do. It calls the Python way for the
        others: if a container is not `empty`, or an attribute not `unset`, for example. `more`:
        `unfinished` goes on with a call that has to wait, `broke` fails one that raised an error,
        and what else `core.Caller` needs."""
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
            loop=self._loop,
            time=self._loop.time,
            work=Work,
            where=records.where,
            run=self._run,
            all_reduce=self._all_reduce,
            flat_of=flat_of,
            loop_word=("loop",),
            **more,
        )
        vars(self).update(all_reduce=self._caller.all_reduce, _run=self._caller.run)

    def _all_reduce(self, x: Any, op: Any, seconds: float, tag: object = None) -> Work[Any] | None:
        """Reduce an array of a kind that the compiled part does not know, perhaps from now on."""
        work = Express.all_reduce(self, x, op, seconds, tag)
        if work is not None:
            recipe = self._recipes.get((id(op), x.dtype, x.shape))
            if recipe is not None and recipe.tapes[0] is not None:
                self._caller.know(x, op, recipe)
        return work

    def _passed(self, tag: object) -> None:
        """A call with a tag that was not idle before is done."""
        self._calls.tags.passed(tag)
        if self._calls.tags.many:
            self._calls.forget_tags()

    # -- finding recipes --------------------------------------------------------------------------

    def all_reduce(self, x: Any, op: Any, seconds: float, tag: object = None) -> Work[Any] | None:
        """Reduce `x` in place. None: the fast path does not apply, nothing has happened."""
        cls = type(x)
        if cls is not np.ndarray and cls is not tensors.plain_type():
            return None
        try:
            key = (id(op), x.dtype, x.shape)
        except RuntimeError:  # a nested tensor has no shape
            return None  # and the ordinary way refuses it
        try:
            recipe = self._recipes[key]
        except KeyError:
            if arrays.plain(x) is None:
                return None
            self._keep(key, self._learn(x, op))
            return self._watched(self.all_reduce(x, op, seconds, tag))
        if recipe is None:
            return None
        flat = flat_of(recipe, x)
        return None if flat is None else self._run(recipe, x, flat, seconds, tag)

    def _learn(self, x: Any, op: Any) -> R | None:
        """Prepare an all_reduce of arrays like `x`, if that is one phase."""
        if not isinstance(op, ReduceOp) or op.function:
            return None
        try:
            item = arrays.view(x, "x")
            if item is None or not item.is_flat:
                return None
            kernel = Kernel.of(op, item.name)
        except TypeError:
            return None  # and the ordinary way raises it
        vector = Vector.of(np.empty(item.base.size, kernel.dtype))
        group = DtypeGroup(kernel.name, kernel, vector, vector, [0, vector.length])
        call = f"all_reduce({op}, {item})".encode()
        if goes_on_berths(self._context, [group], self._on_lane):
            recipe = self._prepare_large(call, group, op)
        else:
            phases = list(phases_of_all_reduce(self._context, [group], self._on_lane))
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
        """Start the collective `op`, which is none of the above, as ``make(context, *args)`` says.
        None: nothing has happened."""
        for known, form in self._forms.get(op, ()):
            found = form(args, *args)
            if found is not None:
                return self._run(known, *found, seconds, tag)
        flats: list[Flat] = []
        words: list[Any] = []
        key = kind_of(op, args, flats, words)
        if key is None:
            return None
        try:
            recipe = self._recipes[key]
        except KeyError:
            self._keep(key, self._learn_other(op, make, args))
            return self._watched(self.start(op, make, args, seconds, tag))
        if recipe is None:
            return None
        laid = recipe.lay_out(args, flats, words)
        if laid is None:
            return None
        recipe.unformed -= 1
        if not recipe.unformed and (made := recipe.form(args)) is not None:
            others = [each for each in self._forms.get(op, ()) if each[0] is not recipe]
            self._forms[op] = [(recipe, made), *others[: FORMS - 1]]
            for dropped, _ in others[FORMS - 1 :]:
                dropped.unformed = AGAIN
        return self._run(recipe, *laid, seconds, tag)

    def _learn_other(self, op: str, make: Callable[..., Call], args: tuple[Any, ...]) -> R | None:
        """Prepare the collective `op`, called with arguments like these."""
        return None

    def begin(
        self, call: Call, args: tuple[Any, ...], seconds: float, tag: object = None
    ) -> Work[Any] | None:
        """Start a collective of a kind that is not prepared, which was called with `args`. None:
        nothing has happened."""
        return None

    def _may_begin(self, call: Call, args: tuple[Any, ...]) -> bool:
        """Whether the program of a call may run within it: if nothing of the user's does, which
        could call the next collective before this one has taken its number."""
        if call.place == ON_DEVICE or self._runs_others():
            return False
        return not any(map(_is_function, args))

    def _runs_others(self) -> bool:
        """Whether any program may run what is the user's: pickles, or hooks."""
        return self._context.allow_pickle or self._records.trace is not None

    def _watched(self, work: Work[Any] | None) -> Work[Any] | None:
        """`work`, the first of its kind."""
        return None if work is None else work.for_user(self._records.unseen)

    def _keep(self, key: tuple[Any, ...], recipe: R | None) -> None:
        # A recipe keeps its operator alive, so that no other one has that id. A None keeps nothing:
        # if another operator gets the id, it takes the ordinary way, and that is all.
        self._recipes[key] = recipe
        self._weight += _weight(key, recipe)
        if recipe is not None:
            self._records.planned(recipe.call, recipe.phase.prepared.plan.name)
        while self._weight > KEPT and len(self._recipes) > 1:
            oldest = next(iter(self._recipes))
            self._weight -= _weight(oldest, self._recipes.pop(oldest))
            for known, _ in itertools.chain.from_iterable(self._forms.values()):
                known.unformed = 1
            self._forms.clear()  # or they would keep it

    def close(self) -> None:
        """The group has ended: let go of all memory."""
        # What does a call in one go refers to its recipe, and that to it: so they would be freed by
        # the collector alone, and what they look at stay mapped as long.
        for recipe in self._recipes.values():
            if recipe is not None:
                recipe.tapes = (None, None)
                recipe.release()
        self._recipes.clear()
        self._forms.clear()
        if self._caller is not None:
            self._caller.forget()
            self._caller = None
            vars(self).pop("all_reduce")
            vars(self).pop("_run")

    # -- the two ends of a call -------------------------------------------------------------------

    def _done(self, work: Work[Any], recipe: Recipe, x: Any) -> None:
        """The collective is done, its result is `x`, or what `finish` makes of that."""
        if recipe.finish is not None:
            x = recipe.finish(x)
        self._finish(work, recipe.op, recipe.call, recipe.nbytes, x)

    def _finish(self, work: Work[Any], op: str, call: bytes, nbytes: int, result: Any) -> None:
        """The collective `op` is done, with this result."""
        self._calls.tags.pass_over(work.tag)
        ended = self._note(work, op, call, nbytes)
        if self._records.trace is not None:
            self._records.started(work)
        self._progress.finish(work, result, ended)

    def _finish_waiting(
        self, work: Work[Any], op: str, call: bytes, nbytes: int, result: Any
    ) -> None:
        """A collective that has waited (`aiodist.engine.waiting_calls`) is done."""
        self._calls.ended(work.tag)
        work.finish(result, self._note(work, op, call, nbytes) if work.record is None else None)

    def _note(self, work: Work[Any], op: str, call: bytes, nbytes: int) -> float:
        """Note a call that ends now: when that is, by the clock of the loop."""
        records, ended = self._records, self._loop.time()
        records.add(
            (records.where, op, work.tag, work.seq, call, None, nbytes, work._started, ended)
        )
        return ended


def flat_of(recipe: Recipe, x: Any) -> Flat | None:
    """The memory of `x`, which `recipe` is for; None: it is to be taken the long way."""
    # Looked at anew in each call: what was there before may be freed by now.
    if type(x) is np.ndarray:
        return x.reshape(-1) if x.flags.carray else None
    return arrays.flat(x, recipe.vector.dtype, recipe.vector.length)


def marked(x: Any) -> Any:
    """`x`, a tensor that was written."""
    tensors.mark_written(x)
    return x


def written(x: Any) -> Any:
    """`x`, an array or a list of arrays that were written."""
    for each in x if isinstance(x, (list, tuple)) else (x,):
        if type(each) is not np.ndarray:
            tensors.mark_written(each)
    return x


def rest_of(recipe: Recipe, x: Any) -> Program:
    """What follows the one phase."""
    yield from ()
    return x if recipe.finish is None else recipe.finish(x)


def before(phase: Phase | Running, program: Program) -> Program:
    """`phase`, and then what is left of the program that gave it."""
    yield phase
    return (yield from program)


def returning(result: Any) -> Program:
    """What follows where all is done but to return."""
    yield from ()
    return result


def failing(error: Exception) -> Program:
    """What follows an `error` in the phase."""
    yield from ()
    raise error


def _is_function(x: Any) -> bool:
    """Whether it is an operator of the user."""
    return x.function is not None if type(x) is ReduceOp else callable(x)


def _weight(key: tuple[Any, ...], recipe: Recipe | None) -> int:
    """Bytes of a recipe, and of the key that it is found by."""
    kinds = sum(len(kind) for kind in key if type(kind) is tuple)
    return A_STEP * (1 + kinds) if recipe is None else A_RECIPE + A_STEP * (recipe.weight + kinds)


WIDE = 64
"""Most items of each container of a value whose kind is looked at."""
DEEP = 4
"""Most containers within containers there."""


def kind_of(
    op: str, args: tuple[Any, ...], flats: list[Flat], words: list[Any]
) -> tuple[Any, ...] | None:
    """What calls of `op` have in common that are done alike: dtypes, shapes and types of the value,
    which is the first of `args`, and of the last one if that is an `out`; and the others as they
    are. The memory of arrays is added to `flats`, and to `words` all else that is in the value, as
    something that is equal where that is. None where there is anything that is not to be
    prepared."""
    kinds: list[Any] = [op]
    last = 0 if op == "broadcast" else len(args) - 1
    for index, each in enumerate(args):
        cls = type(each)
        if each is None or (index and cls is int):
            kinds.append(each)
        elif cls is ReduceOp and index and each.function is None:
            kinds.append(id(each))
        elif not index or index == last:
            kind = _kind(each, flats, None if index else words)
            if kind is None:
                return None
            kinds.append(kind)
        else:
            return None
    return tuple(kinds)


def _kind(x: Any, flats: list[Flat], words: list[Any] | None, depth: int = 0) -> Any:
    """`words`: None where there are to be none."""
    cls = type(x)
    if cls is np.ndarray:  # what most are
        if not x.flags.carray:
            return None
        flats.append(x.reshape(-1))
        return x.dtype, x.shape
    if cls in WORDS:
        if words is None:
            return None
        words.append(said(x))
        return cls
    kinds: list[Any] = [cls]
    if cls is dict:
        kinds += x
        if {*map(type, x)} - {str}:
            return None
        x = x.values()
    elif not (cls is list or cls is tuple):
        flat = arrays.plain(x)
        if flat is None:
            return None
        flats.append(flat)
        return x.dtype, x.shape
    if len(x) > WIDE or depth == DEEP:
        return None
    for each in x:
        kind = _kind(each, flats, words, depth + 1)
        if kind is None:
            return None
        kinds.append(kind)
    return tuple(kinds)
