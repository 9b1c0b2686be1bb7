"""`toolkit check` for strategies that shard or split: ZeRO, FSDP2, a mesh of ranks, pipelines; and their names."""

import json
import os
from dataclasses import replace

import pytest

from tests.test_launch_config import CPU, DDP, GB, TWO_GPUS, only
from toolkit.arguments import Arguments, parse
from toolkit.launch import environment
from toolkit.launch.check import describe, problems, simpler
from toolkit.launch.config import read_config, with_launch_flags
from toolkit.launch.recommend import recommend, simpler_hint
from toolkit.launch.strategies import pipeline

ZERO = "distributed_type: DEEPSPEED\nnum_processes: 2\nmain_process_port: 0\ndeepspeed_config:\n"
FSDP = "distributed_type: FSDP\nnum_processes: 4\nmain_process_port: 0\nfsdp_config:\n  fsdp_version: 2\n"
MESH = FSDP + "parallelism_config:\n"
EIGHT_GPUS = replace(TWO_GPUS, gpus=8, gpu_names=("H100",) * 8, gpu_memory=(80 * GB,) * 8, visible_devices=None)


@pytest.fixture
def config(tmp_path):
    def write(text, name="c.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return read_config(path)

    return write


@pytest.fixture
def found(config):
    """The problems of a yaml text on a CPU."""
    return lambda text, *flags: problems(config(text), CPU, list(flags) or None, environ={})


@pytest.fixture
def model(tmp_path):
    """Writes a config.json; gives the folder."""

    def write(**values):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(values))
        return str(folder)

    return write


