"""Even use of the experts of a model: its losses, the state that follows the loads, and metrics.

    micro-batch   sums of each layer (`RoutingSums`)          ->  losses of this step
                                                              ->  loads, to the exchange of the step
    step          loads of the global batch, on every rank    ->  state of the coming steps, metrics

What decides is the global batch, whichever way it is cut: a load is a count of tokens, and counts
are summed by the all-reduce that every step has. For a layer, with f_e the share of the tokens that
chose expert e and P_e the mean of its scores:

    balance: loss   E sum_e f_e P_e (Fedus et al. 2022, 2.2; its mean over layers)
    balance: bias   bias_e += rate sign(mean load - load_e) (Wang et al. 2024, algorithm 1)
    z_loss          mean of (log sum exp logits)^2 (Zoph et al. 2022, 3.2; its mean over layers)

f of the whole batch is known when its last micro-batch has been routed, and the gradient of the
first one is needed before: f is that of the step before, even at first, and part of a checkpoint.
The loss is then a sum over tokens, so that its gradient is the same for any micro-batches and
ranks. A step that is skipped changes neither f nor bias. Means are over tokens without padding.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pretrain.engine.replicated import KeptTensor
from pretrain.model.parts.experts import MixtureOfExperts, RoutingSums
from pretrain.training.layer_norms import name_layers
from pretrain.utils.units import plural

log = logging.getLogger(__name__)


class ExpertBalance:
    """The balance of all layers with experts of a model. All ranks call the same methods alike.

    Args:
        layers: The layers by the prefix of their parameter names, in the order of the stack; their
            keys are those of one stack.

    Attributes:
        state: Tensors that a checkpoint keeps beside the parameters.
        num_shown: Values of `shown`, and of a sum of them over ranks.
    """

    def __init__(self, layers: dict[str, MixtureOfExperts]) -> None:
        router = next(iter(layers.values())).router
        config = self._config = router.config
        balances = [layer.router.balance for layer in layers.values()]
        self._biases = [balance.bias for balance in balances if balance is not None]
        shape = (len(layers), config.count)
        self._share_LE = torch.full(
            shape, config.top_k / config.count, dtype=torch.float32, device=router.weight.device
        )
        self._names = list(name_layers(layers).values())
        self.num_shown = len(layers) * (config.count + 1)
        self._sums = torch.zeros(self.num_shown, dtype=torch.float64)
        self._steps = 0
        self._dead: dict[str, list[int]] = {}
        self.state: list[KeptTensor] = []
        if config.balance == "loss":
            for name, layer, share_E in zip(layers, layers.values(), self._share_LE, strict=True):
                whole = (config.count, layer.width)
                self.state.append(KeptTensor(f"{name}.router.weight", "load", share_E, whole))
        elif config.balance == "bias":
            for name, bias_E in zip(layers, self._biases, strict=True):
                self.state.append(KeptTensor(f"{name}.router.balance.bias", "weight", bias_E))

    def loss(self, routing_LW: Tensor) -> Tensor | None:
        """Returns the weighted losses, summed over the tokens of a micro-batch; None: no loss."""
        config = self._config
        sums = RoutingSums.unpack(routing_LW)
        terms = []
        if config.balance == "loss":
            factor = config.balance_weight * config.count / len(routing_LW)
            terms.append(factor * (self._share_LE * sums.score_E).sum())
        if config.z_loss:
            terms.append(config.z_loss / len(routing_LW) * sums.z.sum())
        return sum(terms[1:], terms[0]) if terms else None

    @staticmethod
    def shown(routing_LW: Tensor) -> Tensor:
        """Returns loads and entropies of a micro-batch, float64 [L E + L], exact under addition."""
        sums = RoutingSums.unpack(routing_LW.detach().double())
        return torch.cat((sums.load_E.flatten(), sums.entropy))

    @torch.no_grad()
    def follow(self, totals: Sequence[float]) -> None:
        """Takes the sum of `shown` over a step that was applied, and over all ranks."""
        sums = torch.tensor(totals, dtype=torch.float64)
        self._sums += sums
        self._steps += 1
        load_LE = sums[: self._share_LE.numel()].view(self._share_LE.shape)
        all_L1 = load_LE.sum(dim=1, keepdim=True)
        if not all_L1.all():  # a step without tokens
            return
        self._share_LE.copy_(load_LE / (all_L1 / self._config.top_k))
        if self._config.balance == "bias":
            # Integers below 2^53: their sign is exact, and so the same for any number of ranks.
            signs_LE = torch.sign(all_L1 - self._config.count * load_LE).float()
            for bias_E, sign_E in zip(self._biases, signs_LE, strict=True):
                bias_E.add_(sign_E.to(bias_E.device), alpha=self._config.balance_rate)

    def forget(self) -> None:
        """Discards what the next metrics would be of, for a run that goes back."""
        self._sums, self._steps = torch.zeros_like(self._sums), 0

    def take(self) -> dict[str, float]:
        """Returns the metrics since the last call, and warns of experts that no token chose in it.

        Loads are relative to an even one, by layer and over all layers; entropies are in nats.
        """
        sums, steps = self._sums, self._steps
        self.forget()
        load_LE = sums[: self._share_LE.numel()].view(self._share_LE.shape)
        tokens_L = load_LE.sum(dim=1) / self._config.top_k
        if not tokens_L.all():
            return {}
        even_LE = load_LE / tokens_L[:, None] * (self._config.count / self._config.top_k)
        by_layer = {
            "expert_load_max": even_LE.amax(dim=1),
            "expert_load_min": even_LE.amin(dim=1),
            "router_entropy": sums[self._share_LE.numel() :] / tokens_L,
        }
        dead: dict[str, list[int]] = {}
        for layer, expert in (load_LE == 0).nonzero().tolist():
            dead.setdefault(self._names[layer], []).append(expert)
        self._warn(dead, steps)
        metrics = {
            "expert_load_max": float(even_LE.max()),
            "expert_load_min": float(even_LE.min()),
            "router_entropy": float(by_layer["router_entropy"].mean()),
            "experts_dead": float((load_LE == 0).sum()),
            "experts_dropped": 0.0,  # tokens: no expert is ever full
        }
        for kind, values_L in by_layer.items():
            for name, value in zip(self._names, values_L.tolist(), strict=True):
                metrics[f"{kind}/{name}"] = value
        return metrics

    def _warn(self, dead: dict[str, list[int]], steps: int) -> None:
        if dead and dead != self._dead:
            listed = [f"{name}: {', '.join(map(str, experts))}" for name, experts in dead.items()]
            text = "no token chose these experts in %s: %s"
            log.warning(text, plural(steps, "step"), "; ".join(listed))
        self._dead = dead


def find_balance(model: nn.Module) -> ExpertBalance | None:
    """Returns the balance of the experts of a model on its device; None: it has none."""
    modules = model.named_modules()
    layers = {name: module for name, module in modules if isinstance(module, MixtureOfExperts)}
    return ExpertBalance(layers) if layers else None
