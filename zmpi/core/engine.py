"""The engine: the training step of models/layer.py, with the training state kept apart. Read this first.

Every rank runs `train_step` on its own data. A layer's weights are put together just before they are used and dropped
after; its gradient is summed over ranks as soon as it is complete, each rank keeping one slice; then every rank updates
the slice it owns. The stage decides which of these do anything: see the three booleans in stages.py, asked in unit.py.
"""

from contextlib import contextmanager
from functools import wraps
from math import inf, isfinite, sqrt

import numpy as np

from models.layer import Recomputed, key_for, refused, turn, unit_of, units
from zmpi.core.layout import Layout
from zmpi.core.owned import Shared
from zmpi.core.schedule import evaluation_schedule, training_schedule
from zmpi.core.stages import STAGES
from zmpi.core.step import Opening, Step, Stopped
from zmpi.core.unit import Unit
from zmpi.messages.comm import Communicator
from zmpi.messages.ledger import Ledger
from zmpi.numbers.domains import Domain
from zmpi.numbers.optim import AdamW
from zmpi.numbers.precision import Policy
from zmpi.numbers.sums import add_up
from zmpi.process.agree import same_on_all_ranks
from zmpi.process.errors import Agreed, UsageError
from zmpi.saving import checkpoint

STAGE = Domain(highest=len(STAGES) - 1, whole=True, words="0, 1, 2 or 3")
SEED = Domain(-inf, whole=True)


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
    one error on all of them (errors.UsageError).
    """

    # What a changed algorithm replaces, in a subclass of its own.
    make_ledger = Ledger
    make_communicator = Communicator
    make_layout = Layout
    make_unit = Unit
    make_schedule = staticmethod(training_schedule)
    turn = staticmethod(turn)

    def make_layer(self, layer):
        """The layer as the loops call it: itself."""
        return layer

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
        self.layers = self._layers(model.layers)
        self.schedule = self.make_schedule(model.layers, names)
        self.evaluation = evaluation_schedule(model.layers, names)
        asked = {"stage": stage, "seed": seed, "policy": self.policy, "optimizer": self.optimizer}
        asked |= {"reduction": reduction, "device": world.device.name, "transport": world.transport}
        same_on_all_ranks(world, {**asked, "model": specs})
        world.settle()
        with world.agreed():  # that there is memory
            self.units = self._make_units(specs)
            self._initialise()

    # -- the step ----------------------------------------------------------------------------------

    @lets_go
    def train_step(self, micro_batches):
        """One update from [(inputs, targets), ...], one entry per micro-batch of this rank; returns the mean loss.

        The loss is that before the update, over all counted targets (those >= 0) of all ranks.
        """
        self.ledger.begin_step()
        counted = self._open(micro_batches)
        for unit in self.units.values():
            unit.begin_step(len(micro_batches))

        divisor = counted / self.scaler.scale
        batches = self.world.device.batches(micro_batches)
        losses = [self.forward_backward(batch, divisor) for batch in batches]

        self.last = self._agree(losses, counted)
        if not self.last.skipped:
            self.updates += 1
            factor = self.optimizer.clip_factor(self.last.grad_norm) / self.scaler.scale
            for unit in self.units.values():
                unit.update(self.optimizer, self.updates, factor)  # each rank its own shard
        self.scaler.after_step(overflow=self.last.skipped)
        return self.last.loss

    def forward_backward(self, micro_batch, divisor):
        """Add the gradient of (this micro-batch's loss sum / divisor) onto the units'; returns the loss sum."""
        (x, targets), kept = micro_batch, {}
        *layers, _ = self.layers
        forward, last, backward = self.schedule.parts

        for layer, visit in zip(layers, forward, strict=True):
            w = self.gather(visit)
            x, kept[layer] = layer.forward(w, x)
            self.free(visit)

        w, dw = self.gather(last), self.partial(last)
        loss_sum, dx = self.turn(self.model, w, dw, x, targets, divisor)
        del x
        self.free(last)
        self.reduce(last)

        for layer, visit in zip(reversed(layers), backward, strict=True):
            w, dw = self.gather(visit), self.partial(visit)
            dx = layer.backward(w, dw, kept.pop(layer), dx)
            self.free(visit)
            self.reduce(visit)
        return loss_sum

    def gather(self, visit):
        """The visit's weights, put together ({}: it needs none); then the next visit's gather starts."""
        if visit.gather:
            self.units[visit.unit].gather()
        w = self.units[visit.unit].weights() if visit.weights else {}
        if self.policy.prefetch and visit.next:
            self.units[visit.next].gather()
        return w

    def partial(self, visit):
        """The partial gradient of the visit's unit, to which backward adds."""
        return self.units[visit.unit].partial() if visit.unit else {}

    def free(self, visit):
        """Drop the full vector of the visit's unit, unless the next visit needs it. This empties the views of it."""
        if visit.free:
            self.units[visit.unit].free()

    def reduce(self, visit):
        """Sum the partial gradient over ranks and keep the shard, once the unit's last layer has added to it."""
        if visit.reduce:
            self.units[visit.unit].reduce()

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
        for layer, visit in zip(self.model.layers, self.evaluation, strict=True):
            w = self.gather(visit)
            x = apply(layer, w, x)
            self.free(visit)
        return x

    # -- what the ranks tell each other ------------------------------------------------------------

    def _open(self, micro_batches, training=True):
        """Agree on the step. Returns the counted targets of all ranks; raises Agreed where it cannot be taken."""
        stop, started = training * self.world.guard.stop_requested, self.world.lane.started
        too_large = int(sum(unit.too_large for unit in self.units.values()))
        fault = refused(self.model, micro_batches)  # on the host: an index on a GPU would wrap
        mine = Opening.of(micro_batches, too_large, stop, started, fault is not None)
        everyone = Opening.columns(self.comm.gather_scalars(mine))
        self.world.settle(everyone.started)
        if everyone.stop.any():
            raise Stopped(int(everyone.stop.max()))
        if lost := int(sum(everyone.too_large)):
            precision = self.policy.precision
            raise Agreed(f"step {self.step}: {lost} weights became too large for {precision}")
        everyone.check_numbers()
        if everyone.refused.any():
            rank = int(everyone.refused.argmax())
            raise UsageError(f"rank {rank}, {self.world.share(fault)[rank]}")
        return everyone.check_counted()

    def _agree(self, losses, counted):
        """The Step: every rank tells its losses and its pieces of the norm. Raises Agreed if float32 is not enough."""
        assert not self.comm.in_flight, (
            "a gather is under way at the update: it would bring weights of the last step"
        )
        squares = sum(unit.squares() for unit in self.units.values())  # unit after unit
        everyone = self.comm.gather_scalars([*losses, *squares])
        all_losses, all_squares = np.split(everyone, [len(losses)], axis=1)
        loss = add_up(all_losses.T.ravel()) / counted  # in order of j: of m, then of the rank
        norm, scale = sqrt(add_up(all_squares.ravel())) / self.scaler.scale, self.scaler.scale
        self.step += 1
        skipped = not (isfinite(loss) and isfinite(norm))
        if skipped and scale == 1:
            what = f"the loss is {loss} and the gradient's norm {norm}"
            raise Agreed(f"step {self.step}: {what}; nothing was updated")
        lr = self.optimizer.rate(self.updates + (not skipped))
        return Step(loss, norm, lr, counted, len(losses), scale, skipped)

    def save(self, folder, keep=3):
        """Add a checkpoint to a folder of them, of which the last `keep` remain. Collective; see checkpoint.Keeper."""
        return checkpoint.save(self, folder, keep)

    def load(self, folder):
        """Go on from a folder's newest complete checkpoint. Collective; what cannot be loaded changes nothing."""
        self.world.settle()
        return checkpoint.load(self, folder)

    # -- how it is made ----------------------------------------------------------------------------

    def _layers(self, layers):
        """The layers as the loops call them. The last one's input is at hand at the turn, so nothing is recomputed."""
        *layers, last = map(self.make_layer, layers)
        if self.policy.recompute:
            layers = [Recomputed(at) if at.backward_needs_weights else at for at in layers]
        return [*layers, last]

    def _make_units(self, specs):
        """{name: Unit} with all the memory that they own, and the message buffers."""
        if not specs:
            raise ValueError("model: expected at least one parameter, no layer has any")
        device, moments = self.world.device, self.optimizer.moments
        recipe = device.recipe(self.policy.recipe)
        shared = Shared(self.stage, recipe, self.comm, self.ledger, device, moments)
        layouts = [
            self.make_layout(name, spec.prefix, spec.shapes, self.comm.shards, device.align)
            for name, spec in specs.items()
        ]
        self.comm.reserve(layouts, self.policy.recipe.gradient)
        return {layout.name: self.make_unit(layout, shared) for layout in layouts}

    # -- weights -----------------------------------------------------------------------------------

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
