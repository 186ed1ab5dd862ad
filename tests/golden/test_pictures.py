"""Golden pictures: terminal at 80 and 120 columns with and without colour, SVG, HTML.

`make golden` writes them again. Check every change: `git diff`, a browser for SVG and HTML.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from roost import Plan, Topology, make_plan
from roost.config.run import read_run_draft
from roost.placement.ledger import make_ledger
from roost.render.fit import domain_lines, memory_lines
from roost.render.grid import PALETTE, ink, make_grid, short_names
from roost.render.html import draw_html
from roost.render.svg import DARK, LIGHT, draw_svg
from roost.render.terminal import draw_terminal, to_ascii
from roost.rl import make_flags_plan

ROOT = Path(__file__).resolve().parents[2]
FILES = Path(__file__).parent / "files"


def plan_of(name: str) -> Plan:
    if name == "heterogeneous":
        return make_plan(
            ROOT / "examples/heterogeneous.yaml", Topology.from_file(ROOT / "examples/heterogeneous-inventory.yaml")
        )
    if name == "large":
        components = {"actor": "0-255", "rollout": "256-503:0-61", "reward": "504-507", "env": "0-255:0-511"}
        return make_plan(
            {"cluster": {"num_nodes": 64, "component_placement": components}}, Topology.from_shorthand("64x8:H100")
        )
    if name == "wide":
        components = {"训练": "0-15", "rollout": "0-15:0-1", "idle-ish": "20"}
        return make_plan({"cluster": {"component_placement": components}}, Topology.from_shorthand("1x24"))
    if name == "robots":
        arms = {"type": "Franka", "configs": [{"node_rank": 0}, {"node_rank": 0}]}
        topology = Topology.from_dict(
            {"nodes": [{"accelerators": 4}], "groups": [{"label": "r", "node_ranks": 0, "hardware": arms}]}
        )
        components = {"actor": "0-3:0", "env": {"node_group": "r", "placement": "0-1"}}
        return make_plan({"cluster": {"component_placement": components}}, topology)
    shapes = {"job": "2x8:H100,1x0", "collocated": "2x8:H100", "disaggregated": "2x8:H100"}
    return make_plan(ROOT / f"examples/{name}.yaml", Topology.from_shorthand(shapes[name]))


NAMES = ["job", "collocated", "disaggregated", "heterogeneous", "large", "wide", "robots"]


@pytest.mark.parametrize(
    ("width", "colour"), [(40, "plain"), (60, "plain"), *[(w, c) for w in (80, 120) for c in ("colour", "plain")]]
)
@pytest.mark.parametrize("name", NAMES)
def test_terminal(name, width, colour, golden):
    out = io.StringIO()
    system = "truecolor" if colour == "colour" else None
    console = Console(file=out, width=width, color_system=system, force_terminal=True, legacy_windows=False)
    console.print(draw_terminal(make_grid(plan_of(name), title=f"{name}.yaml"), width=width), soft_wrap=True)
    golden(FILES / f"{name}-{width}-{colour}.txt", out.getvalue())


@pytest.mark.parametrize("name", NAMES)
def test_svg(name, golden):
    text = draw_svg(plan_of(name), make_grid(plan_of(name), title=f"{name}.yaml"))
    ElementTree.fromstring(text)  # noqa: S314 - our own text
    golden(FILES / f"{name}.svg", text)


@pytest.mark.parametrize("name", ["job", "heterogeneous"])
def test_html(name, golden):
    text = draw_html(plan_of(name), make_grid(plan_of(name), title=f"{name}.yaml"))
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    golden(FILES / f"{name}.html", text)


def test_ascii(golden):
    text = to_ascii(draw_terminal(make_grid(plan_of("collocated")), width=80)).plain
    assert text.isascii()
    golden(FILES / "collocated-ascii.txt", text + "\n")


def test_a_64_node_plan_folds_into_a_few_rows():
    grid = make_grid(plan_of("large"))
    assert [(row.title, row.count) for row in grid.rows] == [("nodes 0-31", 32), ("nodes 32-62", 31), ("node 63", 1)]
    assert len(make_grid(plan_of("large"), fold=False).rows) == 64


def test_no_line_is_wider_than_the_terminal():
    for name in NAMES:
        for width in (40, 60, 80, 120, 200):
            text = draw_terminal(make_grid(plan_of(name)), width=width)
            assert max(line.cell_len for line in text.split()) <= width, (name, width)


def test_markup_in_names_is_text():
    config = {"cluster": {"component_placement": {"a": "0"}}}
    topology = Topology.from_dict({"nodes": [{"accelerators": 1, "name": "[red]<script>alert(1)</script>"}]})
    plan = make_plan(config, topology)
    grid = make_grid(plan, title="<b>")
    for text in (draw_svg(plan, grid), draw_html(plan, grid)):
        assert "<script>alert" not in text
        assert "<b>" not in text.replace("<b>warning", "").replace("<b>info", "")
    assert "[red]" in draw_terminal(make_grid(plan), width=200).plain


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, as WCAG defines it."""

    def luminance(colour: str) -> float:
        long = colour if len(colour) == 7 else "#" + "".join(digit * 2 for digit in colour[1:])
        parts = [int(long[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_reads_on_every_colour():
    for colour in PALETTE:
        assert contrast(colour, ink(colour)) >= 4.5, colour


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_reads_on_the_paper_and_in_the_cells_of_a_picture(theme):
    for text in ("text", "soft"):
        for ground in ("paper", "cell"):
            assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)


def test_text_reads_on_a_page_in_both_themes():
    page = draw_html(plan_of("job"), make_grid(plan_of("job")))
    themes = re.findall(r":root\{([^}]*--paper[^}]*)\}", page)
    assert len(themes) == 2
    for theme in themes:
        colours = dict(re.findall(r"--(\w+):(#\w+)", theme))
        for text in ("text", "soft"):
            for ground in ("paper", "tip"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (theme, text, ground)


def test_a_picture_needs_no_css_variables():
    assert "var(--" not in draw_svg(plan_of("job"), make_grid(plan_of("job")))


def test_the_map_of_a_page_fits_a_telephone():
    for name in ("job", "collocated", "disaggregated", "large"):
        page = draw_html(plan_of(name), make_grid(plan_of(name)))
        narrow = page[page.index('<div class="map narrow">') :]
        widths = [float(width) for width in re.findall(r'<svg class="roost" width="([\d.]+)"', narrow)]
        assert len(widths) == len(make_grid(plan_of(name)).rows)
        # 390 px less the padding of the page.
        assert max(widths) <= 390 - 32, name


def test_a_page_has_all_workers_in_both_maps_and_can_tell_components_apart():
    page = draw_html(plan_of("job"), make_grid(plan_of("job")))
    blocks = re.findall(r'<g class="block" data-component="(\d)"', page)
    assert [blocks.count(str(index)) for index in range(4)] == [8 + 8, 4 + 4, 2 + 2, 1 + 1]
    assert re.findall(r'<li data-component="(\d)">', page) == ["0", "1", "2", "3"]
    assert 'data-worker="rollout:3"' in page
    assert '<input id="find" type="search"' in page


def test_the_picture_of_the_readme_is_the_picture_of_its_job(golden):
    plan = plan_of("job")
    golden(ROOT / "docs" / "images" / "map.svg", draw_svg(plan, make_grid(plan, title="job.yaml")))


@pytest.mark.parametrize(
    ("name", "shape", "flags"),
    [("colocate", "1x8:H100", {"colocate": True}), ("dis-agg", "2x8:H100", {"rollout_num_gpus": 8})],
)
def test_the_pictures_of_train_and_rollout_are_those_of_their_flags(name, shape, flags, golden):
    plan = make_flags_plan({**flags, "rollout_num_gpus_per_engine": 2}, Topology.from_shorthand(shape))
    golden(ROOT / "docs" / "images" / f"{name}.svg", draw_svg(plan, make_grid(plan, title=f"{name}.yaml")))


def test_runs_of_three_nodes_fold_and_runs_of_two_do_not():
    def titles(actor: str) -> list[str]:
        config = {"cluster": {"component_placement": {"actor": actor}}}
        return [row.title for row in make_grid(make_plan(config, Topology.from_shorthand("9x1"))).rows]

    assert titles("0-1") == ["node 0", "node 1", "nodes 2-8"]
    assert titles("0-2") == ["nodes 0-2", "nodes 3-8"]


@given(st.lists(st.text("abc_", min_size=1, max_size=8), min_size=1, max_size=9, unique=True), st.integers(1, 4))
def test_short_names_stay_apart(names, length):
    keys = short_names(names, length)
    assert len(set(keys)) == len(names)
    assert all(keys)


def test_ranks_are_never_cut_off_the_map():
    names = ["env_train", "env_eval", "reward_model", "reward_rule"]
    config = {"cluster": {"component_placement": {",".join(names): "0-15"}}}
    plan = make_plan(config, Topology.from_shorthand("2x8"))
    for width in (60, 80, 120):
        text = draw_terminal(make_grid(plan), width=width).plain
        for rank in range(16):
            assert len(re.findall(rf"\[[a-z_…]* ?{rank} *\]", text)) == 4, (width, rank)


def test_every_strip_has_its_own_numbers():
    text = draw_terminal(make_grid(plan_of("robots")), width=40).plain.splitlines()
    franka = next(index for index, line in enumerate(text) if "Franka" in line)
    assert text[franka - 1].split()[-2:] == ["0", "1"]


def test_a_wrapped_worker_has_no_bracket_where_it_continues():
    config = {"cluster": {"component_placement": {"actor": "0-7:0"}}}
    plan = make_plan(config, Topology.from_shorthand("1x8"))
    lines = [line for line in draw_terminal(make_grid(plan), width=40).plain.splitlines() if "actor 0" in line]
    assert [line.rstrip()[-1] for line in lines] == ["═", "]"]
    assert lines[1].strip().startswith("═")


def test_components_that_are_not_shown_are_not_idle():
    plan = plan_of("job")
    grid = make_grid(plan, only=["reward", "env"])
    text = draw_terminal(grid, width=80).plain
    assert "actor" not in text
    assert "other" in text
    assert "idle" not in text
    assert "reward" in draw_svg(plan, grid)
    assert "rollout" not in draw_svg(plan, grid)


def test_blocks_with_many_ranks_keep_their_key():
    config = {"cluster": {"component_placement": {"actor": "all:0-1599", "agent": "all:0-1599"}}}
    plan = make_plan(config, Topology.from_shorthand("20x8"))
    for width in (40, 60, 80, 120):
        lines = draw_terminal(make_grid(plan, fold=False), width=width).plain.splitlines()
        blocks = [block for line in lines for block in re.findall(r"\[([^\]]*)\]", line)]
        assert len(blocks) == 320
        assert all(re.fullmatch(r"(ac…|act…|actor|ag…|age…|agent|a#\d) \d+-\d+ *", block) for block in blocks), (
            width,
            blocks[:3],
        )


def test_keys_of_different_lengths_stay_apart():
    config = {"cluster": {"component_placement": {"e1": "all:0-31", "env": "all", "e12": "all", "e": "0"}}}
    plan = make_plan(config, Topology.from_shorthand("2x8"))
    for width in (40, 60, 70, 80, 120):
        text = draw_terminal(make_grid(plan), width=width).plain
        found = re.findall(r"\[(\S+) [\d-]+ *\]", text)
        assert len(found) == 16 * 3 + 1
        assert len(set(found)) == 4, (width, set(found))


def test_a_name_is_whole_or_visibly_cut():
    names = ["actor", "rollout", "critic", "reward"]
    plan = make_plan({"cluster": {"component_placement": {",".join(names): "0-7"}}}, Topology.from_shorthand("1x8"))
    for width in range(40, 130, 3):
        text = draw_terminal(make_grid(plan), width=width).plain
        shown = set(re.findall(r"\[(\S+) \d+ *\]", text))
        assert len(shown) == 4
        assert all(key in names or re.fullmatch(r"[a-z]+…|[a-z](#\d)?", key) for key in shown), (width, shown)


def test_an_svg_has_room_for_names():
    text = draw_svg(plan_of("job"), make_grid(plan_of("job")))
    for name in ("actor 7", "rollout 3", "reward 1", "env 0-7"):
        assert f">{name}<" in text
    assert "…" not in text


def test_a_node_has_the_ranks_that_a_job_writes():
    def labels(plan: Plan) -> list[list[str]]:
        return [[text for strip in row.strips for text in strip.ranks_texts] for row in make_grid(plan).rows]

    assert labels(plan_of("job")) == [["ranks 0-7"], ["ranks 8-15"], []]
    robots = [["ranks 0-1 of robot"], ["ranks 2-3 of robot"]]
    assert labels(plan_of("heterogeneous")) == [["ranks 0-8 of a800"], ["ranks 0-8 of 4090"], *robots]
    assert labels(plan_of("large")) == [["ranks 0-255"], ["ranks 256-503"], ["ranks 504-511"]]
    for drawn in (draw_terminal(make_grid(plan_of("job"))).plain, draw_svg(plan_of("job"), make_grid(plan_of("job")))):
        assert "ranks 8-15" in re.sub(r"accelerators? each; ranks [\d-]+", "", drawn)


def test_the_ranks_of_several_node_groups_are_all_there():
    groups = [{"label": "a", "node_ranks": 0}, {"label": "b", "node_ranks": 1}]
    topology = Topology.from_dict({"nodes": [{"accelerators": 2}] * 2, "groups": groups})
    components = {"actor": {"node_group": "b,a", "placement": "0-3"}, "reward": "2-3"}
    rows = make_grid(make_plan({"cluster": {"component_placement": components}}, topology)).rows
    found = [row.strips[0].ranks_texts for row in rows]
    assert found == [["ranks 2-3 of b,a"], ["ranks 0-1 of b,a", "ranks 2-3"]]


def test_ascii_keeps_wide_names_over_their_cells():
    config = {"cluster": {"component_placement": {"机器人": "0-3", "奖励模型": "4-7:0-1", "actor": "0-7"}}}
    plan = make_plan(config, Topology.from_shorthand("1x8"))
    wide = draw_terminal(make_grid(plan), width=100)
    plain = to_ascii(wide).plain
    assert plain.isascii()
    assert [cell_len(line) for line in wide.plain.splitlines()] == [len(line) for line in plain.splitlines()]


def test_long_names_do_not_widen_the_legend():
    name = "reward_model_for_the_very_long_experiment_name"
    plan = make_plan({"cluster": {"component_placement": {name: "0-3", "actor": "0"}}}, Topology.from_shorthand("1x4"))
    for width in (40, 60):
        text = draw_terminal(make_grid(plan), width=width)
        assert max(line.cell_len for line in text.split()) <= width


def test_a_long_title_is_not_cut_off():
    plan = make_plan({"cluster": {"component_placement": {"actor": "0"}}}, Topology.from_shorthand("1x1"))
    title = "a title that is much longer than the row of the one accelerator that there is below it"
    width = re.search(r'<svg [^>]*width="(\d+)"', draw_svg(plan, make_grid(plan, title=title)))
    # A bold letter of 16 px is about this wide on average.
    assert int(width[1]) >= 8.5 * len(title) + 2 * 24


@pytest.mark.parametrize("width", [40, 80, 120])
def test_domains_and_memory(width, golden):
    """Ten nodes of two domains: brackets, bars that are full, one that overflows, one that is not known."""
    nodes = [
        {"accelerators": {"count": 4, "memory": f"{80 if rank else 64}GiB"}, "memory": "900GiB",
         "labels": {"nvlink": "ab"[rank > 4]}}
        for rank in range(9)
    ]  # fmt: skip
    nodes.append({"accelerators": [{}, {}, {"labels": {"nvlink": "c"}}, {"labels": {"nvlink": "c"}}]})
    job = {
        "cluster": {"component_placement": {"actor,rollout": "0-39"}},
        "memory": {
            "actor": {"train": "61GiB", "asleep": {"device": "1.4GiB", "host": "60GiB"}},
            "rollout": {"generate": "70GiB", "asleep": "3.4GiB"},
        },
        "phases": {
            "generate": {"rollout": "generate", "actor": "asleep"},
            "train": {"actor": "train", "rollout": "asleep"},
        },
    }
    draft = read_run_draft(job)
    plan = make_plan(draft, Topology.from_dict({"nodes": nodes}), allow_overflow=True)
    lines = domain_lines(plan.topology, ["nvlink"])
    for rank, bars in memory_lines(make_ledger(plan, draft.memory)).items():
        lines[rank] += bars
    grid = make_grid(plan, title="job.yaml", lines=lines)
    golden(FILES / f"memory-{width}.txt", f"{draw_terminal(grid, width=width).plain}\n")
    golden(FILES / "memory.svg", draw_svg(plan, grid))
