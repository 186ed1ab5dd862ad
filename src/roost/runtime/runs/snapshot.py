"""A snapshot of the driver's surroundings: versions, environment variables, the git checkout."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from roost.redact import hide
from roost.runtime.limits import GIT_SECONDS
from roost.runtime.runs.record import GitState

_PREFIXES = (
    *("RAY_", "ROOST_", "HYDRA_", "CUDA_", "NVIDIA_", "NCCL_", "HIP_", "ROCR_", "ASCEND_", "HCCL_", "GLOO_", "UCX_"),
    *("OMP_", "MKL_", "TORCH_", "PYTORCH_", "TRITON_", "XLA_", "JAX_", "VLLM_", "SGLANG_"),
)
_NAMES = {
    *("PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "CONDA_DEFAULT_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR"),
    *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_NODEID", "PBS_JOBID", "LSB_JOBID"),
    *("MASTER_ADDR", "MASTER_PORT", "TOKENIZERS_PARALLELISM"),
}
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The options of `ray job submit`, with the job's variables and their values."""
_MODULES = "roost ray numpy torch transformers vllm sglang megatron deepspeed jax gymnasium"


def environment_of(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that matter to a run, with None for a value that looks like a secret.

    >>> environment_of({"NCCL_DEBUG": "INFO", "RAY_AUTH_TOKEN": "abc", "HOME": "/home/me"})
    {'NCCL_DEBUG': 'INFO', 'RAY_AUTH_TOKEN': None}
    """
    wanted = {name: value for name, value in environ.items() if name.startswith(_PREFIXES) or name in _NAMES}
    # Ray sets it.
    wanted.pop("RAY_CLIENT_MODE", None)
    return {
        name: None if name == _JOB_CONFIG or hide(name, value) != value else value
        for name, value in sorted(wanted.items())
    }


def loaded_versions() -> dict[str, str]:
    """Return the versions of Python, of Roost, and of the well-known packages that this process has loaded."""
    found = {"python": platform.python_version()}
    for name in _MODULES.split():
        # Recording a run must not load torch.
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found


def git_state(folder: Path) -> GitState | None:
    """Read the commit and the branch that are checked out around a folder from the files of git, or return None."""
    try:
        git_dir = next(found for parent in (folder, *folder.parents) if (found := parent / ".git").exists())
        if git_dir.is_file():
            # A worktree or a submodule.
            git_dir = git_dir.parent / git_dir.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        commit, branch = (git_dir / "HEAD").read_text(encoding="utf-8").strip(), ""
        if commit.startswith("ref: "):
            name = commit.removeprefix("ref: ")
            if (git_dir / "commondir").is_file():
                git_dir /= (git_dir / "commondir").read_text(encoding="utf-8").strip()
            branch = name.removeprefix("refs/heads/")
            if (git_dir / name).is_file():
                commit = (git_dir / name).read_text(encoding="utf-8").strip()
            else:
                packed = (git_dir / "packed-refs").read_text(encoding="utf-8").splitlines()
                commit = next(line.split()[0] for line in packed if line.endswith(f" {name}"))
    except (OSError, UnicodeDecodeError, StopIteration):
        return None
    return GitState(commit=commit, branch=branch) if re.fullmatch(r"[0-9a-f]{40,64}", commit) else None


def with_changes(state: GitState, folder: Path) -> GitState:
    """Ask git whether tracked files differ from the commit, and wait for its answer for a while."""
    # Git takes no lock and starts no helper that the checkout configures.
    command = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain", "--untracked-files=no"]
    environ = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        changes = subprocess.check_output(  # noqa: S603 - a fixed command
            command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return state
    return replace(state, changed=bool(changes.strip()))
