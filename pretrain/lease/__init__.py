"""Who owns a run folder."""

from pretrain.lease.lease import Lease, refuse_if_owned

__all__ = ["Lease", "refuse_if_owned"]
