"""What holds the house together: import layers, public names, and what planning must not load."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import roost

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "roost"

# Who may import whom; a package may always import itself.
PURE = {"config", "errors", "redact", "text"}
LAYERS = {
    "text": set(),
    "deadline": set(),
    "errors": {"text"},
    "redact": set(),
    "config": {"errors", "text"},
    "placement": PURE,
    "search": {"placement", *PURE},
    "render": {"placement", *PURE},
    "machine": {"deadline", *PURE},
    "runtime": {"machine", "placement", "deadline", *PURE},
    "comm": {"runtime", "machine", "placement", "deadline", *PURE},
    "weights": {"comm", "runtime", "machine", "placement", "deadline", *PURE},
    "rl": {"weights", "comm", "runtime", "machine", "placement", "deadline", *PURE},
    "compat": {"rl", "weights", "comm", "runtime", "machine", "placement", "deadline", *PURE, ""},
    "testing": {"rl", "weights", "comm", "runtime", "machine", "placement", "deadline", *PURE},
    "doctor": {"runtime", "machine", "placement", "deadline", *PURE},
    "watch": {"runtime", "machine", "render", "placement", "deadline", *PURE},
    "xray": {"runtime", "machine", "deadline", *PURE},
    "demo": {"testing", "rl", "weights", "search", "config", "render", "watch", "deadline", ""},
    "cli": {
        "demo",
        "doctor",
        "compat",
        "testing",
        "watch",
        "xray",
        "rl",
        "weights",
        "comm",
        "runtime",
        "machine",
        "render",
        "search",
        "placement",
        "deadline",
        "extras",
        *PURE,
        "",
    },
    "extras": {"errors"},
    "mypy_plugin": set(),
    "__main__": {"cli"},
    "": {"extras"},
}
OUTSIDE = {
    "config": {"yaml", "omegaconf"},
    "render": {"rich"},
    "machine": {"psutil", "pynvml", "platformdirs"},
    "runtime": {"ray", "psutil", "rich", "packaging"},
    "comm": {"ray", "numpy", "torch"},
    "weights": {"numpy", "torch", "lazy_loader"},
    "rl": {"ray", "aiohttp", "lazy_loader", "torch"},
    "compat": {"ray"},
    "testing": {"ray", "psutil", "pytest", "numpy", "aiohttp", "lazy_loader"},
    "doctor": {"ray", "psutil"},
    "xray": {"psutil", "rich"},
    "watch": {"rich", "starlette", "uvicorn", "opentelemetry", "tensorboard", "wandb"},
    "demo": {"gymnasium", "numpy", "rich", "torch"},
    "cli": {"rich", "typer", "yaml"},
    "mypy_plugin": {"mypy"},
    "": {"lazy_loader"},
}
# The rooms of `runtime`, each of which imports only those before it.
ROOMS = [
    "limits", "connect", "runs", "events", "failures", "process", "nodes", "managers", "reserve", "launch",
    "options", "cluster", "groups", "worker", "job", "status", "leftovers",
]  # fmt: skip


def test_the_guide_for_contributors_lists_every_room():
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = guide[guide.index("src/roost/\n") :].partition("```")[0]
    listed = {line.split()[0].rstrip("/").removesuffix(".py") for line in tree.splitlines()[1:]}
    assert (LAYERS.keys() | ROOMS) - {"", "__main__", "mypy_plugin"} - listed == set()


def layer_of(module: str) -> str:
    """`roost.placement.plan` is in `placement`, `roost` itself in the layer without a name."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Every module that a file imports when it runs; imports for type checkers do not count."""
    tree = tree_of(path)
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            found.add(str(node.module))
            # `from roost.cli import out` names a module, `from roost.errors import Problem` does not.
            own = [f"{node.module}.{alias.name}" for alias in node.names if str(node.module).startswith("roost")]
            found |= {name for name in own if (SOURCE.parent / f"{name.replace('.', '/')}.py").exists()}
    return found


# Those in `inside` run in the interpreter of an engine, without Roost.
INSIDE = sorted(SOURCE.glob("rl/engines/inside/*.py"))
FILES = sorted({*SOURCE.rglob("*.py")} - {*INSIDE})


