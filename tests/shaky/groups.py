"""Tests that luck once decided, by what they depended on."""

D = "tests/dist/"
FORMERLY_FRAGILE = {
    "a race for the store": [D + "test_one_byte.py"],
    "an exchange that is late": [D + "test_sync_late.py"],
    "times of messages": [D + "test_message_times.py"],
    "timeouts of groups": [D + "test_engine_states.py"],
    "a limit of memory": [D + "test_memory_limit.py"],
    "ports of runs": [D + "test_run.py", D + "test_run_faults.py"],
    "ports of launchers": [D + "test_examples.py", "tests/anchors", "tests/one_byte"],
    "who is slow": ["tests/stragglers"],
    "shaped links": ["tests/box/test_links.py"],
    "patience of replicas": [D + "test_quorum.py"],
    "writes of checkpoints": [D + "test_checkpoint_writes.py"],
    "runs that stop": [D + "test_stopped_runs.py"],
    "misuse": [D + "test_misuse.py"],
    "limits of random programs": ["tests/random"],
    "limits of fuzzing": ["tests/fuzz"],
    "submitting": ["tests/workflow/test_submit.py"],
    "limits around kernels": [f"tests/kernels/test_{name}.py" for name in ("bench", "gpu_sequence")],
    "limits around imports": [
        f"tests/unit/test_{name}.py" for name in ("command_line", "files", "softmax_cpu")
    ],
    "the box's folder": ["tests/box/test_cluster.py"],
    "memory of a process": ["tests/load"],
}
