"""The engine: the training step of models/layer.py, with the training state kept apart. Read this first.

Every rank runs `train_step` on its own data. A layer's weights are put together just before they are used and dropped
after; its gradient is summed over ranks as soon as it is complete, each rank keeping one slice; then every rank updates
the slice it owns. The stage decides which of these do anything: see the three booleans in stages.py, asked in unit.py.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import zip_longest
from math import inf, isfinite, sqrt

import numpy as np

from models.layer import key_for, refused, unit_of, units
from zmpi import checkpoint
from zmpi.comm import Communicator
from zmpi.domains import Domain
from zmpi.layout import Layout
from zmpi.ledger import Ledger
from zmpi.manners.agree import same_on_all_ranks
from zmpi.manners.guard import Agreed, UsageError
from zmpi.optim import AdamW
from zmpi.precision import Policy
from zmpi.schedule import evaluation_schedule, training_schedule
from zmpi.stages import STAGES
from zmpi.sums import add_up
from zmpi.unit import Rules, Unit

STAGE = Domain(highest=len(STAGES) - 1, whole=True, words="0, 1, 2 or 3")
SEED = Domain(-inf, whole=True)


@dataclass(frozen=True)
class Step:
    """What the last training step was: the same numbers on every rank."""

    loss: float  # mean over the counted targets of all ranks, before the update
    grad_norm: float  # of the gradient of that mean, unscaled and before clipping
    lr: float
    tokens: int  # counted targets of all ranks
    micro_batches: int  # of each rank
    loss_scale: float  # the scale of this step
    skipped: bool  # whether 16-bit gradients overflowed, and nothing was updated


def lets_go(walk):
    """For a walk through the layers: one that ends by an exception lets go of all that is not owned."""

    @wraps(walk)
    def guarded(self, *arguments):
        try:
            return walk(self, *arguments)
        except BaseException:
            for unit in self.units.values():
                unit.drop()
            self.comm.drop()
            raise

    return guarded


class ZeRO:
    """A model in training, its state kept apart over the ranks of `world` as `stage` (0-3) says.

    `optimizer` is an AdamW or SGD (default: AdamW()); initial weights depend on `seed` and the parameters' names only;
    `policy` holds the precision, prefetch and recomputation. What the ranks disagree on, or what cannot be done, is
    one error on all of them (guard.UsageError).
    """

    # What a changed algorithm replaces, in a subclass of its own.
    make_ledger = Ledger
    make_communicator = Communicator
    make_layout = Layout
    make_unit = Unit
    make_schedule = staticmethod(training_schedule)

    def __init__(self, model, world, stage=3, optimizer=None, seed=0, policy=None):
        with world.agreed():
            stage, seed = STAGE.of("--stage", stage), SEED.of("--seed", seed)
            self.stage, self.policy = STAGES[stage], policy or Policy()
            reduction = world.reduction_for(self.policy.recipe)
        self.model, self.world, self.optimizer, self.seed = model, world, optimizer or AdamW(), seed
        self.step = 0  # training steps taken
        self.updates = 0  # updates made: Adam's count, and the learning rate's place in its course
        self.scaler = self.policy.scaler()
        self.last = None  # the last Step
        self.ledger = self.make_ledger()
        self.ledger.peak_bytes = world.device.peak_bytes
        self.comm = self.make_communicator(world, self.ledger, reduction)

        specs = {name: spec for name, spec in units(model).items() if spec.shapes}
        names = [unit_of(layer) if layer.shapes() else None for layer in model.layers]
        self.schedule = self.make_schedule(model.layers, names)
        self.evaluation = evaluation_schedule(model.layers, names)
        asked = {"stage": stage, "seed": seed, "policy": self.policy, "optimizer": self.optimizer}
        asked |= {"reduction": reduction, "device": world.device.name, "transport": world.transport}
        same_on_all_ranks(world, {**asked, "model": specs})
        world.settle()
        with world.agreed():  # that there is memory
            self.units = self._make_units(specs)
            self._initialise()

    def _make_units(self, specs):
        """{name: Unit} with all the memory that they own, and the message buffers."""
        if not specs:
            raise ValueError("model: expected at least one parameter, no layer has any")
        device, moments = self.world.device, self.optimizer.moments
        recipe = device.recipe(self.policy.recipe)
        rules = Rules(self.stage, recipe, self.comm, self.ledger, device, moments)
        layouts = [
            self.make_layout(name, spec.prefix, spec.shapes, self.comm.shards, device.align)
            for name, spec in specs.items()
        ]
        self.comm.reserve(layouts, self.policy.recipe.gradient)
        return {layout.name: self.make_unit(layout, rules) for layout in layouts}

    # -- the step -------------------------------------------------------------------------------------------------

    @lets_go
    def train_step(self, micro_batches):
        """One update from [(inputs, targets), ...], one entry per micro-batch of this rank; returns the mean loss.

        The loss is that before the update, over all counted targets (those >= 0) of all ranks.
        """
        self.ledger.begin_step()
        counted = self._open(micro_batches)
        losses = []
        for m, (x, targets) in enumerate(self.world.device.batches(micro_batches)):
            first, last = m == 0, m + 1 == len(micro_batches)
            saved = []
            for visit, upcoming in zip_longest(self.schedule, self.schedule[1:]):
                w = self._fetch(visit, upcoming)  # wait for its weights, start the next one's
                if visit.forward:
                    x = self._forward(visit, w, x, saved)
                if visit.turn:
                    loss, x = self.model.loss(x, targets, counted / self.scaler.scale)
                    losses.append(loss)
                if visit.backward:
                    x = self._backward(visit, w, saved, x, first)
                del w
                if visit.free:
                    self.units[visit.unit].free()
                if visit.reduce:
                    self.units[visit.unit].reduce(first, last)
        return self._update(losses, counted)

    def evaluate(self, micro_batches):
        """The mean loss over the counted targets of all ranks' micro-batches; gathers and frees as training does."""
        with self.ledger.as_other():
            counted = self._open(micro_batches, training=False)
            batches = self.world.device.batches(micro_batches)
            losses = [
                self.model.loss(self.forward(x), targets, counted)[0] for x, targets in batches
            ]
            return add_up(self.comm.gather_scalars(losses).T.ravel()) / counted

    @lets_go
    def forward(self, x, apply=lambda layer, w, x: layer.forward(w, x)[0]):
        """What comes out of the last layer: x = apply(layer, w, x) of each. Gathers and frees as training does."""
        for visit, upcoming in zip_longest(self.evaluation, self.evaluation[1:]):
            w = self._fetch(visit, upcoming)
            x = apply(self.model.layers[visit.layer], w, x)
            del w
            if visit.free:
                self.units[visit.unit].free()
        return x

    def _open(self, micro_batches, training=True):
        """Agree on the step: every rank brings as many micro-batches. Returns the counted targets of all ranks."""
        full = all(len(targets) for _, targets in micro_batches)
        number = len(micro_batches) * full  # 0 if one is empty
        mine = sum(int(np.count_nonzero(targets >= 0)) for _, targets in micro_batches)
        too_large = int(sum(unit.too_large for unit in self.units.values()))
        stop, started = training * self.world.guard.stop_requested, self.world.lane.started
        fault = refused(self.model, micro_batches)  # on the host: an index on a GPU would wrap
        said = [number, mine, too_large, stop, started, fault is not None]
        everyone = self.comm.gather_scalars(said).T
        numbers, counted = everyone[0], int(sum(everyone[1]))
        self.world.settle(everyone[4])
        if everyone[3].any():
            raise checkpoint.Stopped(int(everyone[3].max()))
        if everyone[2].any():
            lost = int(sum(everyone[2]))
            raise Agreed(
                f"step {self.step}: {lost} weights became too large for {self.policy.precision}"
            )
        if numbers.min() != numbers.max() or not numbers[0]:
            raise UsageError(
                f"micro-batches: every rank needs the same number, none empty; got {numbers.astype(int).tolist()}"
            )
        if everyone[5].any():
            faults = self.world.share(fault)
            rank = next(rank for rank, found in enumerate(faults) if found)
            raise UsageError(f"rank {rank}, {faults[rank]}")
        if not counted:
            raise UsageError("targets: none is counted (all are below 0) on any rank")
        return counted

    def _fetch(self, visit, upcoming):
        """This visit's weights, once they are there (None: it needs none); then the next visit's gather starts."""
        if visit.gather:
            self.units[visit.unit].gather()
        w = self.units[visit.unit].weights() if visit.weights else None if visit.unit else {}
        if self.policy.prefetch and upcoming and upcoming.gather:
            self.units[upcoming.unit].gather()
        return w

    def _forward(self, visit, w, x, saved):
        """The layer's output. What its backward needs goes to the end of `saved`: its input alone, to be recomputed."""
        y, kept = self.model.layers[visit.layer].forward(w, x)
        saved.append(x if self._recomputes(visit) else kept)
        return y

    def _backward(self, visit, w, saved, dy, first):
        """The gradient of the layer's input; that of its weights is added onto the unit's partial gradient."""
        layer, kept = self.model.layers[visit.layer], saved.pop()
        if self._recomputes(visit):
            kept = layer.forward(w, kept)[1]
        dw = self.units[visit.unit].gradient_views(first) if visit.unit else {}
        return layer.backward(w, dw, kept, dy)

    def _recomputes(self, visit):
        """Whether the layer's forward runs again for its backward. Where that needs no weights, nothing is saved by it."""
        return (
            self.policy.recompute
            and not visit.turn
            and self.model.layers[visit.layer].backward_needs_weights
        )

    def _update(self, losses, counted):
        """Every rank tells its losses and its pieces of the norm; then every unit updates its own shard."""
        assert not self.comm.in_flight, (
            "a gather is under way at the update: it would bring weights of the last step"
        )
        squares = sum(unit.squares() for unit in self.units.values())  # unit after unit
        everyone = self.comm.gather_scalars([*losses, *squares])
        loss = (
            add_up(everyone[:, : len(losses)].T.ravel()) / counted
        )  # micro-batch j = m x size + r: in order of m, then of r
        norm = sqrt(add_up(everyone[:, len(losses) :].ravel())) / self.scaler.scale
        self.step += 1
        scale, skipped = self.scaler.scale, not (isfinite(loss) and isfinite(norm))
        if skipped and scale == 1:
            raise Agreed(
                f"step {self.step}: the loss is {loss} and the gradient's norm {norm}; nothing was updated"
            )
        if not skipped:
            self.updates += 1
            for unit in self.units.values():
                unit.update(self.optimizer, self.updates, self.optimizer.clip_factor(norm) / scale)
        self.scaler.after_step(overflow=skipped)
        self.last = Step(
            loss, norm, self.optimizer.rate(self.updates), counted, len(losses), scale, skipped
        )
        return loss

    def save(self, folder, keep=3):
        """Add a checkpoint to a folder of them, of which the last `keep` remain. Collective; see checkpoint.Keeper."""
        return checkpoint.save(self, folder, keep)

    def load(self, folder):
        """Go on from a folder's newest complete checkpoint. Collective; what cannot be loaded changes nothing."""
        self.world.settle()
        return checkpoint.load(self, folder)

    # -- weights --------------------------------------------------------------------------------------------------

    def _initialise(self):
        """Make the weights unit by unit (fill, keep the slice, free): no rank ever holds the whole model at stage 3."""
        for unit in self.units.values():
            full = self.ledger.track("full", np.zeros(unit.layout.padded, np.float32))
            for layer in self.model.layers:
                if unit_of(layer) == unit.layout.name:
                    layer.init(unit.layout.views(full), key_for(self.seed, unit.layout.prefix))
            unit.fill(full)
            del full  # before the next one is made

    @contextmanager
    def gathered(self):
        """The whole model on every rank, as {full name: array}: the one place where it may be. For reading only.

        The arrays are the engine's memory: they are valid inside the `with` block, and must be copied to be kept.
        """
        parameters = {}
        self.world.settle()
        with self.ledger.as_other():
            for unit in self.units.values():
                unit.gather()
                parameters |= {
                    unit.layout.prefix + name: view for name, view in unit.weights().items()
                }
        try:
            yield parameters
        finally:
            parameters.clear()
            for unit in self.units.values():
                unit.free()
