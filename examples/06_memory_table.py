"""The paper's memory table for your model: bytes of training state per rank at each stage.

Run:        python examples/06_memory_table.py
Last line:  06 ok: 7.5B parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB, as in Figure 1

For your model, give layers, width, heads, context and vocabulary. GPT-2 XL:
            python examples/06_memory_table.py 48 1600 25 1024 50257
"""

import sys

from models import GPT
from models.layer import parameter_count
from zmpi.core.formulas import state_bytes
from zmpi.core.stages import STAGES
from zmpi.numbers.precision import RECIPES

sizes = [int(size) for size in sys.argv[1:]] or [12, 768, 12, 1024, 50257]
if len(sizes) != 5:
    raise SystemExit(f"expected layers, width, heads, context and vocabulary, got {sizes}")
model = GPT(*sizes)
parameters = parameter_count(model)

for name in ("float16", "float32"):
    recipe = RECIPES[name]
    print(
        f"\n{parameters:,} parameters, {recipe.describe()};"
        f" GB per rank (1 GB = 1e9 bytes), section 5 of arXiv 1910.02054"
    )
    print("ranks   " + "".join(f"{f'stage {stage.number}':>10}" for stage in STAGES))
    for ranks in (1, 4, 16, 64, 256, 1024):
        row = [
            sum(state_bytes(stage, parameters, ranks, recipe).values()) / 1e9 for stage in STAGES
        ]
        print(f"{ranks:<8}" + "".join(f"{gigabytes:10.3f}" for gigabytes in row))

figure_1 = [
    sum(state_bytes(stage, 7.5e9, 64, RECIPES["float16"]).values()) / 1e9 for stage in STAGES
]
assert [f"{gigabytes:.3g}" for gigabytes in figure_1] == ["120", "31.4", "16.6", "1.88"]
print("06 ok: 7.5B parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB, as in Figure 1")
