"""Which code is mutated, and which tests are run for it: the only home of both.

The tests of a file are those that are about it, the quickest first; those marked `slow`, `timed` or `waits`
are left out. A mutant that survives these counts as survived, though another test might notice it.
"""

from pathlib import Path

UNIT, DIST = "tests/unit/test_", "tests/dist/test_"

# Mutants that are drawn of each folder.
COUNTS = {"spec": 60, "cost": 35, "predict": 30, "evidence/tables": 20, "evidence/claims": 35, "engine": 60}

# Of this folder only these files: what tables mean; the rest renders and sorts.
_ONLY = {"evidence/tables": ("points", "collect")}


def files(root: Path, folder: str) -> list[Path]:
    """The mutated files of a folder, relative to `root`, in a fixed order."""
    found = sorted((root / "src" / "lowband" / folder).rglob("*.py"))
    return [path.relative_to(root) for path in found if path.stem in _ONLY.get(folder, (path.stem,))]


def folder_of(file: str) -> str:
    """That of COUNTS in which a mutated file is."""
    [found] = [folder for folder in COUNTS if file.startswith(f"src/lowband/{folder}/")]
    return found


SHIPPED = f"{UNIT}shipped_predictions.py"  # all that the predictor says of published runs
TERMS = f"{UNIT}cost_terms.py"  # single terms by hand, in a blink
_PREDICT = [f"{UNIT}cost_by_hand.py", f"{UNIT}predict.py"]
_COUNTED = [f"{DIST}counts.py", f"{DIST}closed_forms.py"]
# What every step of training goes through, behind the tests that are about a file of the engine.
EVERY_STEP = [
    f"{DIST}parity.py::test_bit_equal_to_single_process[hier3-exact-4-cases4]",
    f"{DIST}parity.py::test_bit_equal_to_single_process[hpz-4-cases4]",
    f"{DIST}closed_forms.py",
    f"{DIST}engine_states.py",
    f"{DIST}wires.py",
    f"{DIST}misuse.py",
    "tests/random/test_random.py::test_sample",
    f"{DIST}library_steps.py",
]


def _dist(*names: str) -> list[str]:
    return [f"{DIST}{name}.py" for name in names]


