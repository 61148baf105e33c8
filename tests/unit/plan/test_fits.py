"""What a launcher is told before it submits: batches that cannot be cut, and layouts that are predicted not to fit."""

import re
from dataclasses import asdict, replace

import pytest

from pretrain.config.engine import ParallelConfig
from pretrain.config.load import load_config
from pretrain.plan.cluster import Cluster
from pretrain.plan.estimate import PlanOptions, plan_facts
from pretrain.plan.gpus import find_gpu
from pretrain.plan.memory import host_bytes, largest_micro, memory_limit, rank_memory
from pretrain.plan.roofline import plan_work, predict_rate, wire_bytes
from pretrain.plan.search import check_fits, divisors, parse_sweep, search, sweep
from pretrain.plan.task import ParallelLayout, changes, task_of

GPT2 = ["model.preset=gpt2-124m", "model.vocab_size=50257", "batch.seq_len=1024", "engine.precision=bf16"]
LLAMA = ["model.preset=llama3-8b", "model.vocab_size=128256", "batch.seq_len=8192", "engine.precision=bf16"]
LLAMA += ["optim.kind=adamw", "optim.muon=null"]


def config_of(*overrides):
    return load_config("configs/run/quickstart.yaml", overrides)


def nodes_of(name, nodes=1, per_node=8):
    return Cluster(nodes, per_node, find_gpu(name))


def test_what_divides_and_fits_has_no_problem():
    config = config_of(*GPT2, "batch.global_tokens=524288", "batch.micro=16")
    assert check_fits(config, nodes_of("h100", 4)) == []


def test_a_run_shorter_than_its_warm_up_is_a_warning_of_plan_and_launch():
    (problem,) = check_fits(config_of("train.steps=8"), nodes_of("cpu", 1, 2))
    assert (problem.kind, problem.refuses) == ("schedule", False)
    assert problem.what == "the warm-up of 10 steps is cut to 2, as the schedule has 8 steps in all"


def test_a_batch_that_does_not_divide_is_named_with_the_nearest_sizes():
    config = config_of(*GPT2, "batch.global_tokens=524288", "batch.micro=24")
    (problem,) = check_fits(config, nodes_of("h100"))
    assert problem.kind == "batch"
    assert "seq_len 1024 x micro 24 x ranks 8 = 196608" in problem.what
    assert problem.fix == "use 393216 or 589824, or batch.micro=16"
    assert "batch.global_tokens=524288 must be a multiple" in str(problem.error())


@pytest.mark.parametrize(
    ("key", "recipe"),
    [("parallel.experts=4", "experts_quickstart"), ("engine.zero_hpz=4", "quickstart")],
)
def test_ranks_that_groups_do_not_divide_are_not_mended_by_another_micro_batch(key, recipe):
    given = ["batch.global_tokens=24576", "batch.seq_len=256", "batch.micro=2", "engine.zero_stage=3", key]
    config = load_config(f"configs/run/{recipe}.yaml", given)
    cluster = nodes_of("cpu", per_node=6)
    (problem,) = check_fits(config, cluster)
    assert (problem.what, problem.fix) == (f"{key} must divide the number of ranks, 6", "start 4 or 8 ranks")
    assert search(config, task_of(config), cluster) == []
    (point,) = sweep(config, task_of(config), cluster, [1])
    assert point.why == f"{key} does not divide 6 ranks"


def test_one_process_is_not_several():
    config = config_of("engine.kind=single", "engine.zero_stage=0")
    (problem,) = check_fits(config, nodes_of("cpu", 1, 2))
    assert problem.what == "engine.kind=single is one process, not 2"


def test_what_does_not_fit_is_refused_with_the_nearest_layout_that_does():
    config = config_of(*LLAMA, "batch.global_tokens=4194304", "batch.micro=4")
    cluster = nodes_of("h100")
    (problem,) = check_fits(config, cluster)
    assert problem.kind == "memory"
    assert re.match(r"a rank needs \d+\.\d GiB, of the 79\.1 GiB of H100 SXM 80GB, with batch\.micro=4", problem.what)
    overrides = re.findall(r"[a-z_]+\.[a-z_]+=\w+", problem.fix)
    assert overrides == ["batch.micro=1"]
    mended = config_of(*LLAMA, "batch.global_tokens=4194304", "batch.micro=4", *overrides)
    assert check_fits(mended, cluster) == []


