"""Which peer runs which scheme, and the way to a peer's words and back."""

import json
from pathlib import Path

import pytest
import yaml

from lowband.__main__ import main
from lowband.errors import UserError
from lowband.spec.exchange import scheme_of_deepspeed
from lowband.spec.mesh import Levels
from lowband.spec.peers import FORMS, OFF_DEVICE, PEERS, TABLE, form_of, peer_arguments
from lowband.spec.tiers import TIERS
from tests.checkout import CONFIG, ROOT
from tests.printed import printed_by

SCHEMES = yaml.safe_load((ROOT / "config" / "schemes.yaml").read_text())
LEVELS = Levels.fit({"package": 2, "node": 4}, 8)


def scheme(name: str):
    return CONFIG.scheme(name)


def test_every_form_has_a_word_on_every_peer() -> None:
    assert set(TABLE) == {*FORMS.values(), "other"}
    assert set(OFF_DEVICE) == set(TIERS)
    assert all(set(row) == set(PEERS) for row in (*TABLE.values(), *OFF_DEVICE.values()))


@pytest.mark.parametrize(
    ("name", "ranks", "form"),
    [
        ("hpz", 8, "hpz"),
        ("hpz", 4, "zero3"),  # a node of 4 is the world: no secondary shard is kept
        ("hsdp", 8, "hsdp"),
        ("hsdp", 4, "zero3"),
        ("zero3", 1, "zero3"),
        ("ddp", 1, "ddp"),
        ("hier3-exact", 8, "other"),
        ("hier3-exact", 2, "zero3"),  # a package of 2 is the world
    ],
)
def test_the_form_is_that_on_the_ranks_at_hand(name: str, ranks: int, form: str) -> None:
    assert form_of(scheme(name), Levels.fit({"package": 2, "node": 4}, ranks)) == form


def test_fsdp2_meshes() -> None:
    assert peer_arguments("fsdp2", scheme("hsdp"), LEVELS)["mesh_shape"] == [2, 4]
    assert peer_arguments("fsdp2", scheme("hpz"), LEVELS) == {"mesh_shape": [8], "reshard_after_forward": 4}
    assert peer_arguments("fsdp2", scheme("zero2"), LEVELS)["reshard_after_forward"] is False


