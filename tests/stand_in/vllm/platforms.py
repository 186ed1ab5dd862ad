from types import SimpleNamespace

current_platform = SimpleNamespace(is_cpu=lambda: False)
