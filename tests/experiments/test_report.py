from __future__ import annotations

import base64
import json
import math
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml
from experiments.runners import quick, spoiled
from experiments.test_run_experiment import Here

from dl2d.experiments.definition import read_experiment
from dl2d.experiments.report import command_line, summary_json, write_report
from dl2d.experiments.run_experiment import ExperimentError, Run, begin_run, read_run, run_cells
from dl2d.experiments.run_simulation import Cell, Finished, Runner
from dl2d.experiments.tables_of_results import read_timelines, summarise

HOSTILE = "<b>a|b</b> & `c`"


def make_run(folder: Path, runner: Runner = quick, **changes: object) -> Run:
    content = {
        "name": "mine", "version": 7, "description": "What <it> is.",
        "workloads": [{"name": "plain", "source": "generator:dl2"}, {"name": HOSTILE, "source": "generator:poisson"}],
        "policies": ["drf", "fifo"], "seeds": 3, **changes,
    }  # fmt: skip
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    return run_cells(begin_run(read_experiment(path), folder / "my out"), Here(), runner=runner)


@dataclass(frozen=True)
class Reported:
    run: Run
    markdown: Path
    html: Path


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    """A run and its report, for those that only read it: drawing the plots takes most of the time."""
    run = make_run(tmp_path_factory.mktemp("reported"))
    return Reported(run, *write_report(run))


def only_drf(cell: Cell) -> Finished:
    return quick(cell) if cell.policy == "drf" else {}["nothing"]


def test_summaries_by_hand(tmp_path: Path) -> None:
    plain = summarise(make_run(tmp_path))[0]
    # Seeds 0, 1, 2: drf 2, 4, 6 slots, fifo 3, 6, 9; the bound is 1 slot; t(2 degrees, 97.5 %) = 4.302653.
    drf, fifo = plain.policies
    assert (drf.jct.mean, drf.jct.deviation) == (4.0, 2.0)
    assert drf.jct.half_width == pytest.approx(4.302653 * 2 / math.sqrt(3), rel=1e-6)
    assert drf.difference is None
    assert drf.change is None
    assert (fifo.difference.mean, fifo.difference.deviation) == (2.0, 1.0)
    assert (fifo.change.mean, fifo.change.half_width) == (0.5, 0.0)
    assert (fifo.above_bound.mean, fifo.resizes.mean, fifo.utilisation.mean) == (5.0, 2.0, 0.5)
    assert plain.resource == "gpu"


def test_both_reports_say_everything(reported: Reported) -> None:
    run, markdown, html = reported.run, reported.markdown.read_text(), reported.html.read_text()
    for text in (markdown, html):
        for word in ("drf", "fifo", "mine, version 7", run.digest, "plain", "+50 ± 0 %", "12 with a result"):
            assert word in text
        assert "have no result" not in text
    rows = [re.split(r" \| ", line.strip("| ")) for line in markdown.splitlines() if line.startswith("| fifo")]
    assert rows[0][:6] == ["fifo", "6", "3", "-1.452 to 13.45", "+2 ± 2.5", "+50 ± 0 %"]
    assert command_line(run) == f"dl2d experiment run '{run.folder}/definition.yaml' --out '{run.folder}-again'"
    assert shlex.split(command_line(run))[3] == f"{run.folder}/definition.yaml"
    assert command_line(run) in markdown
    assert (run.folder / "definition.yaml").read_text() in markdown
    assert json.loads(re.search(r"```json\n(.*?)```", markdown, re.DOTALL)[1])["code"]


