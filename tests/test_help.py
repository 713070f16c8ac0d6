"""Help of each command: a sentence, examples that parse, at most 80 columns."""

import shlex
from collections.abc import Iterator

import click
import pytest
import typer
from click.testing import CliRunner, Result

from fedshift.cli import app

ROOT = typer.main.get_command(app)


def commands(command: click.Command = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Words that lead to each command."""
    yield path
    if isinstance(command, click.Group):
        for name, inside in command.commands.items():
            yield from commands(inside, (*path, name))


def invoke(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).invoke(ROOT, words, prog_name="fedshift")


def examples(text: str) -> list[list[str]]:
    """Words of each example at the end of a help text."""
    _, found, after = text.partition("For example:")
    assert found, text
    return [shlex.split(line, comments=True) for line in after.splitlines() if line.strip()]


@pytest.mark.parametrize("path", [*commands()], ids=" ".join)
def test_a_help_has_a_sentence_and_fits_and_its_examples_parse(path: tuple[str, ...]) -> None:
    done = invoke(*path, "--help")
    assert done.exit_code == 0
    assert max(map(len, done.output.splitlines())) <= 80
    usage, sentence = [line.strip() for line in done.output.splitlines() if line.strip()][:2]
    assert usage.startswith(" ".join(("Usage: fedshift", *path)))
    assert sentence[0].isupper()
    for program, *words in examples(done.output):
        assert program == "fedshift"
        assert words[: len(path)] == list(path)
        parse(words)
    assert invoke(*path, "-h").output == done.output


def parse(words: list[str]) -> None:
    """Parse words like the command would, without running it; UsageError for wrong ones."""
    command: click.Command | None = ROOT
    context: click.Context | None = None
    while isinstance(command, click.Group):
        context = command.make_context(command.name, list(words), parent=context)
        _, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
    assert command is not None
    command.make_context(command.name, list(words), parent=context)


def test_wrong_examples_are_detected() -> None:
    for words in ["run", "--preste", "demo"], ["ruin"], ["plan"], ["bench", "codecs", "--repeats", "0"]:
        with pytest.raises(click.UsageError):
            parse(words)


def test_groups_without_a_command_show_their_help() -> None:
    for path in (), ("bench",), ("paper",):
        assert invoke(*path).output.split() == invoke(*path, "--help").output.split()
