"""The ranks of a run make sure that they run the same: our code, Python, and what results depend on.

A digest of 16 digits is gathered; only where two differ are the versions themselves. With other packages on one node a
run dies oddly, or trains on with sums that are not those of its peers.
"""

from pretrain import dist
from pretrain.dist import World
from pretrain.doctor.check import this_host
from pretrain.doctor.versions import digest_of, own_versions, refuse_differences


def agree_on_versions(world: World) -> None:
    """Compares the versions of all ranks. Collective; one small gather, and the 20 ms of reading our own source.

    Raises:
        LaunchError: They differ; every rank names host and package.
    """
    if world.size == 1:
        return
    versions = own_versions()
    if len(set(dist.gather_objects(digest_of(versions)))) > 1:
        found = dist.gather_objects({"host": this_host(), "versions": versions})
        refuse_differences([(one["host"], one["versions"]) for one in found])
