"""A whole run as text for a terminal."""

from lowband.predict.whole import Conditions, WholeRun


def lines(run: WholeRun, given: Conditions) -> list[str]:
    """Its length, what failures and checkpoints take of it, and the devices' energy."""
    found = [
        f"{given.tokens:.4g} tokens: {run.steps:,.0f} steps, {run.days:.4g} days ({run.days_fast:.4g} to "
        f"{run.days_slow:.4g}), {run.gpu_hours:,.0f} GPU-hours"
    ]
    if run.checkpoint_every_s is not None:
        found.append(
            f"of it {100 * run.lost:.2g} % in {run.failures:,.0f} failures and in checkpoints, one every "
            f"{run.checkpoint_every_s / 60:.3g} minutes"
        )
    if run.megawatt_hours is None or run.power is None:
        return [*found, "energy: the device's power is not known"]
    between = " to ".join(dict.fromkeys(f"{end:,.0f}" for end in run.megawatt_hours))  # once if equal
    return [*found, f"energy of the devices: {between} MWh at most ({run.power.source})"]
