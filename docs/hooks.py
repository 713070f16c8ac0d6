"""What the site has beyond the pages of docs/: the example apps, and the commands as they explain themselves."""

import re
from pathlib import Path
from typing import Any

import typer.cli
from click import Context
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from fedshift.cli import app

ROOT = Path(__file__).parent.parent
APPS = sorted((ROOT / "examples").glob("*/README.md"))
COMMANDS = "<!-- commands -->"
EXAMPLES = re.compile(r"^fedshift .+(?:\n\nfedshift .+)*", re.MULTILINE)  # each a paragraph of its own


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pages link to the apps among the examples, which lie beside docs/: their READMEs come along."""
    for path in APPS:
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(rf"\]\({re.escape(up)}\.\./(examples/[\w-]+)\)", rf"]({up}\1/README.md)", markdown)
    return markdown.replace(COMMANDS, commands()) if COMMANDS in markdown else markdown


def commands() -> str:
    """Every command with its arguments and options, one heading each."""
    command = typer.main.get_command(app)
    told = typer.cli.get_docs_for_click(obj=command, ctx=Context(command, info_name="fedshift"), name="fedshift")
    told = EXAMPLES.sub(lambda found: "\n".join(["```bash", *found[0].split("\n\n"), "```\n\n"]), told)
    return told.partition("\n")[2].replace("```console\n$ ", "```text\n")
