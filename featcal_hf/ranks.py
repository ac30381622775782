"""The processes that share a run: who they are, and how they add up and hand over what each of them has.

One process alone is the trivial case: nothing is sent, nothing is copied, nothing is waited for.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from featcal_hf.errors import FeatCalError, RanksError

FIRST = 0
JOINING, WAITING = timedelta(minutes=5), timedelta(hours=2)
"""How long ranks wait for one another: to begin with, and at work, where the first may have to write much. One that
ends is noticed at once; this is for one that hangs."""
AGAIN = "The merged model is as it was; the same command goes on from the last finished block."
LAUNCHED = ("RANK", "WORLD_SIZE")
Value = TypeVar("Value")
Parts = list[tuple[Tensor, ...]]


@dataclass(frozen=True)
class Ranks:
    """The processes that share a run, as one of them sees them. All call the same methods in the same order.

    Attributes:
        number: this process's rank, from 0.
        size: how many there are.
        neighbour: this process's number among those on its machine.
        neighbours: how many are on its machine.
    """

    number: int = FIRST
    size: int = 1
    neighbour: int = 0
    neighbours: int = 1
    _link: _Link | None = None

    def __repr__(self) -> str:
        return f"Ranks({self.number} of {self.size})"

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.number == FIRST

    def place(self, device: str) -> str:
        """The device of this rank, for what was asked of all: each takes a GPU of its own.

        Raises:
            RanksError: they can't all compute there.
        """
        if self._link is None or device == "cpu":
            return device
        if device != "cuda":
            raise RanksError(
                f"{self.size} ranks can't share the device {device}; give --device cpu, or cuda for a GPU each."
            )
        if torch.cuda.device_count() < self.neighbours:
            raise RanksError(
                f"{self.neighbours} ranks are on this machine, which has {torch.cuda.device_count()} GPUs; start one "
                "rank for each."
            )
        own = torch.device("cuda", self.neighbour)
        torch.cuda.set_device(own)
        self._link.use(own)
        return str(own)

    def exchange(self, value: Value) -> list[Value]:
        """What each rank gave, by rank. Small things only: they are pickled.

        Raises:
            FeatCalError: another rank's error; or `RanksError` if one is gone.
        """
        return [value] if self._link is None else self._link.exchange(value)

    def of_first(self, make: Callable[[], Value]) -> Value:
        """What the first rank makes, on all."""
        if self._link is None:
            return make()
        return self._link.exchange(make() if self.is_first else cast(Value, None))[FIRST]

    def add_up(self, totals: Sequence[Tensor], owner: int) -> None:
        """Add the ranks' tensors up, in place on the owner; on the others they are of no use afterwards."""
        if self._link is not None:
            self._link.add_up(totals, owner)

    def collect(self, parts: Parts, owner: int) -> Parts:
        """The parts of all ranks, in their order, on the owner; none on the others."""
        return parts if self._link is None else self._link.collect(parts, owner)

    def pool(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What any rank gave, on every rank."""
        return tensors if self._link is None else self._link.pool(tensors)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is done inside ends on all ranks, or with one's error on all; nobody leaves before the others."""
        with self.telling():
            yield
        self.exchange(None)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An error inside ends the others too, wherever they next exchange something."""
        try:
            yield
        except BaseException as error:
            if self._link is not None:
                self._link.tell(error)
            raise

    @property
    def leaves_it_to_the_first(self) -> bool:
        """Whether the first rank knows of the error that ends this one, and says it."""
        return not self.is_first and self._link is not None and self._link.told


ALONE = Ranks()


def divide(costs: Sequence[float], loads: list[float]) -> list[int]:
    """Which rank does what: each in turn goes to the one with the least to do.

    Args:
        costs: of each piece of work.
        loads: what each rank has to do already; grows by what it is given.
    """
    owners = []
    for cost in costs:
        owners.append(loads.index(min(loads)))
        loads[owners[-1]] += cost
    return owners


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The processes that `torchrun` or `accelerate launch` started, joined in a `with` statement.

    Returns:
        This process's view of them, for `ranks=`; without a launcher of one alone. `place("cuda")` is the GPU to give
        as `device`, `is_first` the one that writes.

    Raises:
        RanksError: they don't find each other; or, at any time, the launcher stops this one because another is gone.
    """
    if not all(name in os.environ for name in LAUNCHED) or os.environ["WORLD_SIZE"] == "1":
        yield ALONE
        return
    number, size = (int(os.environ[name]) for name in LAUNCHED)
    try:
        dist.init_process_group("gloo", timeout=JOINING)
        link = _Link(number, size)
    except (RuntimeError, ValueError) as error:
        raise RanksError(
            f"rank {number} of {size} doesn't find the others ({error}); start them with torchrun or accelerate "
            f"launch, or unset {' and '.join(LAUNCHED)} to run alone."
        ) from error
    try:
        with _stopped_by_the_launcher(number):
            yield Ranks(
                number,
                size,
                int(os.environ.get("LOCAL_RANK", number)),
                int(os.environ.get("LOCAL_WORLD_SIZE", size)),
                link,
            )
    finally:
        link.part()
        dist.destroy_process_group()


@dataclass(frozen=True)
class _Failure:
    """A rank's error, for the others to end with."""

    kind: type[BaseException]
    text: str


class _Link:
    """What connects this rank with the others.

    Every way of passing something on begins with an exchange, so that a rank that fails can tell the others whatever
    they are about to do.
    """

    def __init__(self, number: int, size: int) -> None:
        self.told = False
        self._number, self._size = number, size
        self._device = torch.device("cpu")
        self._words = self._tensors = dist.new_group(backend="gloo", timeout=WAITING)
        self._is_whole = True

    def use(self, device: torch.device) -> None:
        """Pass tensors on from GPU to GPU."""
        self._device = device
        self._tensors = dist.new_group(backend="nccl", timeout=WAITING)

    def exchange(self, value: Value) -> list[Value]:
        """See `Ranks.exchange`."""
        answers = self._everyone(value)
        for answer in answers:
            if isinstance(answer, _Failure):
                raise answer.kind(answer.text)
        return answers

    def tell(self, error: BaseException) -> None:
        """Let the others end with this error, unless they know, or can't be reached."""
        if self.told or not self._is_whole:
            return
        if isinstance(error, (FeatCalError, KeyboardInterrupt)):
            failure = _Failure(type(error), str(error))
        else:
            failure = _Failure(RanksError, f"rank {self._number}: {type(error).__name__}: {error}")
        with suppress(RanksError):  # nobody is left to tell; the error itself goes on
            self._everyone(failure)

    def part(self) -> None:
        """After an error that all know of, wait for all: the launcher kills the others when the first one leaves."""
        if self.told and self._is_whole:
            with suppress(RanksError):
                self._everyone(None)

    def add_up(self, totals: Sequence[Tensor], owner: int) -> None:
        """See `Ranks.add_up`."""
        self.exchange(None)
        with self._unbroken():
            for total in totals:
                dist.reduce(total, owner, group=self._tensors)

    def collect(self, parts: Parts, owner: int) -> Parts:
        """See `Ranks.collect`."""
        outlines = self.exchange([[(value.shape, value.dtype) for value in part] for part in parts])
        with self._unbroken():
            if self._number != owner:
                for part in parts:
                    for value in part:
                        dist.send(_raw(value.contiguous()), owner, group=self._tensors)
                return []
            everyone: Parts = []
            for number, outline in enumerate(outlines):
                everyone += parts if number == owner else [self._received(part, number) for part in outline]
        return everyone

    def pool(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Ranks.pool`."""
        outlines = self.exchange({name: (value.shape, value.dtype) for name, value in tensors.items()})
        everything = {}
        with self._unbroken():
            for number, outline in enumerate(outlines):
                for name, (shape, dtype) in outline.items():
                    if number == self._number:
                        value = tensors[name].to(self._device).contiguous()
                    else:
                        value = torch.empty(shape, dtype=dtype, device=self._device)
                    dist.broadcast(_raw(value), number, group=self._tensors)
                    everything[name] = value
        return everything

    def _received(self, outline: Sequence[tuple[torch.Size, torch.dtype]], sender: int) -> tuple[Tensor, ...]:
        part = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in outline)
        for value in part:
            dist.recv(_raw(value), sender, group=self._tensors)
        return part

    def _everyone(self, value: Any) -> list[Any]:
        answers: list[Any] = [None] * self._size
        with self._unbroken():
            dist.all_gather_object(answers, value, group=self._words)
        self.told = self.told or any(isinstance(answer, _Failure) for answer in answers)
        return answers

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Once something was passed on by half, nothing more can be: the others wait for the rest of it."""
        self._is_whole = False
        try:
            yield
        except RuntimeError as error:
            raise RanksError(
                f"rank {self._number} of {self._size} has lost another one, which was killed, ran out of memory or "
                f"can't be reached ({str(error).splitlines()[0]}). {AGAIN}"
            ) from error
        self._is_whole = True


def _raw(value: Tensor) -> Tensor:
    """A tensor's bytes, of whatever dtype."""
    return value.view(-1).view(torch.uint8)


@contextmanager
def _stopped_by_the_launcher(number: int) -> Iterator[None]:
    """While open, being asked to end is an error like others, so that it is said and what is open is closed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signal_number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise RanksError(
            f"rank {number} was stopped by the launcher, as it does when another rank has ended; its own lines say "
            f"which. {AGAIN}"
        )

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
