"""Which memory of a process that tests fork is made of pages of 2 MiB."""

from tests.huge_pages import starts

MAPS = """\
00400000-00800000 rw-p 00000000 fe:00 1234                               /usr/lib/libx.so
00a00000-01400000 r--p 00000000 00:00 0
01500000-01b00000 rw-p 00000000 00:00 0                                  [heap]
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
7f0000600000-7f00007ff000 rw-p 00000000 00:00 0
7f0000a00000-7f0000e00000 rw-s 00000000 00:01 5                          /dev/zero (deleted)
7ffd00000000-7ffd00400000 rw-p 00000000 00:00 0                          [stack]
"""


def test_whole_pages_of_memory_that_is_written_and_of_no_file() -> None:
    heap = [0x1600000, 0x1800000]  # begin behind its start, end before its end
    assert [*starts(MAPS)] == [*heap, 0x7F0000000000, 0x7F0000200000]
