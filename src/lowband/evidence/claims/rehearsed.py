"""What a suite's runs should say of the claims that it names: predicted ratios beside the papers' numbers."""

from collections.abc import Sequence

from lowband.errors import UserError
from lowband.evidence.claims.claim import read_claims
from lowband.evidence.claims.grade import reported_number
from lowband.predict.search.ratios import Ratio, Wanted, ratios
from lowband.spec.config import Config
from lowband.spec.run import RunSpec
from lowband.spec.stack import Stack

STACKS = {"deepspeed": "deepspeed-zero", "fsdp2": "fsdp2"}  # of engines that have one


def suite_stacks(config: Config, specs: Sequence[RunSpec]) -> dict[str, Stack]:
    """By engine, the stacks with which runs of peers are predicted on their machine."""
    cluster = specs[0].machine.name
    engines = dict.fromkeys(spec.engine for spec in specs if spec.engine in STACKS)
    return {engine: config.stack_on(STACKS[engine], cluster) for engine in engines}


def suite_ratios(config: Config, name: str) -> list[Ratio]:
    """A row per claim that the suite `decides` and per condition; none if it names no claim.

    Its number is the paper's or, where no paper has one, its target. Raises UserError for a claim that is not
    in config/claims.yaml, or has neither.
    """
    suite = config.suite(name)
    if not suite.decides:
        return []
    specs = config.runs([name])
    claims_yaml = config.root / "config" / "claims.yaml"
    claims = {claim.id: claim for claim in read_claims(claims_yaml)}
    wanted = []
    for claim, of in suite.decides.items():
        number = None if claim not in claims else claims[claim].target
        if claim in claims and claims[claim].reported:
            number = reported_number(claims[claim], claims_yaml)
        if number is None:
            with_number = sorted(one.id for one in claims.values() if one.reported or one.target is not None)
            raise UserError(f"decides: no claim '{claim}' with a number", where=name, allowed=with_number)
        wanted.append(Wanted(claim, number, of, is_one_sided=claims[claim].relation not in ("==", None)))
    machine = specs[0].machine
    return ratios(specs, wanted, suite_stacks(config, specs), config.given_stack(None, machine))