def said_by_launcher(words, monkeypatch, keep=None):
    """The variables that `accelerate launch` hands to the processes, from its own code."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    for name in os.environ:
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")) and name != keep:
            monkeypatch.delenv(name)
    args, defaults, from_config = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    if not args.use_deepspeed:
        return prepare_multi_gpu_env(args)
    fields = list(defaults.deepspeed_config) + ["mixed_precision"] * from_config
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)
    return prepare_deepspeed_cmd_env(args)[1]


# ZeRO's section


@pytest.mark.parametrize(
    "lines, parts",
    [
        ("  zero_stage: 0\n", (":5:", "shards nothing", "multi_gpu.yaml")),
        ("  zero_stage: 4\n", (":5:", "expected 1, 2 or 3")),
        ("  zero3_init_flag: true\n", ("zero_stage`: missing", "accelerate would take 2")),
        ("  zero_stage: 1\n  offload_optimizer_device: cpu\n", (":6:", "needs stage 2 or 3")),
        ("  zero_stage: 2\n  offload_param_device: cpu\n", (":6:", "needs stage 3")),
        ("  zero_stage: 3\n  offload_param_device: nvme\n", (":6:", "nvme is not supported")),
        ("  zero_stage: 3\n  offload_optimizer_device: cup\n", (":6:", "expected none or cpu. Did you mean `cpu`?")),
        ("  zero_stage: 2\n  gradient_accumulation_steps: 4\n", (":6:", "--global_batch_size")),
        ("  zero_stage: 2\n  gradient_clipping: 0.5\n", (":6:", "contradicts --max_grad_norm 1.0")),
        ("  zero_stage: 3\n  zero3_save_16bit_model: true\n", (":6:", "no effect here", "float32")),
        ("  zero_stage: 2\n  deepspeed_hostfile: hosts\n", (":6:", "no effect here")),
        ("  zero_stage: 2\n  deepspeed_multinode_launcher: pdsh\n", (":6:", "write standard")),
    ],
)
def test_zero_faults(found, lines, parts):
    only(found(ZERO + lines), *parts)


def test_zero_that_is_right(found):
    lines = "  zero_stage: 3\n  offload_optimizer_device: cpu\n  offload_param_device: cpu\n  zero3_init_flag: true\n"
    lines += "  gradient_accumulation_steps: auto\n  gradient_clipping: auto\n"
    lines += "  deepspeed_multinode_launcher: standard\n"
    assert found(ZERO + lines) == []
    assert found(ZERO + "  zero_stage: 2\n  gradient_clipping: 0.5\n", "--max_grad_norm", "0.5") == []


def test_zero_on_two_machines_needs_torchrun(config):
    text = ZERO.replace("port: 0", "port: 29511") + "  zero_stage: 2\n"
    text += "num_machines: 2\nmachine_rank: 1\nmain_process_ip: h\n"
    only(problems(config(text), CPU, environ={}), "deepspeed_multinode_launcher", "missing, which means pdsh")


def test_zero_without_deepspeed(found, monkeypatch):
    monkeypatch.setattr("toolkit.launch.zero.importlib.util.find_spec", lambda name: None)
    only(found(ZERO + "  zero_stage: 2\n"), ":1:", "pip install deepspeed")
    assert found(FSDP) == []


def test_what_accelerate_does_with_what_is_left_out(config, monkeypatch):
    from accelerate.utils import DeepSpeedPlugin

    path = str(config(ZERO + "  zero3_init_flag: false\n").path)
    with monkeypatch.context() as patch:
        said = said_by_launcher(["--config_file", path, "x.py"], patch)
        patch.setattr(os, "environ", said)
        plugin = DeepSpeedPlugin()
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE" not in said and plugin.zero_stage == 2
    path = str(config(FSDP.replace("_version: 2", "_offload_params: true")).path)
    said = said_by_launcher(["--config_file", path, "x.py"], monkeypatch)
    assert said["FSDP_VERSION"] == "1"


def test_variables_that_the_launcher_passes_on(config, monkeypatch):
    read = config(ZERO + "  zero_stage: 2\n")
    variable = "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"
    monkeypatch.setenv(variable, "cpu")
    only(problems(read, CPU, environ=os.environ), "offload_optimizer_device`: not there", f"{variable}=cpu; unset it")
    said = said_by_launcher(["--config_file", str(read.path), "x.py"], monkeypatch, keep=variable)
    assert said[variable] == "cpu"  # the fact itself
    read = config(FSDP)
    assert problems(read, CPU, environ=os.environ) == []
    only(problems(read, CPU, environ={"FSDP_TRANSFORMER_CLS_TO_WRAP": "GPT2Block"}), "GPT2Block; unset it")


# DeepSpeed's json


@pytest.fixture
def zero_json(found, tmp_path):
    """The problems of a yaml that names a json of this content."""

    def check(content, *flags, more=""):
        path = tmp_path / "ds.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
        return found(ZERO + f"  deepspeed_config_file: {path}\n{more}", *flags)

    return check


STAGE_2 = {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    "content, parts",
    [
        ({"train_batch_size": 64}, (":5:", "train_batch_size: 64", "--global_batch_size", "remove the key")),
        ({"train_micro_batch_size_per_gpu": 4}, (":5:", "--global_batch_size")),
        ({"gradient_accumulation_steps": 2}, (":5:", "--global_batch_size")),
        ({"gradient_clipping": 0.3}, (":5:", "contradicts --max_grad_norm 1.0")),
        ({"bf16": {"enabled": True}}, (":6:", "bf16.enabled: true", "contradicts mixed precision no")),
        ({"fp16": {"enabled": True}}, (":6:", "--mixed_precision fp16")),
        ({"optimizer": {"type": "Adam"}}, ("optimizer", "--optim")),
        ({"scheduler": {"type": "WarmupLR"}}, ("scheduler", "--lr_scheduler_type")),
        ({"activation_checkpointing": {}}, ("--gradient_checkpointing",)),
        ({"prescale_gradients": True}, ("prescale_gradients", "remove it")),
        ({"train_batch_sise": 8}, ("Did you mean `train_batch_size`?",)),
        ({"zero_optimization": {"stage": 0}}, (":3:", "shards nothing")),
        ({"zero_optimization": {}}, ("zero_optimization.stage`: missing, which means 0",)),
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, (":4:", "Did you mean `overlap_comm`?")),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, (":4:", "not any more")),
        ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, (":4:", "changes the training")),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, (":4:", "needs stage 2 or 3")),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, (":4:", "nvme")),
    ],
)
def test_json_that_contradicts_the_step(zero_json, content, parts):
    only(zero_json({**STAGE_2, **content}), "ds.json", *parts)


def test_json_that_leaves_the_step_alone(zero_json):
    content = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.3,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": False},
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "stage3_prefetch_bucket_size": "auto",
            "offload_optimizer": {"device": "cpu"},
        },
    }
    assert zero_json(content, "--max_grad_norm", "0.3") == []


def test_optimizer_that_needs_a_compiler(zero_json, tmp_path, monkeypatch):
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    content = {"zero_force_ds_cpu_optimizer": True, "zero_optimization": zero}
    monkeypatch.delenv("CXX", raising=False)
    assert zero_json(content) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    only(zero_json(content), ":2:", "no C++ compiler (c++)", "torch's AdamW")
    assert zero_json({**content, "zero_force_ds_cpu_optimizer": False}) == []
    assert zero_json({**content, "zero_optimization": {"stage": 2}}) == []


def test_json_that_cannot_be_read(zero_json, found):
    only(zero_json('{\n"zero_optimization": {]\n}'), ":5:", "ds.json:2: not valid json")
    only(zero_json({}), "ds.json", "zero_optimization", "missing")
    only(found(ZERO + "  deepspeed_config_file: nowhere.json\n"), ":5:", "nowhere.json: no such file")
    only(found(ZERO + "  deepspeed_config_file: ds.yaml\n"), ":5:", "ends in .json")


def test_keys_that_accelerate_refuses_beside_a_json(config, zero_json, tmp_path, monkeypatch):
    from accelerate.utils import DeepSpeedPlugin

    only(zero_json(STAGE_2, more="  zero_stage: 3\n"), ":6:", "not read beside deepspeed_config_file")
    more = "mixed_precision: bf16\n"
    only(zero_json(STAGE_2, more=more), ":6:", "refuses it", "pass --mixed_precision bf16")
    path = str(tmp_path / "c.yaml")
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", said_by_launcher(["--config_file", path, "x.py"], patch))
        with pytest.raises(ValueError, match="mixed_precision"):
            DeepSpeedPlugin()
    words = ["--config_file", path, "--mixed_precision", "bf16", "x.py"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", said_by_launcher(words, patch))
        DeepSpeedPlugin()
    assert problems(with_launch_flags(read_config(path), words), CPU, environ={}) == []


# FSDP2's section


@pytest.mark.parametrize(
    "lines, parts",
    [
        ("  fsdp_state_dict_type: SHARDED_STATE_DICT\n", (":6:", "no effect here (the model is always saved whole)")),
        ("  fsdp_activation_checkpointing: true\n", (":6:", "--gradient_checkpointing")),
        ("  fsdp_sharding_strategy: FULL_SHARD\n", (":6:", "fsdp_reshard_after_forward")),
        ("  fsdp_use_orig_params: true\n", (":6:", "no effect here; remove it")),
        ("  backward_prefetch: BACKWARD_PRE\n", (":6:", "no effect here; remove it")),  # the prefix may be missing
        ("  fsdp_cpu_ram_efficient_loading: true\n", (":6:", "every rank reads the whole model", "Write false")),
        ("  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n", (":6:", "TRANSFORMER_BASED_WRAP")),
        ("  fsdp_transformer_layer_cls_to_wrap: BertLayer\n", (":6:", "only with fsdp_auto_wrap_policy")),
        ("  fsdp_reshard_after_forward: FULL_SHARD\n", (":6:", "true (less memory) or false")),
        ("  fsdp_ofload_params: true\n", (":6:", "Did you mean `fsdp_offload_params`?")),
    ],
)
def test_fsdp_faults(found, lines, parts):
    only(found(FSDP + lines), *parts)


def test_fsdp_version(found):
    only(found(FSDP.replace("version: 2", "version: 1")), ":5:", "only version 2", "write fsdp_version: 2")
    only(found(FSDP.replace("fsdp_version: 2", "fsdp_offload_params: true")), "missing, which means version 1")


def test_fsdp_that_is_right(found):
    lines = "  fsdp_offload_params: true\n  fsdp_reshard_after_forward: false\n"
    lines += "  fsdp_cpu_ram_efficient_loading: false\n  fsdp_activation_checkpointing: false\n"
    lines += "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: BertLayer\n"
    assert found(FSDP + lines) == []


# The mesh


def size(**sizes):
    return MESH + "".join(f"  parallelism_config_{name}_size: {value}\n" for name, value in sizes.items())


@pytest.mark.parametrize(
    "sizes, parts",
    [
        ({"dp_replicate": 2, "dp_shard": 4}, (":6:", "2 (dp_replicate) x 4 (dp_shard) x 1 (tp) = 8 is not num_")),
        ({"dp_replicate": 2, "dp_shard": 4}, ("NPROC=8), or write parallelism_config_dp_shard_size: 2",)),
        ({"tp": 3}, ("x 3 (tp) = 3 is not num_processes: 4. Pass --num_processes 3 (launch.sh: NPROC=3).",)),
        ({"dp_shard": -1}, (":7:", "accelerate fills in no size by itself")),
        ({"dp_replicate": 4}, (":6:", "only copied", "multi_gpu.yaml")),
        ({"dp_replicate": 2, "tp": 2}, (":6:", "accelerate refuses", "fsdp2_tensor_parallel.yaml")),
        ({"dp_shard": 4, "cp": 2}, (":8:", "not supported")),
    ],
)
def test_mesh_faults(found, sizes, parts):
    only(found(size(**sizes)), *parts)


def test_mesh_that_is_right(found):
    assert found(size(dp_replicate=2, dp_shard=2)) == []
    assert found(size(dp_shard=2, tp=2)) == []
    assert found(size(tp=4, cp=1)) == []
    text = size(tp=4).replace("version: 2\n", "version: 2\n  fsdp_offload_params: true\n")
    only(found(text), ":6:", "only shards are offloaded")
    assert found(text.replace("tp_size: 4", "tp_size: 2\n  parallelism_config_dp_shard_size: 2")) == []
    text = size(tp=2).replace("FSDP", "MULTI_GPU").replace("fsdp_config:\n  fsdp_version: 2\n", "")
    only(found(text), "no effect with distributed_type: MULTI_GPU")


def test_sizes_as_accelerate_has_them(monkeypatch):
    from accelerate import ParallelismConfig

    for name in ("DP_REPLICATE_SIZE", "DP_SHARD_SIZE", "TP_SIZE"):
        monkeypatch.delenv(f"PARALLELISM_CONFIG_{name}", raising=False)
    left_out = ParallelismConfig(tp_size=2)
    assert (left_out.dp_replicate_size, left_out.dp_shard_size) == (1, 1)
    with pytest.raises(ValueError, match="at least 1"):
        ParallelismConfig(dp_shard_size=-1)
    with pytest.raises(ValueError, match="cannot be used with pure data parallelism"):
        ParallelismConfig(dp_replicate_size=2, tp_size=2)


def test_tensor_ranks_against_the_heads(found, model):
    text = size(tp=4)
    flags = ["--model_name_or_path", model(num_attention_heads=6)]
    only(found(text, *flags), ":7:", "does not divide the model's 6 attention heads", "a divisor of 6")
    model(num_attention_heads=8, num_key_value_heads=2)
    only(found(text, *flags), "2 key/value heads", "a divisor of 2")
    model(n_heads=4)
    assert found(text, *flags) == []
    assert found(text, "--model_name_or_path", "some/hub-model") == []


# Flags of the launcher that override a section


def test_launch_flags_of_sections(config):
    words = "launch --parallelism_config_dp_shard_size 4 --num_processes=8 --fsdp_offload_params true t.py --fsdp_x 1"
    read = with_launch_flags(config(size(dp_replicate=2, dp_shard=2)), words.split())
    assert read.find("parallelism_config.parallelism_config_dp_shard_size") == 4
    assert problems(read, EIGHT_GPUS, environ={}) == []
    assert describe(read, EIGHT_GPUS) == "8 of 8 visible GPUs, HSDP 2 x 4 with CPU offload, fp32"
    read = with_launch_flags(config(ZERO + "  zero_stage: 2\n"), ["launch", "--zero_stage", "0", "t.py"])
    only(problems(read, CPU, environ={}), "accelerate launch --zero_stage 0: stage 0 shards nothing")


def test_the_launcher_lets_its_flag_win(config, monkeypatch):
    path = str(config(size(dp_replicate=2, dp_shard=2)).path)
    words = ["--config_file", path, "--parallelism_config_dp_shard_size", "4", "--num_processes", "8", "x.py"]
    said = said_by_launcher(words, monkeypatch)
    assert (said["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"], said["PARALLELISM_CONFIG_DP_SHARD_SIZE"]) == ("2", "4")


# Pipelines


@pytest.mark.parametrize(
    "flags, kind, processes, parts",
    [
        ("--pipeline_stages 0", "MULTI_GPU", 2, ("--pipeline_stages 0: expected at least 1",)),
        ("--pipeline_stages 3", "MULTI_GPU", 4, ("does not divide the 4 processes", "--num_processes 6")),
        ("--pipeline_stages 2", "NO", 1, ("does not divide the 1 process,", "--num_processes 2", "pipeline_parallel")),
        ("--pipeline_stages 2", "FSDP", 4, ("cannot be combined with distributed_type: FSDP",)),
        ("--pipeline_stages 2", "DEEPSPEED", 4, ("cannot be combined with distributed_type: DEEPSPEED",)),
        ("--pipeline_stages 2 --data_parallel", "NO", 1, ("--data_parallel one for all GPUs: leave one out",)),
        ("--pipeline_microbatches 4", "MULTI_GPU", 2, ("--pipeline_microbatches has no effect without",)),
        ("--pipeline_schedule gpipe", "MULTI_GPU", 2, ("--pipeline_schedule has no effect without",)),
        ("--pipeline_stages 2 --pipeline_microbatches 0", "MULTI_GPU", 2, ("--pipeline_microbatches 0: expected",)),
    ],
)
def test_pipeline_faults(config, monkeypatch, flags, kind, processes, parts):
    words = flags.split()
    only(pipeline(parse(Arguments, words), kind, processes), *parts)
    # The same in a config …
    text = {"NO": "distributed_type: 'NO'\n", "MULTI_GPU": DDP, "DEEPSPEED": ZERO, "FSDP": FSDP}[kind]
    text = text.replace("num_processes: 2\n", "").replace("num_processes: 4\n", "") + f"num_processes: {processes}\n"
    if kind == "DEEPSPEED":
        text = text.replace("config:\n", "config:\n  zero_stage: 2\n")
    only(problems(config(text), CPU, words, environ={}), *parts)
    # … and in what torchrun starts.
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    for name in environment.STRATEGY_VARIABLES:
        monkeypatch.setenv(name, str(environment.STRATEGY_VARIABLES[name] == kind).lower())
    only(environment._asked_in_environment(parse(Arguments, words)), *parts)


def test_pipeline_that_is_right(config, monkeypatch, model):
    words = ["--pipeline_stages", "4", "--pipeline_microbatches", "1", "--pipeline_schedule", "gpipe"]
    args = parse(Arguments, [*words, "--model_name_or_path", model(num_hidden_layers=4)])
    assert pipeline(args, "MULTI_GPU", 8) == []
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert environment._asked_in_environment(args) == []


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "n_layers"])
def test_more_stages_than_layers(model, key):
    args = parse(Arguments, ["--pipeline_stages", "4", "--model_name_or_path", model(**{key: 3})])
    only(pipeline(args, "MULTI_GPU", 4), "the model has 3 layers", "config.json")


def test_a_config_that_needs_stages(config):
    read = config("# flags: --pipeline_stages 2\n" + DDP)
    assert problems(read, CPU, environ={}) == []
    only(problems(read, CPU, ["--seed", "1"], environ={}), "`--pipeline_stages 2`; missing: --pipeline_stages")
    assert problems(read, CPU, ["--pipeline_stages", "2"], environ={}) == []
    assert "DDP, fp32" in describe(read, CPU, ["--seed", "1"])
    assert describe(read, CPU).endswith("2 processes, pipeline of 2 stages, fp32")


# Names and advice


@pytest.mark.parametrize(
    "text, flags, expected",
    [
        (ZERO + "  zero_stage: 2\n", [], "ZeRO-2"),
        (ZERO + "  zero_stage: 3\n  offload_optimizer_device: cpu\n", [], "ZeRO-3 with CPU offload"),
        (FSDP, [], "FSDP2"),
        (FSDP + "  offload_params: true\n", [], "FSDP2 with CPU offload"),
        (size(dp_replicate=2, dp_shard=2), [], "HSDP 2 x 2"),
        (size(tp=4), [], "TP 4"),
        (size(dp_shard=2, tp=2), [], "FSDP2 x TP 2 x 2"),
        (DDP, ["--pipeline_stages", "2"], "pipeline of 2 stages"),
        (DDP.replace("2", "4"), ["--pipeline_stages", "2"], "pipeline of 2 stages x 2 data ranks"),
        (DDP, [], "DDP"),
    ],
)
def test_names(config, text, flags, expected):
    assert f", {expected}, fp32" in describe(config(text), CPU, flags)


def test_name_from_a_json(config, tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}')
    text = ZERO + f"  deepspeed_config_file: {tmp_path / 'ds.json'}\n"
    assert ", ZeRO-3 with CPU offload, fp32" in describe(config(text), CPU)


def test_hint_that_data_parallelism_is_simpler(config):
    # 16 bytes x 1.75e9 = 28 GB = 35 % of 80 GB
    assert simpler_hint(1_750_000_001, 80 * GB) is None
    hint = simpler_hint(1_750_000_000, 80 * GB)
    assert "28.0 GB" in hint and "80 GB" in hint and "multi_gpu" in hint
    pipe = "--pipeline_stages 2"
    for text, flags in ((ZERO, []), (FSDP, []), (DDP, pipe.split()), (f"# flags: {pipe}\n" + DDP, None)):
        assert simpler(config(text), flags, 1_000_000, 80 * GB) is not None
    assert simpler(config(DDP), [], 1_000_000, 80 * GB) is None
    assert simpler(config(FSDP), [], None, 80 * GB) is None


def test_recommended_configs_exist_and_pass():
    from toolkit.launch.config import find_config

    old = replace(EIGHT_GPUS, gpus=1, gpu_memory=(16 * GB,), bf16=False)
    wanted = {
        (EIGHT_GPUS, 3_000_000_000): "multi_gpu_bf16",
        (EIGHT_GPUS, 7_000_000_000): "fsdp2_bf16",  # 112 GB in 8 x 80 GB
        (replace(EIGHT_GPUS, bf16=False), 7_000_000_000): "fsdp2",
        (EIGHT_GPUS, 40_000_000_000): "zero3_offload",  # 640 GB
        (old, 1_000_000_000): "zero3_offload",
    }
    for (machine, parameters), name in wanted.items():
        assert recommend(machine, parameters)[0] == name
        read = with_launch_flags(read_config(find_config(name)), ["launch", "--num_processes", str(machine.gpus)])
        assert problems(read, machine, environ={}) == []
