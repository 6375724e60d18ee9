"""The files of world/ in small MPI worlds, on 1 to 4 ranks or on their own SIZES: see worlds.py."""

import pytest
from worlds import FILES, sizes_of

CASES = [(file, size) for size in range(1, 7) for file in FILES if size in sizes_of(file)]


@pytest.mark.parametrize(
    ("file", "size"), [pytest.param(*c, id=f"{c[0].stem}-{c[1]}") for c in CASES]
)
def test_world(file, size, failed):
    output = failed(size).get(file.name)
    if output is not None:
        pytest.fail(f"{size} ranks of {file.name}: {output}", pytrace=False)
