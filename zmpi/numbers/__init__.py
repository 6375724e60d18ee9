"""Numbers on one rank: what a setting may be, the types of a recipe, sums in a fixed order, the optimizers."""