_ENGINE = {
    "checkpoint/dcp_reader": _dist("peer_checkpoints"),
    "checkpoint/deepspeed_reader": _dist("peer_checkpoints"),
    "checkpoint/peer_checkpoint": _dist("peer_checkpoints"),
    "checkpoint/stored": _dist("peer_checkpoints"),
    "checkpoint/safetensors_files": _dist("safetensors"),
    "checkpoint/stages": _dist("checkpoint_stages"),
    "checkpoint/extra_states": _dist("checkpoint_extra_state"),
    "collectives/collectives": [
        *_dist("wires", "flat_collectives", "joined", "buckets", "flat", "sync_partners"),
        *EVERY_STEP,
    ],
    "collectives/hops": [
        *_dist("wires", "flat_collectives", "joined", "buckets", "flat", "sync_partners", "context"),
        *EVERY_STEP,
    ],
    "collectives/parts": [*_dist("joined", "buckets", "wires"), *EVERY_STEP],
    "collectives/ring": _dist("flat_collectives", "flat", "flat_breadth"),
    "collectives/wire": [*_dist("wires"), f"{UNIT}block_quant.py", *_COUNTED],
    "api": [*_dist("library", "idioms"), *EVERY_STEP],
    "arguments": _dist("kinds_of_arguments"),
    "options": EVERY_STEP,
    "jobs/check": _dist("quorum"),
    "jobs/handover": _dist("quorum"),
    "jobs/life": _dist("quorum_rounds", "quorum"),
    "jobs/link": _dist("quorum_rounds", "quorum"),
    "jobs/one_byte": _dist("quorum_rounds", "one_byte"),
    "jobs/quorum": _dist("quorum_rounds", "quorum"),
    "jobs/rounds": _dist("quorum_rounds", "quorum"),
    "jobs/state": _dist("quorum"),
    "jobs/store": _dist("quorum_rounds", "one_byte"),
    "jobs/voice": _dist("quorum"),
    "optimizers/adafactor": _dist("optimizers"),
    "optimizers/adamw": _dist("fused_adamw"),
    "optimizers/lamb": _dist("optimizers"),
    "optimizers/matrices": _dist("matrices"),
    "optimizers/matrix_owners": _dist("matrices"),
    "collectives/activations": _dist("tensor", "tensor_more", "tensor_shard", "tensor_parts"),
    "collectives/context": _dist("context"),
    "collectives/copies": _dist("tiers", "closed_forms"),
    "passes/kept_on_host": [*_dist("activations_on_host"), *EVERY_STEP],
    "disk": _dist("disk", "tiers"),
    "units/absent": _dist("disk"),
    "units/own_attributes": _dist("idioms"),
    "units/states_of_part": _dist("states_of_part", "idioms"),
    "units/on_disk": _dist("behind", "tiers", "disk", "offload"),
    "units/behind": _dist("behind", "tiers", "disk"),
    "units/copied": [*_dist("behind", "late"), *EVERY_STEP],
    "units/to_and_fro": [*_dist("offload"), *EVERY_STEP],
    "units/late": [*_dist("late", "checkpoint_refused"), *EVERY_STEP],
    "backend": _dist("backend"),
    "resident_weights": _dist("weights_beyond"),
    "units/room": [*_dist("weights_beyond"), *EVERY_STEP],
    "units/weights_beyond": [*_dist("weights_beyond"), *EVERY_STEP],
    "units/turns": [*_dist("tiers", "disk", "offload"), *EVERY_STEP],
    "collectives/states": _dist("linear"),
    "collectives/experts": _dist("dispatch"),
    "parallel/dispatch": _dist("dispatch"),
    "parallel/exchange": _dist("dispatch"),
    "parallel/experts": _dist("experts_gpt", "experts_misuse"),
    "parallel/hot_experts": _dist("dispatch", "experts_gpt"),
    "parallel/attend": _dist("context"),
    "parallel/blocks": _dist("context"),
    "parallel/context": _dist("context", "context_gpt", "linear"),
    "parallel/routing": [f"{UNIT}{of}.py" for of in ("routing", "routing_balance", "routing_peers")],
    "parallel/expert_products": [f"{UNIT}routing_products.py"],
    "parallel/linear": _dist("linear", "context_gpt"),
    "parallel/cut_layers": _dist("tensor", "tensor_more", "latent"),
    "parallel/divided": _dist("divided_tokens", "tensor"),
    "parallel/tensor": _dist("tensor", "tensor_more", "tensor_shard", "tensor_parts"),
    "parallel/torch_cut": _dist("torch_cut"),
    "parallel/deferred": _dist("pipeline_programs", "pipeline_modules", "pipeline"),
    "parallel/executor": _dist("pipeline_programs", "pipeline_modules", "pipeline"),
    "parallel/kept_graphs": _dist("pipeline_programs"),
    "parallel/left_out": _dist("context_left_out", "context", "context_replicas"),
    "parallel/mail": _dist("pipeline_refused", "pipeline_modules", "pipeline"),
    "parallel/tied": _dist("tied_stages", "tied_buffers"),
    "parallel/pipeline": _dist("pipeline_refused", "pipeline_modules", "pipeline"),
    "parallel/plan": _dist("pipeline_refused", "pipeline_modules", "pipeline"),
    "passes/attributes": _dist("side_losses"),
    "passes/backward": [*_dist("backward_order", "side_losses", "library_steps", "dropped"), *EVERY_STEP],
    "passes/breadth": _dist(
        "breadth_modules", "breadth_programs", "breadth_activations", "breadth", "flat_breadth"
    ),
    "passes/compilers": [*_dist("foreign_tools"), *EVERY_STEP],
    "passes/coroutine": _dist("breadth_activations", "breadth_modules", "breadth_programs"),
    "passes/engine": [*_dist("library_steps", "library"), *EVERY_STEP],
    "passes/forward_pass": [*_dist("library_steps", "breadth_modules"), *EVERY_STEP],
    "passes/grad_norm": EVERY_STEP,
    "passes/hooks": [*_dist("hooks", "library_steps", "breadth_modules", "library"), *EVERY_STEP],
    "passes/inputs": [*_dist("given", "side_losses"), *EVERY_STEP],
    "passes/nested": _dist("side_losses", "breadth_modules"),
    "passes/passes": [*_dist("hooks", "library_steps", "breadth_modules", "library"), *EVERY_STEP],
    "passes/places": [*_dist("foreign_tools", "compiled_blocks"), *EVERY_STEP],
    "passes/saved_leaves": [*_dist("side_losses", "saved_leaves", "dropped"), *EVERY_STEP],
    "passes/alike": _dist("alike"),
    "passes/whole": _dist("deferred", "idioms", "safetensors", "library"),
    "replicas/anchor": _dist("quorum_rounds", "sync", "sync_late"),
    "replicas/exchange": _dist("sync", "sync_late", "sync_partners"),
    "replicas/pair": _dist("sync_partners"),
    "replicas/replicas": _dist("sync", "sync_late", "sync_partners", "sync_checkpoint_late"),
    "transport/axis": [*_dist("topology", "axes", "groups", "joined", "flat"), *EVERY_STEP],
    "transport/call": EVERY_STEP,
    "transport/consistency": _dist("topology", "agree", "unit_placements", "misuse"),
    "transport/everyone": _dist("topology", "axes", "memory_limit", "optimizers"),
    "transport/gloo": [*_dist("message_times", "groups", "flat", "engines"), *EVERY_STEP],
    "transport/hosts": [f"{UNIT}hosts.py"],
    "transport/lane": [*_dist("lanes", "streams", "late_lane", "engines"), *EVERY_STEP],
    "transport/ledger": _dist("wires", "unit_placements", "closed_forms"),
    "transport/messages": _dist("pipeline_refused", "pipeline"),
    "transport/meter": _dist("wires", "flat_collectives", "closed_forms"),
    "transport/meeting": _dist("meeting_groups", "checkpoint_fit", "checkpoint_writes"),
    "transport/order": _dist("misuse"),
    "transport/topology": [
        *_dist("topology", "axes", "groups", "device_mesh", "joined", "flat"),
        *EVERY_STEP,
    ],
    "units/bucket": [
        *_dist("buckets", "backward_order", "library_steps"),
        *EVERY_STEP,
        *_dist("idioms"),
        f"{DIST}tensor_shard.py::test_a_bucket_of_units_with_partial_sums_and_without",
    ],
    "units/by_element": [f"{UNIT}by_element.py", *_dist("outside", "idioms")],
    "units/changes": [f"{UNIT}changes.py", *_dist("misuse", "dropped"), *EVERY_STEP],
    "units/zero_grad": _dist("matrices", "idioms", "late", "behind"),
    "units/by_unit": [*_dist("late", "sync", "matrices"), *EVERY_STEP],
    "units/steps": [*_dist("late", "sync", "matrices", "idioms", "misuse", "disk", "behind"), *EVERY_STEP],
    "units/division": [*_dist("unit_placements", "library"), *EVERY_STEP],
    "units/gradients": [*_dist("buckets", "library_steps", "library"), *EVERY_STEP],
    "units/initial": _dist("deferred", "safetensors"),
    "units/kinds": [*_dist("foreign_tools"), *EVERY_STEP],
    "units/known_optimizers": _dist("optimizers", "idioms", "misuse"),
    "units/rank_shards": [*_dist("unit_placements", "deferred"), *EVERY_STEP],
    "units/seen_whole": _dist("optimizers", "idioms", "foreign_tools"),
    "units/unusable": _dist("dropped", "misuse", "outside"),
    "units/waiting": _dist("checkpoint_waiting", "misuse", "idioms"),
    "units/shard_grad": [*_dist("outside", "idioms"), *EVERY_STEP],
    "units/shard_init": [*_dist("foreign_tools"), *EVERY_STEP],
    "units/shard_of": [*_dist("topology", "library"), *EVERY_STEP],
    "units/shard_parameter": [*_dist("outside", "dropped", "unit_placements", "idioms"), *EVERY_STEP],
    "units/shard_sums": _dist("optimizers"),
    "units/state_dict": _dist("foreign_tools", "idioms", "safetensors", "library"),
    "units/leaves": [
        f"{UNIT}leaves.py",
        *_dist("unit_placements", "deferred", "dropped", "misuse", "torch_cut"),
        *EVERY_STEP,
        *_dist("idioms"),
    ],
    "units/parts": _dist("tensor_parts", "alike"),
    "units/seen_as": _dist("torch_cut"),
    "units/slice_of": _dist("tensor", "tensor_shard"),
    "units/tied_to": _dist("tied_stages", "checkpoint_stages"),
    "units/states": _dist("engine_states", "library_steps"),
    "units/unit": [*_dist("unit_placements", "deferred", "dropped"), *EVERY_STEP, *_dist("idioms")],
}
_CHECKPOINT = {
    "checkpointer": _dist("checkpoint_fit", "checkpoint_writes", "checkpoint_damage", "checkpoint"),
    "fit": _dist("checkpoint_fit", "sync_checkpoint_late"),
    "folder": _dist("checkpoint_damage", "checkpoint_writes"),
    "json_values": [
        f"{DIST}quorum.py::test_what_would_train_wrongly_is_one_line", *_dist("checkpoint_fit", "checkpoint"),
    ],
    "logical_tensors": _dist("checkpoint_fit", "sync_checkpoint_late", "sync_checkpoint", "checkpoint"),
    "manifest": _dist("checkpoint_fit", "checkpoint_damage", "checkpoint"),
    "names": _dist("sync_checkpoint_late", "sync_checkpoint", "checkpoint_fit", "checkpoint"),
    "owner": _dist("checkpoint_refused"),
    "rank_file": [f"{UNIT}rank_file.py", *_dist("checkpoint_writes", "checkpoint_damage")],
    "snapshot": _dist("checkpoint_waiting", "checkpoint_refused", "checkpoint"),
    "restore": _dist("checkpoint_fit", "checkpoint_refused", "sync_checkpoint_late", "checkpoint"),
}  # fmt: skip