def test_the_page_is_well_formed_and_needs_no_other_file(reported: Reported) -> None:
    page = ET.fromstring(reported.html.read_text())
    assert page.tag == "html"
    assert page.find("head/title").text == "Experiment mine, version 7"
    images = [image.get("src") for image in page.iter("img")]
    assert len(images) == 3 + 2  # completion times, distribution, utilisation; allocations of each workload
    for source in images:
        assert base64.b64decode(source.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")
    assert HOSTILE in [title.text for title in page.iter("h3")]
    assert not list(page.iter("b"))
    assert not [each for each in page.iter() if each.get("href") or each.tag in ("script", "link")]
    tables = list(page.iter("table"))
    assert len(tables) == 3
    for table in tables:
        columns = len(table.findall("thead/tr/th"))
        assert {len(list(row)) for row in table.findall("tbody/tr")} == {columns}


def test_markdown_tables_keep_their_columns(reported: Reported) -> None:
    lines = reported.markdown.read_text().splitlines()
    starts = [place for place, line in enumerate(lines) if line.startswith("|---")]
    assert len(starts) == 3
    for start in starts:
        columns = {len(re.findall(r"(?<!\\)\|", lines[place])) for place in range(start - 1, start + 3)}
        assert len(columns) == 1
        assert not lines[start - 2]


def test_pictures_are_there_and_the_same_each_time(reported: Reported) -> None:
    run = reported.run
    names = re.findall(r"\((plots/[^)]+)\)", reported.markdown.read_text())
    assert sorted({Path(name).name for name in names}) == [
        f"{name}.{kind}"
        for name in (
            "allocation-1-plain",
            "allocation-2-b-a-b-b-c",
            "cdf",
            "jct",
            "utilisation",
        )
        for kind in ("png", "svg")
    ]
    content = {name: (run.folder / name).read_bytes() for name in names}
    for name, data in content.items():
        if name.endswith(".svg"):
            ET.fromstring(data.decode())
    write_report(run)
    assert {name: (run.folder / name).read_bytes() for name in names} == content


def test_timelines_by_hand(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    case = summarise(run)[0]
    timelines = read_timelines(run, case)
    # Five slots, of which 2 and 3 have no job; over seeds 0, 1, 2 the last slot has 1 PS on average.
    assert (timelines.width, timelines.edges.tolist()) == (1, [0, 1, 2, 3, 4, 5])
    drf = timelines.policies["drf"]
    assert drf.utilisation.tolist() == [0.5, 1, 0, 0, 0.25]
    assert drf.workers.tolist() == [2, 3, 0, 0, 1]
    assert drf.ps.tolist() == [1, 2, 0, 0, 1]
    for path in (run.folder / "series").iterdir():
        path.unlink()
    assert not read_timelines(run, case).policies
    markdown, _ = write_report(run)
    assert "Utilisation over time" not in markdown.read_text()


def test_many_slots_are_averaged_in_groups(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    case = summarise(run)[0]
    long = replace(
        case,
        policies=tuple(
            replace(each, results={seed: replace(result, slots=241) for seed, result in each.results.items()})
            for each in case.policies
        ),
    )
    timelines = read_timelines(run, long)
    assert timelines.width == 3
    assert timelines.edges[:3].tolist() == [0, 3, 6]
    assert timelines.edges[-2:].tolist() == [240, 241]
    assert timelines.policies["drf"].workers[:3].tolist() == pytest.approx([5 / 3, 1 / 3, 0])


def test_what_failed_is_in_the_report(tmp_path: Path) -> None:
    run = make_run(tmp_path, spoiled)
    markdown, html = (path.read_text() for path in write_report(run))
    for text in (markdown, html):
        assert "2 of 12 simulations have no result" in text
        assert "cannot decide" in text
    assert "| plain | fifo | 1 | cannot decide |" in markdown
    fifo = summarise(run)[0].policies[1]
    assert (fifo.jct.count, fifo.difference.count, fifo.difference.mean) == (2, 2, 2.0)
    ET.fromstring(html)


def test_a_bound_that_can_be_beaten_is_told_as_such(tmp_path: Path) -> None:
    source = "generator:dl2"
    workloads = [
        {"name": "plain", "source": source},
        {"name": "none of it", "source": source, "with": {"speed_noise": 0}},
        {"name": "noisy", "source": source, "with": {"speed_noise": 0.1}},
        {"name": "real", "source": source, "preset": "realistic"},
    ]
    markdown, _ = write_report(make_run(tmp_path, workloads=workloads))
    parts = re.split(r"^### ", markdown.read_text(), flags=re.MULTILINE)[1:]
    assert ["random speeds" in part for part in parts] == [False, False, True, True]
    assert ["no policy can beat" in part for part in parts] == [True, True, False, False]


def test_policies_without_a_result_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, only_drf, baseline="fifo")
    write_report(run)
    assert [each.policy for each in summarise(run)[0].policies] == ["drf"]
    assert summarise(run)[0].policies[0].change is None


def test_a_run_without_any_result_has_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    empty = replace(run, finished={})
    markdown, html = write_report(empty)
    assert "12 of 12 simulations have no result" in markdown.read_text()
    ET.fromstring(html.read_text())
    assert summary_json(empty)["workloads"] == {}


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    run = make_run(tmp_path, seeds=[4])
    markdown, _ = write_report(run)
    assert "With one seed there are no intervals" in markdown.read_text()
    assert "±" not in markdown.read_text().split("## Average")[0].split("### plain")[1]


def test_resumed_with_other_code_is_told(tmp_path: Path) -> None:
    markdown, _ = write_report(replace(make_run(tmp_path), codes=2))
    assert "its cells come from 2 states of dl2d" in markdown.read_text()


def test_the_summary_as_json(tmp_path: Path) -> None:
    run = make_run(tmp_path, spoiled)
    found = json.loads(json.dumps(summary_json(run), allow_nan=False))
    assert found["failed"][0] == {"workload": "plain", "policy": "fifo", "seed": 1, "error": "cannot decide"}
    drf = found["workloads"]["plain"]["policies"]["drf"]
    assert drf["avg_jct_slots"]["mean"] == 4.0
    assert drf["difference_slots"] is None
    assert found["workloads"][HOSTILE]["policies"]["fifo"]["change"]["mean"] == 0.5


def test_a_report_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.folder / "report.md").mkdir()
    with pytest.raises(ExperimentError, match=r"report\.md"):
        write_report(read_run(run.folder))
