"""The order in which processes that share the tests take the files."""

from tests.conftest import longest_first


def test_long_files_and_those_of_unknown_length_come_first() -> None:
    tests = [("short", 2.0), ("two", 3.0), ("new", 0.0), ("long", 4.5), ("two", 2.0), ("new", 0.0)]
    assert longest_first(tests) == ["new", "two", "long", "short"]
