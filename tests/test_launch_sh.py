"""launch.sh: the command it builds from GPUs, environment and SLURM, with stand-ins for the tools it asks."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "accelerate_configs"
TASK = str(ROOT / "tasks" / "classify.py")
READ = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs bash")


@pytest.fixture
def launch(tmp_path):
    """Run launch.sh in a foreign folder with stubs first on the PATH; returns (exit code, stdout, stderr)."""
    tools = tmp_path / "tools"
    tools.mkdir()

    def stub(name, body):
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)

    stub("accelerate", 'printf "started"; printf " [%s]" "$@"')
    stub("nproc", "echo 16")
    stub("nvidia-smi", "exit 9")

    def run(*words, gpus=0, **environ):
        if gpus:
            stub("nvidia-smi", "".join(f"echo 'GPU {index}: H100 (UUID: GPU-{index})'\n" for index in range(gpus)))
        if "SLURM_JOB_NODELIST" in environ:
            stub("scontrol", '[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"')
        kept = {key: value for key, value in os.environ.items() if key not in READ and not key.startswith("SLURM")}
        kept["PATH"] = f"{tools}:{Path(sys.executable).parent}:{kept['PATH']}"
        done = subprocess.run(
            [str(ROOT / "launch.sh"), *words], cwd=tmp_path, env=kept | environ, capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr

    return run


def command(output):
    """The printed command as (threads, launcher's flags as a dict, words from the script on)."""
    variable, *words = shlex.split(output)
    assert words[:2] == ["accelerate", "launch"] and "--quiet" in words
    script = words.index(TASK)
    flags = [word for word in words[2:script] if word != "--quiet"]
    return variable, dict(zip(flags[::2], flags[1::2])), words[script + 1 :]


def test_rehearsal_without_gpus(launch):
    code, output, _ = launch("--dry-run", "multi_gpu", "classify", "--train_file", "a b'c.csv")
    threads, flags, rest = command(output)
    assert code == 0 and threads == "OMP_NUM_THREADS=8"
    assert flags == {"--config_file": str(CONFIGS / "multi_gpu.yaml"), "--num_processes": "2"}
    assert rest == ["--train_file", "a b'c.csv"]


@pytest.mark.parametrize(
    "environ, processes, threads",
    [
        ({"gpus": 4}, "4", "4"),
        ({"gpus": 4, "CUDA_VISIBLE_DEVICES": "1,3"}, "2", "8"),
        ({"gpus": 4, "CUDA_VISIBLE_DEVICES": ""}, "2", "8"),  # hidden: a rehearsal
        ({"gpus": 4, "CUDA_VISIBLE_DEVICES": "-1"}, "2", "8"),
        ({"gpus": 4, "NPROC": "3"}, "3", "5"),
        ({"NPROC": "32"}, "32", "1"),
        ({"gpus": 1, "OMP_NUM_THREADS": "7"}, "1", "7"),
    ],
)
def test_processes_and_threads(launch, environ, processes, threads):
    variable, flags, _ = command(launch("multi_gpu", "classify", "--dry-run", **environ)[1])
    assert flags["--num_processes"] == processes and variable == f"OMP_NUM_THREADS={threads}"


def test_single_process_configs_start_one(launch):
    threads, flags, rest = command(launch("--dry-run", "single_gpu_bf16", "classify", gpus=4)[1])
    assert flags["--num_processes"] == "1" and threads == "OMP_NUM_THREADS=16" and rest == []


def test_rehearsal_of_a_config_that_needs_more_processes(launch, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: FSDP\nnum_processes: 4  # 2 x 2\n")
    assert command(launch("--dry-run", "own.yaml", "classify")[1])[1]["--num_processes"] == "4"
    assert command(launch("--dry-run", "own.yaml", "classify", NPROC="8")[1])[1]["--num_processes"] == "8"
    assert command(launch("--dry-run", "own.yaml", "classify", gpus=2)[1])[1]["--num_processes"] == "2"


@pytest.mark.parametrize(
    "sizes, gpus, environ, shards",
    [
        ({"dp_replicate": 2, "dp_shard": 2}, 8, {}, "4"),
        ({"dp_shard": 2, "tp": 2}, 8, {}, "4"),
        ({"dp_shard": 2, "tp": 2}, 4, {}, None),  # as written
        ({"dp_shard": 2, "dp_replicate": 2}, 2, {}, None),  # check says what to change
        ({"tp": 2}, 8, {}, None),
        ({"dp_replicate": 2, "dp_shard": 2}, 4, {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "h"}, "4"),
    ],
)
def test_shards_take_the_gpus_that_are_left(launch, tmp_path, sizes, gpus, environ, shards):
    lines = [f"  parallelism_config_{name}_size: {size}\n" for name, size in sizes.items()]
    text = "distributed_type: FSDP\nnum_processes: 4\nparallelism_config:\n"
    (tmp_path / "own.yaml").write_text(text + "".join(lines))
    flags = command(launch("--dry-run", "own.yaml", "classify", gpus=gpus, **environ)[1])[1]
    assert flags.get("--parallelism_config_dp_shard_size") == shards


def test_given_flags_win_over_those_of_the_config(launch, tmp_path):
    head = "# flags: --pipeline_stages 2 --pipeline_schedule gpipe\n"
    (tmp_path / "own.yaml").write_text(head + "distributed_type: MULTI_GPU\nnum_processes: 4\n")
    rest = command(launch("--dry-run", "own.yaml", "classify", "--seed", "1")[1])[2]
    assert rest == ["--seed", "1", "--pipeline_stages", "2", "--pipeline_schedule", "gpipe"]
    for given in (["--pipeline_stages", "4"], ["--pipeline_stages=4"]):
        rest = command(launch("--dry-run", "own.yaml", "classify", *given)[1])[2]
        assert rest == [*given, "--pipeline_schedule", "gpipe"]


def test_flags_of_the_config_are_appended(launch):
    _, flags, rest = command(launch("--dry-run", "data_parallel", "classify", "--seed", "1", gpus=4)[1])
    assert flags["--num_processes"] == "1" and rest == ["--seed", "1", "--data_parallel"]


def test_several_machines(launch):
    environ = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711"}
    flags = command(launch("--dry-run", "multi_gpu", "classify", gpus=4, **environ)[1])[1]
    assert flags["--num_processes"] == "8" and flags["--num_machines"] == "2" and flags["--machine_rank"] == "1"
    assert flags["--main_process_ip"] == "10.0.0.1" and flags["--main_process_port"] == "4711"


def test_slurm(launch):
    environ = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "node[3-4]"}
    flags = command(launch("--dry-run", "multi_gpu_bf16", "classify", gpus=2, **environ)[1])[1]
    assert flags["--num_processes"] == "4" and flags["--num_machines"] == "2" and flags["--machine_rank"] == "1"
    assert flags["--main_process_ip"] == "node3" and flags["--main_process_port"] == "29500"


@pytest.mark.parametrize(
    "words, environ, said",
    [
        (["mutli_gpu", "classify"], {}, "there is no config mutli_gpu. Configs: auto data_parallel"),
        (["multi_gpu", "clasify"], {}, "there is no task clasify. Tasks: classify"),
        (["multi_gpu", "classify"], {"NNODES": "2", "MASTER_ADDR": "h"}, "NODE_RANK"),
        (["multi_gpu", "classify"], {"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR"),
        (["single_gpu", "classify"], {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "h"}, "use multi_gpu"),
        (["multi_gpu"], {}, "./launch.sh CONFIG TASK"),
    ],
)
def test_errors_name_what_to_do(launch, words, environ, said):
    code, output, error = launch(*words, **environ)
    assert code == 2 and said in error and "started" not in output


def test_it_starts_the_command_and_passes_its_exit_code(launch, tmp_path):
    code, output, _ = launch("multi_gpu", "classify", "--train_file", "a b.csv")
    assert code == 0 and output.startswith("started [launch] [--quiet]") and output.endswith("[--train_file] [a b.csv]")
    (tmp_path / "tools" / "accelerate").write_text("#!/bin/bash\nexit 7\n")
    assert launch("multi_gpu", "classify")[0] == 7


# A rank in a session of its own, as torchrun starts them, that stops with a checkpoint when it is told to.
RANK = """
import os, pathlib, signal, sys, time
def stop(number, frame):
    pathlib.Path(os.environ["TOOLKIT_INTERRUPTED_FILE"]).write_text("interrupted")
    sys.exit(0)
os.setsid()
signal.signal(signal.{}, stop)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_stop_is_for_the_ranks_and_has_its_exit_code(name, launch, tmp_path):
    (tmp_path / "rank.py").write_text(RANK.format(name))
    rank = f'"{sys.executable}" "{tmp_path}/rank.py" &\nwait'
    # A scheduler may send the signal to the launcher as well, which must outlive the ranks.
    launch("--dry-run", "multi_gpu", "classify")  # makes the stubs
    (tmp_path / "tools" / "accelerate").write_text(f"#!/bin/bash\n{rank}\n")
    process = subprocess.Popen(
        [str(ROOT / "launch.sh"), "multi_gpu", "classify"],
        env={**os.environ, "PATH": f"{tmp_path / 'tools'}:{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    launcher = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if launcher.exists():
        os.kill(int(launcher.read_text().split()[0]), getattr(signal, name))
    process.send_signal(getattr(signal, name))
    assert process.wait(20) == 75
    process.stdout.close()


def test_a_config_file_of_ones_own(launch, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: 'NO'\n# flags: --late\nnum_processes: 1\n")
    _, flags, rest = command(launch("--dry-run", "own.yaml", "classify", gpus=4)[1])
    assert flags == {"--config_file": "own.yaml", "--num_processes": "1"} and rest == []


def test_auto_takes_the_recommended_config(launch):
    from toolkit.launch.machine import detect
    from toolkit.launch.recommend import recommend

    code, output, error = launch("--dry-run", "auto", "classify")
    expected = recommend(detect())[0]
    assert code == 0, error
    assert command(output)[1]["--config_file"] == str(CONFIGS / f"{expected}.yaml")
