"""`flatshard plan`: the shapes it plans for, what it says, and what it says to bad input."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import plan as by_plan
from benchmarks.moe import MOE_TINY, mixture
from benchmarks.systems import get_system
from benchmarks.table import CASES, NETWORK
from flatshard import shard_model
from flatshard.cli import main
from flatshard.engine.tree.build import units_below
from flatshard.rehearsal import rehearse
from flatshard.rehearsal.network import difference, get_network
from flatshard.tools.activations import activations_of
from flatshard.tools.dry_run import memory_of, time_of
from flatshard.tools.model_shapes import NAMED, load_model, load_runnable, model_of, skeleton
from flatshard.tools.plan import compare_strategies
from flatshard.tools.strategy_plan import Machine, Training
from flatshard.tools.timing import Speed
from flatshard.train.model import Llama, LlamaConfig
from tests.dist.models import Net

COUNTS = {
    "llama-1b": 1_498_482_688,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
}


@pytest.mark.parametrize("name", NAMED)
def test_named_shapes_have_the_published_sizes(name):
    assert load_model(name).numel == COUNTS[name]


def shapes(model):
    return sorted((unit.is_embedding, sorted(tensor.shape for tensor in unit.tensors)) for unit in model.units)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"num_key_value_heads": 1, "head_dim": 24}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 8}),
        ("mixtral", {"num_local_experts": 3}),
        ("qwen3_moe", {"head_dim": 8, "num_experts": 6, "moe_intermediate_size": 24, "mlp_only_layers": [1]}),
    ],
)
def test_a_configuration_has_the_units_of_the_model_it_configures(kind, options, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 101}
    config = transformers.AutoConfig.for_model(
        kind, num_attention_heads=4, **{**sizes, "num_key_value_heads": 2, **options}
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    config.save_pretrained(tmp_path)
    found, wanted = load_model(str(tmp_path)), model_of(model)
    assert shapes(found) == shapes(wanted)
    assert [call.unit for call in found.root.inner] == [call.unit for call in wanted.root.inner]


@pytest.mark.parametrize("units", ["auto", ["tests.dist.models.Block"]])
def test_units_and_groups_are_those_that_shard_model_makes(units):
    model = Net()
    model.blocks[1].up.requires_grad_(False)
    wanted = model_of(model, units)
    with rehearse(2, "free"):
        shard_model(model, units=units)
        found = [(name or "(root)", unit) for name, unit in units_below(model)]
    by_name = {unit.name: unit for unit in wanted.units}
    assert {name for name, _ in found} == by_name.keys()
    for name, unit in found:
        members = [(tuple(m.sharded.shape), m.sharded.requires_grad) for group in unit.groups for m in group.params]
        assert sorted(members) == sorted((t.shape, t.trainable) for t in by_name[name].tensors)
        assert unit.unshard_in_backward != by_name[name].is_embedding


def net():
    return Net(depth=5)


def not_a_model():
    return 7


def frozen() -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(False)


def needs_more(width):
    return nn.Linear(width, width)


def test_the_largest_model_is_planned_from_shapes(capsys, tmp_path):
    path = tmp_path / "plan.json"
    command = ["plan", "llama-405b", "--devices", "512", "--memory", "80GiB", "--json", str(path)]
    assert main([*command, "--tokens", "8192", "--tflops", "400"]) == 0
    printed = capsys.readouterr().out
    assert [line.split("  ")[0] for line in printed.splitlines()[4:11]] == [
        "ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3", "HSDP", "HFSDP", "ZeRO 3 offload"
    ]  # fmt: skip
    assert "h100-nvlink (360 GB/s inside a node, 45 GB/s between nodes)" in printed
    assert "keep_for_backward=" not in printed  # activations, which are not known, need that memory too
    assert any(line.startswith("ZeRO 3: ") for line in printed.splitlines())  # whether formats pay is told after it
    assert 'mesh = init_device_mesh("cuda", (512,), mesh_dim_names=("dp",))' in printed
    plan = json.loads(path.read_text())
    assert plan["advice"] == "ZeRO 3"
    rows = {row["name"]: row for row in plan["strategies"]}
    assert [name for name, row in rows.items() if row["fits"]] == ["ZeRO 3", "ZeRO 3 offload"]
    main_bytes = rows["ZeRO 3"]["memory"]["resting"]["main"]
    assert main_bytes == pytest.approx(4 * COUNTS["llama-405b"] / 512, rel=0.001)
    assert rows["ZeRO 3"]["memory"]["resting"]["state"] == 2 * main_bytes
    assert rows["HSDP"]["mesh"] == [64, 8]
    weights = COUNTS["llama-405b"] - 128256 * 16384  # an embedding multiplies nothing
    least = 6 * weights * 8192 / 400e12
    for name in ("HSDP", "ZeRO 3"):
        step = rows[name]["step"]
        assert max(least, rows[name]["wire"]) < step["total"] < 1.1 * (least + step["waits"] + step["optimizer"])
        assert step["flops"] == pytest.approx(6 * weights * 8192, rel=0.001)
        mfu = f"{100 * step['flops'] / step['total'] / 989e12:.0f}%"
        cells = next(line.split() for line in printed.splitlines() if line.startswith(f"{name}  "))
        assert cells[-2:] == [mfu, "yes" if rows[name]["fits"] else "no"]
        assert float(cells[-3].replace(",", "")) == pytest.approx(512 * 8192 / step["total"], rel=0.001)
    assert rows["HSDP"]["step"]["waits"] < 0.05 * rows["ZeRO 3"]["step"]["waits"]  # on a fast link little is exposed


@pytest.mark.parametrize(
    ("model", "devices", "memory", "advice", "why"),
    [
        ("llama-1b", 8, 80e9, "ZeRO 0", "it takes the least time on the network"),
        ("llama-8b", 8, 40e9, "ZeRO 1", "it takes the least time on the network"),
        ("llama-8b", 8, 21e9, "ZeRO 3", "no other strategy fits"),
        ("llama-8b", 64, 40e9, "HSDP", "it takes the least time on the network"),
        ("llama-8b", 2, 40e9, "ZeRO 3 offload", "On 4 devices, ZeRO 3 takes"),
        ("mixtral-8x7b", 64, 10e9, "ZeRO 3 offload ep 8", "On 256 devices, ZeRO 3 ep 8 takes 6.47 GB and fits"),
        ("llama-1b", 8, 1e9, None, "More devices do not help"),
    ],
)
def test_what_is_recommended_and_why(model, devices, memory, advice, why):
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16, "main_dtype": torch.float32}
    training = Training(precision=type(Training().precision)(**bf16))
    plan = compare_strategies(load_model(model), Machine(devices, memory, get_network("h100-nvlink")), training)
    assert plan.advice == advice
    assert why in plan.why
    assert plan.why in plan.table()
    chosen = [row for row in plan.rows if row.name == advice]
    assert all(row.fits for row in chosen)


def test_recompute_is_suggested_where_it_is_the_answer():
    """And the lines keep weights for backward only where activations are known to leave room for them."""
    training = Training(activations=60e9, recomputed=2e9)
    machine = Machine(8, 40e9, get_network("h100-nvlink"))
    plan = compare_strategies(load_model("llama-1b"), machine, training)
    assert plan.advice is None
    assert "With --recompute, activations take 2.00 GB instead of 60.0 GB, and ZeRO 0 fits." in plan.why
    plan = compare_strategies(load_model("llama-8b"), replace(machine, devices=2), training)
    assert "instead of 60.0 GB, and ZeRO 3 offload fits. On 8 devices, ZeRO 3 takes" in plan.why
    wide = replace(training, activations=20e9)
    plan = compare_strategies(load_model("llama-8b"), replace(machine, devices=64), wide)
    assert plan.advice == "HFSDP"
    assert "faster" not in plan.why  # HSDP would send as much
    slow = replace(machine, devices=64, memory=30e9)
    plan = compare_strategies(load_model("llama-8b"), slow, replace(wide, activations=18e9))
    assert plan.advice == "ZeRO 3"
    assert "With --recompute, HSDP also fits, and is likely to be faster." in plan.why
    kept = {}
    for size in (None, 0.0, 8e9):
        plan = compare_strategies(load_model("llama-8b"), machine, Training(activations=size))
        kept[size] = replace(plan, advice="ZeRO 3").kept_bytes
    assert kept[None] == 0
    assert kept[0.0] > kept[8e9] > 0


def test_offload_leaves_gathered_weights_and_staging_on_the_device():
    plan = compare_strategies(load_model("llama-8b"), Machine(8, 40e9, get_network("h100-nvlink")), Training())
    rows = {row.name: row.memory for row in plan.rows}
    device, host = rows["ZeRO 3"], rows["ZeRO 3 offload"]
    assert host.resting.total == host.peak.main == host.peak.state == 0
    assert host.host == pytest.approx(device.resting.total + 4 * COUNTS["llama-8b"] / 8, rel=0.001)
    moving = device.peak.total - device.resting.total
    assert max(device.most_gathered, device.most_staging) < host.peak.total < moving + 0.1 * device.resting.total


def test_only_what_does_not_fit_is_offloaded():
    model, network = load_model("llama-8b"), get_network("h100-nvlink")

    def plan(memory, activations):
        return compare_strategies(model, Machine(1, memory, network), Training(activations=activations))

    found = plan(80e9, 8e9)
    rows = {row.name: row for row in found.rows}
    whole, all_of_it = rows["ZeRO 3"], rows["ZeRO 3 offload"]
    peak = whole.memory.peak
    assert found.advice == "ZeRO 3 offload"
    assert 0 < found.offload_bytes < peak.main
    left = whole.peak - found.offload_bytes * (1 + (peak.state + peak.gradients) / peak.main)
    assert left + all_of_it.memory.peak.gathered + all_of_it.memory.peak.staging <= found.machine.usable
    assert f"offload_bytes={found.offload_bytes:_})" in found.python()
    assert plan(60e9, 8e9).offload_bytes > found.offload_bytes  # a smaller device keeps less
    assert "offload_bytes" not in plan(26e9, 8e9).python()  # all of it goes
    assert "offload_bytes" not in plan(80e9, None).python()  # activations are unknown


def test_stacked_experts_are_not_padded_where_there_are_fewer_than_devices():
    machine = Machine(64, 80e9, get_network("h100-nvlink"))
    training = Training(speed=Speed(400e12, 8192, host=0.0), expert_parts=1)
    for layout in ("tensor", "auto"):
        plan = compare_strategies(load_model("mixtral-8x7b"), machine, replace(training, layout=layout))
        rows = {row.name: row for row in plan.rows}
        for name in ("ZeRO 3", "HFSDP"):
            assert rows[name].memory.resting.main == pytest.approx(4 * COUNTS["mixtral-8x7b"] / 64, rel=0.001)
        assert plan.advice == "ZeRO 3"
        used = COUNTS["mixtral-8x7b"] - 32 * 6 * 3 * 4096 * 14336  # two of eight experts
        step = rows["HSDP"].step
        moved = 1.5 * 45e9 * rows["HSDP"].wire / 3.35e12  # at most, by what travels beside kernels
        assert 0 < step.total - step.waits - step.optimizer - 6 * used * 8192 / 400e12 < 10 * moved


def test_a_module_is_planned_from_an_import_path(capsys):
    assert main(["plan", "tests.tools.test_plan:net", "--devices", "4", "--memory", "1MB"]) == 0
    with torch.device("meta"):
        wanted = model_of(Net(depth=5)).numel
    assert capsys.readouterr().out.startswith(f"{wanted:,} parameters in 8 units; 4 devices")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nonsense"], "must be one of llama-1b"),
        (["torch.nn:ReLU"], "no parameter requires gradients"),
        (["tests.tools.test_plan:frozen"], "no parameter requires gradients"),
        (["no/such/config.json"], "cannot be read as JSON"),
        (["no.such.module:model"], "cannot be imported"),
        (["tests.tools.test_plan:missing"], "cannot be imported"),
        (["tests.tools.test_plan:not_a_model"], "returned int, not a torch.nn.Module"),
        (["tests.tools.test_plan:needs_more"], "calling it raised TypeError"),
        (["llama-1b", "--json", "/no/such/folder/plan.json"], "No such file"),
        (["llama-1b", "--batch", "0", "--length", "8"], "--batch 0 --length 8: give both, at least 1"),
        (["llama-1b", "--devices", "0"], "--devices 0: must be at least 1"),
        (["llama-1b", "--devices", "70000"], "--devices 70000: must be at most 65536"),
        (["llama-1b", "--spare", "5"], "--spare 5: must be a fraction"),
        (["llama-1b", "--memory", "80XB"], "must be a number of GB"),
        (["llama-1b", "--memory", "nan"], "must be a number of GB"),
        (["llama-1b", "--memory", "0"], "--memory 0: must be more than 0"),
        (["llama-1b", "--network", "string"], "network='string': must be one of"),
        (["llama-1b", "--optimizer", "newton"], "must be one of adamw"),
        (["llama-1b", "--param-dtype", "fp8"], "must be a dtype of torch"),
        (["llama-1b", "--param-dtype", "int32"], "floating-point"),
        (["llama-1b", "--microbatches", "0"], "microbatches must be at least 1"),
        (["llama-1b", "--tokens", "8"], "is missing: the step time needs both --tokens and --tflops"),
        (["llama-1b", "--tokens", "8", "--tflops", "fast"], "must be a number of TFLOP/s, or 'measured'"),
        (["llama-1b", "--tokens", "8", "--tflops", "nan"], "--tflops nan: must be more than 0, and finite"),
        (["llama-1b", "--tokens", "nan", "--tflops", "8"], "--tokens nan: must be more than 0, and finite"),
        (["llama-1b", "--tokens", "8", "--tflops", "8", "--memory-bandwidth", "0"], "--memory-bandwidth 0: must be"),
        (["llama-1b", "--tokens", "8", "--tflops", "8", "--host-ms", "nan"], "--host-ms nan: must be at least 0"),
        (["llama-1b", "--ep", "4"], "the model has no stacked experts"),
        (["mixtral-8x7b", "--ep", "16"], "--ep 16: must divide the number of devices, 8, and of experts, 8"),
        (["mixtral-8x7b", "--ep", "0"], "at least 1"),
        (["llama-1b", "--units", "torch.nn.LSTM"], "contains no module of LSTM"),
    ],
    ids=lambda given: str(given)[-30:],
)
def test_bad_input_gives_one_line(arguments, text, capsys):
    defaults = ["--devices", "8", "--memory", "80"]
    assert main(["plan", arguments[0], *defaults, *arguments[1:]]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith("flatshard plan: ")
    assert text in printed.err


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "mixtral"}, "num_local_experts is None"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"hidden_size": 33}, "must be a multiple"),
        ({"vocab_size": -1}, "vocab_size is -1"),
    ],
)
def test_a_configuration_that_says_too_little_is_refused(change, text):
    with pytest.raises(ValueError, match=text):
        skeleton({**NAMED["llama-1b"], **change})


def test_shapes_are_read_without_running_or_filling_anything():
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1 << 20, 1 << 20)) for _ in range(3))

    sys.modules["planned_here"] = module = type(sys)("planned_here")
    module.Large = Large
    try:
        assert load_model("planned_here:Large").numel == 3 * ((1 << 40) + (1 << 20))
    finally:
        del sys.modules["planned_here"]


@pytest.mark.full
def test_formats_are_told_to_pay_only_where_the_wire_is_what_a_step_waits_for(capsys):
    told = {}
    for name, more in {
        "slow": ["--network", "ethernet-100"],
        "fast": [],
        "chosen": ["--network", "ethernet-100", "--gather-format", "int8", "--reduce-format", "int8"],
        "two": ["--network", "ethernet-100", "--gather-format", "float8", "--reduce-format", "int8", "bf16_fp32"],
    }.items():
        given = ["plan", "llama-8b", "--devices", "64", "--memory", "10GB", "--tokens", "8192", "--tflops", "400"]
        assert main([*given, *more]) == 0
        told[name] = capsys.readouterr().out.splitlines()[-1]
    assert re.search(
        r'"int8".* would take the wire from [\d,.]+ to [\d,.]+ ms, and a step from [\d,.]+ to', told["slow"]
    )
    assert re.search(
        r"does not make a step faster: compute hides .* in either case, and .* a step takes [\d,.]+ ms instead of",
        told["fast"],
    )
    for name in ("chosen", "two"):
        found = [float(x.replace(",", "")) for x in re.findall(r"[\d,]+\.\d", told[name])]
        assert told[name].startswith("The formats take the wire from")
        assert found[1] < 0.75 * found[0]
        assert found[3] < 0.75 * found[2]


@pytest.mark.full
def test_a_third_level_is_spanned_by_replicas_and_not_by_shards(capsys):
    given = [
        "plan",
        "llama-8b",
        "--devices",
        "512",
        "--memory",
        "80",
        "--network",
        "h100-pods",
        "--ranks-per-pod",
        "64",
    ]
    assert main([*given, "--tokens", "8192", "--tflops", "400"]) == 0
    said = capsys.readouterr().out
    meshes = re.findall(r"^(HF?SDP(?: pods)?) +(\d+ x \d+)", said, re.M)
    assert meshes == [("HSDP", "64 x 8"), ("HFSDP", "64 x 8"), ("HSDP pods", "8 x 64"), ("HFSDP pods", "8 x 64")]
    assert re.search(r"^HF?SDP pods: ", said, re.M)
    assert main([*given[:-1], "1024", "--tokens", "8192", "--tflops", "400"]) == 0
    assert "HSDP pods" not in capsys.readouterr().out  # one pod holds them all


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("gpt2", "GPT2LMHeadModel"),
        ("gemma2", "Gemma2ForCausalLM"),
        ("bart", "BartForConditionalGeneration"),
        ("vit", "ViTModel"),
    ],
)
@pytest.mark.sampled(2)
def test_whatever_transformers_knows_is_planned(kind, made, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 101, "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
    sizes |= {} if kind == "vit" else {"tie_word_embeddings": True}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, made)(config)
    model.tie_weights()
    found = load_model(str(tmp_path))
    assert found.numel == sum(parameter.numel() for parameter in model.parameters())
    assert len(found.units) >= 4
    (tmp_path / "config.json").write_text('{"model_type": "unheard"}')
    with pytest.raises(ValueError, match="model_type 'unheard': transformers cannot build it"):
        load_model(str(tmp_path))


def test_experts_of_transformers_are_planned_apart(tmp_path):
    """Their module holds an activation beside the stacks."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 101, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    transformers.OlmoeConfig(**sizes, num_experts=16, num_experts_per_tok=4).save_pretrained(tmp_path)
    found = load_model(str(tmp_path))
    assert found.expert_counts == {16}
    assert {tensor.used for unit in found.units for tensor in unit.tensors if tensor.is_expert} == {0.25}
    assert found.experts == ("transformers.models.olmoe.modeling_olmoe.OlmoeExperts",)


