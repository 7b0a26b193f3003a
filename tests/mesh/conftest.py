from collections.abc import Iterator

import pytest

from mesh.pool import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.close()
