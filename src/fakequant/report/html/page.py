"""Render the report as one HTML file without external references."""

from __future__ import annotations

import os
from datetime import datetime
from html import escape
from pathlib import Path

from fakequant.files import writable_file, write_whole
from fakequant.report.data import OPTIONAL, ReportData, Section
from fakequant.report.html.sections import SECTIONS, paragraphs
from fakequant.report.html.style import SCRIPT, STYLE
from fakequant.report.html.verdict import verdict


def write_report(path: str | os.PathLike[str], data: ReportData) -> Path:
    """Write a report as one HTML file; an existing file is replaced in one step.

    Args:
        path: the file; folders above it are made where they do not exist.
        data: the content; parts may be missing.

    Returns:
        The path of the file.

    Raises:
        OutputError: the file cannot be written.
    """
    return write_page(path, render(data))


def write_page(path: str | os.PathLike[str], page: str) -> Path:
    """Write the text of a page; see `write_report`."""
    target = writable_file(path)
    # UTF-8 cannot encode lone surrogates, so they are escaped.
    write_whole(target, page.encode("utf-8", "backslashreplace"))
    return target


def render(data: ReportData) -> str:
    """Render a report as HTML text.

    >>> from fakequant.report import Accuracy, ReportData
    >>> page = render(ReportData("A model", accuracy=[Accuracy("float32", "", 98.5)]))
    >>> page.count("<h2"), "98.5" in page
    (7, True)
    """
    bodies = {section: SECTIONS[section](data) for section in Section}
    shown = [section for section, body in bodies.items() if body or section not in OPTIONAL]
    links = "".join(f'<a href="#{section.name.lower()}">{escape(section.value)}</a>' for section in shown)
    state = ""
    if data.unfinished:
        state = f'<p class="bad">Not finished: {escape(data.unfinished)}. What follows is what was done by then.</p>'
    sections = "".join(_section(section, bodies[section], data) for section in shown)
    return document(
        data.title, f"{state}{verdict(data)}{paragraphs(data.summary, 'soft')}<nav>{links}</nav><main>{sections}</main>"
    )


def document(title: str, body: str) -> str:
    """A whole page with the style sheet and the script; the body is HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<header><h1>{escape(title)}</h1>"
        f'<p class="soft">Written {datetime.now().astimezone():%Y-%m-%d %H:%M %Z} by fakequant.</p></header>'
        f"{body}<script>{SCRIPT}</script></body></html>\n"
    )


def _section(section: Section, body: str, data: ReportData) -> str:
    if not body:
        reason = data.missing.get(section, "This run did not measure it.")
        body = f'<p class="soft">Missing: {escape(reason)}</p>'
    return f'<section id="{section.name.lower()}"><h2>{escape(section.value)}</h2>{body}</section>\n'