def test_a_model_that_no_layout_fits_is_said_to_need_more():
    config = config_of(*LLAMA, "model.preset=llama3-70b", "batch.global_tokens=4194304", "batch.micro=1")
    (problem,) = check_fits(config, nodes_of("l4", 1, 1))
    assert "no layout fits 1 x L4 24GB" in problem.fix


def test_every_layout_that_is_found_fits_and_the_first_is_the_fastest():
    config, cluster = config_of(*LLAMA, "batch.global_tokens=4194304", "batch.micro=1"), nodes_of("h100")
    found = search(config, task_of(config), cluster)
    assert len(found) == 5
    for one in found:
        assert one.memory_bytes <= memory_limit(cluster)
        assert one.layout.micro * one.layout.accumulation * cluster.size == config.batch.rows
    # Sorted to within half a per cent.
    assert all(one.rate.step_s >= found[0].rate.step_s * 0.995 for one in found)


@pytest.mark.parametrize(
    "given",
    [
        (),
        ("engine.activation_checkpointing=full", "engine.activation_checkpointing_every=2"),
        ("engine.feedforward_tiles=4",),
        ("engine.gradients=fp32",),
        ("finetune={kind: lora, dora: true}", "init.from=models/base"),
        ("engine.precision=fp16",),
        ("engine.kind=ddp", "engine.zero_stage=0", "model.preset=llama-1b"),
        ("optim.kind=muon",),
        ("parallel.experts=8", "model.preset=qwen3_moe-30b-a3b"),
    ],
    ids=lambda given: " ".join(given[:1]),
)
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.long)])
def test_a_found_layout_is_a_config_that_loads(given, step):
    base = [*LLAMA, "batch.global_tokens=4194304", "batch.micro=1", "engine.zero_stage=2", *given]
    config, cluster = config_of(*base), nodes_of("h200", 4)
    found = search(config, task_of(config), cluster, count=99)
    assert found
    for one in found[::step]:
        loaded = config_of(*base, *one.layout.overrides())
        assert changes(one.layout, loaded) == []
        layout = replace(one.layout, engine=loaded.engine)
        assert rank_memory(task_of(loaded), layout, cluster).total == one.memory_bytes


def test_the_largest_micro_batch_fits_and_one_more_row_does_not():
    config, cluster = config_of(*GPT2, "batch.global_tokens=524288", "batch.micro=1"), nodes_of("a10")
    task = task_of(config)
    most = largest_micro(task, config.engine, cluster, 10_000)
    needed = [rank_memory(task, ParallelLayout(config.engine, most + more, 1), cluster).total for more in (0, 1)]
    assert needed[0] <= memory_limit(cluster) < needed[1]


