"""Memory beyond the devices' in machine files: names, rates with sources, and what is refused."""

from pathlib import Path

import pytest

from lowband.errors import UserError
from lowband.spec.machine import Machine
from tests.checkout import CONFIG

RATE = {"value": 10, "source": "made up"}
HOST = {
    "capacity_gib": 100,
    "source": "made up",
    "fetch_gigabytes_per_s": RATE,
    "stash_gigabytes_per_s": RATE,
}
NAMES = sorted(path.parent.name for path in CONFIG.root.glob("slurm/*/machine.yaml"))


def machine(tiers: object) -> Machine:
    device, levels = {"name": "d", "source": "s"}, [{"name": "world"}]
    values = {"name": "m", "description": "d", "device": device, "levels": levels, "tiers": tiers}
    return Machine.parse(values, Path("m/machine.yaml"))


def test_each_rate_is_a_fact_of_the_machine() -> None:
    found = machine({"host": HOST})
    assert found.tier("host").capacity_gib == 100
    assert set(found.facts) == {"tiers.host.fetch_gigabytes_per_s", "tiers.host.stash_gigabytes_per_s"}
    assert found.hardware == machine({}).hardware  # only predictions need them: no run's point is parted


@pytest.mark.parametrize(
    "tiers, says",
    [
        ({"hosts": HOST}, "hosts"),
        ({"host": {key: HOST[key] for key in ("capacity_gib", "source")}}, "fetch_gigabytes_per_s"),
        ({"host": HOST | {"capacity_gib": 0}}, "capacity_gib"),
        ({"host": HOST | {"fetch_gigabytes_per_s": RATE | {"value": 0}}}, "divided"),
        ({"host": HOST | {"fetch_gigabytes_per_s": 10}}, "fetch_gigabytes_per_s"),
    ],
)
def test_a_name_a_rate_or_a_size_that_cannot_be_is_refused(tiers: object, says: str) -> None:
    with pytest.raises(UserError, match=says):
        machine(tiers)


def test_a_tier_without_rates_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="tier 'disk' has no rates"):
        machine({"host": HOST}).tier("disk")


@pytest.mark.parametrize("name", NAMES)
def test_a_disk_is_larger_and_slower_than_the_host(name: str) -> None:
    tiers = CONFIG.machine(name).tiers
    for tier in tiers.values():
        node = tier.node_fetch_gigabytes_per_s, tier.node_stash_gigabytes_per_s
        alone = tier.fetch_gigabytes_per_s, tier.stash_gigabytes_per_s
        assert all(all_.value >= one.value for all_, one in zip(node, alone, strict=True) if all_)
    if "disk" in tiers:
        host, disk = tiers["host"], tiers["disk"]
        assert disk.capacity_gib > host.capacity_gib
        assert disk.fetch_gigabytes_per_s.value <= host.fetch_gigabytes_per_s.value
