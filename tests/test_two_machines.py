"""Two launchers on loopback, as on two machines: the losses of one process."""

import os
import subprocess
import sys

import pytest

from tests.runs import ROOT, free_port, read_rows, run_here
from tests.tiny import write_csv

CONFIGS = {"DDP": ("multi_gpu", []), "DDP x pipeline": ("pipeline_parallel", ["--pipeline_stages", "2"])}


@pytest.mark.parametrize("name", CONFIGS)
def test_two_machines_of_two_ranks(name, tiny_classifier, tmp_path):
    config, more = CONFIGS[name]
    data = write_csv(tmp_path / "train.csv", 26, seed=3)
    flags = ["--model_name_or_path", str(tiny_classifier), "--train_file", str(data), "--global_batch_size", "10"]
    flags += ["--num_train_epochs", "2", "--dropout", "0", "--max_grad_norm", "0.5"]
    expected = run_here([*flags, "--output_dir", str(tmp_path / "one")])
    out, port = tmp_path / "two", str(free_port())
    machines = []
    for rank in range(2):
        command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
        command += ["--config_file", f"accelerate_configs/{config}.yaml", "--num_machines", "2", "--num_processes", "4"]
        command += ["--machine_rank", str(rank), "--main_process_ip", "127.0.0.1", "--main_process_port", port]
        command += ["tasks/classify.py", *flags, *more, "--output_dir", str(out)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        machines.append(subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes))
    try:
        said = [machine.communicate(timeout=150)[0] for machine in machines]
    finally:
        for machine in machines:
            if machine.poll() is None:
                os.killpg(machine.pid, 9)
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(said)
    rows = read_rows(out)
    assert len(rows) == len(expected) == 6
    for row, wanted in zip(rows, expected):
        assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=5e-5)
