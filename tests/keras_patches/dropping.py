"""Leave out one patch, in this process and in the workers that it starts."""

from keras_strategy.keras_patches import installation, patch


def drop(name: str) -> None:
    """Make the first strategy install all patches but one."""
    install = patch.install

    def all_but_one(extensions):
        listed = list(extensions)
        kept = [extension for extension in listed if extension.name != name]
        assert len(kept) == len(listed) - 1, f"there is no hook {name!r}"
        install(kept)

    installation.install = all_but_one
