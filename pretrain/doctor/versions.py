"""Versions of code and packages of a host, and differences between hosts.

Ranks that run different code are found before they train: one rank with another torch gives wrong
sums, or a hang long after the start, and nothing in that hang says why.
"""

import hashlib
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pretrain
from pretrain.doctor.check import MOST_HOSTS, Check, Report, merge_reports
from pretrain.errors import LaunchError, install_fix
from pretrain.run.folder import package_versions
from pretrain.utils.units import listed, plural

_UNCOMPARED = {"wandb"}  # rank 0 alone uses it


def own_versions() -> dict[str, str]:
    """Returns versions of packages, a digest of the source, the kind of machine; about 50 ms."""
    digest = hashlib.sha256()
    root = Path(pretrain.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return {**package_versions(), "code": digest.hexdigest()[:12], "machine": platform.machine()}


def digest_of(versions: dict[str, str]) -> str:
    """Returns 16 hex digits, equal for two hosts if all compared versions are equal."""
    compared = [f"{name} {version}" for name, version in sorted(versions.items()) if name not in _UNCOMPARED]
    return hashlib.sha256("\n".join(compared).encode()).hexdigest()[:16]


def find_differences(hosts: Sequence[tuple[str, dict[str, str]]]) -> list[str]:
    """Returns `torch is 2.9.0 on n2, 2.8.0 on n1, n3, n4 and 5 more` for each package that differs.

    `hosts` are name and versions of each rank; a host may appear several times.
    """
    differences = []
    for name in sorted({name for _, versions in hosts for name in versions} - _UNCOMPARED):
        by_version: dict[str, list[str]] = {}
        for host, versions in hosts:
            places = by_version.setdefault(versions.get(name, "absent"), [])
            if host not in places:
                places.append(host)
        if len(by_version) > 1:
            rarest = sorted(by_version.items(), key=lambda item: len(item[1]))
            shown = ", ".join(f"{version} on {listed(places, MOST_HOSTS)}" for version, places in rarest)
            differences.append(f"{name} is {shown}")
    return differences


def refuse_differences(hosts: Sequence[tuple[str, dict[str, str]]]) -> None:
    """Raises: LaunchError if versions differ between hosts, with host and package."""
    differences = find_differences(hosts)
    if differences:
        raise LaunchError(
            "the ranks do not run the same: " + "; ".join(differences),
            fix="install the same packages on every node, or one environment on a shared file system",
        )


def compare_reports(reports: Sequence[Report]) -> list[Check]:
    """Returns the merged checks of several ranks or hosts, and the comparison of their versions."""
    name = "same versions"
    if differences := find_differences([(report.host, report.versions) for report in reports]):
        fix = "install the same packages on every node"
        return [*merge_reports(reports), Check(name, "fail", "; ".join(differences), fix)]
    num_hosts = len({report.host for report in reports})
    ranks = plural(len(reports), "rank")
    text = f"{ranks} on {plural(num_hosts, 'host')} run the same"
    return [*merge_reports(reports), Check(name, "pass", text)]


def check_packages(versions: dict[str, str], deepspeed_needed: bool) -> Check:
    """Checks that the packages for training are installed, in supported versions."""
    needed = [name for name in versions if deepspeed_needed or name != "deepspeed"]
    absent = [name for name in needed if versions[name] == "absent"]
    if absent:
        fix = install_fix("deepspeed" if "deepspeed" in absent else "")
        return Check("packages", "fail", f"not installed: {', '.join(absent)}", fix)
    wrong = [f"{name} {versions[name]}, not {wanted}" for name, wanted in _unfit(versions)]
    if wrong:
        return Check("packages", "warn", "; ".join(wrong), install_fix())
    shown = [f"{name} {versions[name]}" for name in ("python", "torch", "deepspeed", "accelerate")]
    return Check("packages", "pass", f"{', '.join(shown)}; code {versions['code']}")


def _unfit(versions: dict[str, str]) -> list[tuple[str, Any]]:
    """Returns packages outside the ranges that this package declares, with the range."""
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion

    problems = []
    try:
        declared = [Requirement(line) for line in metadata.requires("pretrain-transformers") or []]
    except metadata.PackageNotFoundError:
        return []  # run from its source
    for one in declared:
        version = versions.get(one.name, "absent")
        with suppress(InvalidVersion):
            if version != "absent" and not one.specifier.contains(version, prereleases=True):
                problems.append((one.name, one.specifier))
    return problems
