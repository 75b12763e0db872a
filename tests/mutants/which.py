"""Which code is mutated, and which tests are run for it: the only home of both.

The tests of a file are those that are about it, the quickest first; `slow` ones are left out. A mutant that
survives these counts as survived, though another test might notice it.
"""

from pathlib import Path

UNIT, DIST = "tests/unit/test_", "tests/dist/test_"

# Mutants that are drawn of each folder.
COUNTS = {"spec": 60, "cost": 35, "predict": 30, "tables": 20, "claims": 35, "engine": 60}

# Of this folder only these files: what tables mean; the rest renders and sorts.
_ONLY = {"tables": ("points", "collect")}


def files(root: Path, folder: str) -> list[Path]:
    """The mutated files of a folder, relative to `root`, in a fixed order."""
    found = sorted((root / "src" / "lowband" / folder).rglob("*.py"))
    return [path.relative_to(root) for path in found if path.stem in _ONLY.get(folder, (path.stem,))]


_PREDICT = [f"{UNIT}cost_by_hand.py", f"{UNIT}predict.py"]
_COUNTED = [f"{DIST}counts.py", f"{DIST}closed_forms.py"]
_STEP = [
    f"{DIST}closed_forms.py",
    f"{DIST}wires.py",
    f"{DIST}parity.py::test_bit_equal_to_single_process[hier3-exact-4-2]",
    f"{DIST}parity.py::test_bit_equal_to_single_process[hpz-4-1]",
    f"{DIST}engine_states.py",
    f"{DIST}library_steps.py",
    "tests/random/test_random.py::test_sample",
    f"{DIST}misuse.py",
]
_CHECKPOINT = [f"{DIST}checkpoint{part}.py" for part in ("_fit", "_writes", "_damage", "")]

