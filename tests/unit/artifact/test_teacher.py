"""A frozen teacher in the step: what it adds to each objective of words, its absence in evaluations, refusals."""

from types import SimpleNamespace

import pytest
import torch

from pretrain.artifact.teacher import Teacher, check_teacher
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.lengths import RowLengths
from pretrain.config.model import parse_model
from pretrain.config.objective import DistillConfig, ObjectiveConfig
from pretrain.config.presets import expand_preset
from pretrain.errors import ConfigError
from pretrain.model import build_model, init_weights
from pretrain.objective import build_loss
from pretrain.training.step import TrainModule
from pretrain.types import IGNORE_INDEX, Batch, StackRows

SIZES = {"causal": "llama-tiny", "masked": "bert-tiny", "seq2seq": "t5-tiny"}


def build(preset: str, seed: int, layers: int):
    stacks = {"decoder": {"layers": layers}} if preset == "llama-tiny" else {"encoder": {"layers": layers}}
    config = parse_model(expand_preset({"preset": preset, "vocab_size": 90, "max_seq_len": 16} | stacks))
    model = build_model(config, PLAIN_ENGINE, torch.device("cpu"))
    init_weights(model, config, seed)
    for parameter in model.parameters():  # scores that differ
        parameter.data.mul_(2)
    return model.double()


def batch_of(kind: str) -> Batch:
    generator = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(90, (2, 3, 16), generator=generator)
    targets[0, 9:] = IGNORE_INDEX
    if kind == "seq2seq":
        return Batch(tokens, targets, source=StackRows(tokens.flip(1)))
    if kind == "masked":
        targets[torch.rand(targets.shape, generator=generator) < 0.6] = IGNORE_INDEX
        (places,) = (targets.flatten() != IGNORE_INDEX).nonzero(as_tuple=True)
        return Batch(tokens, targets, target_positions_P=places)
    return Batch(tokens, targets)


@pytest.mark.parametrize("kind", SIZES)
def test_the_divergence_of_each_target_is_added_and_an_evaluation_has_none(kind):
    student, teacher = build(SIZES[kind], 1, 2), build(SIZES[kind], 2, 3)
    settings = DistillConfig(teacher="-", weight=0.5, temperature=2.0)
    objective = ObjectiveConfig(kind=kind, distill=settings)
    module = TrainModule(student.eval(), build_loss(objective), shown=("distill_loss",))
    module.teacher = Teacher(teacher.eval(), settings)
    module.training = True  # without dropout
    batch = batch_of(kind)
    loss_sum, sums = module(batch)
    found = torch.autograd.grad(loss_sum, [*student.parameters()])
    learned = batch.targets_BT.flatten() != IGNORE_INDEX
    scores, known = (
        model(batch, logits=True).logits_BTV[..., :90].flatten(0, 1)[learned] for model in (student, teacher)
    )
    q, p = ((one / 2).log_softmax(dim=1) for one in (scores, known.detach()))
    added = 0.5 * 4 * torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
    plain = torch.nn.functional.cross_entropy(scores, batch.targets_BT.flatten()[learned], reduction="sum")
    expected = torch.autograd.grad(plain + added, [*student.parameters()])
    torch.testing.assert_close(loss_sum, plain + added, rtol=1e-10, atol=0)
    named = module.layout.unpack(sums.tolist())
    assert named["shown.distill_loss"][0] == pytest.approx(added.item()) and named["nll"][0] == pytest.approx(
        plain.item()
    )
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-8, atol=1e-11)
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert [*module.parameters()] == [*student.parameters()], "no engine sees the teacher"
    module.eval()
    torch.testing.assert_close(module(batch)[0], plain)


@pytest.mark.parametrize(
    ("preset", "changes", "message"),
    [
        (
            "bert-tiny",
            {},
            "has encoder and model.head.kind=lm, the model decoder; choose another objective",
        ),
        ("llama-tiny", {"max_seq_len": 8}, "reads 8 tokens, and rows have 16; .*, or shorter rows"),
        ("llama-tiny", {"vocab_size": 91}, "a vocabulary of 91, and the model one of 90; .* with its tokenizer"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(preset, changes, message):
    sizes = {"vocab_size": 90, "max_seq_len": 16}
    student, teacher = (
        parse_model(expand_preset({"preset": name, **sizes, **values}))
        for name, values in (("llama-tiny", {}), (preset, changes))
    )
    config = SimpleNamespace(model=student, lengths=RowLengths(16, 16))
    with pytest.raises(ConfigError, match=message):
        check_teacher(SimpleNamespace(config=teacher, path="teacher"), config, None)


def test_micro_batches_add_up_to_the_whole():
    student, teacher = build("llama-tiny", 1, 2), build("llama-tiny", 2, 3)
    settings = DistillConfig(teacher="-", kind="reverse_kl")
    module = TrainModule(student, build_loss(ObjectiveConfig(distill=settings)), shown=("distill_loss",))
    module.teacher = Teacher(teacher.eval(), settings)
    batch = batch_of("causal")
    rows = [Batch(batch.tokens_BT[row : row + 1], batch.targets_BT[row : row + 1]) for row in range(3)]
    whole, parts = module(batch), [module(row) for row in rows]
    torch.testing.assert_close(whole[0], sum(loss for loss, _ in parts))
    torch.testing.assert_close(whole[1], sum(sums for _, sums in parts))