def test_imports_go_one_way():
    wrong = []
    for path in FILES:
        module = ".".join(["roost", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")
        layer = layer_of(module)
        for name in imports_of(path):
            if name.split(".")[0] == "roost":
                is_right = layer_of(name) in LAYERS[layer] | {layer}
            else:
                is_right = name.split(".")[0] in sys.stdlib_module_names | OUTSIDE.get(layer, set())
            if not is_right:
                wrong.append(f"{module} imports {name}")
    assert not wrong


@pytest.mark.parametrize("path", INSIDE, ids=lambda path: path.name)
def test_what_runs_inside_an_engine_needs_no_roost(path):
    outside = {name.split(".")[0] for name in imports_of(path)} - set(sys.stdlib_module_names)
    assert outside <= {"torch", "vllm", "uvicorn", "roost_proof"}, "uvicorn comes with SGLang"


def modules() -> dict[str, set[str]]:
    """Every module of the package, and those that it imports, in functions too."""
    names = {".".join(["roost", *path.relative_to(SOURCE).with_suffix("").parts]): path for path in FILES}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    return {
        name: {found for found in imports_of(path) if found in names and found != name} for name, path in names.items()
    }


def test_the_rooms_of_runtime_import_only_those_before_them():
    for module, imports in modules().items():
        own = module.split(".")[2:3]
        for name in imports:
            other = name.split(".")[2:3]
            if module.startswith("roost.runtime.") and name.startswith("roost.runtime."):
                assert ROOMS.index(other[0]) <= ROOMS.index(own[0]), f"{module} imports {name}"


def test_no_import_cycle_has_more_than_two_modules():
    graph = modules()

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        new = {start}
        while new:
            found |= new
            new = {name for module in new for name in graph[module]} - found
        return found

    reach = {module: reached(module) for module in graph}
    for module in graph:
        cycle = {other for other in reach[module] if module in reach[other]}
        assert len(cycle) <= 2, f"an import cycle: {sorted(cycle)}"


# Where the time of day may be read, and for what. It can jump; whatever waits or ages counts on `time.monotonic`.
TIME_OF_DAY = {
    "cli/commands/runs.py": "how long a run has been running, for people",
    "cli/commands/status.py": "how old a job is, for people",
    "comm/process.py": "part of a name that no other process has",
    "demo/rounds.py": "the interval of the events that the summary is about",
    "doctor/cluster_facts.py": "compares the clocks of nodes",
    "doctor/machine_facts.py": "compares the clocks of nodes, and the age of a local cluster, for people",
    "machine/disks.py": "the age of files",
    "rl/engines/openai_api.py": "when an answer was made, which OpenAI's API tells",
    "runtime/events/emitter.py": "the time of day that a process's events begin with, for people",
    "runtime/events/sampler.py": "the time of day that a node's samples begin with, for people",
    "runtime/failures/failure.py": "when a worker failed, for people",
    "runtime/failures/meanwhile.py": "how long ago a worker failed, for people",
    "runtime/groups/result.py": "when a worker failed, for people",
    "runtime/managers/job_info.py": "when a job began, for people",
    "runtime/managers/long_waits.py": "since when a driver waits, for people",
    "runtime/managers/worker_manager.py": "since when a worker has its state, for people",
    "runtime/runs/folder.py": "the age of files",
    "runtime/runs/recorder.py": "when something happened in a run, for people",
    "xray/gather.py": "how long something waits, by the clock of Ray's tables, for people",
    "watch/live.py": "compares the events of a run with the time of day",
}


def test_no_deadline_depends_on_the_time_of_day():
    wall = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now", "datetime.today"}
    found = {
        str(path.relative_to(SOURCE))
        for path in FILES
        for node in ast.walk(tree_of(path))
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in wall)
        or (isinstance(node, ast.ImportFrom) and node.module == "time")
    }
    assert found == set(TIME_OF_DAY)


# Limits outside a `limits.py`, and why they are there.
LIMITS_ELSEWHERE = {
    "config/profile.py": "how long a measured call may take: a rule for profiles, and nothing waits for it",
    "comm/collectives.py": "the room of communication moves it with its deadlines",
    "comm/devices.py": "the same",
    "comm/process.py": "the same",
    "machine/forks.py": "runs outside the package, and imports nothing of it",
}


def test_every_limit_of_a_room_is_in_its_limits():
    found = {
        str(path.relative_to(SOURCE))
        for path in FILES
        for node in tree_of(path).body
        for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
        if path.name != "limits.py" and isinstance(target, ast.Name) and target.id.endswith("_SECONDS")
    }
    assert found <= set(LIMITS_ELSEWHERE)


# Where moments are computed without `Deadline`, and why.
MOMENTS = {
    "deadline.py": "computes them for all others",
    "comm/collectives.py": "takes a number of seconds that it hands to torch",
    "comm/devices.py": "the lock of accelerators, which takes a number of seconds",
    "comm/wire/loop.py": "the timers of the communication thread, which are compared thousands of times a second",
}


def test_deadlines_are_passed_down_and_not_computed_again():
    def is_clock(node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and ast.unparse(node.func) == "time.monotonic"

    def computes(path: Path) -> bool:
        sums = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.BinOp)]
        # `spent + time.monotonic() - began` measures what has passed.
        elapsed = {id(node.left) for node in sums if isinstance(node.op, ast.Sub)}
        return any(
            is_clock(node.right) or (isinstance(node.op, ast.Add) and is_clock(node.left))
            for node in sums
            if id(node) not in elapsed
        )

    assert {str(path.relative_to(SOURCE)) for path in FILES if computes(path)} <= set(MOMENTS)


