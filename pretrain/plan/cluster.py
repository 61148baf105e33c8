"""The cluster that a run is planned for, and measured shares of its peaks, bandwidths and memory.

    pretrain doctor --calibrate CONFIG   writes ~/.cache/pretrain/calibration/GPU.json
    pretrain plan CONFIG --gpu GPU       reads it

With a calibration, a layout that is predicted not to fit is refused; without, it is a warning.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import linear_regression

from pretrain.errors import ConfigError
from pretrain.plan.gpus import CONSTANTS, Constants, Gpu
from pretrain.utils.io import make_dir, write_json
from pretrain.utils.safe_read import check_fields, read_json


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measurements of one kind of device."""

    gpu: str  # name in `GPUS`
    device: str  # name by the driver
    host: str  # host of the measurement
    measured: str  # time of the measurement, ISO
    versions: dict[str, str]  # versions of torch, CUDA and the like
    products: float  # share of the peak that products of wide matrices reach
    half_width: float  # width at which they reach half of it
    attention: float  # share of the peak that attention reaches, all pairs counted
    memory_share: float  # share of the memory bandwidth
    link_share: float | None  # share of the links within a node; None: measured by one rank
    network_share: float | None  # share of the network; None: measured on one node
    overhead_bytes: int  # memory of a process before its first tensor
    group_bytes: int | None  # further memory of its process group; None: measured by one rank
    memory_bytes: int  # memory for a rank: of its GPU; on CPUs, of a machine, whose ranks share it
    half_keys: float = 0.0  # keys of a row at which attention reaches half of its share
    passes: float | None = None  # times that a block moves what it keeps. None: not measured
    update_share: float = 1.0  # share of the memory's speed that an update reaches
    launch_s: float | None = None  # time in which the host launches a kernel. None: not measured
    efficiency: float = 1.0  # share that a step reached of all these, as earlier versions measured it

    def constants(self, gpu: Gpu) -> Constants:
        """Returns the roofline's constants for this device; those not measured stay."""
        products = self.products * self.efficiency / gpu.best_product
        attention = self.attention * self.efficiency
        fitted = CONSTANTS.shares[gpu.generation]
        shares = replace(
            fitted,
            products=products,
            half_width=self.half_width,
            flash=attention,
            cudnn=attention,
            half_keys=self.half_keys,
            compiled_passes=self.passes or fitted.compiled_passes,
            eager_passes=self.passes or fitted.eager_passes,
        )
        link = self.link_share
        network = self.network_share
        return replace(
            CONSTANTS,
            shares={**CONSTANTS.shares, gpu.generation: shares},
            memory_share=self.memory_share * self.efficiency,
            update_share=self.update_share,
            launch_s=CONSTANTS.launch_s if self.launch_s is None else self.launch_s,
            link_share=CONSTANTS.link_share if link is None else link,
            network_share=CONSTANTS.network_share if network is None else network,
        )


def fit_products(measured: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fits share = products w / (w + half_width) to pairs of width and share; returns the constants.

    Its reciprocal is linear in 1 / w: least squares of that. Where shares do not grow with width,
    the half width is 0 and the share is the largest.
    """
    widths = [1 / width for width, _ in measured]
    slope, start = linear_regression(widths, [1 / share for _, share in measured])
    if slope <= 0 or start <= 0:
        return max(share for _, share in measured), 0.0
    return 1 / start, slope / start


def calibration_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of the user's calibrations."""
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path("~/.cache").expanduser()) / "pretrain" / "calibration"


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Writes a calibration."""
    make_dir(path.parent)
    write_json(path, asdict(calibration))


def load_calibration(path: Path, gpu: str | None = None) -> Calibration:
    """Reads a calibration. Raises: ConfigError: The file is invalid, or not of the GPU of `--gpu`."""
    fix = "measure anew with `pretrain doctor --calibrate CONFIG`, or remove it"
    try:
        calibration = Calibration(**check_fields(read_json(path), {}))
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise ConfigError(problem, where=str(path), fix="check the path of --calibration") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"is no calibration: {error}", where=str(path), fix=fix) from None
    shares = (calibration.products, calibration.attention, calibration.memory_share, calibration.efficiency)
    if not all(isinstance(share, float) and share > 0 for share in shares):
        raise ConfigError("is no calibration: a share is not above 0", where=str(path), fix=fix)
    if gpu is not None and calibration.gpu != gpu.lower():
        problem = f"was measured on {calibration.gpu}, not {gpu}"
        raise ConfigError(problem, where=str(path), fix="give the other --gpu, or none")
    return calibration


def find_calibration(name: str, folder: Path | None = None) -> Calibration | None:
    """Returns the calibration of a GPU by the name that `--gpu` takes; None: there is none."""
    path = (folder or calibration_folder()) / f"{name.lower()}.json"
    return load_calibration(path, name) if path.is_file() else None


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of one kind: `per_node` GPUs each, or ranks on CPUs."""

    nodes: int
    per_node: int
    gpu: Gpu
    calibration: Calibration | None = None

    @property
    def size(self) -> int:
        """Ranks."""
        return self.nodes * self.per_node

    @property
    def device(self) -> str:
        """Device type of torch."""
        return "cpu" if self.gpu.generation == "cpu" else "cuda"

    @property
    def constants(self) -> Constants:
        """Constants of the roofline: measured, or fitted on published runs."""
        return CONSTANTS if self.calibration is None else self.calibration.constants(self.gpu)