# folder or file inside the package -> its tests
_TESTS = {
    "spec/context": _dist("context", "context_gpt"),
    "cost/context_load": [f"{UNIT}predict_context.py", *_dist("context_kept")],
    "cost/context": [f"{UNIT}predict_context.py", *_dist("context_gpt")],
    "cost/states": [f"{UNIT}predict_linear.py", *_dist("linear", "context_gpt")],
    "cost/lora": [f"{UNIT}predict_lora.py", *_dist("lora_kept")],
    "cost/linear": [f"{UNIT}predict_linear.py", *_dist("linear_kept")],
    "predict/states": [f"{UNIT}predict_linear.py"],
    "predict/search/lengths_tasks": _dist("by_length"),
    "cost/held": [f"{UNIT}predict_experts.py", f"{UNIT}report_collect.py", f"{DIST}activations_on_host.py"],
    "cost/popular": [f"{UNIT}cost_popular.py"],
    "cost/experts": [*(f"{UNIT}{of}.py" for of in ("cost_experts", "cost_popular")), *_dist("experts_gpt")],
    "spec/activations": _dist("tensor", "tensor_shard"),
    "spec/routing": [f"{UNIT}routing.py", f"{UNIT}routing_peers.py"],
    "spec/tensor": [*_dist("tensor"), f"{DIST}count.py"],
    "cost/contents": [f"{DIST}count.py", f"{DIST}latent.py", f"{DIST}activations_on_host.py"],
    "cost/stages": [f"{DIST}run_stages.py", f"{UNIT}predict_stages.py", f"{UNIT}predict_uneven.py"],
    "spec/axes": [f"{DIST}axes.py", *(f"{UNIT}{of}.py" for of in ("mesh", "suites", "predict_uneven"))],
    "spec/buckets": [f"{UNIT}bucket_rule.py", f"{DIST}buckets.py"],
    "spec/benchmarks": [f"{UNIT}{of}.py" for of in ("benchmarks", "command_line")],
    "spec/config": [f"{UNIT}{of}.py" for of in ("suites", "built_in", "stacks", "command_line")],
    "spec/exchange": [f"{UNIT}counterparts.py"],
    "spec/huggingface": [f"{UNIT}huggingface.py"],
    "spec/columns": [f"{UNIT}columns.py"],
    "spec/plain_data": [f"{UNIT}plain_data.py"],
    "spec/tiers": _dist("tiers", "closed_forms"),
    "spec/offload": _dist("offload", "late"),
    "spec/sync": [f"{UNIT}{of}.py" for of in ("predict", "suites", "sync_schedule")] + [f"{DIST}sync.py"],
    "spec/sourced": [f"{UNIT}machine.py", *_PREDICT],
    "spec/free_memory": [f"{UNIT}free_memory.py"],
    "spec/files": [f"{UNIT}files.py", f"{UNIT}records.py"],
    "spec/job": [f"{UNIT}job.py"],
    "spec/batch_script": [f"{UNIT}submittable.py"],
    "spec/slurm_task": [f"{UNIT}job.py"],
    "spec/lock": [f"{UNIT}lock.py", f"{UNIT}report_status.py"],
    "spec/csv_tables": [
        f"{UNIT}plain_data.py", *(f"{UNIT}report_{of}.py" for of in ("collect", "tables", "points", "grade")),
    ],
    "spec/kernel_rows": [f"{UNIT}report_kernels.py", "tests/kernels/test_bench.py"],
    "cost/compute": [
        *(f"{UNIT}{of}.py" for of in ("cost_by_hand", "predict_experts", "predict_lora", "model_shapes")),
        f"{UNIT}predict.py",
    ],
    "spec/machine": [
        f"{UNIT}{of}.py" for of in ("machine", "suites", "box_layout", "predict", "counterparts")
    ],
    "spec/mesh": [f"{UNIT}{of}.py" for of in ("mesh", "machine", "predict", "counterparts")],
    "spec/stack": [f"{UNIT}stacks.py"],
    "spec/step_columns": [f"{UNIT}step_columns.py", f"{UNIT}report_collect.py"],
    "spec/stages": [f"{UNIT}suites.py", f"{DIST}run_stages.py", f"{DIST}uneven_stages.py"],
    "spec/schedules": [f"{UNIT}schedule.py", f"{UNIT}schedule_torch.py", f"{UNIT}timeline.py"],
    "spec/schedule": [f"{UNIT}schedule.py", f"{UNIT}predict_stages.py"],
    "spec/step": [f"{DIST}step.py", *_PREDICT, *_COUNTED],
    "spec/model": [f"{UNIT}model.py", f"{UNIT}model_shapes.py", *_PREDICT],
    "spec/attention": [f"{UNIT}model_shapes.py", f"{UNIT}huggingface.py"],
    "spec/partition": [f"{UNIT}machine.py", *_COUNTED],
    "spec/peers": [f"{UNIT}counterparts.py"],
    "spec/records": [
        f"{UNIT}{of}.py" for of in ("records", "report_collect", "report_status", "report_points")
    ],
    "spec/run_folder": [
        f"{UNIT}{of}.py" for of in ("records", "report_status", "report_collect")
    ],
    "spec/run_options": [*_dist("step_options"), f"{UNIT}report_points.py", f"{UNIT}suites.py"],
    "spec/run": [f"{UNIT}{of}.py" for of in ("suites", "report_points", "report_collect", "job")],
    "spec/scheme": [
        f"{UNIT}{of}.py" for of in ("suites", "counterparts", "report_points", "report_collect")
    ],
    "spec/placement": [f"{UNIT}suites.py", *_dist("offload", "sync_partners")],
    "spec/scheme_check": [
        *(f"{UNIT}{of}.py" for of in ("sync_schedule", "suites")), *_dist("offload", "sync", "sync_partners"),
    ],
    "spec/softmax": [f"{UNIT}softmax_report.py"],
    "spec/yaml_model": [f"{UNIT}{of}.py" for of in ("suites", "records", "command_line", "report_claims")],
    "spec/suites": [f"{UNIT}{of}.py" for of in ("suites", "job", "report_points")],
    "spec/wire": [f"{UNIT}wire.py", f"{UNIT}block_quant.py", *_COUNTED],
    "cost/matrices": [f"{UNIT}products_and_recomputation.py"],
    "cost/tcp": [f"{UNIT}box_layout.py", f"{UNIT}report_box.py"],
    "predict/blocks": [f"{UNIT}predict_uneven.py", f"{UNIT}stragglers.py", *_PREDICT],
    "predict/context_ways": [f"{UNIT}{of}.py" for of in ("predict_context", "context_cells")],
    "predict/exposed": [f"{UNIT}{of}.py" for of in ("predict_context", "predict_experts")] + _PREDICT,
    "predict/footprint": [f"{UNIT}{of}.py" for of in ("cost_by_hand", "plan_bounds", "predict_uneven")],
    "predict/given": [*_PREDICT, f"{UNIT}command_line.py", f"{UNIT}plan_axes.py"],
    "predict/interval": [f"{UNIT}interval.py", f"{UNIT}folds.py"],
    "predict/lanes": [*_PREDICT, f"{UNIT}plan_bounds.py", f"{UNIT}box_layout.py"],
    "predict/meeting": [f"{UNIT}plan_seldom.py", f"{UNIT}wan.py", *_PREDICT],
    "predict/prediction": [*_PREDICT, f"{UNIT}whole_run.py"],
    "predict/request": [f"{UNIT}defaults.py", *_PREDICT, f"{UNIT}command_line.py"],
    "predict/room": [f"{UNIT}{of}.py" for of in ("interval", "plan_choice", "published_fits")],
    "predict/time": [*_PREDICT, f"{UNIT}defaults.py"],
    "predict/show/advice_page": ["tests/workflow/test_advice_page.py"],
    "predict/bubble": [
        *(f"{UNIT}{of}.py" for of in ("predict_uneven", "stages_step", "predict_stages")), *_PREDICT,
    ],
    "predict/stage_messages": [f"{UNIT}stage_messages.py", f"{UNIT}predict_stages.py", *_PREDICT],
    "predict/place": [f"{UNIT}predict_uneven.py", f"{UNIT}predict_stages.py", *_PREDICT],
    "predict/search/advice": [f"{UNIT}advice.py"],
    "predict/show/advice_text": [f"{UNIT}advice.py"],
    "predict/search/candidates": [f"{UNIT}cost_by_hand.py", f"{UNIT}plan_choice.py"],
    "predict/search/choice": [f"{UNIT}plan_choice.py"],
    "predict/search/degrees": [f"{UNIT}plan_axes.py"],
    "predict/search/bounded": [
        *(f"{UNIT}{of}.py" for of in ("plan_bounds", "plan_choice", "cost_by_hand", "predict_tiers")),
    ],
    "predict/search/floors": [f"{UNIT}plan_bounds.py"],
    "predict/search/exposure": [f"{UNIT}plan_bounds.py"],
    "predict/search/peaks": [f"{UNIT}plan_bounds.py"],
    "predict/search/placements": [f"{UNIT}plan_axes.py", f"{UNIT}cost_by_hand.py"],
    "predict/search/plan": [f"{UNIT}plan_choice.py", f"{UNIT}plan_axes.py", f"{UNIT}cost_by_hand.py"],
    "predict/groups": [f"{UNIT}plan_groups.py"],
    "predict/search/relief": [f"{UNIT}plan_relief.py"],
    "predict/search/parts": [f"{UNIT}plan_parts.py"],
    "predict/search/software": [f"{UNIT}plan_software.py"],
    "predict/show/plan_text": [f"{UNIT}plan_relief.py", f"{UNIT}plan_parts.py", f"{UNIT}predict.py"],
    "predict/show/plan_files": [f"{UNIT}{of}.py" for of in ("plan_relief", "plan_parts", "plan_choice")],
    "predict/show/plan_options": [f"{UNIT}plan_software.py"],
    "predict/show/whole_text": [f"{UNIT}whole_run.py"],
    "predict/refused": [
        *(f"{UNIT}{of}.py" for of in ("cost_by_hand", "predict_kept", "predict_lora", "predict_context")),
        f"{UNIT}products_and_recomputation.py", f"{UNIT}predict_tiers.py", f"{UNIT}predict_linear.py",
    ],
    "predict/workload": [f"{UNIT}predict_context.py", *_PREDICT, f"{UNIT}command_line.py"],
    "predict/whole": [f"{UNIT}whole_run.py"],
    "predict/context": [f"{UNIT}predict_context.py"],
    "predict/experts": [f"{UNIT}predict_experts.py"],
    "predict/tiers": [f"{UNIT}predict_tiers.py"],
    "predict/search/largest": [f"{UNIT}predict_tiers.py"],
    "predict/show/largest": [f"{UNIT}predict_tiers.py"],
    "predict/defaults": [f"{UNIT}defaults.py"],
    "predict/search/lengths": [f"{UNIT}plan_lengths.py"],
    "predict/search/lengths_step": [f"{UNIT}plan_lengths.py"],
    "predict/search/lengths_cost": [f"{UNIT}plan_lengths_job.py"],
    "predict/show/lengths": [f"{UNIT}plan_lengths_job.py"],
    "predict/search/plan_seldom": [f"{UNIT}plan_seldom.py"],
    "predict/show/grid_text": [f"{UNIT}defaults.py", f"{UNIT}predict_context.py", f"{UNIT}command_line.py"],
    "predict/show/point_text": [
        f"{UNIT}defaults.py", *_PREDICT, f"{UNIT}command_line.py",
        f"{UNIT}products_and_recomputation.py", f"{UNIT}plan_experts.py",
    ],
    "predict/show/record": [f"{UNIT}defaults.py", *_PREDICT, f"{UNIT}command_line.py"],
    "predict/search/rehearsal": [f"{UNIT}rehearsal.py"],
    "predict/search/ratios": [f"{UNIT}ratios.py"],
    "cost/collectives": [f"{UNIT}collectives_at_scale.py", *_PREDICT],
    "cost/numbers": [f"{UNIT}plan_bounds.py", *_PREDICT],
    "cost/products": [f"{UNIT}products_cpu.py"],
    "cost/stragglers": [f"{UNIT}stragglers.py", *_PREDICT],
    "cost/activations": [
        f"{UNIT}cost_by_hand.py", f"{UNIT}products_and_recomputation.py",
        *_dist("activations_on_host", "context_kept"),
    ],
    "cost/attention": [f"{UNIT}cost_by_hand.py", f"{UNIT}report_kernels.py", "tests/kernels/test_bench.py"],
    "cost/buffers": [*_PREDICT, *_COUNTED, *_dist("weights_beyond")],
    "cost/bytes": [*_PREDICT, *_COUNTED, *_dist("weights_beyond", "experts_gpt", "context_gpt")],
    "cost/conventions": [f"{UNIT}foreign_logs.py", *_PREDICT],
    "cost/flops": [f"{UNIT}model.py", *_PREDICT],
    "cost/checkpoint": [f"{UNIT}checkpoint_time.py"],
    "cost/memory": [f"{UNIT}cost_by_hand.py", f"{UNIT}report_collect.py", *_COUNTED],
    "cost/peers": [f"{UNIT}report_collect.py", f"{UNIT}report_points.py", f"{DIST}peers.py"],
    "cost/eviction": [f"{UNIT}eviction.py"],
    "cost/residents": [f"{UNIT}residents.py", *_dist("weights_beyond")],
    "cost/tiers": [f"{UNIT}tier_efficiency.py", f"{UNIT}predict_tiers.py", f"{UNIT}offload_logs.py"],
    "cost/seldom": [f"{UNIT}low_communication.py", f"{UNIT}wan.py"],
    "cost/player": [f"{UNIT}slow_sends.py"],
    "cost/slow_sends": [f"{UNIT}slow_sends.py"],
    "cost/stages_step": [f"{UNIT}stages_step.py", f"{UNIT}predict_uneven.py"],
    "cost/timeline": [f"{UNIT}timeline.py", f"{UNIT}predict_uneven.py"],
    "cost/weights_copies": [f"{UNIT}predict_tiers.py", *_COUNTED, *_dist("weights_beyond")],
    "cost/groups": [f"{DIST}groups.py"],
    "cost/softmax": [f"{UNIT}softmax_report.py", f"{UNIT}report_kernels.py"],
    "evidence/claims/claim": [f"{UNIT}report_{of}.py" for of in ("grade", "claims", "page", "appendix")],
    "evidence/claims/grade": [f"{UNIT}report_{of}.py" for of in ("grade", "claims")],
    "evidence/claims/expected": [f"{UNIT}report_{of}.py" for of in ("grade", "claims")],
    "evidence/claims/experiments": [f"{UNIT}report_{of}.py" for of in ("appendix", "claims")],
    "evidence/claims/origin": [f"{UNIT}report_{of}.py" for of in ("grade", "claims")],
    "evidence/claims/rehearsed": [f"{UNIT}ratios.py"],
    "evidence/tables/points": [f"{UNIT}report_{of}.py" for of in ("points", "tables", "box")],
    "evidence/tables/collect": [f"{UNIT}report_{of}.py" for of in ("collect", "points", "grade")],
    **{f"engine/{file}": tests for file, tests in _ENGINE.items()},
    **{f"engine/checkpoint/{file}": tests for file, tests in _CHECKPOINT.items()},
}  # fmt: skip


def tests_of(file: str) -> list[str]:
    """The tests of a mutated file, in the order in which they are run."""
    inside = Path(file).relative_to("src/lowband").with_suffix("")
    found = _TESTS[str(inside)]
    terms = [TERMS] if inside.parts[0] == "cost" else []
    return [*terms, *found, SHIPPED] if inside.parts[0] in ("spec", "cost", "predict") else found
