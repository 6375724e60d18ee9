"""Whether a run's steps train anything: in float16 a step whose gradients overflow is skipped, and nothing is updated."""

from collections import deque

from zmpi.process.errors import Agreed

RECENT = 50  # steps, the last ones
MANY = RECENT // 5  # skipped steps among them that are worth a warning
GIVE_UP = 100  # steps skipped in a row


class NothingTrained(Agreed):
    """The steps of a run updated nothing; all ranks raise it together."""


class Progress:
    """Counts the steps that this process takes with an engine. The counts are the same on all ranks."""

    def __init__(self, zero):
        self._zero = zero
        self._recent = deque(maxlen=RECENT)  # of the last steps, whether each was skipped
        self._steps = self._in_a_row = 0
        self._skipped_all, self._learned, self._warned = True, False, False

    def step(self):
        """Count the engine's last step. Returns a warning, or None; raises NothingTrained after GIVE_UP skipped in a row."""
        last = self._zero.last
        self._steps += 1
        self._recent.append(last.skipped)
        self._in_a_row = self._in_a_row + 1 if last.skipped else 0
        self._skipped_all = self._skipped_all and last.skipped
        self._learned = self._learned or (not last.skipped and last.grad_norm > 0)
        if self._in_a_row == GIVE_UP:
            raise NothingTrained(
                f"step {self._zero.step}: the last {GIVE_UP} steps were skipped: {self._overflow()}"
            )
        many, warned = sum(self._recent), self._warned
        self._warned = many >= MANY or (warned and many > 0)
        if self._warned and not warned:
            return (
                f"step {self._zero.step}: {many} of the last {len(self._recent)} steps were skipped:"
                f" {self._overflow()}"
            )
        return None

    def fault(self):
        """At the end of a run: why its steps trained nothing, or None. A dynamic loss scale may skip a resumed run's few."""
        if self._learned:
            return None
        if not self._skipped_all:
            return f"nothing was trained: the gradient was 0 in all {self._steps} steps"
        if self._zero.scaler.window and self._zero.updates:
            return None
        return f"nothing was trained: all {self._steps} steps were skipped: {self._overflow()}"

    def _overflow(self):
        scale, fixed = self._zero.scaler.scale, self._zero.scaler.window is None
        advice = (
            "lower --loss-scale, or let it be auto"
            if fixed
            else "it is still being lowered; take more --steps, or --precision bfloat16"
        )
        kind = self._zero.policy.precision
        return f"gradients overflow {kind} at a loss scale of {scale:.10g} ({advice})"
