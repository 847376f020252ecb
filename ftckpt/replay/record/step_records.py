"""The recorder: turns a training process's actions into one record per step.

A step ends with an optimizer step after a forward or backward pass. (Torch and some scripts create
an optimizer's state by a step with zero gradients: that is not a step of the training.) Everything
after it (scaler, schedule, averaged weights, a save) still belongs to it, until the next batch,
forward or backward pass begins. State is read then, as that step begins, so restored state is seen
before anything is computed.

The recorder never raises into the training, draws no random number and changes no tensor. Processes
without steps (a launcher, the workers of a data loader) write nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeVar

from ftckpt.replay.processes import Settings

from . import counters
from . import training as readings
from .journal import Journal
from .log import ENDED, TOLD, StepRecord
from .training import Training

Method = TypeVar("Method", bound=Callable[..., None])


def _guarded(method: Method) -> Method:
    """Make a method do nothing in a forked child, without gradients, and never raise."""

    @wraps(method)
    def guarded(self: Recorder, *arguments: Any, **named: Any) -> None:
        if self.broken or os.getpid() != self.pid:
            return
        import torch

        try:
            with torch.no_grad():
                method(self, *arguments, **named)
        except Exception as error:
            self.broken = f"{type(error).__name__}: {error}"
            self.note(f"recording ended: {self.broken}")
            print(f"ftckpt: recording ended: {self.broken}", file=sys.stderr)

    return guarded  # type: ignore[return-value]


class Recorder:
    """Records one process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pid = os.getpid()
        self._parent = os.getppid()
        self.step = settings.at + 1
        self.broken = ""
        self._events: dict[str, dict[str, Any]] = {}
        self._notes: list[str] = []
        self._journal = Journal(settings)
        self._training = Training(
            lambda event, item, tensor: self._journal.keep(self.step, event, item, tensor)
        )
        self._roots = self._training.modules
        self._captured: set[int] = set()
        self._before: dict[str, Any] = {}
        self._unscaled: tuple[Any, Any] = (None, None)
        self._more = 0
        self._backward = False
        self._worked = False
        self._making_state = 0
        # Backward passes of this step. A restart within a window of accumulation has some already;
        # the uninterrupted run records that step from the same pass on.
        within = settings.passes and settings.at + 1 == settings.pass_step
        self._passes = settings.passes if within else 0
        self._since_pass = self._passes
        self._updated = False
        self._told_ends = False
        self._saved = False
        atexit.register(self.close)

    @property
    def dense(self) -> bool:
        """Whether whole tensors are read in this step."""
        return self.settings.reads_tensors(self.step)

    def made(self, kind: str, thing: Any) -> None:
        """Remember an optimizer, schedule, scaler or averaged model that the training made."""
        if os.getpid() == self.pid:
            self._training.made(kind, thing)

    def note(self, text: str) -> None:
        """Remember an event in words: a save, a seed."""
        if os.getpid() == self.pid and len(self._notes) < 100:
            self._notes.append(text)

    @_guarded
    def saved(self, what: str, state: Any = None) -> None:
        """Remember a save of state; the process may have to end after this step.

        Saves without tensors (metrics, settings) are not state for a restart.
        """
        self.note(f"saved {what}")
        if state is not None and not counters.holds_tensors(state):
            return
        done = self.step if self._updated else self.step - 1
        passes = 0 if self._updated else self._passes
        self._saved |= done > self.settings.at or passes > 0
        if self.settings.stop_at or self.settings.stop_after_save:
            self._journal.saved(done, passes)
        shown = counters.step_counters(state)
        if shown:
            of = self._events.setdefault("counter", {})
            of |= {name: f"{value} {done}" for name, value in shown.items()}

    @contextmanager
    def making_state(self) -> Iterator[None]:
        """Do not count optimizer steps meanwhile: torch makes them only to create state."""
        self._making_state += 1
        try:
            yield
        finally:
            self._making_state -= 1

    @_guarded
    def fetching(self) -> None:
        """Read the random streams: a data loader is about to draw a batch."""
        self._begin()
        self._before = readings.random_streams(whole=self.dense)

    @_guarded
    def fetched(self, batch: Any) -> None:
        """Record a batch of a data loader, and the random streams before it was drawn.

        Batches drawn before the first backward pass of a step replace each other: those that a
        restart skips to reach its place, and those of an evaluation.
        """
        self._worked = True
        if not self._backward:
            self._events["rng_start"] = self._before
            self._events["batch"] = self._training.items("batch", batch)
            return
        self._more += 1
        more = self._training.items("batch", batch, prefix=f"+{self._more}.")
        self._events.setdefault("batch", {}).update(more)

    @_guarded
    def forward(self, module: Any, arguments: tuple[Any, ...]) -> None:
        """Record the state as the step begins, and the input, when an outermost module is called.

        A module inside one that was called before is not outermost.
        """
        if not self._roots.knows(module):
            self._listen(module, self._roots.add(module))
        place = self._roots.place(module)
        if place is None:
            return
        self._begin()
        self._worked = True
        if not self._captured:
            self._state("rng" if "rng_start" in self._events else "rng_start")
        if place not in self._captured:
            self._captured.add(place)
            self._model(place)
        self._stop_where_asked()
        self._input(place, arguments)

    def called(self, module: Any, named: Mapping[str, Any]) -> None:
        """Record the keyword arguments of a call; torch shows them when the call is over."""
        if named and os.getpid() == self.pid:
            place = self._roots.place(module)
            if place is not None:
                self._keywords(place, named)

    @_guarded
    def _keywords(self, place: int, named: Mapping[str, Any]) -> None:
        self._input(place, named)

    def _input(self, place: int, arguments: Any) -> None:
        if arguments:
            pass_ = self._passes - self._since_pass
            prefix = f"+{pass_}." if pass_ else ""
            prefix += self._roots.named(place, "")
            items = self._training.items("input", arguments, prefix=prefix)
            self._events.setdefault("input", {}).update(items)

    def scaled(self, loss: Any, result: Any) -> None:
        """Remember which loss a scaler has scaled: the loss is recorded without its scale."""
        self._unscaled = (result, loss)

    @_guarded
    def backward(self, loss: Any) -> None:
        """Record a loss when its gradients are computed."""
        if self._unscaled[0] is loss:
            loss = self._unscaled[1]
        self._unscaled = (None, None)
        self._begin()
        if not self._captured:  # a network without modules
            self._captured.add(-1)
            self._state("rng" if "rng_start" in self._events else "rng_start")
            self._stop_where_asked()
        self._backward = True
        self._passes += 1
        of = self._events.setdefault("loss", {})
        of |= readings.value_items(readings.scalar(loss), str(len(of)))

    @_guarded
    def gradients(self, optimizer: Any) -> None:
        """Record the gradients that an optimizer is about to use."""
        if not self.dense or not self._is_step():
            return
        names = self._roots.parameter_names()
        grads = self._events.setdefault("grad", {})
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter), str(len(grads)))
                if parameter.grad is not None:
                    grads[name] = self._training.digest("grad", name, parameter.grad)

    def differentiated(self) -> None:
        """Remember that gradients were computed without `backward`."""
        self._worked = True

    def updated(self) -> None:
        """Note that an optimizer has made its step."""
        if os.getpid() != self.pid:
            return
        if self._is_step():
            self._updated = True
        else:
            self.note("an optimizer made a step of nothing, such as makes its state: not counted")

    def _is_step(self) -> bool:
        return not self._making_state and (self._updated or self._worked or self._backward)

    @_guarded
    def told(self, step: int | None, events: Mapping[str, Any]) -> None:
        """Record the state passed to `ftckpt.hook.step`."""
        if self._told_ends:
            self._begin()
            self._captured.add(-1)
            self._stop_where_asked()
        for key, value in events.items():
            event = "told" if key in TOLD else key
            prefix = f"{key}." if key in TOLD else ""
            value = readings.scalar(value) if key == "loss" else value
            items = self._training.items(event, value, prefix=prefix)
            self._events.setdefault(event, {}).update(items)
        if not self._updated and not self._backward:  # nothing else shows where a step ends
            self._events.setdefault("rng", readings.random_streams(whole=self.dense))
            self._told_ends = self._updated = True
        if step is None:
            return
        if self._journal.numbered == "counted" and not self._journal.begun:
            self._journal.numbered = "told"
        if self.settings.last or self.settings.at or self.settings.stop_at:
            # Steps are counted here: the training's own count is part of its state.
            self._events.setdefault("counter", {})["told"] = f"{int(step)} {self.step}"
        elif step != self.step:
            if not self._journal.begun:
                self.step = step
            else:
                self.note(f"the training counts step {step}")

    def close(self) -> None:
        """Write the rest; the state after the last step becomes a partial record."""
        if self.broken or os.getpid() != self.pid:
            if self._journal.begun and self.broken and os.getpid() == self.pid:
                self._write(partial=True)
            return
        if "torch" in sys.modules:  # without torch nothing was trained; import nothing at exit
            self._close()

    @_guarded
    def _close(self) -> None:
        self._begin()
        if not self._journal.begun or not self._roots:
            return
        self._captured = set(range(len(self._roots)))
        self._state("rng_start")
        for place in range(len(self._roots)):
            self._model(place)
        self.note(ENDED)
        self._write(partial=True)
        if self.settings.last and self.step > self.settings.last:  # otherwise it may end in a crash
            self._journal.done()

    def _begin(self) -> None:
        """Finish the step that an optimizer has ended, if one has."""
        if not self._updated:
            if self._passes and (self.step, self._passes, self._since_pass) == (
                self.settings.pass_step, self.settings.passes, 0
            ):  # fmt: skip
                self._since_pass = self._passes
                self._forget()
            return
        if not self.settings.last or self.step <= self.settings.last:
            self._write()
        self.step += 1
        self._notes, self._passes, self._since_pass = [], 0, 0
        self._forget()
        done = self.step - 1
        if done == self.settings.stop_at or (self.settings.stop_after_save and self._saved):
            self._journal.stopped(done)
            self._wait()

    def _forget(self) -> None:
        """Begin a new recording: a step, or the rest of one from the checkpoint's place on."""
        self._events, self._captured = {}, set()
        self._training.forget_moments()
        self._backward = self._updated = self._worked = False
        self._more = 0

    def _stop_where_asked(self) -> None:
        last = self.settings.last
        if last and self.step > last and len(self._captured) >= max(1, len(self._roots)):
            self._write(partial=True)
            self._journal.done()
            self._wait()

    def _wait(self) -> None:
        """Wait to be killed from outside, at most while the parent lives."""
        sys.stdout.flush()
        while os.getppid() == self._parent:
            time.sleep(0.05)
        os._exit(0)

    def _state(self, streams: str) -> None:
        self._events.setdefault(streams, readings.random_streams(whole=self.dense))
        self._events |= self._training.numbers()
        if self.dense:
            self._training.read_moments()
            self._events |= self._training.averages()

    def _listen(self, root: Any, place: int) -> None:
        """Observe the gradients of a rank before they are reduced over ranks."""
        import torch

        if isinstance(root, torch.nn.parallel.DistributedDataParallel):
            for name, parameter in root.named_parameters():
                if parameter.requires_grad:
                    hear = partial(self.local_gradient, self._roots.named(place, name))
                    parameter.register_hook(hear)  # type: ignore[no-untyped-call]

    @_guarded
    def local_gradient(self, name: str, gradient: Any) -> None:
        """Record one gradient of one backward pass, before its reduction."""
        if self.dense:
            of = self._events.setdefault("grad_local", {})
            earlier = sum(1 for key in of if key.partition("+")[0] == name) if name in of else 0
            item = f"{name}+{earlier}" if earlier else name
            of[item] = self._training.digest("grad_local", item, gradient)

    def _model(self, place: int) -> None:
        if self.dense:
            for event, items in self._training.weights(place).items():
                self._events.setdefault(event, {}).update(items)
            if self._since_pass:
                of = self._events.setdefault("grad_start", {})
                of |= self._training.accumulated(place)

    def _write(self, *, partial: bool = False) -> None:
        if self.dense and self._captured:
            self._events["optimizer"] = self._training.moments()
            masters = self._training.masters()
            if masters:
                self._events["masters"] = masters
        record = StepRecord(
            self.step, self._journal.rank, self._events, tuple(self._notes), partial
        )
        self._journal.write(record)
