"""Who owns a run folder."""

from pretrain.lease.lease import Lease

__all__ = ["Lease"]