# folder or folder/file -> its tests
_TESTS = {
    "spec/benchmarks": [f"{UNIT}{of}.py" for of in ("benchmarks", "command_line")],
    "spec/config": [f"{UNIT}{of}.py" for of in ("suites", "built_in", "command_line")],
    "spec/exchange": [f"{UNIT}counterparts.py"],
    "spec/huggingface": [f"{UNIT}huggingface.py"],
    "spec/plain_data": [f"{UNIT}plain_data.py"],
    "spec/sync": [f"{UNIT}{of}.py" for of in ("predict", "suites", "sync_schedule")] + [f"{DIST}sync.py"],
    "spec/sourced": [f"{UNIT}machine.py", *_PREDICT],
    "spec/files": [f"{UNIT}files.py", f"{UNIT}records.py"],
    "spec/job": [f"{UNIT}job.py"],
    "spec/lock": [f"{UNIT}lock.py", f"{UNIT}report_status.py"],
    "spec/csv_tables": [f"{UNIT}report_{of}.py" for of in ("collect", "tables", "points", "grade")],
    "spec/kernel_rows": [f"{UNIT}report_kernels.py", "tests/kernels/test_bench.py"],
    "spec/machine": [
        f"{UNIT}{of}.py" for of in ("machine", "suites", "box_layout", "predict", "counterparts")
    ],
    "spec/mesh": [f"{UNIT}{of}.py" for of in ("mesh", "machine", "predict", "counterparts")],
    "spec/stack": [f"{UNIT}stacks.py"],
    "spec/step_columns": [f"{UNIT}step_columns.py", f"{UNIT}report_collect.py"],
    "spec/step": [f"{DIST}step.py", *_PREDICT, *_COUNTED],
    "spec/model": [f"{UNIT}model.py", *_PREDICT],
    "spec/partition": [f"{UNIT}machine.py", *_COUNTED],
    "spec/peers": [f"{UNIT}counterparts.py"],
    "spec/records": [
        f"{UNIT}{of}.py" for of in ("records", "report_collect", "report_status", "report_points")
    ],
    "spec/run": [f"{UNIT}{of}.py" for of in ("suites", "report_points", "report_collect", "job")],
    "spec/scheme": [
        f"{UNIT}{of}.py" for of in ("suites", "counterparts", "report_points", "report_collect")
    ],
    "spec/softmax": [f"{UNIT}softmax_report.py"],
    "spec/yaml_model": [f"{UNIT}{of}.py" for of in ("suites", "records", "command_line", "report_claims")],
    "spec/suites": [f"{UNIT}{of}.py" for of in ("suites", "job", "report_points")],
    "spec/wire": [f"{UNIT}wire.py", f"{UNIT}block_quant.py", *_COUNTED],
    "cost/tcp": [f"{UNIT}box_layout.py", f"{UNIT}report_box.py"],
    "predict": [*_PREDICT, f"{UNIT}command_line.py"],
    "predict/advice": [f"{UNIT}advice.py"],
    "predict/defaults": [f"{UNIT}defaults.py"],
    "predict/plan_seldom": [f"{UNIT}plan_seldom.py"],
    "predict/render": [f"{UNIT}defaults.py", *_PREDICT, f"{UNIT}command_line.py"],
    "predict/rehearsal": [f"{UNIT}rehearsal.py"],
    "cost": [*_PREDICT, f"{UNIT}command_line.py"],
    "cost/attention": [f"{UNIT}cost_by_hand.py", f"{UNIT}report_kernels.py", "tests/kernels/test_bench.py"],
    "cost/buffers": [*_PREDICT, *_COUNTED],
    "cost/bytes": [*_PREDICT, *_COUNTED],
    "cost/conventions": [f"{UNIT}foreign_logs.py", *_PREDICT],
    "cost/flops": [f"{UNIT}model.py", *_PREDICT],
    "cost/checkpoint": [f"{UNIT}checkpoint_time.py"],
    "cost/memory": [f"{UNIT}cost_by_hand.py", f"{UNIT}report_collect.py", *_COUNTED],
    "cost/peers": [f"{UNIT}report_collect.py", f"{UNIT}report_points.py", f"{DIST}peers.py"],
    "cost/seldom": [f"{UNIT}low_communication.py", f"{UNIT}wan.py"],
    "cost/groups": [f"{DIST}groups.py"],
    "cost/softmax": [f"{UNIT}softmax_report.py", f"{UNIT}report_kernels.py"],
    "claims/claim": [f"{UNIT}report_{of}.py" for of in ("grade", "claims", "page", "appendix")],
    "claims/grade": [f"{UNIT}report_{of}.py" for of in ("grade", "claims")],
    "claims/expected": [f"{UNIT}report_{of}.py" for of in ("grade", "claims")],
    "claims/experiments": [f"{UNIT}report_{of}.py" for of in ("appendix", "claims")],
    "claims/origin": [f"{UNIT}report_{of}.py" for of in ("grade", "claims")],
    "tables/points": [f"{UNIT}report_{of}.py" for of in ("points", "tables", "box")],
    "tables/collect": [f"{UNIT}report_{of}.py" for of in ("collect", "points", "grade")],
    "engine": _STEP,
    "engine/consistency": [f"{DIST}agree.py", *_STEP],
    "engine/changes": [f"{DIST}misuse.py", *_STEP],
    "engine/hosts": [f"{UNIT}hosts.py"],
    "engine/one_byte": [f"{DIST}one_byte.py"],
    **{f"engine/quorum{part}": [f"{DIST}quorum.py"] for part in ("", "_check", "_link", "_rounds", "_state")},
    "engine/store": [f"{DIST}one_byte.py"],
    "engine/lane": [f"{DIST}streams.py", f"{DIST}engines.py", *_STEP],
    "checkpoint": _CHECKPOINT,
    "checkpoint/logical_tensors": [f"{DIST}library.py", *_CHECKPOINT],
}  # fmt: skip


def tests_of(file: str) -> list[str]:
    """The tests of a mutated file, in the order in which they are run."""
    folder, name = Path(file).parts[-2], Path(file).stem
    return _TESTS.get(f"{folder}/{name}") or _TESTS[folder]