def test_the_public_names_are_these():
    assert sorted(roost.__all__) == [
        "ANY",
        "Accelerator",
        "AcceleratorInfo",
        "AcceleratorType",
        "AcceleratorsTaken",
        "CallResult",
        "CallTimedOut",
        "Channel",
        "ChannelClosed",
        "ChannelWorker",
        "CheckFailed",
        "Cluster",
        "ClusterConfig",
        "ClusterError",
        "CollectiveGroup",
        "CollectiveGroupOptions",
        "CollectiveManager",
        "ComponentPlacement",
        "ComponentPlan",
        "ConfigError",
        "DeclaredHardware",
        "DeviceLock",
        "EngineFailed",
        "EnvConfig",
        "Failure",
        "Finding",
        "FlexiblePlacementStrategy",
        "GroupDraft",
        "Handle",
        "HybridComponentPlacement",
        "ItemStream",
        "Job",
        "JobConfig",
        "LaunchTimedOut",
        "ManagerDied",
        "ModelParallelComponentPlacement",
        "NameTaken",
        "Node",
        "NodeGroup",
        "NodeInfo",
        "NodeManager",
        "NodePlacementStrategy",
        "NodesMissing",
        "Outcome",
        "OutcomeKind",
        "PackedPlacementStrategy",
        "Placement",
        "PlacementError",
        "PlacementMode",
        "PlacementStrategy",
        "Plan",
        "PlanDiff",
        "Pool",
        "PortLease",
        "PortsExhausted",
        "RankResult",
        "Reservation",
        "ReservationLost",
        "RoostError",
        "Seat",
        "Topology",
        "Worker",
        "WorkerAddress",
        "WorkerDied",
        "WorkerFailed",
        "WorkerGroup",
        "WorkerManager",
        "WorkerRecord",
        "WorkerState",
        "WrongPlace",
        "__version__",
        "group_of",
        "lint",
        "make_plan",
        "plan_routes",
        "register_accelerator_type",
        "register_hardware",
    ]


def test_every_public_name_is_there_and_has_a_docstring():
    for name in roost.__all__:
        thing = getattr(roost, name)
        assert name == "__version__" or thing.__doc__, name
    assert dir(roost) == sorted(roost.__all__)
    with pytest.raises(AttributeError, match="No roost attribute nothing"):
        roost.nothing  # noqa: B018 - the access is the test


def loaded_after(code: str) -> set[str]:
    code += "\nimport sys; sys.stderr.write(' '.join({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split("\n")[-1].split())


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    """A folder with a `ray` and a `torch` that say so when they are loaded, for machines that have neither."""
    folder = tmp_path_factory.mktemp("fakes")
    for name in ("ray", "torch"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')")
    return folder


def test_importing_roost_loads_neither_ray_nor_torch_nor_much_else(fakes):
    loaded = loaded_after(f"import sys; sys.path.insert(0, {str(fakes)!r})\nimport roost")
    assert not loaded & {"ray", "torch", "omegaconf", "yaml", "rich", "typer"}


@pytest.mark.parametrize("form", ["map", "table", "json", "svg", "html"])
def test_the_whole_plan_path_loads_neither_ray_nor_torch(fakes, form):
    loaded = loaded_after(
        f"""
import sys
sys.path.insert(0, {str(fakes)!r})
sys.argv = ["roost", "plan", "examples/job.yaml", "--cluster", "2x8,1x0", "--format", {form!r}]
from roost.cli.main import main
try:
    main()
except SystemExit as end:
    assert end.code == 0, end
"""
    )
    assert "roost" in loaded
    assert not loaded & {"ray", "torch"}


def test_nothing_in_the_repository_names_this_machine():
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, timeout=60)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    for name in tracked.stdout.split("\n"):
        path = ROOT / name
        if path.suffix in (".py", ".md", ".yaml", ".toml", ".sh") and path.is_file():
            assert str(ROOT) + "/" not in path.read_text(encoding="utf-8", errors="replace"), name


def test_every_module_is_in_a_package_and_git_ignores_none():
    assert {path.parent for path in FILES} == {path.parent for path in FILES if path.name == "__init__.py"}
    command = ["git", "check-ignore", "--no-index", *map(str, FILES)]
    ignored = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert not ignored.stdout, "ruff does not see these, and no wheel has them"


def test_the_doctests_of_every_module_pass():
    modules = [".".join(["roost", *path.relative_to(SOURCE).with_suffix("").parts]) for path in FILES]
    code = (
        "import doctest, importlib, sys\n"
        "tried = 0\n"
        f"for name in {[name.removesuffix('.__init__') for name in modules]!r}:\n"
        "    result = doctest.testmod(importlib.import_module(name))\n"
        "    tried += result.attempted\n"
        "    assert not result.failed, name\n"
        "assert tried > 15, tried\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