def llama():
    return Llama(LlamaConfig(width=32, layers=3, heads=4, kv_heads=2, ffn=64, vocab=50, max_tokens=24))


def really_saved(model, **inputs):
    """Bytes that autograd saves of a forward."""
    saved = {}
    held = {parameter.untyped_storage().data_ptr() for parameter in (*model.parameters(), *model.buffers())}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in held:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(**inputs)
    del out  # which has kept all that has been saved in its place
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def test_activations_of_an_encoder_and_its_decoder(tmp_path):
    """As many tokens out as in."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 101, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 0}
    sizes |= {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    config = transformers.AutoConfig.for_model("bart", **sizes)
    config.save_pretrained(tmp_path)
    model, blocks = load_runnable(str(tmp_path))
    assert len(blocks) == 4
    estimate = activations_of(model, blocks, 2, 24, None)
    tokens = torch.zeros(2, 24, dtype=torch.int64)
    real = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="sdpa").train(model.training)
    assert estimate.saved == pytest.approx(really_saved(real, input_ids=tokens, labels=tokens), rel=0.1)


def test_activations_are_what_a_real_forward_saves():
    model, blocks = load_runnable("tests.tools.test_plan:llama")
    assert [type(block).__name__ for block in blocks] == ["TransformerBlock"] * 3
    estimate = activations_of(model, blocks, 2, 24, None)
    total = really_saved(llama(), tokens=torch.zeros(2, 24, dtype=torch.int64))
    assert estimate.saved == pytest.approx(total, rel=0.02), estimate
    hidden = 2 * 24 * 32 * 4
    assert estimate.inputs == (hidden,) * 3
    assert estimate.recomputed == 3 * hidden + max(estimate.blocks) + estimate.rest
    assert activations_of(model, blocks, 4, 24, None).saved == pytest.approx(2 * estimate.saved, rel=0.02)


def test_a_picture_shows_what_fits_where(capsys):
    assert main(["plan", "llama-1b", "--devices", "16", "--memory", "20GB", "--picture"]) == 0
    lines = capsys.readouterr().out.splitlines()
    marks = {
        line.split("  ")[0]: line[16:].split() for line in lines if line[16:].strip() and set(line[16:]) <= set(" #.")
    }
    assert marks["ZeRO 0"] == ["."] * 8
    assert marks["ZeRO 3"] == [".", *"#######"]
    assert len(marks["HSDP"]) == 4


@pytest.mark.parametrize("model", ["llama", "experts"])
def test_the_python_lines_of_every_strategy_run_and_shard_as_they_say(model):
    make = llama if model == "llama" else lambda: mixture(MOE_TINY)
    with torch.device("meta"):
        shapes = model_of(make() if model == "llama" else mixture(replace(MOE_TINY, ep=1)), "auto", 2)
    training = Training(activations=0.0, recompute=True)
    plan = compare_strategies(shapes, Machine(16, 2e6, get_network("h100-nvlink")), training)
    apart = [row for row in plan.rows if row.ep > 1 or model == "llama"]
    assert len(apart) == (6 if model == "experts" else 7)
    wanted = {row.name: row.memory.resting.main for row in apart}
    for row in apart:
        lines = replace(plan, advice=row.name).python()
        with rehearse(16, "free"):
            names = {"model": make()}
            exec(lines.replace('"cuda"', '"cpu"'), names)
            mains = [group.main.local for _, unit in units_below(names["model"]) for group in unit.groups]
            assert sum(main.nbytes for main in mains) == wanted[row.name.replace(" offload", "")], lines


def test_experts_apart_send_what_the_plan_says():
    setup = CASES["tiny-moe"]
    config, tokens = setup.model, setup.batch * setup.seq
    formula = memory_of(by_plan.shapes_of(setup), by_plan.choice_of(setup))
    with rehearse(setup.world, NETWORK) as rehearsal:
        step = get_system("flatshard")(setup)
        for _ in range(2):
            step()
        before = rehearsal.medium.traffic.snapshot()
        step()
        traffic = difference(rehearsal.medium.traffic.snapshot(), before)
    exchanges = traffic.pop("all_to_all")
    sizes: dict[str, list[int]] = {}
    seconds = 0.0
    for launch in formula.launches:
        entry = sizes.setdefault(launch.kind, [0, 0])
        entry[0] += launch.times
        entry[1] += launch.times * launch.size
        args = launch.kind, launch.size, launch.reach(NETWORK), launch.segments
        seconds += launch.times * NETWORK.seconds(*args)
    head = 4 * (config.vocab + 1) * config.width  # which the benchmarks gather once
    sizes["all_gather"] = [sizes["all_gather"][0] - 1, sizes["all_gather"][1] - head]
    seconds -= NETWORK.seconds("all_gather", head, NETWORK.reach(range(setup.world)), 2)
    assert {kind: [entry.launches, entry.bytes] for kind, entry in traffic.items()} == sizes
    assert seconds == pytest.approx(sum(entry.wire_seconds for entry in traffic.values()))
    # two of tokens in forward and two in backward; what a rank sends to each is counted before, once
    assert exchanges.launches == config.layers * 5
    sent = config.layers * 4 * (4 * tokens * config.chosen * config.width)
    assert exchanges.bytes == pytest.approx(sent + config.layers * 8 * config.experts, rel=0.01)


@pytest.mark.parametrize(
    "case", ["a", *(pytest.param(case, marks=pytest.mark.full) for case in ("b", "c", "e", "e64"))]
)
def test_step_times_are_near_the_rehearsed_ones(case):
    """From the rate of the compute limit of the same run; benchmarks/results has the errors."""
    found = [(limit["ms"], ours["ms"]) for _, name, limit, ours in by_plan.recorded() if name == case]
    assert found
    for limit, ours in found:
        setup = CASES[case]
        estimate = by_plan.estimate(setup, by_plan.reached(setup, 1e-3 * limit))
        assert 1e3 * estimate.total == pytest.approx(ours, rel=0.03)


def test_what_decodes_takes_the_time_of_the_bytes_that_it_reads_and_writes():
    setup = CASES["a"]
    plain = by_plan.choice_of(setup)
    coded = replace(plain, precision=replace(plain.precision, gather_format="int8"))
    model, speed = by_plan.shapes_of(setup), Speed(450e12, 4096, 4096, host=0.0)
    assert 1 < by_plan.estimate(setup, 450e12, 0.0, coded).total / by_plan.estimate(setup, 450e12, 0.0).total < 1.01
    totals = [time_of(model, setup, speed, get_network("free")).total for setup in (plain, coded)]
    pairs = list(zip(*(memory_of(model, setup).launches for setup in (plain, coded)), strict=True))
    moved = sum(one.times * (one.size + other.size) for one, other in pairs if one.size != other.size)
    assert moved > 5e9  # 1.0e9 weights of blocks, 3 bytes each, twice
    assert totals[1] - totals[0] == pytest.approx(moved / speed.bandwidth)


@pytest.mark.full
def test_many_microbatches_take_as_much_longer_and_the_host_is_a_bound(capsys):
    machine, model = Machine(8, 80e9, get_network("h100-nvlink")), load_model("llama-1b")
    speed = Speed(450e12, 2048, 2048, host=0.0)
    row = {}
    for count in (1, 3, 4, 40):
        plan = compare_strategies(model, machine, Training(speed=speed, microbatches=count))
        row[count] = next(each for each in plan.rows if each.name == "ZeRO 3").step
    assert row[40].total - row[4].total == pytest.approx(36 * (row[4].total - row[3].total))
    assert 3 * row[1].total > row[3].total
    command = ["plan", "llama-1b", "--devices", "8", "--memory", "80", "--tokens", "64", "--tflops", "450"]
    assert main(command) == 0
    assert "The host bounds the step of ZeRO 0" in capsys.readouterr().out
    assert main([*command, "--host-ms", "0"]) == 0
    assert "The host bounds" not in capsys.readouterr().out


@pytest.mark.full
def test_a_rate_can_be_measured_here(capsys):
    command = "plan tests.tools.test_plan:llama --devices 2 --memory 1 --batch 2 --length 8 --tflops measured"
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    assert float(out.partition("measured here: ")[2].split()[0]) >= 0
    assert "step ms" in out
