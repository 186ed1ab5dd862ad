"""A plugin for mypy that knows the methods of a group: those of its workers' class, each returning a `CallResult`.

    [tool.mypy]
    plugins = ["roost.mypy_plugin"]

With it, mypy checks the arguments of `group.train(batch)` and knows what `.wait()` returns.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.plugin import AttributeContext, Plugin
from mypy.types import AnyType, CallableType, Instance, Type, TypeOfAny, get_proper_type

_GROUP = "roost.runtime.groups.group.WorkerGroup"
_COROUTINES = ("typing.Coroutine", "typing.Awaitable")


class RoostPlugin(Plugin):
    """The plugin."""

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        """Take over the attributes of a group, which Python looks up when they are used."""
        group, _, name = fullname.rpartition(".")
        return (lambda context: _method_of(context, name)) if group == _GROUP else None


def _method_of(context: AttributeContext, name: str) -> Type:
    """Return the method of the workers' class, with a result of all of them in place of what each returns."""
    group = get_proper_type(context.type)
    default = get_proper_type(context.default_attr_type)
    if not isinstance(group, Instance) or not isinstance(default, CallableType) or group.type.get(name) is not None:
        return context.default_attr_type
    result = get_proper_type(default.ret_type)
    worker = get_proper_type(group.args[0])
    if not isinstance(worker, Instance) or not isinstance(result, Instance):
        return context.default_attr_type
    found = worker.type.get_method(name)
    method = get_proper_type(found.type) if found is not None else None
    if found is None:
        context.api.fail(f'"{worker.type.name}" has no method "{name}"', context.context)
    if not isinstance(method, CallableType):
        return AnyType(TypeOfAny.from_error) if found is None else context.default_attr_type
    value = get_proper_type(method.ret_type)
    if isinstance(value, Instance) and value.type.fullname in _COROUTINES:
        value = get_proper_type(value.args[-1])
    return method.copy_modified(
        arg_types=method.arg_types[1:],
        arg_kinds=method.arg_kinds[1:],
        arg_names=method.arg_names[1:],
        ret_type=result.copy_modified(args=[value]),
    )


def plugin(_version: str) -> type[Plugin]:
    """Return the plugin, for any version of mypy."""
    return RoostPlugin
