"""Scripts that complete the command line in a shell, without a call of Python at every key."""

from __future__ import annotations

from typing import Any

from fakequant.calibration import calibrators
from fakequant.errors import ConfigError, nearest
from fakequant.model.choice import AUTO
from fakequant.model.presets import presets

SHELLS = ("bash", "zsh", "fish")

_BASH = """_fakequant() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words=
    case $previous in
{values}
        *) if [[ $COMP_CWORD == 1 ]]; then words="{commands}"
           elif [[ $current == -* ]]; then
               case ${{COMP_WORDS[1]}} in
{options}
               esac
           fi ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _fakequant fakequant
"""


def completion_script(shell: str, group: Any) -> str:
    """The script for a shell; files are completed where no word fits.

    Args:
        shell: one of `SHELLS`.
        group: the command of all commands, as click knows it.

    Raises:
        ConfigError: another shell.
    """
    if shell not in SHELLS:
        raise ConfigError(f"unknown shell {shell!r}{nearest(shell, SHELLS)}")
    commands = {name: _options(command) for name, command in sorted(group.commands.items())}
    if shell == "fish":
        helps = {name: group.commands[name].get_short_help_str(80) for name in commands}
        return _fish(commands, helps)
    script = _BASH.format(
        commands=" ".join(commands),
        values="\n".join(f'        {option}) words="{" ".join(words)}" ;;' for option, words in _values().items()),
        options="\n".join(f'                   {name}) words="{" ".join(o)}" ;;' for name, o in commands.items()),
    )
    # zsh runs the functions of bash.
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def _fish(commands: dict[str, list[str]], helps: dict[str, str]) -> str:
    lines = []
    for name, options in commands.items():
        text = helps[name].replace("\\", "\\\\").replace("'", "\\'")
        lines.append(f"complete -c fakequant -n __fish_use_subcommand -a {name} -d '{text}'")
        seen = f"complete -c fakequant -n '__fish_seen_subcommand_from {name}' -l"
        for option in options:
            words = _values().get(option)
            lines.append(f"{seen} {option[2:]}" + (f" -x -a '{' '.join(words)}'" if words else ""))
    return "\n".join(lines) + "\n"


def _options(command: Any) -> list[str]:
    given = [name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)]
    return [*(name for name in given if name.startswith("--")), "--help"]


def _values() -> dict[str, list[str]]:
    """The words that options take."""
    return {
        "--preset": [name.lower() for name in presets()],
        "--method": [*calibrators(), AUTO],
        "--improve": ["none", "fast", "best"],
        "--style": ["portable", "standard", "trt"],
        "--execution": ["simulate", "auto", "integer"],
        "--unseen": ["error", "float", "siblings"],
        "--over": ["bits", "milliseconds"],
    }
