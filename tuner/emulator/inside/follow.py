"""Follows a training: its steps (ends_of_steps.py) and their phases. Ends it after enough steps."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import itertools
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

from tuner.emulator.inside.arrived import Arrived
from tuner.emulator.inside.decoding import Decoding
from tuner.emulator.inside.ends_of_steps import Steps
from tuner.emulator.inside.failing import send, uses_cuda
from tuner.emulator.inside.faults import guarded
from tuner.emulator.inside.hollow import save_sparsely
from tuner.emulator.inside.horizon import Horizon
from tuner.emulator.inside.host_memory import HostMemory, anonymous_bytes
from tuner.emulator.inside.lines import called_around, in_a_forward, program_line
from tuner.emulator.inside.memory import MemoryWatch, run_phase
from tuner.emulator.inside.one_rank import STANDS_FOR
from tuner.emulator.inside.process import end_when_told, replaces, when_imported
from tuner.emulator.inside.rounds import loops
from tuner.emulator.inside.shortening import WORTHWHILE, Budget, Shortening

_P = ParamSpec("_P")
_R = TypeVar("_R")

LOAD, FORWARD, BACKWARD, OPTIMIZER = "load", "forward", "backward", "optimizer"
GENERATE, REFERENCE = "generate", "reference"
EVALUATION, SAVE, MERGE, RESUME, END = "evaluation", "save", "merge", "resume", "end"
AFTER_STEPS = (EVALUATION, SAVE, MERGE, RESUME, END)
"""Phases of a whole run beside those of its steps."""

CALLS: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "transformers.trainer": (
        ("Trainer", "evaluation_loop", EVALUATION),
        ("Trainer", "prediction_loop", EVALUATION),
        ("Trainer", "save_model", SAVE),
        ("Trainer", "_save_checkpoint", SAVE),
        ("Trainer", "_load_best_model", RESUME),
        ("Trainer", "_load_from_checkpoint", RESUME),
        ("Trainer", "_load_optimizer_and_scheduler", RESUME),
    ),
    "transformers.modeling_utils": (("PreTrainedModel", "save_pretrained", SAVE),),
    "peft.peft_model": (("PeftModel", "save_pretrained", SAVE),),
    "peft.tuners.tuners_utils": (("BaseTuner", "merge_and_unload", MERGE),),
    "peft.tuners.lora.model": (("LoraModel", "merge_and_unload", MERGE),),
    "accelerate.accelerator": (
        ("Accelerator", "save_state", SAVE),
        ("Accelerator", "save_model", SAVE),
        ("Accelerator", "load_state", RESUME),
    ),
    "pytorch_lightning.loops.evaluation_loop": (("_EvaluationLoop", "run", EVALUATION),),
    "lightning.pytorch.loops.evaluation_loop": (("_EvaluationLoop", "run", EVALUATION),),
    "pytorch_lightning.trainer.trainer": (("Trainer", "save_checkpoint", SAVE),),
    "lightning.pytorch.trainer.trainer": (("Trainer", "save_checkpoint", SAVE),),
    "pytorch_lightning.core.saving": (("", "_load_from_checkpoint", RESUME),),
    "lightning.pytorch.core.saving": (("", "_load_from_checkpoint", RESUME),),
    "torch.serialization": (("", "save", SAVE), ("", "load", RESUME)),
    "safetensors.torch": (("", "save_file", SAVE), ("", "save_model", SAVE)),
}
"""By module: a class (empty for a function), a name in it, and the phase that its call is."""

MOST_ENDING = 600
"""Steps in which followed loops (rounds.py) have to end."""

MOST_STEPS = 150
"""Steps beyond the first ones that a loader may drive without a budget for them."""


def _alone(
    method: Callable[Concatenate[Follower, _P], _R],
) -> Callable[Concatenate[Follower, _P], _R]:
    """A decorator for methods that one thread of the program runs at a time."""

    @functools.wraps(method)
    def run(self: Follower, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **kwargs)

    return run


class Follower:
    """Follows the training steps of this process.

    The program is ended after `steps` training steps; with 0 it runs to its own end.
    In a `whole` run it goes on, shortened, through evaluation and saving to its end, and what it
    writes from then on is thrown away. If there is a `pricer`, each phase is announced to it
    (`begin(phase, step)`), and its `snapshot()` is part of the result. `mode` computes values, and
    passes on operators' results.
    """

    def __init__(
        self, *, steps: int, whole: bool = False, pricer: Any = None, mode: Any = None
    ) -> None:
        self._steps = steps
        self._memory = MemoryWatch(steps if whole else 0)
        self._budget = Budget()
        self._horizon = Horizon()
        self._shortening = self._shortened() if whole and steps else None
        self._host: HostMemory | None = None
        self._evaluates = False
        self._interrupted = FORWARD
        self._calls_train = 0
        self._pricer = pricer
        self._mode = mode
        self._arrived = Arrived(self._note_vocabulary, self._note_looked_up)
        self._decoding = Decoding(self._memory, pricer, self._generation)
        self._done = 0
        self._first_end = steps
        self._training_began = 0
        self._most_steps: int | None = None
        self._began = 0
        self._loop_goes_on = False
        self._most_launches = sys.maxsize
        self._renew()
        enter = functools.partial(self._enter, OPTIMIZER)
        trainers = self._memory.owners.trainers
        made = self._note_training
        self._ends = Steps(mode, trainers, made=made, updating=enter, over=self._step_is_over)
        self._trained: Any = None
        self._backward_depth = 0
        self._has_trained = False
        self._phase = LOAD
        self._walls: list[float] = []
        self._started = time.perf_counter()
        self._told = False

    def install(self, before_bytes: int = 0) -> None:
        """Follow optimizers, the backward pass, the first forward pass and the end.

        `before_bytes` is the host memory of the process before the emulator was there.
        """
        import torch

        # torch.optim removes its submodules from its names.
        optimizer = importlib.import_module("torch.optim.optimizer")
        optimizer.register_optimizer_step_pre_hook(self._before_update)
        optimizer.register_optimizer_step_post_hook(self._after_update)
        self._ends.install()
        graph: Any = torch.autograd.graph
        run = self._around_backward(graph._engine_run_backward)
        graph._engine_run_backward = torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
        self._wait_for_forward()
        if self._shortening is not None:
            self._shortening.install()
            loops().training = self
            self._follow_calls()
        self._decoding.install()
        self._memory.install(self._model_is_made)
        self._arrived.install(lambda: self._done)
        with contextlib.suppress(RuntimeError):  # cudaMallocAsync: the device's account has it
            attach: Any = vars(torch._C)["_cuda_attach_out_of_memory_observer"]
            attach(self._tell_out_of_memory)
        if self._shortening is not None and multiprocessing.parent_process() is None:
            self._host = HostMemory(LOAD, max(0, anonymous_bytes() - before_bytes))
        # Forked helpers, which have other process ids, send no result at their end.
        owner = os.getpid()
        os.register_at_fork(after_in_child=self._renew)
        end_when_told(self._tell)
        atexit.register(lambda: os.getpid() == owner and self._tell("end"))

    def _renew(self) -> None:
        """Make the lock anew: another thread may hold it as this process forks."""
        self._lock = threading.RLock()

    # -- phases ---------------------------------------------------------------------------------

    @guarded("a phase of a step")
    @_alone
    def _enter(self, phase: str) -> None:
        if phase == self._phase:
            return
        self._phase = phase
        self._memory.mark(phase, self._done)
        if self._host is not None:
            self._host.enter(run_phase(phase, self._done, self._steps))
        if self._pricer is not None:
            # The time of a step is that of the first ones.
            counts = phase not in AFTER_STEPS and (not self._steps or self._done < self._steps)
            timed = FORWARD if phase == REFERENCE else phase
            trained = self._memory.owners.trained
            self._pricer.begin(timed if counts else END, self._done, trained)

    def _wait_for_forward(self) -> None:
        import torch

        register = torch.nn.modules.module.register_module_forward_pre_hook
        self._forward_hook = register(self._before_module)

    @guarded("the first forward pass")
    @_alone
    def _before_module(self, module: Any, inputs: Any) -> None:
        import torch

        if not (torch.is_grad_enabled() and uses_cuda()):
            return
        if not any(p.is_cuda for p in module.parameters()):
            return
        self._forward_hook.remove()  # torch.compile would compile it
        self._memory.note_training()
        self._memory.owners.note_ran(module)
        self._arrived.note_model(module)
        self._enter(FORWARD)

    def _model_is_made(self) -> None:
        """Go back to loading: forward passes before now, as by a kernel test, trained nothing."""
        if self._phase == FORWARD and not self._has_trained and not in_a_forward():
            self._enter(LOAD)
            self._wait_for_forward()

    def _note_vocabulary(self, words: int) -> None:
        self._memory.note_vocabulary(words)
        if self._mode is not None:
            self._mode.results = self._memory.note_logits
            if self._mode.repeats is not None:
                self._mode.repeats.forget()

    def _around_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def run_and_note(*args: Any, **kwargs: Any) -> Any:
            outermost = self._backward_depth == 0
            self._backward_depth += 1
            if outermost:
                self._begin_backward(sys._getframe(1))
            with self._lock:
                self._ends.begin_backward(args)
            found = None
            try:
                found = run(*args, **kwargs)
                return found
            finally:
                self._backward_depth -= 1
                with self._lock:
                    self._ends.end_backward(found)
                if outermost:
                    self._enter(FORWARD)

        return run_and_note

    @guarded("a backward pass")
    @_alone
    def _begin_backward(self, frame: FrameType) -> None:
        self._has_trained = True
        self._evaluates = False
        if self._mode is not None:
            self._mode.values.transfers.loops.progress()
        if self._shortening is not None:
            self._shortening.note_backward()
            if self._phase in (*AFTER_STEPS, REFERENCE):  # it was a forward pass that trains
                self._memory.correct(FORWARD)
        self._enter(BACKWARD)
        self._memory.note_backward(program_line(frame))

    # -- steps ----------------------------------------------------------------------------------

    @guarded("a step of an optimizer")
    @_alone
    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Note an update; return its arguments with a followed closure, if they have one."""
        self._ends.begin_update(optimizer)
        self._memory.owners.note_update(optimizer)
        if self._backward_depth > 0:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if not callable(closure):
            self._enter(OPTIMIZER)
            return None
        followed = self._around_closure(closure)
        if len(args) > 1:
            return (args[0], followed, *args[2:]), kwargs
        return args, {**kwargs, "closure": followed}

    def _around_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """`closure` as a forward pass, although an optimizer calls it."""

        @functools.wraps(closure)
        def run_and_note() -> Any:
            self._enter(FORWARD)
            try:
                return closure()
            finally:
                self._enter(OPTIMIZER)

        return run_and_note

    @guarded("a step of an optimizer")
    @_alone
    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._ends.end_update(optimizer, in_backward=self._backward_depth > 0)
        if self._backward_depth == 0:
            self._enter(FORWARD)

    def _step_is_over(self) -> None:
        if self._ends.counted_by:
            self._trained = self._ends.trained
            self._memory.owners.note_update(self._trained)
        self._done += 1
        self._walls.append(time.perf_counter())
        send({"event": "step", "step": self._done})
        self._memory.note_step()
        if self._shortening is not None:
            self._shortening.note_step()
            self._horizon.note_step(sys._getframe())
            if self._done == 1:
                save_sparsely()
                self._began = self._budget.launches
            if self._done == self._steps:
                self._begin_rest()
        if self._steps and self._done >= self._steps and not self._goes_on:
            if self._most_steps is None:
                self._most_steps = self._done + MOST_ENDING
            if self._done >= self._most_steps or not loops().enclose(sys._getframe()):
                self._end("steps", 0)

    def _note_training(self, frame: FrameType | None) -> None:
        """Note that an optimizer is made: a training begins, which has steps of its own."""
        self._horizon.note_training(frame)
        self._first_end = max(self._first_end, self._done)
        self._training_began = self._done

    # -- loops of the program (rounds.py) -------------------------------------------------------

    @property
    def steps_done(self) -> int:
        """The steps so far."""
        return self._done

    @property
    def is_spent(self) -> bool:
        """True if the running training has had enough steps."""
        least = min(self._training_began, MOST_STEPS) + self._steps
        is_over = self._shortening is None or self._shortening.is_over
        is_far = is_over and self._budget.launches > self._most_launches // 2
        return self._done >= least and (is_far or not self._goes_on)

    def waits(self) -> bool:
        """True if a branch waits that comes with the next rounds."""
        return bool(self._horizon.waits(MOST_STEPS - self._done))

    def begin_rounds(self) -> None:
        """Go back to training: a loop begins that has trained before."""
        if self._phase == END:
            self._enter(FORWARD)

    @guarded("the end of a loop")
    def cut(self, frame: FrameType, left: range) -> int | None:
        """Note that a loop leaves out rounds; of the numbers `left`, it has to go on with this."""
        assert self._shortening is not None
        self._shortening.has_cut = True
        places = self._memory.ran_lines
        return self._horizon.cut(frame, left, self._done, self._shortening.epochs, places)

    def end_rounds(self) -> None:
        """Enter the end of the run, unless a loader goes on."""
        if self._shortening is not None and self._shortening.is_over:
            self._enter(END)

    # -- the rest of a run ----------------------------------------------------------------------

    def _shortened(self) -> Shortening:
        return Shortening(
            self._steps,
            self._budget,
            report=send,
            stop=lambda: self._end("steps", 0),
            before_training=lambda: self._phase != END or self._enter(FORWARD),
            after_training=lambda: self._enter(END),
            accumulation=lambda: int(self._arrived.settings.get("grad_accum") or 1),
            evaluates=lambda: self._evaluates,
            waits=self.waits,
            memory=self._memory,
        )

    @property
    def _goes_on(self) -> bool:
        """True if a data loader brings the program to its end, or if more steps are cheap."""
        if self._shortening is None:
            return False
        if self._memory.grows:
            self._first_end = self._done + 1
            return True
        if self._shortening.drives:
            if self._shortening.is_granted or self._budget.affords(1, self._step_launches):
                self._first_end = self._done + 1
            if self._done < self._first_end + MOST_STEPS:
                return True
        return self._loop_goes_on and self._budget.affords(1, self._step_launches)

    @property
    def _step_launches(self) -> float:
        return (self._budget.launches - self._began) / max(1, self._done - 1)

    def _begin_rest(self) -> None:
        """Bound the rest, such as a long generation, and see whether a loop may go on."""
        left = min(self._horizon.steps_left or WORTHWHILE, WORTHWHILE)
        self._loop_goes_on = self._budget.affords(left, self._step_launches)
        self._most_launches = self._budget.rest()
        if self._mode is None:
            return
        launches = self._budget.launch_count

        def end_at_most() -> None:
            if launches() > self._most_launches:
                self._mode.bounds = None
                self._end("rest", 0)

        self._mode.bounds = end_at_most

    def _follow_calls(self) -> None:
        for module, calls in CALLS.items():
            when_imported(module, functools.partial(self._follow_module, calls))
        import torch

        @replaces(torch.nn.Module, "train")
        def train_and_note(train: Any, model: Any, mode: bool = True) -> Any:
            self._calls_train += 1
            try:
                return train(model, mode)
            finally:
                self._calls_train -= 1
                if not self._calls_train and self._has_trained:
                    self._note_mode(mode)

    @guarded("the mode of a model")
    def _note_mode(self, trains: bool) -> None:
        self._evaluates = not trains
        if trains and self._phase == EVALUATION:
            self._go_back(self._interrupted)
        elif not trains and self._phase in (FORWARD, END):
            self._interrupted = self._phase
            self._enter(EVALUATION)

    @contextlib.contextmanager
    def _generation(self) -> Iterator[None]:
        """A context for generating: a phase of its own, unless it is part of an evaluation."""
        before = self._phase
        if before not in (*AFTER_STEPS, GENERATE):
            self._enter(GENERATE)
        try:
            yield
        finally:
            if before != GENERATE:
                self._enter(FORWARD if before == LOAD else before)

    def _note_looked_up(self, *, trains: bool) -> None:
        """Note the forward pass of a language model; one without gradients is a reference's."""
        if not trains and self._phase == FORWARD:
            self._enter(REFERENCE)
        elif trains and self._phase == REFERENCE:
            self._enter(FORWARD)

    def _follow_module(self, calls: Sequence[tuple[str, str, str]], module: Any) -> None:
        for owner_name, name, phase in calls:
            owner = getattr(module, owner_name, None) if owner_name else module
            call = vars(owner).get(name) if owner is not None else None
            if callable(call):
                setattr(owner, name, self._as_phase(call, phase))

    def _as_phase(self, call: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """`call` as a phase of its own; before the training, an evaluation only."""

        @functools.wraps(call)
        def run_and_note(*args: Any, **kwargs: Any) -> Any:
            before = self._phase
            if not self._has_trained and phase != EVALUATION:
                return call(*args, **kwargs)
            if before not in (SAVE, MERGE, RESUME):  # a part of that
                self._enter(phase)
            try:
                return call(*args, **kwargs)
            finally:
                self._go_back(before)

        return run_and_note

    def _go_back(self, phase: str) -> None:
        """Enter the phase of before; the end, where no loader goes on with what was done."""
        is_over = self._shortening is not None and self._shortening.is_over
        self._enter(END if is_over and phase in (FORWARD, EVALUATION) else phase)

    # -- the end --------------------------------------------------------------------------------

    def _tell_out_of_memory(self, device: int, size: int, allocated: int, free: int) -> None:
        """Report a request that PyTorch's allocator could not meet, even if the program handles it.

        In the backward pass this runs in an autograd thread, which has no line of the program.
        """
        phase = run_phase(self._phase, self._done, self._steps)
        if phase in (EVALUATION, END):
            phase = _named(called_around(sys._getframe())) or phase
        about = {"phase": phase, **self._memory.refusals.note(size)}
        send({"event": "out_of_memory", "requested_bytes": size, **about})

    def end_unsupported(self) -> None:
        """End the program because it needs something that is not emulated."""
        self._end("unsupported", 3)

    def _end(self, reason: str, status: int) -> None:
        self._lock.acquire()  # and never release it: other threads wait from now on
        self._tell(reason)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    @guarded("the result")
    @_alone
    def _tell(self, reason: str) -> bool:
        """Send the result once, if this process used the device; returns True if it was sent."""
        import torch

        if self._told or not uses_cuda():
            return False
        self._told = True
        stopped = program_line(sys._getframe()) if reason in ("steps", "rest") else None
        times = [self._started, *self._walls]
        host, trained = self._host, self._memory.owners.trained
        send(
            {
                "event": "result",
                "reason": "steps" if reason == "rest" else reason,
                "steps": self._done or self._ends.uncounted(),
                "steps_by": self._ends.counted_by,
                "rank": int(os.environ.get("RANK", "0")),
                "stands_for": STANDS_FOR.get("ranks", 1),
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "host_step_s": [b - a for a, b in itertools.pairwise(times)],
                "devices": self._memory.result() or [],
                "recovered": self._memory.recovered,
                "host": None if host is None else host.result(),
                "horizon": self._horizon_at(reason, stopped),
                "work": None if self._pricer is None else self._pricer.snapshot(trained),
                "values_unknown": [] if self._mode is None else self._mode.values.unknowns.rows(),
                "settings": self._arrived.settings,
                "compares": self._arrived.compares,
                "inputs": self._arrived.inputs,
            }
        )
        return True

    def _horizon_at(self, reason: str, stopped: str | None) -> dict[str, Any]:
        """The lines of the program that were not reached, and the steps that it would take."""
        if self._shortening is None or not self._done:
            return {}
        self._horizon.is_whole = reason == "end" and not self._shortening.has_cut
        if self._horizon.is_whole and STANDS_FOR.get("ranks", 1) == 1:
            return {}
        found = self._horizon.result(
            self._done,
            self._shortening.epochs,
            self._memory.ran_lines,
            grows=self._memory.grows_by_round,
        )
        if stopped is not None:
            found["unreached"] = [stopped, *(one for one in found["unreached"] if one != stopped)]
        return found


def _named(calls: set[str]) -> str:
    """The phase that a program makes by itself, by the names of its functions; empty for none."""
    starts = [name.lstrip("_").lower() for name in calls]
    found = (phase for phase in (SAVE, MERGE) if any(one.startswith(phase) for one in starts))
    return next(found, "")
