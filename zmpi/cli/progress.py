"""Detects runs that train nothing: float16 skips a step's update if gradients overflow."""

from collections import deque

from zmpi.process.errors import Agreed

RECENT = 50  # steps, the last ones
MANY = RECENT // 5  # skipped steps among them that cause a warning
GIVE_UP = 100  # steps skipped in a row


class NothingTrained(Agreed):
    """A run's steps updated nothing; raised on all ranks."""


class Progress:
    """Counts the engine's steps in this process. The counts are the same on all ranks."""

    def __init__(self, zero):
        self._zero = zero
        self._recent = deque(maxlen=RECENT)  # whether each of the last steps was skipped
        self._steps = self._in_a_row = 0
        self._skipped_all, self._learned, self._warned = True, False, False

    def step(self):
        """Count the last step; returns a warning or None. Raises after GIVE_UP skips in a row."""
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
            which = f"{many} of the last {len(self._recent)} steps were skipped"
            return f"step {self._zero.step}: {which}: {self._overflow()}"
        return None

    def fault(self):
        """At the end: why nothing was trained, or None. A resumed run may skip its few steps."""
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
            "lower --loss-scale, or use auto"
            if fixed
            else "it is still falling; use more --steps, or --precision bfloat16"
        )
        kind = self._zero.policy.precision
        return f"gradients overflow {kind} at a loss scale of {scale:.10g} ({advice})"
