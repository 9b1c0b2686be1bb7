"""Accelerate configs and `toolkit check`: every kind of fault is named, with its place and what to do."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest

from toolkit import cli
from toolkit.errors import UserError
from toolkit.launch import check
from toolkit.launch.check import describe, notes, problems
from toolkit.launch.config import find_config, read_config, with_launch_flags
from toolkit.launch.machine import Machine, detect
from toolkit.launch.recommend import count_parameters, recommend

CONFIGS = Path(__file__).resolve().parents[1] / "accelerate_configs"
NAMES = [
    "data_parallel",
    "fsdp2",
    "fsdp2_bf16",
    "fsdp2_offload",
    "fsdp2_tensor_parallel",
    "hsdp",
    "multi_gpu",
    "multi_gpu_bf16",
    "multi_gpu_fp16",
    "pipeline_parallel",
    "pipeline_parallel_bf16",
    "single_gpu",
    "single_gpu_bf16",
    "single_gpu_fp16",
    "tensor_parallel",
    "zero1",
    "zero2",
    "zero2_bf16",
    "zero2_offload",
    "zero3",
    "zero3_bf16",
    "zero3_offload",
]
GB = 10**9
CPU = Machine(0, (), (), None, bf16=True, fp16=True, mps=False, cores=4, memory=16 * GB)
TWO_GPUS = Machine(2, ("H100",) * 2, (80 * GB,) * 2, "4,7", bf16=True, fp16=True, mps=False, cores=32, memory=500 * GB)
FOUR_GPUS = replace(TWO_GPUS, gpus=4, gpu_names=("H100",) * 4, gpu_memory=(80 * GB,) * 4)
OLD_GPU = replace(TWO_GPUS, gpus=1, gpu_names=("Tesla V100",), gpu_memory=(16 * GB,), bf16=False)
ONE = "distributed_type: 'NO'\nnum_processes: 1\n"
DDP = "distributed_type: MULTI_GPU\nnum_processes: 2\nmain_process_port: 0\n"


@pytest.fixture
def config(tmp_path):
    def write(text, name="c.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return read_config(path)

    return write


def only(found, *parts):
    """The one problem there is; it holds all the parts."""
    assert len(found) == 1, found
    for part in parts:
        assert part in found[0], found[0]


# Our own configs


@pytest.mark.parametrize("name", NAMES)
def test_our_configs_are_accepted_by_accelerate_and_by_check(name):
    from accelerate.commands.config.config_args import load_config_from_file

    path = CONFIGS / f"{name}.yaml"
    loaded = load_config_from_file(str(path))
    suffix = name.rpartition("_")[2]
    assert loaded.mixed_precision == (suffix if suffix in ("bf16", "fp16") else "no")
    config = read_config(path)
    for machine in (CPU, FOUR_GPUS):
        assert problems(config, machine, environ={}) == []
    head = list(takewhile(lambda line: line.startswith("# "), path.read_text().splitlines()))
    assert head and all(any(line.startswith(f"# {word}:") for line in head) for word in ("Communication", "Needs"))
    wanted = {"data_parallel": ["--data_parallel"], "pipeline_parallel": ["--pipeline_stages", "2"]}
    assert config.flags == wanted.get(name.removesuffix("_bf16"), [])


def test_all_configs_are_listed_here():
    assert sorted(path.stem for path in CONFIGS.glob("*.yaml")) == NAMES


def test_two_runs_start_at_once_beside_a_taken_port(tmp_path):
    script = tmp_path / "show.py"
    # A file per rank: what two ranks print to one pipe may be mixed.
    script.write_text(
        "import os, pathlib, sys\n"
        "said = ' '.join(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'MASTER_PORT'))\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(said)\n"
    )
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / "multi_gpu.yaml")]
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("", 29500))
            taken.listen()
        except OSError:
            pass  # taken by somebody else, which does as well
        runs = [subprocess.Popen([*command, str(script), str(folder)], env=environ) for folder in folders]
        assert [run.wait(timeout=120) for run in runs] == [0, 0]
    ports = set()
    for folder in folders:
        ranks, sizes, port = zip(*(file.read_text().split() for file in folder.iterdir()))
        assert sorted(ranks) == ["0", "1"] and set(sizes) == {"2"} and len(set(port)) == 1
        ports.update(port)
    assert len(ports) == 2 and "29500" not in ports


# Reading


def test_lines_flags_and_nested_keys(config):
    read = config(
        "# a\n# flags: --data_parallel\n\nfsdp_config:\n  fsdp_version: 2\n# flags: --later\nnum_processes: 1\n"
    )
    assert read.lines == {"fsdp_config": 4, "fsdp_config.fsdp_version": 5, "num_processes": 7}
    assert read.flags == ["--data_parallel"]
    assert read.at("fsdp_config.fsdp_version").endswith("c.yaml:5: key `fsdp_config.fsdp_version: 2`")


def test_json(config):
    read = config(json.dumps({"distributed_type": "NO", "num_proceses": 1}, indent=1), "c.json")
    only(problems(read, CPU, environ={}), "c.json:3", "num_proceses", "Did you mean `num_processes`?")
    with pytest.raises(UserError, match=r"d\.json:2: not valid json"):
        config('{"a": 1,\n b}', "d.json")


@pytest.mark.parametrize(
    "text, said",
    [
        ("a: 1\nb: [", "c.yaml:2: not valid yaml"),
        ("", "found nothing"),
        ("- a\n", "found a list"),
        ("a: 1\n\tb: 2\n", "c.yaml:2: not valid yaml"),
    ],
)
def test_unreadable(config, text, said):
    with pytest.raises(UserError, match=said):
        config(text)


def test_missing_file_names_the_nearest(config, tmp_path):
    config(ONE, "multi_gpu.yaml")
    with pytest.raises(UserError, match=r"no such file\. Did you mean .*multi_gpu\.yaml"):
        read_config(tmp_path / "mutli_gpu.yaml")
    with pytest.raises(UserError, match="Did you mean `multi_gpu`"):
        find_config("mutli_gpu")
    assert find_config("multi_gpu") == CONFIGS / "multi_gpu.yaml"


def test_launch_flags_override_keys_up_to_the_script(config):
    words = [
        "accelerate",
        "launch",
        "--num_processes",
        "4",
        "--mixed-precision=bf16",
        "tasks/t.py",
        "--num_processes",
        "9",
    ]
    read = with_launch_flags(config(DDP), words)
    assert (read.values["num_processes"], read.precision) == (4, "bf16")
    only(problems(read, TWO_GPUS, environ={}), "accelerate launch --num_processes 4", "2 GPUs visible")


# Keys and values: J01, J07


def test_j07_typos_are_named_with_line_and_nearest_key(config):
    found = problems(config("num_proceses: 2\n" + ONE), CPU, environ={})
    only(found, "c.yaml:1", "`num_proceses: 2`", "Did you mean `num_processes`?")
    fsdp = "distributed_type: FSDP\nnum_processes: 1\nfsdp_config:\n  fsdp_reshard_after_foward: false\n"
    found = [message for message in problems(config(fsdp), CPU, environ={}) if ":4:" in message]
    only(found, "Did you mean `fsdp_reshard_after_forward`?")
    deepspeed = "distributed_type: DEEPSPEED\nnum_processes: 1\ndeepspeed_config:\n  zero_stge: 3\n"
    found = [message for message in problems(config(deepspeed), CPU, environ={}) if ":4:" in message]
    only(found, "Did you mean `zero_stage`?")
    found = problems(config(ONE + "dynamo_config:\n  dynamo_mod: default\n"), CPU, environ={})
    only(found, "Did you mean `dynamo_mode`?")


def test_keys_as_the_library_documents_them_pass(config):
    text = """
