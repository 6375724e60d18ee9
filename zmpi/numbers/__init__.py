"""Numbers on one rank: the domains of settings, recipes, sums in a fixed order, optimizers."""
