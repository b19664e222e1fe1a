"""Classes of the user's own, named in a setting by their import path `module:Class`."""

import importlib
from typing import TypeVar

T = TypeVar("T")


def import_class(setting: str, path: str, base: type[T]) -> type[T]:
    """Import the class that `setting` names.

    Args:
        setting: name of the setting, for messages.
        path: `module:Class`; the module must be importable, so its folder is the current one or on PYTHONPATH.
        base: what the class must be a subclass of.

    Raises:
        ValueError: it cannot be imported, or is something else.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{setting}: '{path}' cannot be imported ({error}). Expected module:Class, with the module's folder on "
            "PYTHONPATH."
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{setting}: '{path}' must be a subclass of {base.__module__}.{base.__name__}.")
    return found
