"""``dl2d policy``: what can decide here, and what does."""

from __future__ import annotations

import typer

from dl2d.cli.options import ConfigOption, JsonOption
from dl2d.cli.output import print_json, print_tables, table
from dl2d.config.settings import DEFAULT_PATH, Settings, load_settings
from dl2d.daemon.plugins import PLACEMENTS, POLICIES, available, load_placement, load_policy

app = typer.Typer(no_args_is_help=True, help="What decides how many tasks each job gets.")


@app.callback()
def policy() -> None:
    """What decides how many tasks each job gets."""


@app.command("list")
def list_policies(as_json: JsonOption = False, config: ConfigOption = DEFAULT_PATH) -> None:
    """List the installed policies and placements, and which ones the configuration puts in charge."""
    found = _found(load_settings(config))
    if as_json:
        print_json(found)
        return
    rows = [
        (kind, str(entry["name"]), str(entry.get("version", "")), str(entry["charge"] or ""), str(entry["about"]))
        for kind in ("policy", "placement")
        for entry in found[kind]
    ]
    print_tables(table(("KIND", "NAME", "VERSION", "IN CHARGE", "ABOUT"), rows))


def _found(settings: Settings) -> dict[str, list[dict[str, object]]]:
    charges = {settings.policy.fallback: "fallback", settings.policy.name: "decides"}
    policies: list[dict[str, object]] = [
        {"name": name, "version": load_policy(name).version, "charge": charges.get(name), "about": _about(factory)}
        for name, factory in available(POLICIES).items()
    ]
    placements: list[dict[str, object]] = [
        {
            "name": load_placement(name).name,
            "charge": "places" if name == settings.placement else None,
            "about": _about(factory),
        }
        for name, factory in available(PLACEMENTS).items()
    ]
    return {"policy": policies, "placement": placements}


def _about(factory: object) -> str:
    return (getattr(factory, "__doc__", None) or "").strip().partition("\n")[0]
