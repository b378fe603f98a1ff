"""`keras-strategy completion bash`: what a shell completes."""

import argparse

SHELLS = ("bash", "zsh")

_BASH = """\
_keras_strategy() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words
    case ${{COMP_WORDS[1]}} in
{cases}
        *) words="{commands}" ;;
    esac
    [ "$COMP_CWORD" -eq 1 ] && words="{commands}"
    COMPREPLY=($(compgen -W "$words" -- "$word") $(compgen -f -- "$word"))
}}
complete -o filenames -F _keras_strategy keras-strategy
"""


def script(shell: str, commands: dict[str, argparse.ArgumentParser]) -> str:
    """A script that the shell reads at its start.

    Args:
        shell: One of `SHELLS`.
        commands: The parser of each subcommand.
    """
    cases = "\n".join(
        f'        {name}) words="{" ".join(_words(parser))}" ;;'
        for name, parser in commands.items()
    )
    text = _BASH.format(cases=cases, commands=" ".join(commands))
    if shell == "zsh":
        return f"autoload -U +X bashcompinit && bashcompinit\n{text}"
    return text


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """The options of a command, and what its arguments may be."""
    words: list[str] = []
    for action in parser._actions:
        words += action.option_strings or map(str, action.choices or ())
    return words
