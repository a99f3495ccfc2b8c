"""Launching, with processes that do nothing but end in some way: what the command then says, and with which status."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from distill.parallel.launch import launch, needs_launch
from distill.parallel.processes import LAUNCHED
from patches.errors import RetrofitError
from tests.helpers import ROOT, fresh_process

TWO = 2


def script(folder: Path, code: str) -> list[str]:
    """A command whose ``second`` is true in the second process."""
    file = folder / "script.py"
    file.write_text(f"import os, signal, sys, time\nsecond = os.environ['RANK'] == '1'\n{code}")
    return [str(file)]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What :func:`launch` sets for its processes goes again, and so do torch's handlers; no GPU is asked for."""
    heard = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    yield
    for one, handler in heard.items():
        signal.signal(one, handler)


def test_every_process_runs_the_command(tmp_path: Path) -> None:
    code = f"open(r'{tmp_path}/' + os.environ['RANK'] + '-of-' + os.environ['WORLD_SIZE'], 'w')"
    launch(script(tmp_path, code), TWO)
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "0-of-2", "1-of-2"}


def test_a_signal_is_handed_on_to_all(tmp_path: Path) -> None:
    code = f"""
def stop(*_):
    open(r'{tmp_path}/stopped-' + os.environ['RANK'], 'w')
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
open(r'{tmp_path}/ready-' + os.environ['RANK'], 'w')
while second and not os.path.exists(r'{tmp_path}/ready-0'):
    time.sleep(0.01)
if second:
    os.kill(os.getppid(), signal.SIGINT)
time.sleep(60)
"""
    # a shell starts what runs in the background with SIGINT ignored, and an ignored signal is not handed on
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as stopped:
            launch(script(tmp_path, code), TWO)
    finally:
        signal.signal(signal.SIGINT, outside)
    assert stopped.value.code == 130
    assert {path.name for path in tmp_path.glob("stopped-*")} == {"stopped-0", "stopped-1"}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_killed_command_takes_its_processes_along(tmp_path: Path) -> None:
    code = f"""
from distill.parallel.processes import join
join(deepspeed=False)
open(r'{tmp_path}/ready-' + os.environ['RANK'], 'w')
time.sleep(100)
"""
    command = f"from distill.parallel.launch import launch; launch({script(tmp_path, code)!r}, 2)"
    with subprocess.Popen([sys.executable, "-c", command]) as launcher:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            assert launcher.poll() is None
            time.sleep(0.01)
        children = psutil.Process(launcher.pid).children()
        launcher.kill()
    alive = psutil.wait_procs(children, timeout=10)[1]
    for process in alive:
        process.kill()
    assert len(children) == 2
    assert not alive


def test_a_hung_step_ends_soon_and_a_slow_tokenizer_does_not(tmp_path: Path) -> None:
    code = f"""
from datetime import timedelta
import torch
from distill.parallel import processes
processes.IN_STEP = timedelta(seconds=2)
these = processes.join(deepspeed=False)
with these.main_first():
    time.sleep(0 if second else 4)
if not second:
    try:
        torch.distributed.all_reduce(torch.ones(1))
    except RuntimeError:
        open(r'{tmp_path}/gave-up', 'w')
while not os.path.exists(r'{tmp_path}/gave-up'):
    time.sleep(0.1)
os._exit(0)
"""
    launch(script(tmp_path, code), TWO)
    assert (tmp_path / "gave-up").exists()


def test_a_closed_terminal_ends_no_run_under_nohup(tmp_path: Path) -> None:
    code = f"""
time.sleep(0 if second else 1)
if second:
    os.kill(os.getppid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGHUP)
time.sleep(2)
open(r'{tmp_path}/ended-' + os.environ['RANK'], 'w')
"""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launch(script(tmp_path, code), TWO)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(list(tmp_path.glob("ended-*"))) == 2