distributed_type: FSDP
num_processes: 2
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true, fsdp_offload_params: false,
  fsdp_cpu_ram_efficient_loading: false, auto_wrap_policy: TRANSFORMER_BASED_WRAP,
  fsdp_transformer_layer_cls_to_wrap: BertLayer, fsdp_activation_checkpointing: false}
parallelism_config: {parallelism_config_dp_shard_size: 2, parallelism_config_tp_size: 1}
"""
    assert problems(config(text), CPU, environ={}) == []
    text = """
distributed_type: DEEPSPEED
num_processes: 2
deepspeed_config: {zero_stage: 3, offload_optimizer_device: none, offload_param_device: cpu, zero3_init_flag: true,
  zero3_save_16bit_model: false, gradient_accumulation_steps: 1, gradient_clipping: auto}
"""
    assert problems(config(text), CPU, environ={}) == []


def test_a_key_that_accelerate_parses_but_drops_is_reported(config):
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    # The fact itself, from the launcher: the path does not reach the process.
    words = ["--use_deepspeed", "--num_processes=2", "--num_machines=1", "--main_process_port=0"]
    words += ["--mixed_precision=no", "--offload_optimizer_nvme_path=/a/path", "script.py"]
    args = launch_command_parser().parse_args(words)
    args.deepspeed_fields_from_accelerate_config = ""
    assert "/a/path" not in prepare_deepspeed_cmd_env(args)[1].values()
    text = "distributed_type: DEEPSPEED\nnum_processes: 1\ndeepspeed_config:\n  offload_optimizer_nvme_path: /a/path\n"
    found = [message for message in problems(config(text), CPU, environ={}) if ":4:" in message]
    only(found, "has no effect")


@pytest.mark.parametrize(
    "text, parts",
    [
        (ONE + "mixed_precision: no\n", ("c.yaml:3: key `mixed_precision: no`", "quote it: `mixed_precision: 'no'`")),
        (ONE + "gpu_ids: 0\n", ("c.yaml:3", "quote it: `gpu_ids: '0'`")),
        (ONE + "use_cpu: 'false'\n", ("true or false, without quotes",)),
        ("distributed_type: MULTI_GPU\nnum_processes: '2'\n", ("a whole number without quotes",)),
        ("distributed_type: NO\n", ("quote it: `distributed_type: 'NO'`",)),
        (ONE + "mixed_precision: bf61\n", ("expected one of no, fp16, bf16.", "Did you mean `bf16`?")),
        ("distributed_type: MULTI_GPUS\nnum_processes: 2\n", ("Did you mean `MULTI_GPU`?",)),
        ("num_processes: 1\n", ("key `distributed_type`: missing",)),
        (ONE + "dynamo_config:\n  dynamo_backend: no\n", ("c.yaml:4", "quote it")),
        (ONE + "dynamo_config:\n  dynamo_backend: INDUCTOR\n", ("c.yaml:4", "torch.compile")),
        (ONE + "num_processes: 1\n", ("c.yaml:3", "twice")),
        (ONE + "fsdp_config: 3\n", ("`key: value` lines",)),
        (ONE + "fsdp_config:\n  fsdp_version: 2\n", ("no effect with distributed_type: NO",)),
        (ONE + "compute_environment: AMAZON_SAGEMAKER\n", ("LOCAL_MACHINE",)),
    ],
)
def test_wrong_values(config, text, parts):
    found = problems(config(text), CPU, environ={})
    assert any(all(part in message for part in parts) for message in found), found


def test_unquoted_no_that_accelerate_gets_along_with(config):
    assert problems(config("distributed_type: NO\nnum_processes: 1\n"), CPU, environ={}) == []


# Processes and machines: J03, J05, J15


def test_j03_multi_cpu(config):
    found = problems(config("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n"), CPU, environ={})
    only(found, "starts one process", "multi_gpu.yaml")


def test_j05_more_processes_than_gpus(config):
    text = DDP.replace("num_processes: 2", "num_processes: 4")
    found = problems(config(text), TWO_GPUS, environ={})
    only(found, "c.yaml:2", "config asks 4 processes, 2 GPUs visible (CUDA_VISIBLE_DEVICES=4,7)", "--num_processes 2")
    assert problems(config(text), CPU, environ={}) == []  # a rehearsal
    assert notes(config(text), CPU) == []
    only(notes(config(text), replace(CPU, cores=2)), "4 processes share 2 cores")


@pytest.mark.parametrize(
    "text, parts",
    [
        (ONE.replace("1", "2"), ("starts one process, not 2", "multi_gpu.yaml")),
        (DDP + "use_cpu: true\n", ("use_cpu: true", "contradicts")),
        (DDP.replace("2", "0"), ("at least one process",)),
        ("distributed_type: MULTI_GPU\n", ("num_processes`: missing",)),
        (DDP + "gpu_ids: '0'\n", ("one id",)),
        (DDP + "num_machines: 2\n", ("main_process_ip",)),
        (DDP + "num_machines: 2\nmain_process_ip: h\n", ("same port",)),
        (DDP.replace("2", "3") + "num_machines: 2\n", ("does not divide",)),
        (
            DDP.replace(": 0", ": 29511") + "num_machines: 2\nmachine_rank: 2\nmain_process_ip: h\n",
            ("expected 0 to 1",),
        ),
        (ONE + "num_machines: 2\nmain_process_ip: h\nmain_process_port: 9\n", ("one process on one machine",)),
        (DDP.replace("port: 0", "port: 70000"), ("port number",)),
    ],
)
def test_process_faults(config, text, parts):
    found = problems(config(text), CPU, environ={})
    assert any(all(part in message for part in parts) for message in found), found


def test_one_process_of_multi_gpu_and_two_good_machines_pass(config):
    assert problems(config(DDP.replace("processes: 2", "processes: 1")), TWO_GPUS, environ={}) == []
    text = DDP.replace("processes: 2", "processes: 4").replace("port: 0", "port: 29511")
    text += "num_machines: 2\nmachine_rank: 1\nmain_process_ip: h\n"
    assert problems(config(text), TWO_GPUS, environ={}) == []


def test_j15_port_in_use(config, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        read = config(DDP.replace("port: 0", f"port: {taken.getsockname()[1]}"))
        only(problems(read, CPU, environ={}), "c.yaml:3", "in use", "--main_process_port")
        monkeypatch.setenv("LOCAL_RANK", "0")  # inside the job that has it
        assert problems(read, CPU, environ={}) == []
    monkeypatch.delenv("LOCAL_RANK")
    assert problems(read, CPU, environ={}) == []


# Precision: J09


def test_j09_precision_against_the_hardware(config):
    only(problems(config(ONE + "mixed_precision: bf16\n"), OLD_GPU, environ={}), "Tesla V100", "bf16", "fp16")
    assert problems(config(ONE + "mixed_precision: bf16\nuse_cpu: true\n"), OLD_GPU, environ={}) == []
    only(problems(config(ONE + "mixed_precision: fp8\n"), TWO_GPUS, environ={}), "fp8")
    mps = replace(CPU, mps=True, bf16=False, fp16=False)
    only(problems(config(ONE + "mixed_precision: fp16\n"), mps, environ={}), "MPS")
    fp16 = config(ONE + "mixed_precision: fp16\n")
    assert problems(fp16, CPU, environ={}) == []
    assert "rehearsal on a CPU" in describe(fp16, CPU) and "fp16 (rehearsed" in describe(fp16, CPU)


# The step and the environment: J11


def test_j11_accumulation_and_clipping(config):
    only(problems(config(ONE + "gradient_accumulation_steps: 4\n"), CPU, environ={}), "c.yaml:3", "--global_batch_size")
    variable = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}
    only(problems(config(ONE), CPU, environ=variable), "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=8", "unset")
    text = "distributed_type: DEEPSPEED\nnum_processes: 1\ndeepspeed_config:\n"
    text += "  gradient_accumulation_steps: 4\n  gradient_clipping: 0.5\n"
    found = problems(config(text), CPU, environ={})
    assert any(":4:" in message and "--gradient_accumulation_steps" in message for message in found)
    assert any(":5:" in message and "contradicts --max_grad_norm 1.0" in message for message in found)
    found = problems(config(text), CPU, ["--max_grad_norm", "0.5"], environ={})
    assert not any("max_grad_norm" in message for message in found)


@pytest.mark.parametrize(
    "environ, machine",
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, CPU),
        ({"WORLD_SIZE": "4"}, CPU),
        ({"ACCELERATE_USE_FSDP": "true"}, CPU),
        ({"ACCELERATE_USE_DEEPSPEED": "1"}, CPU),
        ({"ACCELERATE_USE_CPU": "yes"}, TWO_GPUS),
    ],
)
def test_environment_that_contradicts_the_config(config, environ, machine):
    (name, value), *_ = environ.items()
    only(problems(config(DDP + "mixed_precision: fp16\n"), machine, environ=environ), f"{name}={value}", "unset it")


def test_environment_that_agrees(config):
    environ = {"ACCELERATE_MIXED_PRECISION": "fp16", "WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "false"}
    assert problems(config(DDP + "mixed_precision: fp16\n"), CPU, environ=environ) == []


# Task flags: L09 and typos


def test_flags_that_the_config_needs(config):
    read = config("# flags: --data_parallel\n" + ONE)
    assert problems(read, CPU, environ={}) == []
    only(notes(read, CPU), "--data_parallel")
    only(problems(read, CPU, ["--seed", "1"], environ={}), "missing: --data_parallel")
    only(problems(read, CPU, [], environ={}), "missing: --data_parallel")
    assert problems(read, CPU, ["--seed", "1", "--data_parallel"], environ={}) == []


def test_l09_data_parallel_under_many_processes(config):
    only(problems(config(DDP), CPU, ["--data_parallel"], environ={}), "c.yaml:1", "data_parallel.yaml")
    assert problems(config(DDP), CPU, ["--data_parallel", "false"], environ={}) == []


def test_unknown_task_flag(config):
    only(problems(config(ONE), CPU, ["--lerning_rate=1"], environ={}), "Did you mean `--learning_rate`?")


def test_all_problems_at_once(config):
    text = "distributed_type: MULTI_GPU\nnum_processes: 4\nmixed_precision: fp8\nmain_proces_port: 0\n"
    found = problems(config(text), TWO_GPUS, ["--seeed", "--data_parallel"], environ={"WORLD_SIZE": "3"})
    assert len(found) == 5, found


# The command


def test_effective_settings(config):
    four = replace(TWO_GPUS, gpus=4)
    assert describe(config(DDP + "mixed_precision: bf16\n"), four) == "2 of 4 visible GPUs, DDP, bf16"
    assert describe(config("# flags: --data_parallel\n" + ONE), four) == "4 of 4 visible GPUs, DataParallel, fp32"
    assert describe(config(DDP), CPU) == "rehearsal on a CPU with 4 cores, 2 processes, DDP, fp32"


def test_command(config, capsys, monkeypatch, tiny_classifier):
    monkeypatch.setattr(check, "detect", lambda: TWO_GPUS)
    for name in ("WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["check", "multi_gpu_bf16"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "multi_gpu_bf16.yaml: 2 of 2 visible GPUs, DDP, bf16",
        "recommended here: multi_gpu_bf16 (2 GPUs with bf16 units)",
    ]
    path = config("num_proceses: 4\n" + ONE + "mixed_precision: no\n").path
    assert cli.main(["check", str(path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith(f"error: {path}:") for line in lines)
    path = config("distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n").path
    assert cli.main(["check", str(path), "--model_name_or_path", str(tiny_classifier)]) == 0
    assert "data parallelism (multi_gpu) is simpler" in capsys.readouterr().out
    assert cli.main(["check", "--recommend"]) == 0
    assert capsys.readouterr().out == "multi_gpu_bf16\n"
    assert cli.main(["check", "no_such"]) == 2
    assert cli.main(["chek"]) == 2
    assert "Did you mean `check`?" in capsys.readouterr().err


def test_flags_of_tasks_are_known(capsys, monkeypatch):
    monkeypatch.setattr(check, "detect", lambda: CPU)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert cli.main(["check", "single_gpu", "--label_column_name", "y", "--seed", "1"]) == 0
    assert cli.main(["check", "single_gpu", "--label_colum_name=y"]) == 1
    assert "Did you mean `--label_column_name`?" in capsys.readouterr().err


def test_help_imports_nothing_slow():
    code = (
        "import sys; from toolkit.cli import main; main(['--help']); main(['check', '--help']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'accelerate', 'transformers', 'yaml')))"
    )
    root = str(CONFIGS.parent)
    assert subprocess.run([sys.executable, "-c", code], cwd=root, stdout=subprocess.DEVNULL).returncode == 0


# Recommendation and machine


def test_recommend():
    assert recommend(CPU)[0] == "single_gpu"
    assert recommend(replace(CPU, bf16_units=True))[0] == "single_gpu_bf16"
    assert recommend(OLD_GPU)[0] == "single_gpu"
    # 16 bytes x 3.5e9 = 56 GB = 70 % of 80 GB
    assert recommend(TWO_GPUS, 3_500_000_000)[0] == "multi_gpu_bf16"
    name, why = recommend(TWO_GPUS, 3_600_000_000)
    assert name == "fsdp2_bf16" and "58 GB of training state" in why and "shard it over the GPUs" in why
    assert recommend(OLD_GPU, 1_000_000_000)[0] == "zero3_offload"
    assert "too small" in recommend(CPU, 1_000_000_000)[1]


def test_parameters_are_counted_from_the_headers(tmp_path):
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5), "c": torch.zeros(())}, tmp_path / "1.safetensors")
    save_file({"d": torch.zeros(2, 2, 2)}, tmp_path / "2.safetensors", metadata={"format": "pt"})
    assert count_parameters(str(tmp_path)) == 12 + 5 + 1 + 8
    assert count_parameters(str(tmp_path / "nowhere")) is None
    (tmp_path / "3.safetensors").write_bytes(b"not a header")
    assert count_parameters(str(tmp_path)) is None


def test_detect():
    import torch

    machine = detect()
    assert machine.gpus == torch.cuda.device_count() == len(machine.gpu_names) == len(machine.gpu_memory)
    assert 1 <= machine.cores <= os.cpu_count() and machine.memory > GB // 2
    if machine.gpus == 0 and not machine.mps:
        assert machine.bf16 and machine.fp16
