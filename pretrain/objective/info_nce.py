"""InfoNCE over the vectors of a global batch, and its gradient (van den Oord et al. 2018).

    s(a, b) = cos(a, b) exp(log_scale) / temperature
    loss of a query   = -log exp s(q, p) / sum over texts of exp s(q, text)     p: its positive
    loss of a record  = that, or symmetric the mean of it and of the same from its positive to all
    queries

The texts are the positives and the hard negatives of all records. Not among them are others that
belong to the query: those that equal its positive, positives of an equal query, and all of its
group.

The scores are computed for some records at a time, in float64: sums do not depend on how a batch is
cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from pretrain.types import TextBatch

RESULTS = ("loss", "correct", "similarity", "slope")
"""Values of a record: its loss; 1 where its positive has the largest score; the cosine of its pair;
the derivative of its loss by `log_scale`."""

CHUNK_SCORES = 2**18
"""Scores of a direction that are held at a time."""


@dataclass(frozen=True, slots=True)
class InfoNce:
    """Settings of the loss: `objective.contrastive`."""

    temperature: float
    symmetric: bool = True
    widths: Sequence[int] = ()

    def __call__(
        self,
        vectors_PD: Tensor,
        texts: TextBatch,
        log_scale: Tensor,
        first: int = 0,
        last: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the losses of some records among all texts, and their gradient.

        Args:
            vectors_PD: Vectors of all texts, float64, of any length.
            texts: The texts, of records in order.
            log_scale: Logarithm of the factor of all scores, float64 [1].
            first: First record whose loss is computed.
            last: End of these records. None: that of all.

        Returns:
            The gradient of the sum of these losses with respect to the vectors, [P, D], and
            `RESULTS`, [records, 4].
        """
        places = _Places.of(texts)
        num_records = len(places.queries)
        last = num_records if last is None else last
        slopes_PD = torch.zeros_like(vectors_PD)
        results_AR = vectors_PD.new_zeros(last - first, len(RESULTS))
        all_widths = [*self.widths, vectors_PD.shape[1]]
        size = max(1, CHUNK_SCORES // max(1, len(places.candidates)))
        for width in all_widths:
            cut_PD = vectors_PD[:, :width].detach().requires_grad_()
            with torch.enable_grad():
                unit_PD = normalize(cut_PD, dim=1)
            known_PD = unit_PD.detach().requires_grad_()
            gathered_PD = torch.zeros_like(known_PD)
            for start in range(first, last, size):
                records = slice(start, min(start + size, last))
                of_chunk_AR, grad_PD = self._chunk(known_PD, places, log_scale, records)
                gathered_PD += grad_PD
                rows_AR = results_AR[start - first : records.stop - first]
                rows_AR[:, ::3] += of_chunk_AR[:, ::3] / len(all_widths)
                rows_AR[:, 1:3] = of_chunk_AR[:, 1:3]  # of the last one, the whole vectors
            unit_PD.backward(gathered_PD / len(all_widths))
            slopes_PD[:, :width] += cut_PD.grad
        return slopes_PD, results_AR

    @torch.enable_grad()
    def _chunk(
        self,
        unit_PD: Tensor,
        places: "_Places",
        log_scale: Tensor,
        records: slice,
    ) -> tuple[Tensor, Tensor]:
        scale_A1 = log_scale.detach().expand(records.stop - records.start)[:, None].requires_grad_()
        factor_A1 = scale_A1.exp() / self.temperature
        queries_AD = unit_PD[places.queries[records]]
        positives_AD = unit_PD[places.positives[records]]
        cosines_AN = queries_AD @ unit_PD[places.candidates].T
        own_A = torch.arange(records.start, records.stop, device=unit_PD.device)
        is_out_AN = places.excluded(records)
        scores_AN = (cosines_AN * factor_A1).masked_fill(is_out_AN, -torch.inf)
        own_score_A = scores_AN.gather(1, own_A[:, None])[:, 0]
        loss_A = scores_AN.logsumexp(dim=1) - own_score_A
        if self.symmetric:
            back_AQ = positives_AD @ unit_PD[places.queries].T * factor_A1
            back_AQ = back_AQ.masked_fill(is_out_AN[:, : len(places.queries)], -torch.inf)
            loss_A = (loss_A + back_AQ.logsumexp(dim=1) - own_score_A) / 2
        grad_PD, slope_A1 = torch.autograd.grad(loss_A.sum(), (unit_PD, scale_A1))
        with torch.no_grad():
            correct_A = (scores_AN.argmax(dim=1) == own_A).double()
            similarity_A = cosines_AN.gather(1, own_A[:, None])[:, 0]
            results_AR = torch.stack((loss_A, correct_A, similarity_A, slope_A1[:, 0]), dim=1)
        return results_AR, grad_PD


@dataclass(frozen=True, slots=True)
class _Places:
    """Places of the texts of all records, and identities of those that are no negatives."""

    queries: Tensor
    positives: Tensor
    candidates: Tensor  # the positives, then the hard negatives
    keys_P: Tensor
    groups_P: Tensor

    @staticmethod
    def of(texts: TextBatch) -> "_Places":
        places = [torch.nonzero(texts.roles_P == role)[:, 0] for role in range(3)]
        candidates = torch.cat(places[1:])
        return _Places(places[0], places[1], candidates, texts.keys_P, texts.groups_P)

    def excluded(self, records: slice) -> Tensor:
        """Returns candidates that are no negatives of some records, bool [A, N]; not their positives."""
        num_records = len(self.queries)
        query_A = self.keys_P[self.queries[records]]
        positive_A = self.keys_P[self.positives[records]]
        is_out_AN = positive_A[:, None] == self.keys_P[self.candidates]
        is_out_AN[:, :num_records] |= query_A[:, None] == self.keys_P[self.queries]
        group_A = self.groups_P[self.queries[records]]
        is_shared_AN = group_A[:, None] == self.groups_P[self.candidates]
        is_shared_AN &= group_A[:, None] != 0
        # A record's own hard negatives are in its group.
        record_P = torch.zeros_like(self.keys_P).index_fill_(0, self.queries, 1).cumsum(0) - 1
        own_A = torch.arange(num_records, device=group_A.device)[records]
        is_own_AN = record_P[self.candidates] == own_A[:, None]
        is_out_AN |= is_shared_AN & ~is_own_AN
        is_out_AN[:, :num_records] &= ~is_own_AN[:, :num_records]
        return is_out_AN