def test_a_batch_that_grows_is_planned_by_its_tokens():
    """A hundred steps of 2^19 tokens, and four hundred of 2^20, take as long as nine hundred of the former."""
    first, later = 2**19, 2**20
    growth = f"batch.schedule=[{{tokens: {100 * first}, global_tokens: {later}}}]"
    given = [*GPT2, f"batch.global_tokens={first}", "batch.micro=16"]
    configs = [config_of(*given, growth, "train.steps=500"), config_of(*given, "train.steps=900")]
    growing, constant = (plan_facts(config, nodes_of("h100"), PlanOptions()) for config in configs)
    assert growing["course"]["total_s"] == pytest.approx(constant["course"]["total_s"])
    assert growing["data"]["needed_tokens"] == constant["data"]["needed_tokens"] == 900 * first
    odd = config_of(*given, growth.replace(str(later), str(3 * first // 2 + 1024)), "train.steps=500")
    (problem,) = check_fits(odd, nodes_of("h100"))
    assert problem.what.startswith(
        "batch.schedule.0.global_tokens=787456 must be a multiple of seq_len 1024 x micro 16"
    )


def test_the_average_of_the_weights_is_counted_where_the_masters_lie():
    """4 bytes a parameter: cut from stage 1 on, with the optimizer's state on the device or the host, and saved."""
    given = [*LLAMA, "batch.global_tokens=4194304", "batch.micro=1"]
    plain, averaged = config_of(*given), config_of(*given, "optim.ema.horizon_steps=1000")
    parameters, cluster = task_of(plain).values.trained, nodes_of("h100")

    def added(stage, place="none"):
        found = []
        for config in (averaged, plain):
            engine = config.engine.model_copy(update={"zero_stage": stage, "offload_optimizer": place})
            layout = ParallelLayout(engine, 1, 1)
            memory = rank_memory(task_of(config), layout, cluster)
            found.append((memory.optimizer, host_bytes(task_of(config), layout, cluster)))
        return [round((ours - without) / (parameters / 8), 6) for ours, without in zip(*found, strict=True)]

    assert [added(stage) for stage in (0, 1, 3)] == [[32.0, 4.0], [4.0, 4.0], [4.0, 4.0]], "the host has a save's copy"
    assert added(2, "cpu") == [0.0, 8.0]
    sizes = [
        plan_facts(config, nodes_of("h100"), PlanOptions())["course"]["checkpoint_bytes"]
        for config in (averaged, plain)
    ]
    assert sizes[0] - sizes[1] == 4 * parameters


def test_offloading_and_sharding_take_memory_off_the_device():
    config = config_of(*LLAMA, "batch.global_tokens=4194304", "batch.micro=1")
    task, cluster = task_of(config), nodes_of("h100", 2)

    def state(**update):
        found = rank_memory(task, ParallelLayout(config.engine.model_copy(update=update), 1, 1), cluster)
        return found.weights + found.gradients + found.optimizer

    stages = [state(zero_stage=stage) for stage in range(4)]
    assert stages == sorted(stages, reverse=True)
    assert state(zero_stage=2, offload_optimizer="cpu") < stages[2]
    assert state(zero_stage=3, offload_optimizer="cpu", offload_params="cpu") < stages[3]


def test_copies_for_recoveries_are_counted_on_the_host():
    """Three in /dev/shm and the buffer that they are written from, beside the buffer of a save."""
    given = [*LLAMA, "batch.global_tokens=4194304", "batch.micro=1", "run.recover=spare"]
    sizes = []
    for every in (0, 5):
        config = config_of(*given, f"run.recover_every_steps={every}")
        sizes.append(host_bytes(task_of(config), ParallelLayout(config.engine, 1, 1), nodes_of("h100")))
    assert sizes[1] == 5 * sizes[0] > 0


def test_offloaded_activations_are_on_the_host_and_cost_what_no_pass_hides():
    config, cluster = config_of(*LLAMA, "batch.global_tokens=4194304", "batch.micro=1"), nodes_of("h100")
    task, found = task_of(config), {}
    for mode in ("none", "full"):
        update = {"activation_checkpointing": mode}
        for place in ("none", "cpu"):
            engine = config.engine.model_copy(update=update | {"offload_activations": place})
            layout = ParallelLayout(engine, 1, 1)
            memory = rank_memory(task, layout, cluster).activations, host_bytes(task, layout, cluster)
            found[mode, place] = (*memory, predict_rate(task, layout, cluster).step_s)
    for mode in ("none", "full"):
        (device, host, _), (less, more, _) = found[mode, "none"], found[mode, "cpu"]
        assert less < device and more > host
    assert found["full", "cpu"][2] == found["full", "none"][2], "the copies of inputs alone are hidden"
    assert found["none", "cpu"][2] > found["none", "none"][2]


def test_the_curve_keeps_the_batch_and_ends_where_rows_do():
    config = config_of(*GPT2, "batch.global_tokens=65536", "batch.micro=8")
    points = sweep(config, task_of(config), nodes_of("h100"), parse_sweep("nodes=1..16"))
    assert [(p.nodes, p.micro, p.accumulation) for p in points[:4]] == [(1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1)]
    assert points[4].rate is None and points[4].why == "64 rows a step do not divide over 128 ranks"
    assert points[0].efficiency == 1.0
    assert points[3].efficiency < 1.0


@pytest.mark.parametrize("text", ["1..8", "nodes=8", "nodes=0..4", "nodes=8..2", "gpus=1..8"])
def test_a_sweep_that_is_none_is_refused(text):
    from pretrain.errors import ConfigError

    with pytest.raises(ConfigError, match=r"is no sweep; write --sweep nodes=1\.\.512"):
        parse_sweep(text)


def test_an_unknown_gpu_is_refused_with_the_nearest():
    from pretrain.errors import ConfigError

    with pytest.raises(ConfigError, match="unknown GPU 'h10'; use h100"):
        find_gpu("h10")


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]


def test_chunks_of_the_loss_are_larger_on_large_gpus_and_in_fewer_copies_where_compiled():
    options = [*LLAMA, "batch.global_tokens=262144", "batch.micro=4", "engine.zero_stage=3"]
    config, compiled = config_of(*options, "engine.compile=false"), config_of(*options)
    sums = 128256 * 4096 * 4  # the gradient of the head in fp32

    def loss_bytes(config, name):
        cluster = nodes_of(name)
        layout = ParallelLayout(config.engine, config.batch.micro, 1)
        return rank_memory(task_of(config), layout, cluster).loss - sums

    assert loss_bytes(config, "a100-40") == 8 * 2**26
    assert loss_bytes(config, "a100") == 8 * 2**28
    assert loss_bytes(compiled, "a100") == 4 * 2**28


def test_a_copy_of_the_weights_on_each_node_is_counted_and_kept_by_the_search():
    config = config_of(*LLAMA, "batch.global_tokens=4194304", "batch.micro=1", "engine.zero_stage=3")
    copied = config_of(
        *LLAMA, "batch.global_tokens=4194304", "batch.micro=1", "engine.zero_stage=3", "engine.zero_hpz=8"
    )
    cluster, layout = nodes_of("h100", 4), ParallelLayout(copied.engine, 1, 1)
    plain = rank_memory(task_of(config), replace(layout, engine=config.engine), cluster)
    found = rank_memory(task_of(copied), layout, cluster)
    assert found.weights - plain.weights == pytest.approx(2 * task_of(copied).values.weights / 8)
    layouts = search(copied, task_of(copied), cluster)
    assert layouts and {(one.layout.engine.zero_stage, one.layout.engine.offload_params) for one in layouts} == {
        (3, "none")
    }


def test_ranks_that_share_rows_are_planned_with_their_part_of_the_activations():
    given = [*LLAMA, "batch.global_tokens=262144", "batch.seq_len=8192", "batch.micro=1", "engine.zero_stage=3"]
    alone, shared = (config_of(*given, f"parallel.sequence={ranks}") for ranks in (1, 4))
    cluster = nodes_of("h100")
    whole, part = (plan_facts(config, cluster, PlanOptions()) for config in (alone, shared))
    assert part["layout"]["accumulation"] == 4 * whole["layout"]["accumulation"]
    assert part["memory"]["activations"] == pytest.approx(whole["memory"]["activations"] / 4, rel=0.2)
    assert part["memory"]["optimizer"] == whole["memory"]["optimizer"], "cut over all ranks"
    assert whole["exchange"] == {"ranks": 1, "bytes": 0, "seconds": 0.0}
    # 32 layers, 1,024 rows of 2,048 tokens over 2 groups; 32 + 2 x 8 + 32 heads of 128 in bf16, forward and backward.
    assert part["exchange"]["bytes"] == 16 * 2048 * 32 * 80 * 128 * 2 * 2
    faster, slower = (facts["rates"]["predicted"]["parts_s"] for facts in (whole, part))
    assert slower["projections"] == pytest.approx(faster["projections"])
    assert slower["network"] > faster["network"] + part["exchange"]["seconds"]


def test_ranks_that_share_experts_are_planned_with_their_part_and_what_they_exchange():
    given = [
        *LLAMA,
        "model.preset=qwen3_moe-30b-a3b",
        "batch.global_tokens=1048576",
        "batch.seq_len=4096",
        "batch.micro=1",
    ]
    alone, shared = (config_of(*given, f"parallel.experts={ranks}") for ranks in (1, 8))
    cluster = nodes_of("h100", 4)
    of_experts = 48 * 128 * 3 * 2048 * 768
    for stage, kept in enumerate(["weights gradients optimizer", "weights gradients", "weights", ""]):
        update = {"zero_stage": stage}
        whole, part = (
            asdict(rank_memory(task_of(config), ParallelLayout(engine, 1, 1), cluster))
            for config, engine in ((one, one.engine.model_copy(update=update)) for one in (alone, shared))
        )
        fewer = {name for name in ("weights", "gradients", "optimizer") if part[name] < whole[name]}
        assert fewer == set(kept.split()), "what no stage shards; the rest is cut over all ranks already"
        if stage < 3:
            assert whole["weights"] - part["weights"] == 2 * of_experts * 7 // 8
        layout = ParallelLayout(alone.engine.model_copy(update=update), 1, 1)
        sent = [wire_bytes(plan_work(task_of(one), layout, 32), 32).total(1) for one in (alone, shared)]
        assert sent[1] < 0.2 * sent[0], "experts are reduced over 4 ranks, an eighth on each"
    plain, found = (plan_facts(config, cluster, PlanOptions()) for config in (alone, shared))
    assert plain["experts"] == {"ranks": 1, "bytes": 0, "seconds": 0.0}
    # 8 micro-batches of 4,096 tokens, 48 layers, 8 experts a token, 2,048 wide in bf16: to them and back, both passes.
    counts = 8 * 48 * 128 * 4
    assert found["experts"]["bytes"] == 8 * 48 * 4096 * 8 * 2048 * 2 * 4 + counts
    assert found["rates"]["predicted"]["parts_s"]["network"] > found["experts"]["seconds"] > 0
    layouts = search(shared, task_of(shared), cluster)
    assert all(one.layout.engine.zero_stage for one in layouts), "ZeRO 0 in bf16 is refused"
    points = sweep(shared, task_of(shared), replace(cluster, per_node=4), [1, 2])
    assert points[0].why == "parallel.experts=8 does not divide 4 ranks"


def test_the_search_and_the_curve_count_groups_of_ranks():
    config = config_of(*GPT2, "batch.global_tokens=8192", "batch.micro=1", "parallel.sequence=4")
    cluster = nodes_of("h100")
    for one in search(config, task_of(config), cluster):
        assert one.layout.micro * one.layout.accumulation == 4  # 8 rows, 2 groups
    points = sweep(config, task_of(config), cluster, [1, 4, 8])
    assert [point.micro * point.accumulation for point in points] == [4, 1, 0]
    assert points[-1].why == "8 rows a step do not divide over 64 ranks, 4 a row"
    odd = sweep(config, task_of(config), nodes_of("h100", 1, 2), [1])
    assert odd[0].why == "parallel.sequence=4 does not divide 2 ranks"
    (problem,) = check_fits(config, nodes_of("h100", 1, 2))
    assert problem.what == "parallel.sequence=4 must divide the number of ranks, 2"


@pytest.mark.parametrize(
    ("items", "name", "times", "fix"),
    [
        (("parallel.tensor=8",), "tensor=8", "four times", "use one of 1, 2, 4"),
        (("parallel.sequence=8",), "sequence=8", "twice", "use one of 1, 2, 4"),
        (("parallel.sequence=4", "parallel.tensor=2"), "sequence=4", "twice", "use one of 1, 2"),
        (("parallel.sequence=2", "parallel.tensor=8"), "tensor=8", "four times", "use one of 1, 2, 4"),
    ],
)
def test_groups_of_ranks_over_nodes_are_warned_of(items, name, times, fix):
    config = load_config("configs/run/llama_1b.yaml", [*items, "batch.micro=1"])
    (problem,) = check_fits(config, nodes_of("h100", 4, 4))
    assert not problem.refuses and problem.kind == "nodes"
    text = f"parallel.{name} has groups on several nodes of 4 ranks: each layer waits for the network between them"
    assert problem.what == f"{text} {times} a pass"
    assert problem.fix == fix
    whole = {8: nodes_of("h100", 2), 16: nodes_of("h100", 2, 16)}[config.parallel.row_ranks]
    assert check_fits(config, whole) == []


def test_groups_of_experts_over_nodes_are_warned_of():
    ((what, fix),) = ParallelConfig(experts=8).across_nodes(16, 4)
    assert what.startswith("parallel.experts=8 has groups on several nodes of 4 ranks") and what.endswith(
        "twice a pass"
    )
    assert fix == "use one of 1, 2, 4"
    assert not [*ParallelConfig(experts=4, sequence=2).across_nodes(16, 4)]
