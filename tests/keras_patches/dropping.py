"""Leave out one patch, in this process and in the workers that it starts."""

from keras_strategy.keras_patches import patch
from tools.pages import definition_of


def name_of(extension: patch.Patch) -> str:
    """Return a patch's unique name."""
    module = definition_of(extension).__module__.removeprefix("keras_strategy.")
    return f"{module} {extension.target}"


def drop(name: str) -> None:
    """Make the first strategy install all patches but one."""
    install = patch.install

    def all_but_one(extensions):
        listed = list(extensions)
        kept = [extension for extension in listed if name_of(extension) != name]
        assert len(kept) == len(listed) - 1, f"there is no hook {name!r}"
        install(kept)

    patch.install = all_but_one