@pytest.mark.parametrize(
    ("peer", "name", "reason"),
    [
        ("fsdp2", "zeropp", "it has no quantized collectives"),
        ("fsdp2", "hier3-exact", "it keeps weights and gradients where it keeps the optimizer state"),
        ("deepspeed", "hier3", "it keeps weights and gradients where it keeps the optimizer state"),
        ("deepspeed", "hsdp", "MiCS, its sharding inside a group, is gone since 0.19.7"),
        ("ddp", "zero1", "it shards nothing"),
        ("fsdp2", "diloco", "its replicas average gradients in every step"),
    ],
)
def test_a_refusal_says_why(peer: str, name: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as error:
        peer_arguments(peer, scheme(name), LEVELS)
    assert "\n" not in str(error.value)


def test_quantized_gradients_take_two_nodes() -> None:
    with pytest.raises(UserError, match="more than one node of 4 ranks"):
        peer_arguments("deepspeed", scheme("zeropp"), Levels.fit({"package": 2, "node": 4}, 4))


@pytest.mark.parametrize(
    ("wires", "said"),
    [
        ({"forward_gather": "int4"}, "forward_gather in int4"),
        ({"forward_gather": "int8", "backward_gather": "int8", "grad_reduce": "int8"}, "grad_reduce in int8"),
        ({"replica_reduce": "int4"}, "replica_reduce in int4"),
    ],
)
def test_wires_that_no_switch_of_deepspeed_sets_are_refused(wires: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=f"no counterpart: {said} .allowed: .*int8 forward_gather"):
        peer_arguments("deepspeed", scheme("zero3").model_copy(update=wires), LEVELS)


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes_come_back_from_deepspeed(name: str) -> None:
    """Placement and wires, but for one: under qwZ DeepSpeed sends the backward's weights in INT8 too."""
    before = scheme(name)
    try:
        zero = peer_arguments("deepspeed", before, LEVELS)
    except UserError:
        return
    config = json.loads(json.dumps({"zero_optimization": zero}))
    after = scheme_of_deepspeed(config, LEVELS, "test")
    assert peer_arguments("deepspeed", after, LEVELS) == zero
    same = {"name": name, "known_as": before.known_as}
    if before.forward_gather == "int8" and before.backward_gather == "native":
        assert after.backward_gather == "int8"
        same["backward_gather"] = "native"
    assert after.model_copy(update=same) == before


def test_a_users_configuration_becomes_a_scheme(tmp_path: Path, capsys) -> None:
    path = tmp_path / "mine.json"
    zero = {"stage": 3, "mics_shard_size": 4, "overlap_comm": True, "reduce_bucket_size": 500000000}
    path.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": zero}))
    assert main(["spec", "--from", str(path), "--ranks", "8", "--root", str(ROOT)]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {
        "mine": {"weights": "node", "grads": "node", "optim": "node"}
    }


@pytest.mark.parametrize(
    ("device", "optim"), [("none", "world"), ("cpu", "world@host"), ("nvme", "world@disk")]
)
def test_where_deepspeed_keeps_states_is_their_tier(device: str, optim: str) -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": device, "pin_memory": True}}
    found = scheme_of_deepspeed({"zero_optimization": zero}, LEVELS, "test")
    assert found.model_dump(exclude_defaults=True) == {
        "name": "imported", "weights": "self", "grads": "self", "optim": optim,
    }  # fmt: skip


@pytest.mark.parametrize(("device", "tier"), [("none", ""), ("cpu", "@host"), ("nvme", "@disk")])
def test_where_deepspeed_keeps_weights_is_their_tier(device: str, tier: str) -> None:
    zero = {"stage": 3, "offload_param": {"device": device, "nvme_path": "/local_nvme", "buffer_size": 1e9}}
    found = scheme_of_deepspeed({"zero_optimization": zero}, LEVELS, "test")
    assert found.model_dump(exclude_defaults=True) == {
        "name": "imported", "weights": f"world{tier}", "grads": "world", "optim": "world",
    }  # fmt: skip


@pytest.mark.parametrize("config", [{}, {"zero_optimization": {}}, {"zero_optimization": {"stage": 0}}])
def test_without_a_stage_nothing_is_sharded(config: dict) -> None:
    """DeepSpeed's default stage is 0."""
    found = scheme_of_deepspeed(config, LEVELS, "test")
    assert (found.weights, found.grads, found.optim, found.secondary) == ("self", "self", "self", None)
    assert not found.is_quantized


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"stage": 4}, "stage is 4 (allowed: 0, 1, 2, 3)"),
        ({"stage": 3, "zero_hpz_partition_size": 3}, "no level of 3 ranks (allowed: 1, 2, 4, 8)"),
        ({"stage": 2, "zero_quantized_weights": True}, "need stage 3, not 2"),
        ({"stage": 3, "cpu_offload_param": True}, "cpu_offload_param has no counterpart here"),
        (
            {"stage": 2, "offload_param": {"device": "cpu"}},
            "offload_param is not for stage 2 (allowed: stage",
        ),
        (
            {"stage": 3, "offload_param": {"ratio": 0.5}},
            "offload_param.ratio is not known (allowed: buf",
        ),
        ({"stage": 3, "offload_optimizer": "cpu"}, "offload_optimizer is not a mapping of keys to values"),
        ({"stage": 3, "offload_optimizer": []}, "offload_optimizer is not a mapping of keys to values"),
        ({"stage": 3, "offload_optimizer": {"devise": "cpu"}}, "offload_optimizer.devise is not known"),
        ({"stage": 3, "offload_optimizer": {"device": []}}, "device is '[]' (allowed: none, cpu, nvme)"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}, "ratio is 0.3 (allowed: 1:"),
        ({"offload_optimizer": {"device": "cpu"}}, "is not for stage 0 (allowed: stage 1, 2, 3)"),
        ({"stage": 3, "zero_hpz_partitionsize": 4}, "zero_hpz_partitionsize is not known"),
    ],
)
def test_what_no_scheme_says_is_refused(tmp_path: Path, capsys, zero: dict, said: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    asked = ["spec", "--from", str(path), "--ranks", "8", "--root", str(ROOT)]
    assert said in printed_by(capsys, *asked, code=2)
