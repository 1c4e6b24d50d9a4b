import pytest

from tests.helpers.small_verify import write_corpus


@pytest.fixture(scope="session")
def verify_corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("verify"))
