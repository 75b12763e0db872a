"""Raw logs of Deep Optimizer States beside their predictions (offload_fit.py), as tables."""

import pandas as pd

from lowband.cost.tiers import Rates, best_stride
from lowband.evidence.validation.offload_fit import BOUNDS, NODE, SETTINGS, fitted, logs_of, predicted
from lowband.spec.config import Config


def offload_logs(config: Config) -> pd.DataFrame:
    """A row per log. gain_percent: over the same run as DeepSpeed ships it, where there is one."""
    rows = []
    for name, of in SETTINGS.items():
        constants, logs = fitted(config, name), logs_of(config, name)
        for log in logs:
            parts = predicted(config, of, log, constants)
            off = 100 * (parts.step / log.step_s - 1)
            rows.append(
                {
                    "provenance": "predicted", "source": "arXiv 2410.21316", "setting": name, "log": log.name,
                    "model": log.model.name, "system": log.system, "gpus": log.tensor * log.data,
                    "tensor": log.tensor, "micro_batch": log.micro_batch, "accumulation": log.accumulation,
                    "share": log.ratio, "stride": log.stride,
                    "use": "calibration" if of.is_fitted_on(log) else "held out",
                    "published_s": log.step_s, "predicted_s": parts.step, "off_percent": off,
                    "distance_percent": abs(off),
                    "published_update_s": log.update_s, "predicted_update_s": parts.update,
                }
            )  # fmt: skip
    return _with_gains(pd.DataFrame(rows))


def offload_constants(config: Config) -> pd.DataFrame:
    """The constants of each setting: fitted ones with their bounds, the others without."""
    return pd.DataFrame(
        [
            {
                "provenance": "predicted", "setting": name, "constant": constant, "value": value,
                "fitted": constant in of.free, "low": BOUNDS[constant][0], "high": BOUNDS[constant][1],
                "calibrated_on": sum(map(of.is_fitted_on, logs_of(config, name))),
            }
            for name, of in SETTINGS.items()
            for constant, value in fitted(config, name).items()
        ]
    )  # fmt: skip


def offload_strides(config: Config) -> pd.DataFrame:
    """What the stride that the model chooses took, beside both ends, where logs have several strides.

    Ends: no subgroup updated on the device, and every second. times_better_end: at most 1 is as fast
    """
    rows, logs = [], offload_logs(config)
    kept = logs[logs["system"].isin(("interleaved", "asynchronous copies"))]
    for (name, model), of in kept.groupby(["setting", "model"], sort=False):
        took = of.drop_duplicates("stride").set_index("stride")["published_s"]
        if len(took) < len((0, 2, 3)):
            continue
        constants = fitted(config, str(name))
        rates = Rates(constants["link"], constants["link"], constants["node_update"] / NODE)
        chosen, ends = best_stride(rates), took.loc[[0, 2]]
        rows.append(
            {
                "provenance": "predicted", "setting": name, "model": model, "chosen": chosen,
                "chosen_s": took[chosen], "none_s": took[0], "second_s": took[2], "best": took.idxmin(),
                "times_better_end": took[chosen] / ends.min(),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def _with_gains(df: pd.DataFrame) -> pd.DataFrame:
    """With the gain of each interleaved run over the same without, printed and predicted, in percent."""
    shape = ["setting", "folder", "model", "gpus", "tensor", "micro_batch", "accumulation", "share"]
    df = df.assign(folder=df["log"].str.rpartition("/")[0])
    for system, name in (("blocking copies", "gain"), ("asynchronous copies", "gain_over_async")):
        plain = df[df["system"] == system].drop_duplicates(shape).set_index(shape)
        beside = df.set_index(shape).index
        for of in ("published", "predicted"):
            over = plain[f"{of}_s"].reindex(beside).to_numpy()
            gain = 100 * (over / df[f"{of}_s"] - 1)
            df[f"{of}_{name}_percent"] = gain.where(df["system"] == "interleaved")
    return df.drop(columns="folder")