def test_a_slow_hub_ends_no_run(tmp_path: Path) -> None:
    code = """
from datetime import timedelta
from types import SimpleNamespace
import torch
from rich.console import Console
from distill import callbacks
from distill.parallel import processes
processes.IN_STEP = timedelta(seconds=3)
these = processes.join(deepspeed=False)
callbacks.push_folder = lambda *_, **__: time.sleep(6)
state = SimpleNamespace(is_world_process_zero=not second, global_step=1)
args = SimpleNamespace(output_dir='.', hub_model_id='user/name')
args.hub_private_repo = args.hub_revision = args.hub_token = None
callbacks.PushAdapter(args, Console()).on_save(args, state, None)
torch.distributed.all_reduce(torch.ones(1))
these.leave()
"""
    launch(script(tmp_path, code), TWO)


def test_what_one_process_says_ends_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = f"""
from distill.parallel import tell_launcher
if second:
    tell_launcher('the disk is full')
    open(r'{tmp_path}/said', 'w')
    sys.exit(2)
while not os.path.exists(r'{tmp_path}/said'):
    time.sleep(0.01)
tell_launcher('Traceback: the connection to process 1 is lost')
sys.exit(1)
"""
    with pytest.raises(RetrofitError, match=r"^the disk is full$"):
        launch(script(tmp_path, code), TWO)
    assert capfd.readouterr().err == ""


def test_an_unexpected_error_shows_its_traceback_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as failed:
        launch(script(tmp_path, "assert not second, 'a bug'\ntime.sleep(60)"), TWO)
    assert failed.value.code == 1
    said = capfd.readouterr().err
    assert said.count("AssertionError: a bug") == 1
    assert "process 1 failed, with status 1" in said


def test_a_killed_process_is_one_sentence(tmp_path: Path) -> None:
    code = "if second: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    with pytest.raises(RetrofitError, match="process 1 was ended by SIGKILL: most likely the machine"):
        launch(script(tmp_path, code), TWO)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RetrofitError, match="--nproc 2: this machine has 1 GPU, and each process needs one"):
        needs_launch(2, 0, deepspeed=False)
    assert not needs_launch(1, 0, deepspeed=False)
    assert needs_launch(1, 0, deepspeed=True)
    assert needs_launch(1, 1, deepspeed=False)


@pytest.mark.parametrize("mode", ["ddp", "deepspeed"])
def test_one_process_that_torchrun_started_ends_without_a_word(tmp_path: Path, mode: str) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    code = f"""
import torch.distributed as dist
from distill.parallel.processes import join
processes = join(deepspeed={mode == "deepspeed"})
with processes.main_first():
    print(processes.count, processes.main, processes.same("alike"), processes.all_of(1))
processes.wait()
processes.leave()
assert not dist.is_initialized()
processes.leave()  # some releases of accelerate make no group for a single process on a CPU
"""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    done = subprocess.run([*torchrun, *script(tmp_path, code)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["1 True alike [1]"]), done.stderr
    assert "Error" not in done.stderr
    assert "destroy_process_group" not in done.stderr


def test_an_address_where_nobody_can_meet_is_one_sentence(tmp_path: Path) -> None:
    code = """
import os, socket
from distill.parallel.processes import LAUNCHED, join
from patches.errors import RetrofitError
taken = socket.create_server(("127.0.0.1", 0))
os.environ.update(zip(LAUNCHED, ("0", "1", "0", "127.0.0.1", str(taken.getsockname()[1]))))
try:
    join(deepspeed=False)
    join(deepspeed=True)
except RetrofitError as error:
    print(error)
"""
    said = fresh_process(code, tmp_path, path=ROOT).splitlines()[-1]
    assert said.startswith("the processes could not meet at 127.0.0.1:")
    assert said.endswith("give an address that all of them reach, with a port that is free there")


def test_under_another_launcher_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip((*LAUNCHED, "LOCAL_WORLD_SIZE"), ("0", "2", "0", "localhost", "29500", "2"), strict=True):
        monkeypatch.setenv(name, value)
    assert not needs_launch(2, 1, deepspeed=True)
    with pytest.raises(RetrofitError, match="a launcher has already started 2 processes here"):
        needs_launch(3, 0, deepspeed=False)
