"""The engine: the training step of models/layer.py, with sharded training state. Read this first.

Every rank runs `train_step` on its own data. A layer's weights are gathered just before use and
freed after it; its gradient is summed over ranks once complete, and each rank keeps one slice; then
every rank updates the slice it owns. The stage's three booleans (stages.py, asked in unit.py)
decide which of these do anything.
"""

from contextlib import contextmanager
from math import inf, isfinite, sqrt

import numpy as np

from models.layer import Recomputed, key_for, refused, turn, unit_of, units
from zmpi.core.formulas import cut_in_words
from zmpi.core.layout import Layout
from zmpi.core.mesh import Mesh
from zmpi.core.owned import Shared
from zmpi.core.schedule import evaluation_schedule, training_schedule
from zmpi.core.stages import placement
from zmpi.core.step import Opening, Step, Stopped, drop_on_error
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

SEED = Domain(-inf, whole=True)


class ZeRO:
    """A model in training, its state sharded over the ranks of `world` according to `stage` (0-3).

    `optimizer`: an Optimizer (default: AdamW()); `policy`: precision, prefetch, recomputation.
    Initial weights depend only on `seed` and the parameters' names. Settings that differ between
    ranks, or cannot be met, are one UsageError on all ranks.
    """

    # A subclass replaces these to change the algorithm.
    make_ledger = Ledger
    make_communicator = Communicator
    make_layout = Layout
    make_unit = Unit
    make_schedule = staticmethod(training_schedule)
    turn = staticmethod(turn)

    def make_layer(self, layer):
        """The layer that the loops call: itself."""
        return layer

    def __init__(self, model, world, stage=3, optimizer=None, seed=0, policy=None):
        with world.agreed():
            self.stage, seed = placement(stage, len(world.axes)), SEED.of("--seed", seed)
            self.policy = policy or Policy()
            reduction = world.reduction_for(self.policy.recipe)
        self.model, self.world, self.optimizer, self.seed = model, world, optimizer or AdamW(), seed
        self.step = 0  # training steps taken
        self.updates = 0  # updates made: Adam's t, and the learning rate schedule's
        self.scaler = self.policy.scaler()
        self.last = None  # the last Step
        self.ledger = self.make_ledger()
        self.ledger.peak_bytes = world.device.peak_bytes
        self.comm = Mesh(self, reduction)

        specs = {name: spec for name, spec in units(model).items() if spec.shapes}
        names = [unit_of(layer) if layer.shapes() else None for layer in model.layers]
        self.layers = self._layers(model.layers)
        self.schedule = self.make_schedule(model.layers, names)
        self.schedule.heading = cut_in_words(self.stage, self.comm.sizes)
        self.evaluation = evaluation_schedule(model.layers, names)
        asked = {
            "stage": self.stage.number,
            "seed": seed,
            "policy": self.policy,
            "optimizer": self.optimizer,
        }
        asked |= {"reduction": reduction, "device": world.device.name, "transport": world.transport}
        same_on_all_ranks(world, {**asked, "model": specs})
        self.comm.settle()
        with world.agreed():  # that there is memory
            self.units = self._make_units(specs)
            self._initialise()

    # -- the step ----------------------------------------------------------------------------------

    @drop_on_error
    def train_step(self, micro_batches):
        """One update from this rank's micro-batches, [(inputs, targets), ...]; returns the loss.

        That is the mean before the update, over the counted targets (those >= 0) of all ranks.
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
        """Add a micro-batch's gradient of (loss sum / divisor) to the units'; returns the sum."""
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
        """Wait for the visit's weights ({}: none needed), and start the next visit's gather."""
        if visit.gather:
            self.units[visit.unit].gather()
        w = self.units[visit.unit].weights() if visit.weights else {}
        if self.policy.prefetch and visit.next:
            self.units[visit.next].gather()
        return w

    def partial(self, visit):
        """The partial gradient of the visit's unit, for backward to add to."""
        return self.units[visit.unit].partial() if visit.unit else {}

    def free(self, visit):
        """Drop the unit's full vector, and empty its views, unless the next visit needs it."""
        if visit.free:
            self.units[visit.unit].free()

    def reduce(self, visit):
        """Once the unit's last layer added to it, sum the partial gradient over ranks."""
        if visit.reduce:
            self.units[visit.unit].reduce()

    def evaluate(self, micro_batches):
        """The mean loss over the counted targets of all ranks; gathers and frees like training."""
        with self.ledger.as_other():
            counted = self._open(micro_batches, training=False)
            batches = self.world.device.batches(micro_batches)
            losses = [self.model.loss(self.forward(x), y, counted)[0] for x, y in batches]
            return add_up(self.comm.gather_scalars(losses).T.ravel()) / counted

    @drop_on_error
    def forward(self, x, apply=lambda layer, w, x: layer.forward(w, x)[0]):
        """The last layer's output, with x = apply(layer, w, x) at each; gathers and frees."""
        for layer, visit in zip(self.model.layers, self.evaluation, strict=True):
            w = self.gather(visit)
            x = apply(layer, w, x)
            self.free(visit)
        return x

    # -- what the ranks exchange -------------------------------------------------------------------

    def _open(self, micro_batches, training=True):
        """Agree on the step; returns all ranks' counted targets, or raises Agreed."""
        stop, started = training * self.world.guard.stop_requested, self.comm.started
        too_large = int(sum(unit.too_large for unit in self.units.values()))
        fault = refused(self.model, micro_batches)  # on the host: a GPU wraps a wrong index
        mine = Opening.of(micro_batches, too_large, stop, started, fault is not None)
        everyone = Opening.columns(self.comm.gather_scalars(mine))
        self.comm.settle(everyone.started)
        if everyone.stop.any():
            raise Stopped(int(everyone.stop.max()))
        if lost := int(sum(everyone.too_large)):
            precision = self.policy.precision
            raise Agreed(f"step {self.step}: {lost} weights became too large for {precision}")
        everyone.check_numbers()
        if everyone.refused.any():
            rank = int(everyone.refused.argmax())
            raise UsageError(f"rank {self.world.launched[rank]}, {self.world.share(fault)[rank]}")
        return everyone.check_counted()

    def _agree(self, losses, counted):
        """The Step, from all ranks' losses and pieces of the norm. Raises Agreed if not finite."""
        assert not self.comm.in_flight, "a gather is under way at the update"
        squares = sum(unit.squares() for unit in self.units.values())  # unit after unit
        everyone = self.comm.gather_scalars([*losses, *squares])
        all_losses, all_squares = np.split(everyone, [len(losses)], axis=1)
        all_squares = all_squares[np.argsort(self.comm.owners)]  # in the order of the pieces
        loss = add_up(all_losses.T.ravel()) / counted  # in order of j: by micro-batch, then rank
        norm, scale = sqrt(add_up(all_squares.ravel())) / self.scaler.scale, self.scaler.scale
        self.step += 1
        skipped = not (isfinite(loss) and isfinite(norm))
        if skipped and scale == 1:
            what = f"the loss is {loss} and the gradient's norm {norm}"
            raise Agreed(f"step {self.step}: {what}; nothing was updated")
        lr = self.optimizer.rate(self.updates + (not skipped))
        return Step(loss, norm, lr, counted, len(losses), scale, skipped)

    def save(self, folder, keep=3):
        """Add a checkpoint to a folder, which keeps the last `keep`. Collective; see Keeper."""
        return checkpoint.save(self, folder, keep)

    def load(self, folder):
        """Continue from a folder's newest checkpoint. Collective; an error changes nothing."""
        self.comm.settle()
        return checkpoint.load(self, folder)

    # -- construction ------------------------------------------------------------------------------

    def _layers(self, layers):
        """The layers that the loops call. The last one still has its input: never recomputed."""
        *layers, last = map(self.make_layer, layers)
        if self.policy.recompute:
            layers = [Recomputed(at) if at.backward_needs_weights else at for at in layers]
        return [*layers, last]

    def _make_units(self, specs):
        """{name: Unit}, with all owned memory, and the message buffers."""
        if not specs:
            raise ValueError("model: expected at least one parameter, got none")
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
        """Initialise unit by unit (fill, keep the slice, free): stage 3 never has a whole model."""
        for unit in self.units.values():
            full = self.ledger.track("full", np.zeros(unit.layout.padded, np.float32))
            for layer in self.model.layers:
                if unit_of(layer) == unit.layout.name:
                    layer.init(unit.layout.views(full), key_for(self.seed, unit.layout.prefix))
            unit.fill(full)
            del full  # before making the next one

    @contextmanager
    def gathered(self):
        """The whole model on every rank, {full name: array}, read-only: the only place it exists.

        The arrays are the engine's memory, valid inside the `with` block: copy what you keep.
        """
        parameters = {}
        self.comm.settle()
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
