"""Run a command; then print its processor and wall time in seconds and its peak memory in bytes, as JSON.

A script that imports next to nothing, because a process inherits the peak memory of the one that forked it.
"""

import json
import os
import sys
import time

start = time.monotonic()
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)])
_, status, used = os.wait4(pid, 0)
print(
    json.dumps({
        "cpu_s": round(used.ru_utime + used.ru_stime, 2), "wall_s": round(time.monotonic() - start, 2),
        "peak_bytes": used.ru_maxrss * 1024,
    })
)  # fmt: skip
sys.exit(os.waitstatus_to_exitcode(status))
