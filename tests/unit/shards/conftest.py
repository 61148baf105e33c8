"""A served shard folder, and stores of it."""

import pytest

from tests.helpers.served import (
    PLENTY,
    QUICK,
    make_served,
    open_quick,
    room_for,
)
from tests.helpers.servers import serve_folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return folder, make_served(folder)


@pytest.fixture
def server(data):
    with serve_folder(data[0]) as server:
        yield server


@pytest.fixture
def opened(server, tmp_path):
    """Opens stores of the server's folder, and closes them."""
    stores = []

    def open_it(num_bytes=PLENTY, patience=QUICK, **options):
        """With room for so many bytes of shards."""
        limit = num_bytes + room_for(server.folder)
        stores.append(open_quick(server.url, tmp_path / "cache", limit, patience, **options))
        return stores[-1]

    yield open_it
    server.go.set()
    for store in stores:
        store.close()
